"""Augmentation of batches against one image at a time, done the plain way."""
from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F

from ea_vision.data.augment import Augmentation, normalize

MEAN, STD = torch.tensor([0.5, 0.4, 0.3]), torch.tensor([0.2, 0.3, 0.25])


def plainly(image: torch.Tensor, draw: list[int], augmentation: Augmentation) -> torch.Tensor:
    """One image (C, H, W): pad, crop, flip, normalise, cut out."""
    top, left, flip, cut_y, cut_x = draw
    height, width = image.shape[1:]
    pad = augmentation.crop_padding
    image = F.pad(image, (pad, pad, pad, pad))[:, top:top + height, left:left + width]
    if augmentation.flip and flip:
        image = image.flip(-1)
    result = (image / 255 - MEAN.view(-1, 1, 1)) / STD.view(-1, 1, 1)
    if augmentation.cutout:
        y, x, side = cut_y - augmentation.cutout // 2, cut_x - augmentation.cutout // 2, augmentation.cutout
        result[:, max(y, 0):max(y + side, 0), max(x, 0):max(x + side, 0)] = 0
    return result


@pytest.mark.parametrize("augmentation", [
    Augmentation(), Augmentation(flip=False), Augmentation(crop_padding=0), Augmentation(cutout=8),
    Augmentation(flip=False, crop_padding=0, cutout=5), Augmentation(flip=False, crop_padding=0),
    Augmentation(crop_padding=2, cutout=3),
])
def test_batches_equal_single_images(augmentation):
    images = torch.randint(0, 256, (64, 3, 12, 17), dtype=torch.uint8)  # H != W
    draws = augmentation.draw(64, (12, 17), torch.Generator().manual_seed(1))
    batch = augmentation.apply(images, draws, MEAN, STD)
    for image, draw, result in zip(images, draws.tolist(), batch, strict=True):
        torch.testing.assert_close(result, plainly(image, draw, augmentation), atol=1e-6, rtol=0)


def test_draws_cover_their_ranges_evenly():
    augmentation = Augmentation(crop_padding=4, cutout=8)
    draws = augmentation.draw(20_000, (32, 30), torch.Generator().manual_seed(0))
    for column, limit in enumerate((9, 9, 2, 32, 30)):
        counts = torch.bincount(draws[:, column], minlength=limit)
        assert len(counts) == limit and counts.min() > 0.8 * 20_000 / limit


def test_cutout_area():
    """8x8 pixels inside, less where the border cuts the square, and in all channels alike."""
    images = torch.full((2000, 3, 32, 32), 255, dtype=torch.uint8)
    augmentation = Augmentation(flip=False, crop_padding=0, cutout=8)
    result = augmentation.apply(images, augmentation.draw(2000, (32, 32), torch.Generator().manual_seed(0)), MEAN, STD)
    areas = (result == 0).sum((2, 3))
    assert (areas[:, 0] == areas[:, 1]).all() and areas.max() == 64 and areas.min() == 16


def test_normalize():
    images = torch.randint(0, 256, (4, 3, 5, 6), dtype=torch.uint8)
    wanted = (images / 255 - MEAN.view(-1, 1, 1)) / STD.view(-1, 1, 1)
    torch.testing.assert_close(normalize(images, MEAN, STD), wanted, atol=1e-6, rtol=0)
