"""Boxes survive jitter, crop, pad and flip: the rectangle of an image is found again in its pixels."""
import pytest
import torch
from torchvision import tv_tensors

from ea_vision.detection.transforms import boxes_to_original, eval_transform, fitted_size, train_transform

RED = torch.tensor([250, 5, 5], dtype=torch.uint8)


def picture(box: tuple[int, int, int, int], size: tuple[int, int]):
    """A blue image (H, W) with a red rectangle x1 y1 x2 y2, and its target."""
    image = torch.zeros(3, *size, dtype=torch.uint8)
    image[2] = 255
    x1, y1, x2, y2 = box
    image[:, y1:y2, x1:x2] = RED[:, None, None]
    return tv_tensors.Image(image), {
        "boxes": tv_tensors.BoundingBoxes(torch.tensor([box], dtype=torch.float32), format="XYXY", canvas_size=size),
        "labels": torch.tensor([4]), "image_id": 9, "size": size}


def red_box(image: torch.Tensor) -> list[int] | None:
    """x1 y1 x2 y2 of what is rather red than blue or ground."""
    red = (image[0] > 0.6) & (image[1] < 0.35) & (image[2] < 0.35)
    if not red.any():
        return None
    rows, columns = red.any(1).nonzero()[:, 0], red.any(0).nonzero()[:, 0]
    return [int(columns[0]), int(rows[0]), int(columns[-1]) + 1, int(rows[-1]) + 1]


@pytest.mark.parametrize("size", [(80, 120), (50, 40)])
def test_boxes_lie_on_their_pixels_after_jitter_crop_and_flip(size):
    transform = train_transform(64, scale=(0.7, 1.5))
    box = (10, 12, 30, 40)
    kept, corners = 0, set()
    for seed in range(60):
        torch.manual_seed(seed)
        image, target = transform(*picture(box, size))
        assert image.shape == (3, 64, 64) and image.dtype == torch.float32 and 0 <= image.min() and image.max() <= 1
        assert type(image) is torch.Tensor and target["image_id"] == 9
        seen = red_box(image)
        assert len(target["boxes"]) == len(target["labels"]) <= 1
        if len(target["boxes"]):
            kept += 1
            assert target["labels"].tolist() == [4]
            width, height = (target["boxes"][0, 2:] - target["boxes"][0, :2]).tolist()
            if min(width, height) > 2:  # a rim of one pixel is blurred away
                assert seen is not None and target["boxes"][0].tolist() == pytest.approx(seen, abs=1.5)
                corners.add(tuple(seen))
        else:
            assert seen is None or min(seen[2] - seen[0], seen[3] - seen[1]) <= 2
    assert kept > 30 and len(corners) > 25  # it moves


def test_photometric_jitter_changes_colours_and_no_box():
    colours = set()
    for seed in range(8):
        torch.manual_seed(seed)
        image, target = train_transform(40, scale=(1, 1), flip=0, photometric=True)(*picture((5, 5, 20, 30), (40, 40)))
        assert target["boxes"].tolist() == [[5, 5, 20, 30]]
        colours.add(tuple(image[:, 15, 10].tolist()))
    assert len(colours) > 3


@pytest.mark.parametrize("size", [(60, 90), (90, 60), (20, 11), (64, 64), (1, 300)])
def test_evaluation_fits_pads_and_leads_back(size):
    box = (0, 0, size[1] // 2, max(1, size[0] // 2))
    image, target = eval_transform(64)(*picture(box, size))
    height, width = fitted_size(size, 64)
    assert image.shape == (3, 64, 64) and max(height, width) == 64
    assert boxes_to_original(target["boxes"], size, 64)[0].tolist() == pytest.approx(box, abs=1e-3)
    if min(size) > 1:
        assert target["boxes"][0].tolist() == pytest.approx(red_box(image), abs=1.0)
    grey = image[:, -1, -1]
    assert (size[0] == size[1]) or grey.tolist() == pytest.approx([124 / 255, 116 / 255, 104 / 255])
    beyond = boxes_to_original(torch.tensor([[-3.0, -3.0, 70.0, 70.0]]), size, 64)
    assert beyond.tolist() == [[0, 0, size[1], size[0]]]


def test_boxes_are_cut_at_the_border_of_their_image_and_those_without_area_left_out():
    image, target = picture((5, 5, 20, 30), (40, 40))
    boxes = tv_tensors.BoundingBoxes([[-5, 2, 5, 50], [40, 2, 44, 6], [4, 4, 4, 7]], format="XYXY",
                                     canvas_size=(40, 40))
    target |= {"boxes": boxes, "labels": torch.arange(3)}
    for transform in (train_transform(40, (1, 1), flip=0), eval_transform(40)):
        found = transform(image, dict(target))[1]
        assert found["boxes"].tolist() == [[0, 2, 5, 40]] and found["labels"].tolist() == [0]
