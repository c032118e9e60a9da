"""Detectors at the door: how a run of train-detection is built again, and how its images are prepared."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from ea_vision.detection.model import Detector, create_detector
from ea_vision.detection.transforms import Fitted
from ea_vision.zoo.create import Kind, register_kind
from ea_vision.zoo.loaded import LoadedModel
from ea_vision.zoo.source import Source, check_model_name


@dataclass
class DetectorModel(LoadedModel):
    """A detector. Its images are fitted into a square and padded at the right and below; it normalises them itself.

    Attributes:
        category_ids: ids of the classes in COCO's results.
    """

    category_ids: Sequence[int] = ()
    classifies = False


def _create(name: str, *, pretrained: bool = False, **kwargs: Any) -> Detector:
    check_model_name(name)
    return create_detector(name, **kwargs)


def _prepared(model: Detector, source: Source, trained: bool) -> DetectorModel:
    return DetectorModel(
        model,
        source.label,
        Fitted((model.img_size, model.img_size)),
        trained=trained,
        classes=source.note["classes"],
        category_ids=source.note["category_ids"],
    )


register_kind("detection", Kind(_create, _prepared, fixed_size=True))
