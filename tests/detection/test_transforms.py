"""Boxes survive jitter, crop, pad and flip: the rectangle of an image is found again in its pixels."""

import pytest
import torch
from torchvision import tv_tensors

from ea_vision.detection.transforms import (
    boxes_to_original,
    eval_transform,
    fitted_size,
    found_in_original,
    train_transform,
)


def picture(size, *boxes):
    """A blue image (H, W) with a red rectangle x1 y1 x2 y2, the first box, and its target."""
    image = torch.zeros(3, *size, dtype=torch.uint8)
    image[2] = 255
    x1, y1, x2, y2 = boxes[0]
    image[:, y1:y2, x1:x2] = torch.tensor([250, 5, 5])[:, None, None]
    return tv_tensors.Image(image), {
        "boxes": tv_tensors.BoundingBoxes(
            boxes, dtype=torch.float32, format="XYXY", canvas_size=size
        ),
        "labels": torch.arange(4, 4 + len(boxes)),
        "image_id": 9,
        "size": size,
    }


def red_box(image):
    """Return x1 y1 x2 y2 around the red pixels; zeros if there are none."""
    red = (image[0] > 0.6) & (image[1] < 0.35) & (image[2] < 0.35)
    if not red.any():
        return [0, 0, 0, 0]
    places = red.nonzero().T.sort()
    rows, columns = places.values.tolist()
    return [columns[0], rows[0], columns[-1] + 1, rows[-1] + 1]


@pytest.mark.parametrize("size", [(80, 120), (50, 40)])
def test_boxes_lie_on_their_pixels_after_jitter_crop_and_flip(size):
    transform = train_transform(64, scale=(0.7, 1.5))
    seen = set()
    for seed in range(60):
        torch.manual_seed(seed)
        image, target = transform(*picture(size, (10, 12, 30, 40)))
        assert image.shape == (3, 64, 64)
        assert image.dtype == torch.float32
        assert 0 <= image.min()
        assert image.max() <= 1
        assert type(image) is torch.Tensor
        assert target["image_id"] == 9
        boxes = target["boxes"].tolist()
        red = red_box(image)
        assert target["labels"].tolist() == [4] * len(boxes)
        x1, y1, x2, y2 = boxes[0] if boxes else red
        if min(x2 - x1, y2 - y1) > 2:  # a rim of one pixel is blurred away
            assert boxes[0] == pytest.approx(red, abs=1.5)
            seen.add(tuple(red))
    assert len(seen) > 25


@pytest.mark.parametrize("size", [(1, 300), (300, 1), (1, 1)])
def test_narrow_images_are_trained_on(size):
    torch.manual_seed(0)
    transform = train_transform(64, scale=(0.7, 1.5))
    for _ in range(5):
        image, target = transform(*picture(size, (0, 0, size[1], size[0])))
        assert image.shape == (3, 64, 64)
        assert len(target["boxes"]) <= 1


@pytest.mark.parametrize("size", [(60, 90), (90, 60), (20, 11), (64, 64), (1, 300)])
def test_evaluation_fits_pads_and_leads_back(size):
    box = (0, 0, size[1] // 2, max(1, size[0] // 2))
    image, target = eval_transform(64)(*picture(size, box))
    assert image.shape == (3, 64, 64)
    assert max(fitted_size(size, 64)) == 64
    assert boxes_to_original(target["boxes"], size, 64)[0].tolist() == pytest.approx(box, abs=1e-3)
    if min(size) > 1:
        assert target["boxes"][0].tolist() == pytest.approx(red_box(image), abs=1.0)
    if size[0] != size[1]:
        assert image[:, -1, -1].tolist() == pytest.approx([124 / 255, 116 / 255, 104 / 255])
    beyond = boxes_to_original(torch.tensor([[-3.0, -3.0, 70.0, 70.0]]), size, 64)
    assert beyond.tolist() == [[0, 0, size[1], size[0]]]


def test_detections_outside_the_image_are_left_out():
    """An image of 20 x 40 pixels in the upper half of a square of 80."""
    boxes = torch.tensor([[0.0, 41, 80, 80], [10, 20, 30, 60], [4, 40, 8, 44]])
    detections = {
        "boxes": boxes,
        "scores": torch.tensor([0.9, 0.8, 0.7]),
        "labels": torch.arange(3),
    }
    kept = found_in_original(detections, (20, 40), 80)
    assert kept["boxes"].tolist() == [[5, 10, 15, 20]]
    assert kept["labels"].tolist() == [1]
    assert kept["scores"].tolist() == detections["scores"][1:2].tolist()


def test_boxes_are_cut_at_the_border_of_their_image_and_those_without_area_left_out():
    for transform in (train_transform(40, (1, 1), flip=0), eval_transform(40)):
        _, found = transform(*picture((40, 40), (-5, 2, 5, 50), (40, 2, 44, 6), (4, 4, 4, 7)))
        assert found["boxes"].tolist() == [[0, 2, 5, 40]]
        assert found["labels"].tolist() == [4]
