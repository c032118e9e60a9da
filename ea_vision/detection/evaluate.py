"""COCO's metrics of a detector, by pycocotools: AP, AP50, AP75, APs, APm, APl, and AP and AP50 of each class.

All are in percent. AP is the mean over overlap (IoU) thresholds from 0.50 to 0.95; AP50 and AP75 use one threshold;
APs, APm and APl are AP of objects of less than 32^2, of 32^2 to 96^2, and of more than 96^2 pixels. At most 100
detections per image count. A measure without any object is nan.
"""

import copy
import io
import math
from collections import Counter
from collections.abc import Callable, Sequence
from contextlib import closing, redirect_stdout
from dataclasses import dataclass
from itertools import chain

import torch
from torch import nn

from ea_vision.base.errors import RunError, extra_required
from ea_vision.base.processes import World
from ea_vision.detection.coco import results_of
from ea_vision.detection.loaders import BoxEvalLoader
from ea_vision.detection.transforms import found_in_original
from ea_vision.engine.config import TrainConfig
from ea_vision.engine.evaluate import autocast, batches_for, json_numbers, no_stop, percents

MEASURES = ("AP", "AP50", "AP75", "APs", "APm", "APl")


def require_pycocotools():
    """Return pycocotools' COCO and COCOeval.

    Raises:
        UsageError: it is not installed.
    """
    with extra_required("detection", "pycocotools", "detection"):
        from pycocotools.coco import COCO
        from pycocotools.cocoeval import COCOeval
    return COCO, COCOeval


@dataclass
class DetectionResult:
    """The results of a detector on `images` images.

    measures: MEASURES, in percent. per_class: one row per class: class, objects, AP, AP50. detections: COCO's results.
    unreadable: number of images that could not be read; they and their boxes are not counted.
    """

    images: int
    measures: dict[str, float]
    per_class: list[dict]
    detections: list[dict]
    unreadable: int = 0

    def figures(self) -> dict[str, float]:
        """Return the measures of metrics.csv, in percent."""
        return self.measures

    def numbers(self) -> dict:
        """Return the content of evaluation.json; measures without an object are None."""
        return {
            "images": self.images,
            "tta": "none",
            "unreadable_images": self.unreadable,
            "detections": len(self.detections),
            **json_numbers(self.measures),
        }

    def rows(self, classes: list[str]) -> list[dict]:
        """Return the rows of per_class.csv."""
        return self.per_class

    def line(self) -> str:
        """Return the measures, without those that have no object, and the number of images."""
        without = f" without {self.unreadable} that cannot be read" if self.unreadable else ""
        return f"{percents(self.measures)}  {self.images} images{without}"


def coco_metrics(
    ground_truth: dict, detections: Sequence[dict]
) -> tuple[dict[str, float], list[dict]]:
    """Return MEASURES in percent, and AP and AP50 of each class.

    Args:
        ground_truth: content of a COCO JSON: images, categories, annotations with area and iscrowd.
        detections: COCO's results: image_id, category_id, bbox (x, y, width, height) in pixels, score.

    Raises:
        UsageError: pycocotools is not installed.
    """
    COCO, COCOeval = require_pycocotools()
    truth = COCO()
    truth.dataset = copy.deepcopy(ground_truth)  # pycocotools adds fields to it
    with redirect_stdout(io.StringIO()):  # it prints its steps
        truth.createIndex()
        # loadRes takes no empty list
        results = truth.loadRes(copy.deepcopy(detections)) if detections else COCO()
        evaluation = COCOeval(truth, results, "bbox")
        evaluation.evaluate()
        evaluation.accumulate()
        evaluation.summarize()
    stats = evaluation.stats.tolist()[: len(MEASURES)]
    measures = {name: _percent(value) for name, value in zip(MEASURES, stats, strict=True)}
    return measures, _per_class(ground_truth, evaluation)


def _per_class(ground_truth: dict, evaluation) -> list[dict]:
    """Return one row per class: class, objects, AP, AP50."""
    names = {category["id"]: category["name"] for category in ground_truth["categories"]}
    annotations = ground_truth["annotations"]
    objects = Counter(row["category_id"] for row in annotations if not row["iscrowd"])
    # thresholds from 0.5, recalls, classes; all areas, 100 detections
    precision = evaluation.eval["precision"][..., 0, -1]
    rows = []
    for place, category in enumerate(evaluation.params.catIds):
        class_precision = precision[:, :, place]
        row = {
            "class": names[category],
            "objects": objects[category],
            "AP": round(_percent(class_precision.mean()), 2),
            "AP50": round(_percent(class_precision[0].mean()), 2),
        }
        rows.append(row)
    return rows


def _percent(value: float) -> float:
    """Return percent; nan for COCOeval's -1, which means that there is no object."""
    return 100 * float(value) if value >= 0 else math.nan


@torch.no_grad()
def evaluate(
    model: nn.Module,
    loader: BoxEvalLoader,
    num_classes: int,
    world: World,
    config: TrainConfig,
    *,
    between: Callable[[], None] = no_stop,
    tta: str = "none",
) -> DetectionResult:
    """Evaluate a detector, each process its share; see `ea_vision.engine.evaluate.evaluate`.

    `num_classes` and `tta` are not used: the classes are those of the loader's data, and each image has one view.

    Raises:
        RunError: no image that can be read has a box.
    """
    source = loader.source
    results: list[dict] = []
    ids: list[int] = []
    with closing(batches_for(model, loader, between)) as batches:
        for pixels, targets, indices in batches:
            ids += indices.tolist()
            with autocast(config.amp, world.device):
                detected = model(pixels)
            for target, one in zip(targets, detected, strict=True):
                one = found_in_original(one, target["size"], pixels.shape[-1])
                results += results_of(target["image_id"], one, source.category_ids)
    ids = sorted(chain.from_iterable(world.gather(ids)))
    truth = source.ground_truth(ids)
    if all(row["iscrowd"] for row in truth["annotations"]):
        raise RunError(
            f"readable images with boxes are required, got {len(ids)} readable of {len(source)} images and "
            "no box"
        )
    # the same order on any number of processes
    everywhere = chain.from_iterable(world.gather(results))
    results = sorted(everywhere, key=lambda row: str(row["image_id"]))
    measures, per_class = coco_metrics(truth, results)
    return DetectionResult(len(ids), measures, per_class, results, len(source) - len(ids))
