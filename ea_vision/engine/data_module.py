"""The data of a trainer: its options, how its images are opened and loaded, and how a result is written."""

import math
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import timm
from torch import nn

from ea_vision.base.errors import UsageError
from ea_vision.base.files import atomic_write, create, csv_text, write_json
from ea_vision.base.processes import World
from ea_vision.data.bad_images import BadImages
from ea_vision.data.small_images import check_same_classes
from ea_vision.engine.config import TrainConfig
from ea_vision.zoo.create import create_classifier
from ea_vision.zoo.preparation import image_statistics, preparation_of_run, set_image_statistics
from ea_vision.zoo.source import CLASSIFICATION, weights_and_note


class DataModule:
    """A trainer's data module: the class names its options, an instance holds the data of one run.

    A subclass's `__init__` opens the data and sets the attributes below. Loaders are made later, when the model's mean
    and std are known. `keywords` are those of `loader_keywords`.

    A subclass also has `train_loader(**keywords)`; `eval_loader(**keywords)`, for the evaluation after each epoch and
    by --evaluate; `test_loader(**keywords)`, for the test images if eval_split is held_out; and `describe(index)`, the
    name of a training image.

    Class attributes:
        description, examples: for --help.
        options: the dataclass of its options.
        trainer: the training loop; a subclass may have another loss.
        kind: of the networks that it trains.
        default_output: the run folder if --output is empty, with options in braces.
        least_classes: minimum number of classes.

    Attributes:
        classes: names, in the order of the targets.
        train, evaluated, test: the images to train on (None for an evaluation), those to evaluate on and, if eval_split
            is held_out, those to test on; `len()` gives their number.
        eval_split: the images to evaluate on: "test", or "held_out" if the test images are kept for the end.
        fingerprint: the same for the same data; goes into checkpoints.
        same_images: whether the images to train on are those to evaluate on, which `check` refuses.
        preparation: how the images to evaluate on are scaled and cropped; None in detection.
        about: further entries about the data in config.yaml and evaluation.json.
        bad_images: collects the images that the loaders cannot read.
    """

    kind = CLASSIFICATION
    least_classes = 2
    same_images = False
    train = None
    eval_split = "test"

    def __init__(self, config: TrainConfig, world: World, training: bool):
        self.config = config
        self.world = world
        self.about = {}
        self.preparation = preparation_of_run(vars(config))
        self.bad_images = BadImages(getattr(config, "max_bad_images", 0))

    def _train_on(self, train, classes: str = "classes") -> None:
        """Set the attributes of images to train on. Like `evaluated`, they have a name, a fingerprint and an attribute
        `classes`.

        Raises:
            UsageError: they have other classes.
        """
        check_same_classes(train, self.evaluated, classes)
        self.train = train
        self.describe = train.describe
        fingerprint = train.fingerprint()
        self.same_images = fingerprint == self.fingerprint
        self.fingerprint = fingerprint + self.fingerprint
        self.about["train_data"] = train.name

    @classmethod
    def check_places(cls, config: TrainConfig) -> None:
        """Raise UsageError if --data-dir does not exist; nothing is read yet."""
        if config.data_dir and not Path(config.data_dir).exists():
            raise UsageError(f"--data-dir {config.data_dir} does not exist")

    def create_model(self) -> tuple[nn.Module, dict]:
        """Return the network with its initial weights, and the keywords with which `timm.create_model` builds it."""
        config = self.config
        weights, note = weights_and_note(config.pretrained_path)
        model, kwargs = create_classifier(
            config.model,
            config.model_kwargs,
            config.optional_kwargs,
            num_classes=len(self.classes),
            img_size=config.img_size,
            pretrained=config.pretrained,
            weights=weights,
        )
        set_image_statistics(model, note)
        return model, kwargs

    def check(self) -> None:
        """Raise UsageError for too few classes or images, for equal images to train and to evaluate on, and for
        --no-test without images held out."""
        config = self.config
        processes = self.world.size
        if len(self.classes) < self.least_classes:
            raise UsageError(
                f"at least {self.least_classes} classes of images are required, got "
                f"{', '.join(self.classes) or 'none'}"
            )
        if self.train is None:  # an evaluation
            return
        if self.same_images:
            raise UsageError("training and evaluation need different images, got the same")
        if not config.test and self.eval_split != "held_out":
            raise UsageError(
                "--no-test needs training images held out (--holdout) to evaluate on, got none"
            )
        images = len(self.train)
        needed = config.images_of_update(processes)
        if images < needed:
            fitting = 2 ** int(math.log2(max(images // processes, 1)))
            raise UsageError(
                f"an update needs {needed} training images (batch_size x grad_accum_steps x "
                f"processes), and the data set has fewer, {images}: --batch-size {fitting}"
            )

    def check_fingerprint(self, saved: str, source: Path) -> None:
        """Raise UsageError if a run's fingerprint differs from that of this data."""
        if saved != self.fingerprint:
            raise UsageError(
                f"{source} was trained on other data: fingerprint {saved[:12]}, got "
                f"{self.fingerprint[:12]}"
            )

    def loader_keywords(self, model: nn.Module) -> dict:
        """Return the keywords of the loaders of images to evaluate on; those to train on have another batch size."""
        config = self.config
        mean, std = image_statistics(model)
        return {
            "mean": config.mean or mean,
            "std": config.std or std,
            "device": self.world.device,
            "rank": self.world.rank,
            "world_size": self.world.size,
            "batch_size": config.eval_batch_size,
            "seed": config.seed,
        }

    def take_network(self, model: nn.Module, note: Mapping[str, Any], target: str) -> None:
        """Give a network that is not trained here the mean and std of its run.

        Its classes are those of its note, else the `label_names` of its configuration, else ImageNet's if it has 1000
        and the data's are WordNet IDs.

        Args:
            note: of the network's weights. target: how it was named, for the message.

        Raises:
            UsageError: it has other classes than the data.
        """
        set_image_statistics(model, note)
        expected = note.get("classes") or model.pretrained_cfg.get("label_names")
        is_wordnet = re.compile(r"n\d{8}").fullmatch
        if not expected and model.num_classes == 1000 and all(map(is_wordnet, self.classes)):
            expected = timm.data.ImageNetInfo().label_names()
        check_classes(model, self.classes, expected, target)

    def follow(self, model: nn.Module, given: Mapping[str, Any]) -> None:
        """Prepare images as the configuration of a model says that is not of a run. A trainer does this unless `given`,
        the options of the command line, say it; by default it does not."""

    def write_evaluation(self, folder: Path, result, about: dict) -> list[Path]:
        """Write a result of the trainer's `evaluate` to evaluation.json, per_class.csv and a file that shows what is
        taken for what; return their paths."""
        create(folder)
        evaluation = folder / "evaluation.json"
        per_class = folder / "per_class.csv"
        write_json(evaluation, {**about, **result.numbers()})
        atomic_write(per_class, csv_text(result.rows(self.classes)).encode())
        return [evaluation, per_class, self.write_details(folder, result, about["model"])]

    def write_details(self, folder: Path, result, name: str) -> Path:
        """Write confusion.png; return its path. name: of the model."""
        # matplotlib, which training does without
        from ea_vision.engine.pictures import confusion_png

        picture = folder / "confusion.png"
        atomic_write(picture, confusion_png(result, self.classes, name))
        return picture


def check_classes(
    model: nn.Module, classes: list[str], expected: Sequence[str] | None, source: str
) -> None:
    """Raise UsageError if a model's classes differ from those of the data in number or, if they are known, in name."""
    if model.num_classes != len(classes):
        raise UsageError(f"{source} has {model.num_classes} classes, the data {len(classes)}")
    if expected and list(expected) != classes:
        first = next((a, b) for a, b in zip(expected, classes, strict=True) if a != b)
        raise UsageError(
            f"{source} was trained on other classes: {first[0]!r} where the data has {first[1]!r}"
        )
