"""`CocoFolder`: what it reads, and what it refuses."""

import json
import re

import pytest
import torch
from PIL import Image

from ea_vision.data.decoding import BrokenImage
from ea_vision.detection.coco import CocoFolder, results_of
from tests.refused import refused

CONTENT = {  # two images; three categories whose ids have gaps and no order
    "images": [
        {"id": 7, "file_name": "a.png", "width": 30, "height": 20},
        {"id": 3, "file_name": "deep/b.png", "width": 16, "height": 24},
    ],
    "categories": [{"id": 90, "name": "cat"}, {"id": 1, "name": "ship"}, {"id": 13, "name": "dog"}],
    "annotations": [
        {"id": 1, "image_id": 7, "category_id": 90, "bbox": [2, 3, 10.5, 8]},
        {
            "id": 2,
            "image_id": 7,
            "category_id": 13,
            "bbox": [0, 0, 30, 20],
            "area": 400,
            "iscrowd": 0,
        },
        {"id": 3, "image_id": 7, "category_id": 1, "bbox": [1, 1, 5, 5], "iscrowd": 1},
    ],
}


def folder(root, content=CONTENT, images="val", file="val.json"):
    for name, size in (("a.png", (30, 20)), ("deep/b.png", (16, 24))):
        path = root / images / name
        path.parent.mkdir(parents=True, exist_ok=True)
        Image.new("RGB", size).save(path)
    (root / file).parent.mkdir(exist_ok=True)
    (root / file).write_text(content if isinstance(content, str) else json.dumps(content))
    return CocoFolder(root, "val")


@pytest.mark.parametrize(
    "places", [("val", "val.json"), ("val2017", "annotations/instances_val2017.json")]
)
def test_boxes_labels_and_an_image_without_boxes(tmp_path, places):
    data = folder(tmp_path, CONTENT, *places)
    assert data.classes == ["ship", "dog", "cat"]
    assert data.category_ids == [1, 13, 90]
    image, target = data[0]
    assert image.shape == (3, 20, 30)
    assert image.dtype == torch.uint8
    assert target["size"] == (20, 30)
    assert target["boxes"].tolist() == [
        [2, 3, 12.5, 11],
        [0, 0, 30, 20],
    ]  # the crowd is not among them
    assert target["labels"].tolist() == [2, 1]
    assert target["image_id"] == 7
    empty = data[1][1]
    assert len(data) == 2
    assert empty["boxes"].shape == (0, 4)
    assert empty["labels"].shape == (0,)
    rows = results_of(7, {**target, "scores": torch.tensor([0.9, 0.5])}, data.category_ids)
    assert rows == [
        {"image_id": 7, "category_id": 90, "bbox": [2, 3, 10.5, 8], "score": 0.9},
        {"image_id": 7, "category_id": 13, "bbox": [0, 0, 30, 20], "score": 0.5},
    ]
    truth = data.ground_truth()
    assert [(row["category_id"], row["area"], row["iscrowd"]) for row in truth["annotations"]] == [
        (90, 84, 0),
        (13, 400, 0),
        (1, 25, 1),
    ]
    assert [category["id"] for category in truth["categories"]] == data.category_ids


def with_last(part, **values):
    """Return the content with other values in the last entry of a part."""
    return {**CONTENT, part: [*CONTENT[part][:-1], CONTENT[part][-1] | values]}


@pytest.mark.parametrize(
    "content, message",
    [
        ('{"images": [', "val.json is damaged: it is not valid JSON"),
        ("[]", "images must be a list that is not empty, got None"),
        ({**CONTENT, "images": []}, "images must be a list that is not empty, got []"),
        (
            {**CONTENT, "images": [{"id": 1, "file_name": "a.png"}]},
            "images[0].width must be a positive whole number of pixels, got nothing",
        ),
        (
            with_last("images", width=10**400),
            "images[1].width must be a positive whole number of pixels, got 1000",
        ),
        (with_last("images", id="7"), "images[1].id must be a whole number, got '7'"),
        (with_last("images", id=7), "images[1].id must be unique, got 7"),
        (with_last("images", file_name="\ud800\0"), "1 of the 2 images of"),
        (with_last("categories", name=3), "categories[2].name must be a text, got 3"),
        (
            with_last("annotations", bbox=[1, 2, 3]),
            "bbox must be four numbers: x, y, width, height in pixels, got [1, 2, ",
        ),
        (with_last("annotations", bbox=[1, 2, 3, float("nan")]), "annotations[2].bbox"),
        (
            with_last("annotations", category_id=2),
            "[2].category_id must be the id of one of its categories, got 2",
        ),
        (
            with_last("annotations", image_id=8),
            "annotations[2].image_id must be the id of one of its images, got 8",
        ),
        (
            with_last("annotations", area=-1),
            "annotations[2].area must be a number of at least 0, got -1",
        ),
        (with_last("annotations", iscrowd=None), "annotations[2].iscrowd must be 0 or 1, got None"),
        ({**CONTENT, "annotations": [[]]}, "annotations[0] must be a mapping, got []"),
        (
            {**CONTENT, "annotations": CONTENT["annotations"][2:]},
            "must have at least one box that is not a crowd, got ",
        ),
    ],
)
def test_damaged_json_is_one_clear_line(tmp_path, content, message):
    with refused(re.escape(message)):
        folder(tmp_path, content)


def test_missing_folders_and_images_of_another_size_or_that_are_broken(tmp_path):
    data = folder(tmp_path)
    with refused("must have train/ with images and train.json, or COCO's own train2017/"):
        CocoFolder(tmp_path, "train")
    Image.new("RGB", (20, 30)).save(data.describe(0))
    (data.folder / "deep/b.png").write_bytes(b"no image")
    for index, message in ((0, "20x30 pixels, val.json says 30x20"), (1, "cannot identify")):
        with refused(message, BrokenImage):
            data[index]


def test_some_images_and_fingerprint(tmp_path):
    data = folder(tmp_path / "one")
    other = folder(tmp_path / "two")
    truth = data.ground_truth([1])
    assert [image["id"] for image in truth["images"]] == [3]
    assert not truth["annotations"]
    assert data.fingerprint() == other.fingerprint()
    third = folder(tmp_path / "three", with_last("annotations", iscrowd=0))
    assert data.fingerprint() != third.fingerprint()
    Image.new("RGB", (30, 20), "red").save(data.describe(0))
    assert CocoFolder(tmp_path / "one", "val").fingerprint() != other.fingerprint()  # by its size
