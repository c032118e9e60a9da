"""COCO's metrics: ground truth scores 100, misses and wrong classes do not, and what there is no object for is nan."""
import math

import pytest

pytest.importorskip("pycocotools", reason="needs pycocotools")

from ea_vision.detection.evaluate import MEASURES, DetectionResult, coco_metrics  # noqa: E402

TRUTH = {
    "images": [{"id": n, "file_name": f"{n}.png", "width": 200, "height": 200} for n in (1, 2, 3)],
    "categories": [{"id": 3, "name": "cat"}, {"id": 90, "name": "brush"}],  # ids with gaps
    "annotations": [
        {"id": 1, "image_id": 1, "category_id": 3, "bbox": [10, 10, 20, 20], "area": 400, "iscrowd": 0},
        {"id": 2, "image_id": 1, "category_id": 90, "bbox": [50, 50, 60, 60], "area": 3600, "iscrowd": 0},
        {"id": 3, "image_id": 2, "category_id": 3, "bbox": [0, 0, 120, 150], "area": 18000, "iscrowd": 0},
        {"id": 4, "image_id": 2, "category_id": 3, "bbox": [150, 150, 40, 40], "area": 1600, "iscrowd": 1},
    ],  # image 3 has none
}


def as_detections(annotations, score=0.9):
    return [{key: row[key] for key in ("image_id", "category_id", "bbox")} | {"score": score} for row in annotations]


def test_ground_truth_scores_all():
    measures, per_class = coco_metrics(TRUTH, as_detections(TRUTH["annotations"]))
    assert measures == pytest.approx(dict.fromkeys(MEASURES, 100.0))
    assert per_class == [{"class": "cat", "objects": 2, "AP": 100.0, "AP50": 100.0},
                         {"class": "brush", "objects": 1, "AP": 100.0, "AP50": 100.0}]


def test_no_detection_scores_nothing_and_what_is_not_there_is_nan():
    small = {**TRUTH, "annotations": TRUTH["annotations"][:1]}
    measures, per_class = coco_metrics(small, [])
    assert measures["AP"] == measures["AP50"] == measures["APs"] == 0
    assert math.isnan(measures["APm"]) and math.isnan(measures["APl"])
    assert per_class[0]["AP"] == 0 and math.isnan(per_class[1]["AP"])
    result = DetectionResult(3, measures, per_class, [])
    assert result.numbers()["APl"] is None and "APl" not in result.line()


def test_what_is_in_a_crowd_counts_for_nothing():
    inside = {"image_id": 2, "category_id": 3, "bbox": [155, 155, 30, 30], "score": 0.95}
    measures, _ = coco_metrics(TRUTH, [*as_detections(TRUTH["annotations"][:3]), inside])
    assert measures["AP"] == pytest.approx(100)
    outside = {**inside, "bbox": [100, 160, 30, 30]}
    measures, _ = coco_metrics(TRUTH, [*as_detections(TRUTH["annotations"][:3]), outside])
    assert measures["AP"] < 100


def test_overlap_decides_which_thresholds_are_met():
    moved = as_detections(TRUTH["annotations"][:3])
    for row in moved:
        x, y, w, h = row["bbox"]
        row["bbox"] = [x, y, w, 0.7 * h]  # an overlap of 0.7: thresholds 0.50 to 0.65 or 0.70
    measures, _ = coco_metrics(TRUTH, moved)
    assert measures["AP50"] == pytest.approx(100) and measures["AP75"] == 0 and 40 <= measures["AP"] <= 50


def test_the_ground_truth_is_left_as_it_is():
    before = repr(TRUTH)
    found = as_detections(TRUTH["annotations"])
    coco_metrics(TRUTH, found)
    assert repr(TRUTH) == before and all(set(row) == {"image_id", "category_id", "bbox", "score"} for row in found)
