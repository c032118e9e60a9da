"""Boxes that are not visible in their image are counted, logged, and left out of training and of the metric."""

import json

import pytest
from PIL import Image

from ea_vision.detection.coco import CocoFolder
from ea_vision.detection.evaluate import coco_metrics
from ea_vision.detection.transforms import eval_transform
from tests.refused import refused

SEEN = [5, 5, 10, 10]
UNSEEN = [
    *([20, 20, 0, 10], [20, 20, -10, -10], [25, 5, -20, 10]),  # without area
    *([500, 500, 10, 10], [40, 0, 10, 10], [-20, 5, 10, 10]),  # outside
    *([0.1, 0.1, 0.2, 0.2], [39.5, 5, 10, 10], [5, 5, 0.9, 10]),
]


def folder(root, boxes, file_name="a.png"):
    (root / "val").mkdir(exist_ok=True)
    Image.new("RGB", (40, 30)).save(root / "val" / "a.png")
    content = {
        "images": [{"id": 1, "file_name": file_name, "width": 40, "height": 30}],
        "categories": [{"id": 1, "name": "x"}],
        "annotations": [{"image_id": 1, "category_id": 1, "bbox": box} for box in boxes],
    }
    (root / "val.json").write_text(json.dumps(content), encoding="utf-8")
    return CocoFolder(root, "val")


def check_found(data, box):
    """Check that a detector that finds this box alone scores 100."""
    detection = {"image_id": 1, "category_id": 1, "bbox": box, "score": 0.9}
    assert coco_metrics(data.ground_truth(), [detection])[0]["AP"] == pytest.approx(100)


@pytest.mark.parametrize("box", UNSEEN)
def test_what_training_leaves_out_the_metric_leaves_out(tmp_path, caplog, box):
    data = folder(tmp_path, [SEEN, box])
    [line] = caplog.messages
    assert "1 of 2 boxes are left out of training and evaluation, " in line
    assert line.endswith(f"the first: {box} of a.png")
    assert len(data[0][1]["boxes"]) == 1
    check_found(data, SEEN)
    assert data.fingerprint() == folder(tmp_path, [SEEN]).fingerprint()


@pytest.mark.parametrize(
    "box, seen",
    [
        ([-20, 5, 40, 10], [0, 5, 20, 10]),
        ([30, 20, 100.5, 100], [30, 20, 10, 10]),
        ([-1, -2, 50, 40], [0, 0, 40, 30]),
        ([39, 5, 10, 10], [39, 5, 1, 10]),
        ([0, 0, 1, 1], [0, 0, 1, 1]),
    ],
)
def test_the_metric_cuts_boxes_at_the_border_as_training_does(tmp_path, caplog, box, seen):
    """A detector that finds all that can be seen scores 100."""
    data = folder(tmp_path, [box])
    assert not caplog.messages
    [row] = data.ground_truth()["annotations"]
    assert (row["bbox"], row["area"]) == (seen, seen[2] * seen[3])
    image, target = data[0]
    trained = eval_transform(40)(image, target)[1]["boxes"].tolist()
    x, y, width, height = seen
    assert trained == [[x, y, x + width, y + height]]
    check_found(data, seen)


def test_a_json_without_a_box_that_can_be_seen_is_an_error(tmp_path):
    shares = [[0.1, 0.1, 0.2, 0.2], [0.5, 0.5, 0.4, 0.4]]
    with refused("must be x, y, .* in pixels, got 2 boxes .* fractions of"):
        folder(tmp_path, shares)


def test_many_are_counted(tmp_path, caplog):
    folder(tmp_path, [SEEN, *UNSEEN])
    assert "9 of 10 boxes" in caplog.text


def test_a_file_name_may_be_a_path_of_its_own(tmp_path):
    data = folder(tmp_path, [SEEN], file_name=str(tmp_path / "val" / "a.png"))
    assert data[0][0].shape == (3, 30, 40)
