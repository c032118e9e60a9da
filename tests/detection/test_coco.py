"""`CocoFolder`: what it reads, what it mends and says, and what it refuses."""
import json

import numpy as np
import pytest
import torch
from PIL import Image

from ea_vision.base.errors import UsageError
from ea_vision.data.image_files import BrokenImage
from ea_vision.detection.coco import CocoFolder, cut_box


def content() -> dict:
    """Two images; three categories whose ids have gaps and no order."""
    return {
        "images": [{"id": 7, "file_name": "a.png", "width": 30, "height": 20},
                   {"id": 3, "file_name": "deep/b.png", "width": 16, "height": 24}],
        "categories": [{"id": 90, "name": "cat"}, {"id": 1, "name": "ship"}, {"id": 13, "name": "dog"}],
        "annotations": [{"id": 1, "image_id": 7, "category_id": 90, "bbox": [2, 3, 10.5, 8]},
                        {"id": 2, "image_id": 7, "category_id": 13, "bbox": [0, 0, 30, 20], "area": 400, "iscrowd": 0},
                        {"id": 3, "image_id": 7, "category_id": 1, "bbox": [1, 1, 5, 5], "iscrowd": 1}],
    }


def write(root, what, images="val", file="val.json"):
    for name, size in (("a.png", (30, 20)), ("deep/b.png", (16, 24))):
        path = root / images / name
        path.parent.mkdir(parents=True, exist_ok=True)
        Image.fromarray(np.full((size[1], size[0], 3), 9, np.uint8)).save(path)
    (root / file).parent.mkdir(exist_ok=True)
    (root / file).write_text(what if isinstance(what, str) else json.dumps(what))
    return root


@pytest.mark.parametrize("images, file", [("val", "val.json"), ("val2017", "annotations/instances_val2017.json")])
def test_boxes_labels_and_an_image_without_boxes(tmp_path, images, file):
    data = CocoFolder(write(tmp_path, content(), images, file), "val")
    assert data.classes == ["ship", "dog", "cat"] and data.category_ids == [1, 13, 90] and not data.notes()
    image, target = data[0]
    assert image.shape == (3, 20, 30) and image.dtype == torch.uint8 and target["size"] == (20, 30)
    assert target["boxes"].tolist() == [[2, 3, 12.5, 11], [0, 0, 30, 20]]  # the crowd is not among them
    assert target["labels"].tolist() == [2, 1] and target["image_id"] == 7
    empty = data[1][1]
    assert len(data) == 2 and empty["boxes"].shape == (0, 4) and empty["labels"].shape == (0,)
    assert data.describe(1).endswith("deep/b.png")


def test_labels_map_back_to_the_ids_of_the_json(tmp_path):
    data = CocoFolder(write(tmp_path, content()), "val")
    target = data[0][1]
    rows = data.results(7, {"boxes": target["boxes"], "labels": target["labels"], "scores": torch.tensor([0.9, 0.5])})
    assert rows == [{"image_id": 7, "category_id": 90, "bbox": [2, 3, 10.5, 8], "score": 0.9},
                    {"image_id": 7, "category_id": 13, "bbox": [0, 0, 30, 20], "score": 0.5}]
    truth = data.ground_truth()
    assert [(row["category_id"], row["area"], row["iscrowd"]) for row in truth["annotations"]] == [
        (90, 84, 0), (13, 400, 0), (1, 25, 1)]
    assert [category["id"] for category in truth["categories"]] == data.category_ids


def test_useless_boxes_are_mended_by_rule_counted_and_listed(tmp_path):
    what = content()
    boxes = [[-5, 2, 10, 40], [28, 18, 9, 9], [30, 2, 4, 4], [4, 4, 0, 3], [4, 4, -2, 3]]
    what["annotations"] = [{"id": 10 + i, "image_id": 7, "category_id": 1, "bbox": box} for i, box in enumerate(boxes)]
    what["annotations"][0] |= {"area": 70, "segmentation": [[1, 2, 3, 4, 5, 6]]}
    what["annotations"] += [{"id": 20, "image_id": 7, "category_id": 2, "bbox": [1, 1, 2, 2]},
                            {"id": 21, "image_id": 8, "category_id": 1, "bbox": [1, 1, 2, 2]}]
    data = CocoFolder(write(tmp_path, what), "val")
    assert data[0][1]["boxes"].tolist() == [[0, 2, 5, 20], [28, 18, 30, 20]]
    assert [row["area"] for row in data.ground_truth()["annotations"]] == [70, 2 * 2]
    assert "segmentation" not in data.annotations[0][0]
    assert data.problems == {"box reaches beyond the image": [10, 11],
                             "box without area inside the image": [12, 13, 14],
                             "unknown category": [20], "unknown image": [21]}
    notes = data.notes()
    assert len(notes) == 4
    assert "2 annotation(s), box reaches beyond the image: cut at its border (id 10, 11)" in notes[0]
    assert cut_box([1, 1, 2, 2], 3, 3) == [1, 1, 2, 2] and cut_box([3, 0, 1, 1], 3, 3) is None


def without(part, field):
    what = content()
    del what[part][0][field]
    return what


def with_value(part, field, value):
    what = content()
    what[part][-1][field] = value
    return what


@pytest.mark.parametrize("what, message", [
    ('{"images": [', "val.json is damaged: it is not valid JSON"),
    ("[]", "a mapping is required, got list"),
    ({**content(), "categories": None}, "categories must be a list, got NoneType"),
    ({**content(), "images": []}, "at least one of its images"),
    (without("images", "width"), "images[0].width must be a positive whole number of pixels, got nothing"),
    (without("annotations", "bbox"), "annotations[0].bbox must be four numbers"),
    (with_value("annotations", "bbox", [1, 2, 3]), "annotations[2].bbox must be four numbers: x, y, width, height in "
                                                   "pixels, got [1, 2, 3]"),
    (with_value("annotations", "bbox", [1, 2, 3, float("nan")]), "annotations[2].bbox"),
    (with_value("annotations", "category_id", "cat"), "annotations[2].category_id must be a whole number, got 'cat'"),
    (with_value("images", "file_name", "../b.png"), "images[1].file_name must be a path inside"),
    (with_value("images", "id", 7), "images[1].id 7 is there already"),
    (with_value("images", "file_name", "c.png"), "1 of the 2 images of"),
])
def test_damaged_json_is_one_clear_line(tmp_path, what, message):
    with pytest.raises(UsageError) as error:
        CocoFolder(write(tmp_path, what), "val")
    assert message in str(error.value) and "\n" not in str(error.value)


def test_missing_folders_are_named(tmp_path):
    with pytest.raises(UsageError, match="must have train/ with images and train.json, or COCO's own train2017/"):
        CocoFolder(write(tmp_path, content()), "train")


def test_an_image_of_another_size_or_that_is_broken(tmp_path):
    data = CocoFolder(write(tmp_path, content()), "val")
    Image.new("RGB", (20, 30)).save(data.folder / "a.png")
    with pytest.raises(BrokenImage, match="20x30 pixels, val.json says 30x20"):
        data[0]
    (data.folder / "a.png").write_bytes(b"no image")
    with pytest.raises(BrokenImage):
        data[0]


def test_select_and_fingerprint(tmp_path):
    data = CocoFolder(write(tmp_path / "one", content()), "val")
    other = CocoFolder(write(tmp_path / "two", content()), "val")
    chosen = data.select([1, 0], lambda image, target: target["image_id"])
    assert [chosen[0], chosen[1]] == [3, 7] and data[0][1]["image_id"] == 7
    assert [len(data.select([1]).ground_truth()[part]) for part in ("images", "annotations")] == [1, 0]
    assert data.fingerprint() == other.fingerprint() != chosen.fingerprint()
