"""The options of the trainer that a recipe belongs to."""

from ea_vision.detection.train import DetectionConfig
from ea_vision.engine.config import resolve
from ea_vision.engine.train_cifar import CifarConfig
from ea_vision.engine.train_imagenet import ImageNetConfig

TRAINERS = {
    **dict.fromkeys(
        ("imagenet", "finetune", "rsb", "ffcv", "torchvision", "scenes"), ImageNetConfig
    ),
    "coco": DetectionConfig,
}


def resolved(name, **given):
    """Return the options of a recipe's trainer under this recipe; `given` replaces some."""
    kind = "cifar" if name == "finetune" else name.partition("_")[0]
    return resolve(TRAINERS.get(kind, CifarConfig), {"recipe": name, **given})
