"""Train a network on ImageNet, or on any images in class folders, tars or FFCV files, by the papers' recipe.

The data folder has train and val (or validation, test), each a folder or a .tar of class/name.jpg. Images are read by
processes that decode them, or from .beton files that `ea-vision write-ffcv` wrote (much faster).
Started by torchrun it runs on several GPUs or machines; the same command continues a run that was interrupted.
"""

import logging
import math
from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from torch import nn

from ea_vision.base.errors import UsageError, as_usage_error
from ea_vision.base.processes import World
from ea_vision.data.batches import GrowingSize
from ea_vision.data.beton import Beton, Evaluated
from ea_vision.data.ffcv import BetonTrainLoader
from ea_vision.data.hub_images import HubImages, name_on_hub
from ea_vision.data.image_files import ImageFiles
from ea_vision.data.imagenet import ImageEvalLoader, ImageTrainLoader, train_transform
from ea_vision.data.splits import find_split
from ea_vision.engine import run
from ea_vision.engine.classification import ClassificationConfig, ClassificationTrainer, check_sizes
from ea_vision.engine.config import StreamConfig, option, setting
from ea_vision.engine.data_module import DataModule
from ea_vision.zoo.preparation import OPTIONS, preparation_of

log = logging.getLogger(__name__)
DESCRIPTION = __doc__
EXAMPLES = """\
  torchrun --nproc-per-node 8 train_imagenet.py --data-dir /data/imagenet --model ea_aa_resnet50
  python train_imagenet.py --data-dir DIR --recipe imagenet_ea_aa_resnet50 --device cuda --amp bfloat16 --channels-last
  python train_imagenet.py --train-beton train.beton --val-beton val.beton --model aa_resnet34
  python train_imagenet.py --data-dir DIR --model resnet18 --img-size 64 --eval-resize 72 --epochs 5   # any timm model
  python train_imagenet.py --dataset hfds/ILSVRC/imagenet-1k --model ea_aa_resnet50                    # from the hub
  torchrun --nnodes 2 --nproc-per-node 8 --rdzv-backend c10d --rdzv-endpoint HOST:29400 --max-restarts 3 \\
      train_imagenet.py --data-dir DIR --output /shared/runs/ea50
  python train_imagenet.py --evaluate runs/imagenet-ea_aa_resnet50 --data-dir DIR
  python train_imagenet.py --evaluate resnet50 --data-dir DIR                                          # timm's weights
"""


@dataclass
class ImageNetConfig(StreamConfig, ClassificationConfig, model="ea_aa_resnet50", recipe="imagenet"):
    """The options of this trainer."""

    output: str = setting("", "the run's own folder; empty: runs/imagenet-MODEL")
    data_dir: str = setting("", "folder with train and val, folders or tars of classes")

    dataset: str = option(
        "", "another data set: hfds/NAME of Hugging Face's; empty: that of data_dir", "data"
    )
    input_key: str = setting(
        "", "hfds/NAME: column of the images; empty: image", goes_with="dataset"
    )
    target_key: str = setting(
        "", "hfds/NAME: column of the classes; empty: label", goes_with="dataset"
    )
    train_beton: str = setting("", "FFCV file of the training images; empty: data_dir is read")
    val_beton: str = setting("", "FFCV file of the images to evaluate on; empty: data_dir is read")
    train_split: str = setting(
        "",
        "folder or tar in data_dir (split of --dataset) with the training images; empty: "
        "train, ILSVRC2012_img_train or that of ILSVRC/Data/CLS-LOC",
        not_with="train_beton",
    )
    val_split: str = setting(
        "",
        "the same for the images to evaluate on; empty: val, validation, valid, "
        "ILSVRC2012_img_val, test",
        not_with="val_beton",
    )
    num_classes: int = option(0, "classes the data must have; 0: those it has")
    img_size: int = option(
        224,
        "side of the training images in pixels, and of those to evaluate on if eval_img_size is 0",
        minimum=8,
    )
    interpolation: str = option(
        "bilinear", "how images are scaled (FFCV, training: area)", choices=("bilinear", "bicubic")
    )

    first_img_size: int = option(
        0,
        "side of the training images at the start, from which it grows to img_size; 0: one size",
        "augmentation",
        goes_with="grow_epochs",
    )
    grow_epochs: list[float] = option(
        [],
        "two epochs, counted from 0: first_img_size up to the first, img_size from the second on; "
        "between them multiples of 32 pixels",
        goes_with="first_img_size",
    )
    aug_repeats: int = option(
        1,
        "repeated augmentation: an epoch has each of its images this many times, and so many "
        "times fewer different images",
        minimum=1,
    )
    crop_scale: float = option(
        0.08, "least share of an image's area in a training crop", above=0.0, maximum=1.0
    )
    aa: str = option(
        "",
        "timm's policy, such as rand-m9-mstd0.5, or ta_wide, torchvision's TrivialAugment (not "
        "FFCV); empty: none",
        not_with="train_beton",
    )

    eval_img_size: int = option(
        0, "evaluation: side in pixels of the center crop; 0: img_size", "evaluation"
    )
    eval_resize: int = option(
        256, "evaluation: the short side in pixels, before the center crop", minimum=8
    )

    def __post_init__(self):
        super().__post_init__()
        if self.train_beton and self.val_beton and self.data_dir:
            raise UsageError(
                "data_dir must be empty with --train-beton and --val-beton, which are read "
                f"instead, got {self.data_dir}"
            )
        if self.eval_resize < self.side_to_evaluate:
            raise UsageError(
                "eval_resize must be at least "
                f"{'eval_img_size' if self.eval_img_size else 'img_size'} "
                f"({self.side_to_evaluate}), got {self.eval_resize}"
            )
        if self.first_img_size and not 8 <= self.first_img_size <= self.img_size:
            raise UsageError(
                f"first_img_size must be 8 to img_size ({self.img_size}), got {self.first_img_size}"
            )
        rising = sorted(self.grow_epochs) == self.grow_epochs
        if self.grow_epochs and not (rising and len(self.grow_epochs) == 2):
            raise UsageError(
                f"grow_epochs must be two epochs that do not fall, got {self.grow_epochs}"
            )

    @property
    def side_to_evaluate(self) -> int:
        """Side in pixels of the images that are evaluated on."""
        return self.eval_img_size or self.img_size

    @property
    def size_of(self) -> GrowingSize:
        """Side in pixels of the training images by epoch."""
        return GrowingSize(self.first_img_size or self.img_size, self.img_size, *self.grow_epochs)

    @property
    def train_sizes(self) -> set[int]:
        return {self.img_size, *map(self.size_of, range(math.ceil(self.epochs)))}


class GrowingTrainer(ClassificationTrainer):
    """A trainer whose images may grow. Entries of position tables that smaller images leave untrained are filled after
    each epoch, for evaluation, checkpoints and larger images."""

    def finish_epoch(self) -> None:
        if self.config.first_img_size:
            size = self.config.size_of(self.progress.epoch)
            for model in (self.model, self.best_model):
                if hasattr(model, "fill_offsets_beyond"):
                    model.fill_offsets_beyond(size)
        super().finish_epoch()


class ClassFolders(DataModule):
    """Images in class folders, tars or FFCV files, read as they are needed."""

    description = DESCRIPTION
    examples = EXAMPLES
    options = ImageNetConfig
    trainer = GrowingTrainer
    default_output = "runs/imagenet-{model}"

    def __init__(self, config: ImageNetConfig, world: World, training: bool):
        super().__init__(config, world, training)
        if training:
            train = self._open("train", config.train_beton, config.train_split)
        self.evaluated = self._open(
            "validation",
            config.val_beton,
            config.val_split,
            training,
            Evaluated(config.side_to_evaluate, config.eval_resize, config.interpolation),
        )
        self.classes = self.evaluated.classes
        self.fingerprint = self.evaluated.fingerprint()
        self.about = {"eval_data" if training else "data": self.evaluated.name}
        if training:
            self._train_on(train)

    def _open(
        self,
        split: str,
        beton: str,
        named: str,
        training: bool = True,
        evaluated: Evaluated | None = None,
    ):
        """Return the images of "train" or "validation": those of an FFCV file if `beton` names one (stored as they are
        `evaluated`), else those of --dataset or --data-dir. Without `training`, --data-dir may itself hold the class
        folders.

        Raises:
            UsageError: also if they have other than --num-classes classes (0: any number).
        """
        config = self.config
        if beton:
            images = Beton(Path(beton), evaluated)
        elif config.dataset:
            images = HubImages(
                config.dataset,
                config.data_dir,
                split,
                named,
                config.num_classes,
                input_key=config.input_key or "image",
                target_key=config.target_key or "label",
            )
        else:
            images = ImageFiles(self._place_of(config, split, named, training))
        classes = len(images.classes)
        if config.num_classes not in (0, classes):
            raise UsageError(
                f"{images.name} must have {config.num_classes} classes (--num-classes), got {classes}"
            )
        return images

    @staticmethod
    def _place_of(config: ImageNetConfig, split: str, named: str, training: bool) -> Path:
        """Return the folder or tar of "train" or "validation"."""
        if not config.data_dir:
            raise UsageError(
                f"no {split} images: --data-dir is required, or --train-beton and --val-beton"
            )
        root = Path(config.data_dir)
        if not named:
            return find_split(root, split, or_root=not training)
        for path in (root / named, root / f"{named}.tar"):
            if path.exists():
                return path
        raise UsageError(
            f"{split} images: {root} has neither {named} nor {named}.tar (--train-split and "
            "--val-split are names in --data-dir)"
        )

    @classmethod
    def check_places(cls, config: ImageNetConfig) -> None:
        for beton in filter(None, (config.train_beton, config.val_beton)):
            if not Path(beton).is_file():
                raise UsageError(f"there is no file {beton}")
        if not config.train_beton:
            checked_train_transform(config, config.img_size)
        if config.dataset:
            name_on_hub(config.dataset)
            return
        if not config.train_beton:
            cls._place_of(config, "train", config.train_split, True)
        if not config.val_beton:
            cls._place_of(config, "validation", config.val_split, True)

    def train_loader(self, **keywords) -> ImageTrainLoader | BetonTrainLoader:
        config = self.config
        keywords.update(
            img_size=config.img_size, size_of=config.size_of, repeats=config.aug_repeats
        )
        if not config.train_beton:
            transform = partial(checked_train_transform, config)
            return ImageTrainLoader(self.train, transform=transform, **keywords)
        return BetonTrainLoader(
            self.train, scale=(config.crop_scale, 1.0), hflip=config.hflip, **keywords
        )

    def eval_loader(self, **keywords) -> ImageEvalLoader:
        # the pixels of an FFCV file are stored as they are evaluated
        pixels = nn.Identity() if self.config.val_beton else self.preparation.pixels
        return ImageEvalLoader(
            self.evaluated, transform=lambda _: pixels, img_size=self.preparation.size, **keywords
        )

    def follow(self, model: nn.Module, given: Mapping[str, Any]) -> None:
        if not given.keys() & {*OPTIONS, "recipe", "pretrained_path", "val_beton"}:
            self.preparation = preparation_of(model)
            log.info(
                "images are prepared as %s says: %dx%d pixels, crop_pct %g, %s; --img-size and --eval-resize "
                "set others",
                self.config.model,
                *self.preparation.size,
                self.preparation.crop_pct,
                self.preparation.interpolation,
            )

    def loader_keywords(self, model: nn.Module) -> dict:
        config = self.config
        check_sizes(
            model,
            (config.train_sizes | {config.side_to_evaluate}) - {config.img_size},
            f"model {config.model}, made for {config.img_size} pixels,",
            " (timm's vision transformers do with --model-kwargs dynamic_img_size=true)",
        )
        stream = {"workers": config.workers, "bad_images": self.bad_images}
        return super().loader_keywords(model) | stream


def checked_train_transform(config: ImageNetConfig, img_size: int):
    """Return the transform of training images of side `img_size` in pixels.

    Raises:
        UsageError: timm knows no such policy, or a section of it has no number, which timm passes over.
    """
    policies = "aa must be a policy of timm, such as rand-m9-mstd0.5, augmix-m3 or original"
    with as_usage_error(f"{policies}, got {config.aa!r}"):
        for section in config.aa.split("-")[1:]:
            if not section.startswith("t") and not any(map(str.isdigit, section)):
                raise ValueError(f"{section!r} has no number")
        return train_transform(
            img_size,
            scale=(config.crop_scale, 1.0),
            hflip=config.hflip,
            auto_augment=config.aa,
            interpolation=config.interpolation,
        )


main = partial(run.main, ClassFolders)
