"""`CocoFolder`: what it reads, and what it refuses. Boxes that are not visible in their image are counted, logged, and
left out of training and of the metric."""

import json
import re

import pytest
import torch
from PIL import Image

from ea_vision.data.decoding import BrokenImage
from ea_vision.detection.coco import CocoFolder, results_of
from ea_vision.detection.evaluate import coco_metrics
from ea_vision.detection.transforms import eval_transform
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
    # the crowd is not among them
    assert target["boxes"].tolist() == [[2, 3, 12.5, 11], [0, 0, 30, 20]]
    assert target["labels"].tolist() == [2, 1]
    assert target["image_id"] == 7
    assert len(data) == 2
    empty = data[1][1]
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


# ---- boxes that are not visible --------------------------------------------------------------------------------------


SEEN = [5, 5, 10, 10]
UNSEEN = [
    *([10, 10, 0, 5], [10, 10, -5, -5], [25, 5, -20, 10]),  # without area
    *([500, 500, 10, 10], [30, 0, 10, 10], [-20, 5, 10, 10]),  # outside
    *([0.1, 0.1, 0.2, 0.2], [29.5, 5, 10, 10], [5, 5, 0.9, 10]),
]


def boxed(root, *boxes):
    """The folder of these boxes of the first image."""
    rows = [{"image_id": 7, "category_id": 1, "bbox": box} for box in boxes]
    return folder(root, {**CONTENT, "annotations": rows})


def check_found(data, box):
    """Check that a detector that finds this box alone scores 100."""
    detection = {"image_id": 7, "category_id": 1, "bbox": box, "score": 0.9}
    assert coco_metrics(data.ground_truth(), [detection])[0]["AP"] == pytest.approx(100)


@pytest.mark.parametrize("box", UNSEEN)
def test_what_training_leaves_out_the_metric_leaves_out(tmp_path, caplog, box):
    data = boxed(tmp_path, SEEN, box)
    [line] = caplog.messages
    assert "1 of 2 boxes are left out of training and evaluation, " in line
    assert line.endswith(f"the first: {box} of a.png")
    assert len(data[0][1]["boxes"]) == 1
    check_found(data, SEEN)
    assert data.fingerprint() == boxed(tmp_path, SEEN).fingerprint()


@pytest.mark.parametrize(
    "box, seen",
    [
        ([-20, 5, 40, 10], [0, 5, 20, 10]),
        ([20, 10, 100.5, 100], [20, 10, 10, 10]),
        ([-1, -2, 50, 40], [0, 0, 30, 20]),
        ([29, 5, 10, 10], [29, 5, 1, 10]),
        ([0, 0, 1, 1], [0, 0, 1, 1]),
    ],
)
def test_the_metric_cuts_boxes_at_the_border_as_training_does(tmp_path, caplog, box, seen):
    """A detector that finds all that can be seen scores 100."""
    data = boxed(tmp_path, box)
    assert not caplog.messages
    [row] = data.ground_truth()["annotations"]
    assert (row["bbox"], row["area"]) == (seen, seen[2] * seen[3])
    _, trained = eval_transform(30)(*data[0])
    x, y, width, height = seen
    assert trained["boxes"].tolist() == [[x, y, x + width, y + height]]
    check_found(data, seen)


def test_many_are_counted_and_a_json_without_a_box_that_can_be_seen_is_an_error(tmp_path, caplog):
    boxed(tmp_path, SEEN, *UNSEEN)
    assert "9 of 10 boxes" in caplog.text
    with refused("must be x, y, .* in pixels, got 2 boxes .* fractions of"):
        boxed(tmp_path, [0.1, 0.1, 0.2, 0.2], [0.5, 0.5, 0.4, 0.4])


def test_a_file_name_may_be_a_path_of_its_own(tmp_path):
    path = tmp_path / "elsewhere.png"
    Image.new("RGB", (16, 24)).save(path)
    image, _ = folder(tmp_path, with_last("images", file_name=str(path)))[1]
    assert image.shape == (3, 24, 16)
