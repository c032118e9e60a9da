"""Augmentation of whole batches on their device, one random draw per image, no loop over images.

The draws for an epoch are made at once, on the CPU, from seed and epoch: what happens to an image depends neither on
the device nor on the number of processes, and a run that continues inside an epoch sees the same images.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torchvision.transforms.v2 import functional as F

from ea_vision.data.batches import epoch_generator

PADDING_MODES = ("zeros", "reflect")


@dataclass(frozen=True)
class Augmentation:
    """Augmentation of training images; sizes in pixels, 0 for none."""

    flip: str = "on"  # left-right; on: half of the time; alternate: in the first epoch half of the images, then each
    # image every other epoch (Keller Jordan, https://arxiv.org/abs/2404.00498, section 3.6)
    crop_padding: int = 4  # pad by this much and cut the original size out anywhere
    padding_mode: str = "zeros"  # zeros: black; reflect: mirrored at the border, whose pixels are not repeated
    cutout: int = 0  # side of the square that is set to the mean colour; its centre lies anywhere (DeVries 2017)

    def draw(self, count: int, size: tuple[int, int], generator: torch.Generator) -> torch.Tensor:
        """Draw for `count` images of `size` (H, W): integers (count, 5), columns top, left, flip, cutout y and x.

        The flips are those of `flip="on"`; see `alternating_flips` for the others.
        """
        height, width = size
        limits = (2 * self.crop_padding + 1, 2 * self.crop_padding + 1, 2, height, width)
        return torch.stack([torch.randint(limit, (count,), generator=generator) for limit in limits], dim=1)

    def alternating_flips(self, count: int, epoch: int, seed: int) -> torch.Tensor:
        """Return integers (count,): 1 for the images that are flipped in an epoch, by number."""
        first = torch.randint(2, (count,), generator=epoch_generator(seed, -1))  # no epoch's own
        return first ^ (epoch % 2)

    def apply(self, images: torch.Tensor, draws: torch.Tensor, mean: torch.Tensor, std: torch.Tensor) -> torch.Tensor:
        """Augment and normalise.

        Args:
            images: uint8 (B, C, H, W); draws: (B, 5) of `draw`, on the same device; mean, std: (C,), of images in 0..1.

        Returns:
            float32 (B, C, H, W).
        """
        height, width = images.shape[-2:]
        top, left, flip, cut_y, cut_x = draws.unbind(1)
        rows = torch.arange(height, device=images.device)
        columns = torch.arange(width, device=images.device)
        flips = self.flip != "off"
        if self.crop_padding or flips:
            pad = self.crop_padding
            take_rows = rows + top[:, None]  # (B, H)
            take_columns = columns.expand(len(images), width)
            if flips:
                take_columns = torch.where(flip[:, None].bool(), width - 1 - take_columns, take_columns)
            take_columns = take_columns + left[:, None]  # (B, W)
            mode = {"zeros": "constant", "reflect": "reflect"}[self.padding_mode]
            padded = F.pad(images, [pad], padding_mode=mode).flatten(2)  # (B, C, (H + 2 pad)(W + 2 pad))
            index = take_rows[:, :, None] * (width + 2 * pad) + take_columns[:, None, :]  # (B, H, W)
            index = index.flatten(1)[:, None].expand(-1, images.shape[1], -1)  # (B, C, H W)
            images = padded.gather(2, index).view_as(images)
        result = normalize(images, mean, std)
        if self.cutout:
            # The square [centre - side // 2, centre - side // 2 + side), which the border may cut.
            in_rows = _within(rows, cut_y - self.cutout // 2, self.cutout)
            in_columns = _within(columns, cut_x - self.cutout // 2, self.cutout)
            result.masked_fill_((in_rows[:, :, None] & in_columns[:, None, :])[:, None], 0.0)
        return result


def _within(positions: torch.Tensor, start: torch.Tensor, length: int) -> torch.Tensor:
    """Return (B, L) booleans: position l lies in [start_b, start_b + length)."""
    offset = positions - start[:, None]
    return (offset >= 0) & (offset < length)


def normalize(images: torch.Tensor, mean: torch.Tensor, std: torch.Tensor) -> torch.Tensor:
    """Normalise uint8 (B, C, H, W) by mean and std (C,) of images in 0..1: float32, contiguous."""
    scale = (1 / (255 * std)).view(-1, 1, 1)
    shift = (mean / std).view(-1, 1, 1)
    return images.to(torch.float32, memory_format=torch.contiguous_format).mul_(scale).sub_(shift)
