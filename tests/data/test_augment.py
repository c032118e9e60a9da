"""Augmentation of batches against one image at a time, done the plain way."""

import pytest
import torch
import torch.nn.functional as F

from ea_vision.data.augment import Augmentation

MEAN = torch.tensor([0.5, 0.4, 0.3])
STD = torch.tensor([0.2, 0.3, 0.25])


def plainly(image, draw, augmentation):
    """One image (C, H, W): pad, crop, flip, normalise, cut out."""
    # Padding is torch's own, which reflects floating-point images.
    top, left, flip, cut_y, cut_x = draw
    height, width = image.shape[1:]
    mode = "constant" if augmentation.padding_mode == "zeros" else "reflect"
    padded = F.pad(image.float(), [augmentation.crop_padding] * 4, mode)
    image = padded[:, top : top + height, left : left + width]
    if augmentation.flip != "off" and flip:
        image = image.flip(-1)
    result = (image / 255 - MEAN.view(-1, 1, 1)) / STD.view(-1, 1, 1)
    if augmentation.cutout:
        side = augmentation.cutout
        y = cut_y - side // 2
        x = cut_x - side // 2
        rows = slice(max(y, 0), max(y + side, 0))
        columns = slice(max(x, 0), max(x + side, 0))
        result[:, rows, columns] = 0
    return result


@pytest.mark.parametrize(
    "augmentation",
    [
        Augmentation(),
        Augmentation(flip="off", cutout=5),
        Augmentation(flip="alternate", crop_padding=0, cutout=8),
        Augmentation(padding_mode="reflect", crop_padding=11, cutout=3),
    ],
)
def test_batches_equal_single_images(augmentation):
    images = torch.randint(0, 256, (64, 3, 12, 17), dtype=torch.uint8)  # H != W
    draws = augmentation.draw(64, (12, 17), torch.Generator().manual_seed(1))
    batch = augmentation.apply(images, draws, MEAN, STD)
    for image, draw, result in zip(images, draws.tolist(), batch, strict=True):
        expected = plainly(image, draw, augmentation)
        torch.testing.assert_close(result, expected, atol=1e-6, rtol=0)
