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


def annotation(number, image, category, box, crowd=0):
    row = {"image_id": image, "category_id": category, "bbox": box}
    return {"id": number, "area": box[2] * box[3], "iscrowd": crowd, **row}


TRUTH = {  # image 3 has no box
    "images": [{"id": n, "file_name": f"{n}.png", "width": 200, "height": 200} for n in (1, 2, 3)],
    "categories": [{"id": 3, "name": "cat"}, {"id": 90, "name": "brush"}],  # ids with gaps
    "annotations": [
        annotation(1, 1, 3, [10, 10, 20, 20]),
        annotation(2, 1, 90, [50, 50, 60, 60]),
        annotation(3, 2, 3, [0, 0, 120, 150]),
        annotation(4, 2, 3, [150, 150, 40, 40], crowd=1),
    ],
}


DETECTIONS = [{**row, "score": 0.9} for row in TRUTH["annotations"]]


def test_ground_truth_scores_all():
    before = repr((TRUTH, DETECTIONS))
    measures, per_class = coco_metrics(TRUTH, DETECTIONS)
    assert repr((TRUTH, DETECTIONS)) == before, "what is given is left as it is"
    assert measures == pytest.approx(dict.fromkeys(MEASURES, 100.0))
    assert per_class == [
        {"class": "cat", "objects": 2, "AP": 100.0, "AP50": 100.0},
        {"class": "brush", "objects": 1, "AP": 100.0, "AP50": 100.0},
    ]


def test_no_detections_score_0_and_measures_without_objects_are_nan():
    small = {**TRUTH, "annotations": TRUTH["annotations"][:1]}
    measures, per_class = coco_metrics(small, [])
    zero_and_nan = {"AP": 0, "AP50": 0, "AP75": 0, "APs": 0, "APm": math.nan, "APl": math.nan}
    assert measures == pytest.approx(zero_and_nan, nan_ok=True)
    assert [row["AP"] for row in per_class] == pytest.approx([0, math.nan], nan_ok=True)
    result = DetectionResult(3, measures, per_class, [])
    assert result.numbers()["APl"] is None
    assert "APl" not in result.line()


def test_detections_in_a_crowd_do_not_count():
    inside = {"image_id": 2, "category_id": 3, "bbox": [155, 155, 30, 30], "score": 0.95}
    beside = {**inside, "bbox": [100, 160, 30, 30]}
    measures, _ = coco_metrics(TRUTH, [*DETECTIONS[:3], inside])
    assert measures["AP"] == pytest.approx(100)
    measures, _ = coco_metrics(TRUTH, [*DETECTIONS[:3], beside])
    assert measures["AP"] < 100


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
