"""The data of a trainer: its options, how its images are opened and loaded, how a result of it is written."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from pathlib import Path
from typing import Any, ClassVar

import torch
from torch import nn

from ea_vision.base.errors import UsageError
from ea_vision.base.networks import (
    REFUSALS,
    check_classes,
    check_model_name,
    create_classifier,
    image_statistics,
    load_weights,
    pretrained_classes,
    pretrained_model,
)
from ea_vision.base.processes import World
from ea_vision.data.bad_images import BadImages
from ea_vision.engine import run_folder
from ea_vision.engine.classification import Teacher
from ea_vision.engine.config import TrainConfig
from ea_vision.engine.report import line_of, numbers_of, write_evaluation, write_results_row
from ea_vision.engine.train import Trainer


class DataModule:
    """A trainer's data module: the class names its options, an instance holds the data of one run.

    An `__init__` opens the data by the options and sets the attributes below; loaders are made later, when the model
    has said how it wants its images. `keywords` has those that all loaders take: mean and std of images in 0..1,
    device, rank and world_size.

    Class attributes:
        description, examples: for --help.
        options: the dataclass of its options.
        trainer: the training loop; a subclass may have another loss.
        batches_ahead: batches that a process keeps ready in main memory.

    Attributes:
        classes: names, in the order of the targets.
        train_images, eval_images, test_images: how many there are; train_images is 0 for an evaluation.
        eval_split: what the eval_loader has: "test", "held_out" where the test images are kept for the end, or "train"
            where the training images are evaluated on.
        fingerprint: the same for the same data; goes into checkpoints.
        same_images: the training images are those that are evaluated on.
        about: what config.yaml and evaluation.json say of the data besides.
        bad_images: where the loaders put what they cannot read.
        preprocessing: side of the images that are evaluated on, side to which the short one is resized before, and
            interpolation, for a row of timm's results table; None: no row is written.
    """

    description: ClassVar[str]
    examples: ClassVar[str]
    options: ClassVar[type[TrainConfig]]
    trainer: ClassVar[type[Trainer]]

    classes: list[str]
    eval_images: int
    test_images: int
    fingerprint: str
    same_images: bool = False
    train_images: int = 0
    eval_split: str = "test"
    preprocessing: tuple[int, int, str] | None = None
    batches_ahead: int = 0

    def __init__(self, config: TrainConfig, world: World, training: bool):
        self.config, self.world = config, world
        self.about: dict[str, Any] = {}
        self.bad_images = BadImages(limit=0)

    @staticmethod
    def default_output(config: TrainConfig) -> str:
        """The run folder where --output names none."""
        raise NotImplementedError

    def create_model(self, optional_kwargs: frozenset[str]) -> tuple[nn.Module, dict[str, Any]]:
        """Return the network with its initial weights, and the keywords that make it again by `timm.create_model`."""
        config = self.config
        weights = Path(config.pretrained_path)
        if config.pretrained_path and weights.is_dir():
            weights /= run_folder.WEIGHTS
        return create_classifier(config.model, config.model_kwargs, optional_kwargs, num_classes=len(self.classes),
                                 img_size=config.img_size, pretrained=config.pretrained,
                                 weights=str(weights) if config.pretrained_path else "")

    def train_loader(self, **keywords):
        raise NotImplementedError

    def eval_loader(self, **keywords):
        """The images that are evaluated on after each epoch, and by --evaluate."""
        raise NotImplementedError

    def test_loader(self, **keywords):
        """The test images, where eval_split is something else."""
        raise NotImplementedError

    def unaugmented_loader(self, **keywords):
        """The training images as evaluation sees images."""
        raise NotImplementedError

    def describe(self, index: int) -> str:
        """Name a training image."""
        raise NotImplementedError

    def trained_on(self, about: dict[str, Any]) -> bool:
        """Return whether these images are those that the run with this `about` section was trained on."""
        return self.same_images

    def check_fingerprint(self, saved: str, source: Path) -> None:
        """Raise UsageError unless a run's fingerprint is that of this data."""
        if saved != self.fingerprint:
            raise UsageError(f"{source} was trained on other data: fingerprint {saved[:12]}, got "
                             f"{self.fingerprint[:12]}")

    def model_to_evaluate(self, target: str, run: Path | None, weights: str) -> tuple[nn.Module, Path]:
        """Return the model that --evaluate names, and the folder for its results; see the function of this name."""
        return model_to_evaluate(target, run, weights, self.config, self.classes)

    def write_evaluation(self, folder: Path, model: nn.Module, result, about: dict[str, Any]) -> list[Path]:
        """Write what --evaluate leaves on disk of a result of the trainer's `evaluate`; return the paths."""
        written = write_evaluation(folder, result, self.classes, about)
        if self.preprocessing is not None and not self.same_images:
            written += write_results_row(folder, self.config.model, model, result.top1, result.top5, self.preprocessing)
        return written

    def numbers_of(self, result) -> dict[str, Any]:
        """Return a result as evaluation.json has it."""
        return numbers_of(result)

    def line_of(self, result) -> str:
        """Return a result in a line."""
        return line_of(result, getattr(self.config, "tta", "none"))

    def teacher(self, mean: Sequence[float], std: Sequence[float]) -> Teacher:
        """Return the network that --teacher names, for images that are normalised with `mean` and `std`.

        Raises:
            UsageError: no such model or run, or one of other classes or sizes of images.
        """
        name, side = self.config.teacher, self.config.img_size
        run = Path(name) if (Path(name) / run_folder.CONFIG).is_file() else None
        if run is None:
            check_model_name(name, "or run folder ")
        model, _ = model_to_evaluate(name, run, "", dataclasses.replace(self.config, model_kwargs={}), self.classes)
        teacher = Teacher(model, mean, std, self.world.device)
        try:
            teacher(torch.zeros(1, 3, side, side, device=self.world.device))
        except REFUSALS as error:
            raise UsageError(f"teacher {name} does not take images of {side} pixels: {error}") from error
        return teacher

    def check(self) -> None:
        """Raise UsageError for data that nothing can be learnt or judged from."""
        if len(self.classes) < 2:
            raise UsageError(f"at least 2 classes of images are required, got {', '.join(self.classes) or 'none'}")
        if self.same_images and not self.config.eval_on_train:
            raise UsageError("the training images are those to evaluate on: give others, or --eval-on-train, which "
                             "calls no result an accuracy")

    def loader_keywords(self, model: nn.Module) -> dict[str, Any]:
        """Return the keywords of all loaders for this model."""
        mean, std = image_statistics(model)
        return {"mean": tuple(self.config.mean) or mean, "std": tuple(self.config.std) or std,
                "device": self.world.device, "rank": self.world.rank,
                "world_size": self.world.size}


def with_statistics(config: TrainConfig) -> TrainConfig:
    """Return the options with mean and std of the run folder that --pretrained-path names, unless they say others."""
    folder = Path(config.pretrained_path)
    if not config.pretrained_path or not folder.is_dir() or config.mean:
        return config
    about = run_folder.read_config(folder)[1]
    return dataclasses.replace(config, mean=about["mean"], std=about["std"])


def model_to_evaluate(target: str, run: Path | None, weights: str, config: Any,
                      classes: list[str]) -> tuple[nn.Module, Path]:
    """Return the model that `target` names, for data of these classes, and the folder for its results.

    Args:
        run: the run folder, where it names one.
        weights: safetensors file for a model by name; empty: its own pretrained weights.

    Raises:
        UsageError: weights that are missing or do not fit, or other classes than those of the data.
    """
    expected, output = None, Path("runs") / f"evaluation-{target}"
    if run is not None:
        model, _, about = run_folder.load_run(run)
        expected, output = about["classes"], run / "evaluation"
    elif weights:
        model, _ = create_classifier(target, config.model_kwargs, num_classes=len(classes), img_size=config.img_size)
        load_weights(model, Path(weights))
    else:
        model = pretrained_model(target, config.model_kwargs)
        expected = pretrained_classes(model, classes)
    check_classes(model, classes, expected, target)
    return model, Path(config.output or output)
