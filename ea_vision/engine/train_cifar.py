"""Train or evaluate any registered timm model on small images: digits, CIFAR-10, CIFAR-100, or folders of your own."""

from dataclasses import dataclass
from functools import partial

import torch

from ea_vision.base.errors import UsageError
from ea_vision.base.processes import World
from ea_vision.data.augment import PADDING_MODES, Augmentation
from ea_vision.data.on_device import EvalLoader, TrainLoader
from ea_vision.data.small_images import DATASETS, hold_out, load_dataset, places_of
from ea_vision.engine import run
from ea_vision.engine.classification import ClassificationConfig, ClassificationTrainer
from ea_vision.engine.config import option, setting
from ea_vision.engine.data_module import DataModule

DESCRIPTION = __doc__
EXAMPLES = """\
  python train_cifar.py                                         # digits, a few minutes on a CPU
  python train_cifar.py --dataset cifar10 --download --amp bfloat16 --channels-last
  python train_cifar.py --dataset folder --data-dir DIR         # DIR: train and test, folders or tars of class/name.png
  python train_cifar.py --recipe pa_cifar10 --dataset cifar10 --data-dir DIR --device cuda
  python train_cifar.py --model-kwargs alpha=0.3 beta=0.5       # keywords of the model
  python train_cifar.py --evaluate runs/digits-ea_conv_transformer_cifar
  torchrun --nproc-per-node 4 train_cifar.py --dataset cifar10 --data-dir DIR --device cuda
"""


@dataclass
class CifarConfig(ClassificationConfig):
    """The options of this trainer."""

    dataset: str = option(
        "auto",
        "digits (scikit-learn's), cifar10, cifar100 (torchvision's files), folder; auto: "
        "folder if data_dir is given, else digits",
        "data",
        choices=("auto", *DATASETS),
    )
    download: bool = setting(False, "fetch cifar10 or cifar100 if it is not in data_dir")
    img_size: int = option(32, "side of the images in pixels; others are scaled and cut", minimum=8)

    holdout: int = option(
        0,
        "training images to hold out and evaluate on each epoch; 0: the test images are used",
        "evaluation",
    )

    flip: str = option(
        "auto",
        "mirror half of the training images; auto: on; alternate: at random in the first epoch, "
        "then each image in every other epoch; auto and alternate never mirror digits",
        "augmentation",
        choices=("auto", "on", "off", "alternate"),
    )
    crop_padding: int = option(
        4, "pixels by which training images are padded before the random crop"
    )
    crop_padding_mode: str = option(
        "zeros",
        "what they are padded with; zeros: black; reflect: the image, mirrored at its border",
        choices=tuple(PADDING_MODES),
    )
    cutout: int = option(
        8, "side, in pixels, of the square cut out of each training image; 0: none"
    )

    def __post_init__(self):
        super().__post_init__()
        if self.dataset == "auto":
            self.dataset = "folder" if self.data_dir else "digits"
        if self.dataset == "digits" and self.data_dir:
            raise UsageError(
                f"digits are scikit-learn's: data_dir must be empty, got {self.data_dir} "
                "(--dataset folder reads it)"
            )
        if self.crop_padding_mode == "reflect" and self.crop_padding >= self.img_size:
            raise UsageError(
                f"crop_padding must be less than img_size ({self.img_size}) to be reflected, got "
                f"{self.crop_padding}"
            )


class SmallImages(DataModule):
    """Images that fit in memory, decoded once."""

    description = DESCRIPTION
    examples = EXAMPLES
    options = CifarConfig
    trainer = ClassificationTrainer
    default_output = "runs/{dataset}-{model}"

    def __init__(self, config: CifarConfig, world: World, training: bool):
        super().__init__(config, world, training)
        with world.main_first():
            data = load_dataset(
                config.dataset, config.data_dir, self.preparation, config.download, config.workers
            )
        self.classes = data.classes
        self.fingerprint = data.fingerprint()
        self.test = self.evaluated = data.test
        if not training:
            self.about = {"dataset": config.dataset}
            return
        self.train = data.train
        self.same_images = torch.equal(data.train.images, data.test.images)
        if config.holdout:
            self.train, self.evaluated = hold_out(data.train, config.holdout, config.seed)
            self.eval_split = "held_out"

    @classmethod
    def check_places(cls, config: CifarConfig) -> None:
        if config.dataset == "folder":
            places_of(config.data_dir)
        elif not config.download:
            super().check_places(config)

    def train_loader(self, **keywords) -> TrainLoader:
        config = self.config
        flip = "on" if config.flip == "auto" else config.flip
        if config.dataset == "digits" and config.flip in ("auto", "alternate"):
            flip = "off"  # a mirrored digit is not a digit
        augmentation = Augmentation(
            flip=flip,
            crop_padding=config.crop_padding,
            padding_mode=config.crop_padding_mode,
            cutout=config.cutout,
        )
        return TrainLoader(self.train, augmentation=augmentation, **keywords)

    def eval_loader(self, **keywords) -> EvalLoader:
        return EvalLoader(self.evaluated, **keywords)

    def test_loader(self, **keywords) -> EvalLoader:
        return EvalLoader(self.test, **keywords)

    def describe(self, index: int) -> str:
        return self.train.names[index]


main = partial(run.main, SmallImages)
