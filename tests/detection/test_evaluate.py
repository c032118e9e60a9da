"""COCO's metrics: ground truth scores 100, misses and wrong classes less, and a measure without objects is nan."""

import math

import pytest
import torch

from ea_vision.base.errors import RunError
from ea_vision.base.processes import World
from ea_vision.detection.coco import CocoFolder
from ea_vision.detection.evaluate import MEASURES, DetectionResult, coco_metrics, evaluate
from ea_vision.detection.loaders import BoxEvalLoader
from ea_vision.detection.transforms import eval_transform
from ea_vision.engine.config import TrainConfig
from tests.detection.boxes import box_loader, make_boxes
from tests.refused import refused

BOXES = [  # image, category, box, crowd; image 3 has none
    (1, 3, [10, 10, 20, 20], 0),
    (1, 90, [50, 50, 60, 60], 0),
    (2, 3, [0, 0, 120, 150], 0),
    (2, 3, [150, 150, 40, 40], 1),
]
TRUTH = {
    "images": [{"id": n, "file_name": f"{n}.png", "width": 200, "height": 200} for n in (1, 2, 3)],
    "categories": [{"id": 3, "name": "cat"}, {"id": 90, "name": "brush"}],  # ids with gaps
    "annotations": [],
}
for _image, _category, _box, _crowd in BOXES:
    _row = {"image_id": _image, "category_id": _category, "bbox": _box, "iscrowd": _crowd}
    _number = len(TRUTH["annotations"]) + 1
    TRUTH["annotations"].append({"id": _number, "area": _box[2] * _box[3], **_row})


def as_detections(annotations):
    detections = []
    for row in annotations:
        detection = {key: row[key] for key in ("image_id", "category_id", "bbox")}
        detections.append({**detection, "score": 0.9})
    return detections


def test_ground_truth_scores_all():
    before = repr(TRUTH)
    detections = as_detections(TRUTH["annotations"])
    measures, per_class = coco_metrics(TRUTH, detections)
    assert repr(TRUTH) == before, "what is given is left as it is"
    assert detections == as_detections(TRUTH["annotations"])
    assert measures == pytest.approx(dict.fromkeys(MEASURES, 100.0))
    assert per_class == [
        {"class": "cat", "objects": 2, "AP": 100.0, "AP50": 100.0},
        {"class": "brush", "objects": 1, "AP": 100.0, "AP50": 100.0},
    ]


def test_no_detections_score_0_and_measures_without_objects_are_nan():
    small = {**TRUTH, "annotations": TRUTH["annotations"][:1]}
    measures, per_class = coco_metrics(small, [])
    assert measures["AP"] == measures["AP50"] == measures["APs"] == 0
    assert math.isnan(measures["APm"])
    assert math.isnan(measures["APl"])
    assert per_class[0]["AP"] == 0
    assert math.isnan(per_class[1]["AP"])
    result = DetectionResult(3, measures, per_class, [])
    assert result.numbers()["APl"] is None
    assert "APl" not in result.line()


def test_detections_in_a_crowd_do_not_count():
    detections = as_detections(TRUTH["annotations"][:3])
    inside = {"image_id": 2, "category_id": 3, "bbox": [155, 155, 30, 30], "score": 0.95}
    assert coco_metrics(TRUTH, [*detections, inside])[0]["AP"] == pytest.approx(100)
    beside = {**inside, "bbox": [100, 160, 30, 30]}
    assert coco_metrics(TRUTH, [*detections, beside])[0]["AP"] < 100


class Perfect(torch.nn.Module):
    """Returns the true boxes in the order of a data set, without the images numbered `broken`, which it never sees."""

    def __init__(self, source, broken):
        super().__init__()
        self.left = [source[index][1] for index in range(len(source)) if index not in broken]

    def forward(self, images):
        detections = []
        for _ in range(len(images)):
            target = self.left.pop(0)
            boxes = target["boxes"] * images.shape[-1] / max(target["size"])
            scores = torch.full((len(boxes),), 0.9)
            detections.append({"boxes": boxes, "labels": target["labels"], "scores": scores})
        return detections


@pytest.mark.parametrize("broken", [(), (2, 5), range(7)], ids=len)
def test_boxes_of_images_that_cannot_be_read_are_left_out(tmp_path, broken):
    make_boxes(tmp_path / "data", val=7)
    data = CocoFolder(tmp_path / "data", "val")
    arguments = (
        Perfect(data, broken),
        box_loader(BoxEvalLoader, data, eval_transform, img_size=64),
        3,
        World(0, 1, torch.device("cpu")),
        TrainConfig(),
    )
    for index in broken:
        (data.folder / f"{index}.png").write_bytes(b"no image")
    if len(broken) == 7:
        with refused("images with boxes are required, got 0 readable of 7 images", RunError):
            evaluate(*arguments)
        return
    result = evaluate(*arguments)
    lost = sum(len(data.annotations[index]) for index in broken)
    assert result.measures["AP"] == pytest.approx(100)
    assert result.images == 7 - len(broken)
    assert sum(row["objects"] for row in result.per_class) == sum(map(len, data.annotations)) - lost
    assert result.line().endswith(
        "5 images without 2 that cannot be read" if broken else " 7 images"
    )
    assert result.numbers()["unreadable_images"] == len(broken)
