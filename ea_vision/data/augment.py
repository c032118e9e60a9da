"""Augmentation of whole batches on their device, one random draw per image, no loop over images.

All draws of an epoch are made together, on the CPU, from seed and epoch. So the augmentation of an image depends
neither on the device nor on the number of processes, and a run that resumes inside an epoch sees the same images.
"""

from dataclasses import dataclass

import torch
from torch import Tensor
from torchvision.transforms.v2 import functional as F

from ea_vision.data.batches import epoch_generator

# --crop-padding-mode: torchvision's name of it
PADDING_MODES = {"zeros": "constant", "reflect": "reflect"}


@dataclass(frozen=True)
class Augmentation:
    """Augmentation of training images; sizes in pixels, 0 for none.

    Attributes:
        flip: left-right; on: half of the time; off; alternate: in the first epoch half of the images, then each image
            every other epoch (Keller Jordan, https://arxiv.org/abs/2404.00498, section 3.6).
        crop_padding: pad by this much, then crop the original size at a random position.
        padding_mode: zeros: black; reflect: mirrored at the border, whose pixels are not repeated.
        cutout: side of the square that is set to the mean colour; its centre is random (DeVries 2017).
    """

    flip: str = "on"
    crop_padding: int = 4
    padding_mode: str = "zeros"
    cutout: int = 0

    def draw(self, count: int, size: tuple[int, int], generator: torch.Generator) -> Tensor:
        """Draw for `count` images of `size` (H, W): integers (count, 5), columns top, left, flip, cutout y and x.

        The flips are those of `flip="on"`; see `alternating_flips` for the others.
        """
        height, width = size
        offsets = 2 * self.crop_padding + 1
        limits = (offsets, offsets, 2, height, width)
        draws = [torch.randint(limit, (count,), generator=generator) for limit in limits]
        return torch.stack(draws, dim=1)

    def alternating_flips(self, count: int, epoch: int, seed: int) -> Tensor:
        """Return integers (count,), by number of the image: 1 for those that are flipped in an epoch."""
        generator = epoch_generator(seed, -1)  # a generator that no epoch uses
        first = torch.randint(2, (count,), generator=generator)
        return first ^ (epoch % 2)

    def apply(self, images: Tensor, draws: Tensor, mean: Tensor, std: Tensor) -> Tensor:
        """Augment and normalise.

        Args:
            images: uint8 (B, C, H, W); draws: (B, 5) of `draw`, on the same device; mean, std: (C,), of images in 0..1.

        Returns:
            float32 (B, C, H, W).
        """
        B, _, height, width = images.shape
        top, left, flip, cut_y, cut_x = draws[:, :, None].unbind(1)  # (B, 1) each
        rows = torch.arange(height, device=images.device)
        columns = torch.arange(width, device=images.device)
        mode = PADDING_MODES[self.padding_mode]
        padded = F.pad(images, [self.crop_padding], padding_mode=mode)
        mirrored = columns
        if self.flip != "off":
            mirrored = torch.where(flip.bool(), columns.flip(0), columns)  # (B, W)
        image = torch.arange(B, device=images.device)[:, None, None]
        y = (top + rows)[:, :, None]  # (B, H, 1)
        x = (left + mirrored)[:, None, :]  # (B, 1, W)
        cropped = padded[image, :, y, x]  # (B, H, W, C)
        result = normalize(cropped.permute(0, 3, 1, 2), mean, std)
        if self.cutout:
            # the square [centre - side // 2, centre - side // 2 + side), which the border may cut
            in_rows = self._is_cut(rows, cut_y)  # (B, H)
            in_columns = self._is_cut(columns, cut_x)  # (B, W)
            square = in_rows[:, :, None] & in_columns[:, None, :]
            result.masked_fill_(square[:, None], 0.0)
        return result

    def _is_cut(self, places: Tensor, centre: Tensor) -> Tensor:
        """Return whether rows or columns (S,) lie in the squares around centres (B, 1): bool (B, S)."""
        inside = places - centre + self.cutout // 2
        return (0 <= inside) & (inside < self.cutout)


def normalize(images: Tensor, mean: Tensor, std: Tensor) -> Tensor:
    """Normalise uint8 (B, C, H, W) by mean and std (C,) of images in 0..1: float32, contiguous."""
    scale = (1 / (255 * std)).view(-1, 1, 1)
    shift = (mean / std).view(-1, 1, 1)
    values = images.to(torch.float32, memory_format=torch.contiguous_format)
    return values.mul_(scale).sub_(shift)
