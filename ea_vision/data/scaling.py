"""How an image is scaled and cropped for a network that is not trained on it."""

import math
from dataclasses import dataclass
from functools import cached_property

import numpy as np
import timm.data
import torch
from PIL import Image
from torch import Tensor

from ea_vision.data.decoding import MAX_PIXELS, BrokenImage

Size = tuple[int, int]  # height, width in pixels
ROUNDED = "rounded"


def pixels_of(image: Image.Image) -> Tensor:
    """Return uint8 (H, W, 3); the channels are moved to the front on the device, where that costs less."""
    return torch.from_numpy(np.array(image))


@dataclass(frozen=True)
class Scaling:
    """Scale an RGB image and crop its centre: timm's transform for evaluation, or train-cifar's.

    Attributes:
        size: (H, W) of the result in pixels.
        crop_pct: `size` divided by the size to which the image is scaled before it is cropped.
        crop_mode: timm's center (keeps the aspect ratio), squash (changes it) or border (adds a border of the colour
            `mean`); or rounded, train-cifar's: center, but scaled sides are rounded to the next whole pixel, not down.
        interpolation: Pillow's, in lower case.
        mean: per channel, of images in 0..1.
    """

    size: Size
    crop_pct: float = 1.0
    crop_mode: str = "center"
    interpolation: str = "bilinear"
    mean: tuple[float, ...] = (0.0, 0.0, 0.0)

    @classmethod
    def cropped(cls, img_size: int, resize: int, interpolation: str = "bilinear", **more):
        """Scale the short side to `resize` pixels, then crop the centre, `img_size` x `img_size`: train-imagenet's."""
        size = (img_size, img_size)
        return cls(size, img_size / resize, interpolation=interpolation, **more)

    @classmethod
    def filled(cls, img_size: int, **more):
        """Scale the short side to `img_size` pixels, bicubic, and crop the centre: train-cifar's."""
        return cls((img_size, img_size), 1.0, ROUNDED, "bicubic", **more)

    def pixels(self, image: Image.Image) -> Tensor:
        """Return uint8 (H, W, 3).

        Raises:
            BrokenImage: the image is so narrow that it has more than MAX_PIXELS once its short side fits.
        """
        H, W = (math.floor(side / self._crop_pct) for side in self.size)
        factor = max(H / image.height, W / image.width)
        keeps_aspect = self.crop_mode in ("center", ROUNDED)
        if keeps_aspect and factor**2 * image.width * image.height > MAX_PIXELS:
            raise BrokenImage(
                f"must have at most {MAX_PIXELS / 1e6:g} megapixels once its short side has {min(H, W)} "
                f"pixels, got {image.width}x{image.height}"
            )
        if self.crop_mode != ROUNDED:
            return self._of_timm(image).permute(1, 2, 0)
        if image.size != (W, H):
            width = max(W, round(image.width * factor))
            height = max(H, round(image.height * factor))
            image = image.resize((width, height), Image.Resampling[self.interpolation.upper()])
        left = (image.width - self.size[1]) // 2
        top = (image.height - self.size[0]) // 2
        return pixels_of(image.crop((left, top, left + self.size[1], top + self.size[0])))

    def keeps(self, size: Size) -> bool:
        """Return whether images of this size stay as they are."""
        return size == self.size and self.crop_pct == 1

    @property
    def _crop_pct(self) -> float:
        """A little less than crop_pct: img_size / (img_size / resize) must not round down to a smaller integer."""
        return math.nextafter(self.crop_pct, 0)

    @cached_property
    def _of_timm(self):
        """timm's transform to uint8 (3, H, W)."""
        return timm.data.create_transform(
            (3, *self.size),
            interpolation=self.interpolation,
            mean=self.mean,
            crop_pct=self._crop_pct,
            crop_mode=self.crop_mode,
            normalize=False,
        )
