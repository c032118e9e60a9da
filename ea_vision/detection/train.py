"""Train or evaluate a RetinaNet over any of our networks or timm's on COCO, or other images with boxes in its format.

The data folder has train/ and val/ with images, and train.json and val.json (or COCO's train2017/ and annotations/).
Started by torchrun it runs on several GPUs or machines; the same command continues a run that was interrupted.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import nn

from ea_vision.base.errors import UsageError, as_usage_error
from ea_vision.base.files import write_json
from ea_vision.base.processes import World
from ea_vision.detection.coco import CocoFolder, find_coco
from ea_vision.detection.evaluate import MEASURES, DetectionResult, evaluate, require_pycocotools
from ea_vision.detection.loaders import BoxEvalLoader, BoxTrainLoader
from ea_vision.detection.model import Detector, create_detector
from ea_vision.detection.transforms import eval_transform, train_transform
from ea_vision.engine import run
from ea_vision.engine.config import StreamConfig, option, setting
from ea_vision.engine.data_module import DataModule
from ea_vision.engine.evaluate import autocast
from ea_vision.engine.train import Trainer
from ea_vision.zoo.create import build
from ea_vision.zoo.source import weights_and_note
from ea_vision.zoo.weights_file import DAMAGED

DESCRIPTION = __doc__
EXAMPLES = """\
  torchrun --nproc-per-node 8 -m ea_vision train-detection --data-dir COCO --model aa_resnet50 --amp
  ea-vision train-detection --data-dir COCO --recipe coco_26_epochs --model resnet50 --pretrained
  ea-vision train-detection --data-dir DIR --recipe none --img-size 128 --model resnet18 \\
      --model-kwargs fpn_channels=64 head_convs=2 --head-norm batch
  ea-vision train-detection --evaluate runs/detection-aa_resnet50 --data-dir COCO
"""
KIND = "detection"  # `task` in the `about` section of config.yaml


@dataclass
class DetectionConfig(
    StreamConfig,
    recipe="coco_aa_retinanet",
    batch_size=8,
    eval_batch_size=8,
    opt="momentum",
    lr=0.01,
    weight_decay=1e-4,
):
    """The options of this trainer."""

    model: str = option(
        "aa_resnet50",
        "registered timm model, ours or timm's, with features at strides 8, 16 and 32",
    )
    model_kwargs: dict = option(
        {},
        "further keywords of the detector (fpn_channels, head_convs, min_head_qk, "
        "score_thresh, ...) and of its backbone, as key=value ...",
    )
    pretrained: bool = option(False, "begin with timm's weights of the backbone")
    pretrained_path: str = setting(
        "",
        "begin with the weights of a file or run folder of classification instead, "
        "for the backbone",
    )
    output: str = setting("", "the run's own folder; empty: runs/detection-MODEL")
    data_dir: str = setting("", "folder with train/, val/, train.json and val.json, or COCO's own")

    img_size: int = option(
        640,
        "side in pixels, a multiple of 32, of the square that images are scaled into",
        "data",
        minimum=32,
    )

    anchors: int = option(
        6, "anchor boxes per location of the pyramid, 6 or 9", "model", minimum=6, maximum=9
    )
    head_norm: str = option(
        "none", "norms in pyramid and heads, one for each level", choices=("none", "batch")
    )

    gamma: float = option(1.5, "of the focal loss", "loss")
    box_loss: str = option(
        "l1",
        "loss of boxes; huber: of the AA paper's code, weighted 50",
        choices=("l1", "smooth_l1", "huber"),
    )

    scale_min: float = option(
        0.8,
        "training: smallest longer side of an image, in units of img_size",
        "augmentation",
        above=0.0,
    )
    scale_max: float = option(1.2, "training: its largest longer side", above=0.0)

    def __post_init__(self):
        super().__post_init__()
        if self.scale_min > self.scale_max:
            raise UsageError(
                f"scale_min must be at most scale_max ({self.scale_max:g}), got {self.scale_min:g}"
            )

    def _take_statistics(self) -> None:
        """Raise UsageError unless mean and std are empty."""
        if self.mean:
            raise UsageError(
                f"mean and std must be empty: a detector takes its backbone's, got {self.mean}"
            )


class DetectionTrainer(Trainer):
    """The training loop with the detector's own losses, evaluated by COCO's metrics."""

    measures = MEASURES
    quality = "precision"
    evaluate = staticmethod(evaluate)

    @staticmethod
    def _compile(model: Detector, **options: Any) -> Detector:
        """Compile backbone, pyramid and heads, whose shapes are fixed; boxes and losses are not compiled."""
        model.backbone.compile(**options)
        model.head.compile(**options)
        return model

    def _batch_loss(self, images: torch.Tensor, targets: list[dict]) -> torch.Tensor:
        """Return the sum of the losses of classes and boxes; images (B, 3, S, S) in 0..1."""
        with autocast(self.config.amp, self.world.device):
            losses = self.net(images, targets)
        return sum(losses.values())

    @staticmethod
    def loss_on_noise(model: Detector, images: torch.Tensor) -> torch.Tensor:
        boxes = images.shape[-1] * images.new_tensor([[0.1, 0.1, 0.6, 0.7]])
        labels = torch.zeros(1, dtype=torch.int64, device=images.device)
        targets = [{"boxes": boxes, "labels": labels}] * len(images)
        return sum(model(images, targets).values())


class CocoDetection(DataModule):
    """Images with boxes in COCO's format, read as they are needed."""

    description = DESCRIPTION
    examples = EXAMPLES
    options = DetectionConfig
    trainer = DetectionTrainer
    kind = KIND
    default_output = "runs/detection-{model}"
    least_classes = 1

    def __init__(self, config: DetectionConfig, world: World, training: bool):
        super().__init__(config, world, training)
        require_pycocotools()
        self.evaluated = CocoFolder(config.data_dir, "val")
        self.classes = self.evaluated.classes
        self.fingerprint = self.evaluated.fingerprint()
        self.about = {
            "task": KIND,
            "category_ids": self.evaluated.category_ids,
            "eval_data": self.evaluated.name,
        }
        if training:
            self._train_on(CocoFolder(config.data_dir, "train"), "categories")

    @classmethod
    def check_places(cls, config: DetectionConfig) -> None:
        for split in ("train", "val"):
            find_coco(config.data_dir, split)

    def create_model(self) -> tuple[nn.Module, dict]:
        """Return the detector, and the keywords with which `create_detector` builds it."""
        config = self.config
        weights, _ = weights_and_note(config.pretrained_path)
        constructor = partial(
            create_detector,
            config.model,
            pretrained=config.pretrained or weights is not None,
            pretrained_cfg_overlay={"file": str(weights)} if weights else None,
        )
        fixed = {
            name: getattr(config, name)
            for name in ("img_size", "anchors", "gamma", "box_loss", "head_norm")
        }
        try:
            with as_usage_error(f"weights {config.pretrained_path} cannot be read", DAMAGED):
                return build(
                    constructor,
                    config.model,
                    config.model_kwargs,
                    fixed={"num_classes": len(self.classes), **fixed},
                    optional=config.optional_kwargs,
                )
        except UsageError as error:
            if "size mismatch" in str(error.__cause__):
                raise UsageError(
                    f"weights {config.pretrained_path or 'of timm'} do not fit {config.model}: "
                    "classification weights have queries of at least 20 channels per head; "
                    "--model-kwargs min_head_qk=20 gives a detector the same"
                ) from error
            raise

    def train_loader(self, **keywords) -> BoxTrainLoader:
        config = self.config
        transform = partial(
            train_transform, scale=(config.scale_min, config.scale_max), flip=config.hflip
        )
        return BoxTrainLoader(self.train, transform=transform, **keywords)

    def eval_loader(self, **keywords) -> BoxEvalLoader:
        return BoxEvalLoader(self.evaluated, transform=eval_transform, **keywords)

    def loader_keywords(self, model: Detector) -> dict:
        """Return the loaders' keywords. mean and std only go into config.yaml: the detector normalises by itself."""
        return super().loader_keywords(model) | {
            "mean": model.transform.image_mean,
            "std": model.transform.image_std,
            "img_size": self.config.img_size,
            "workers": self.config.workers,
            "bad_images": self.bad_images,
        }

    def take_network(self, model: Detector, note: Mapping[str, Any], target: str) -> None:
        """Raise UsageError if a detector to evaluate has other categories than the data."""
        if (note["classes"], note["category_ids"]) != (self.classes, self.evaluated.category_ids):
            raise UsageError(
                f"{target} was trained on other categories than those of {self.evaluated.json}"
            )

    def write_details(self, folder: Path, result: DetectionResult, name: str) -> Path:
        """Write detections.json (COCO's results); return its path."""
        detections = folder / "detections.json"
        write_json(detections, result.detections)
        return detections


main = partial(run.main, CocoDetection)
