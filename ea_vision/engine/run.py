"""A run, put together: from a trainer's options and data to a complete run folder, or to an evaluation.

A trainer's file holds a `DataModule`: its options, and how its data is opened and loaded. `main` is its command; all
else that makes a run (model, loaders, training loop, checks before the first step, run folder, evaluation) is put
together here, in `train` and `evaluate_target`, for all trainers alike.
"""

from __future__ import annotations

import dataclasses
import logging
import math
import random
import socket
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import safetensors.torch
import torch
from torch import nn

from ea_vision.base.errors import UsageError
from ea_vision.base.figures import inches
from ea_vision.base.files import check_writable, write_json
from ea_vision.base.networks import (
    REFUSALS,
    check_classes,
    check_model_name,
    create_classifier,
    image_statistics,
    lay_out,
    load_weights,
    pretrained_classes,
    pretrained_model,
)
from ea_vision.base.processes import World, join_world
from ea_vision.base.provenance import hardware, provenance
from ea_vision.data.bad_images import BadImages
from ea_vision.engine import checkpoint, run_folder
from ea_vision.engine.classification import Teacher
from ea_vision.engine.config import TrainConfig, describe_recipe, make_parser, parse, resolve
from ea_vision.engine.log_maps import maps_logger
from ea_vision.engine.preflight import preflight
from ea_vision.engine.report import line_of, numbers_of, timm_row, write_evaluation, write_timm_results
from ea_vision.engine.signals import StopRequest
from ea_vision.engine.step_log import StepLog
from ea_vision.engine.train import Trainer

log = logging.getLogger(__name__)
# Options that may differ from node to node: where things lie, and how many hands a node has.
OWN_OF_A_NODE = ("data_dir", "train_beton", "val_beton", "cache_dir", "output", "pretrained_path", "workers", "recipe")


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
        """The network with its initial weights, and the keywords that `timm.create_model` needs to make it again."""
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

    def trained_on(self, run: dict[str, Any]) -> bool:
        """Whether these images are those that the run with this `run` section was trained on."""
        return self.same_images

    def check_fingerprint(self, saved: str, source: Path) -> None:
        """Raise UsageError unless a run's fingerprint is that of this data."""
        if saved != self.fingerprint:
            raise UsageError(f"{source} was trained on other data: fingerprint {saved[:12]}, got "
                             f"{self.fingerprint[:12]}")

    def model_to_evaluate(self, target: str, run: Path | None, weights: str) -> tuple[nn.Module, Path]:
        """The model that --evaluate names, and the folder for its results; see the function of this name."""
        return model_to_evaluate(target, run, weights, self.config, self.classes)

    def write_evaluation(self, folder: Path, model: nn.Module, result, about: dict[str, Any]) -> list[Path]:
        """Write what --evaluate leaves on disk of a result of the trainer's `evaluate`; return the paths."""
        written = write_evaluation(folder, result, self.classes, about)
        if self.preprocessing is not None and not self.same_images:
            written += write_results_row(folder, self, model, result.top1, result.top5)
        return written

    def numbers_of(self, result) -> dict[str, Any]:
        """A result as evaluation.json has it."""
        return numbers_of(result)

    def line_of(self, result) -> str:
        """A result in a line."""
        return line_of(result, views_of(self.config))

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
        """The keywords of all loaders for this model."""
        mean, std = image_statistics(model)
        return {"mean": mean, "std": std, "device": self.world.device, "rank": self.world.rank,
                "world_size": self.world.size}


# ---- the command ------------------------------------------------------------------------------------------------


def main(module: type[DataModule], argv: list[str] | None = None) -> int:
    """The command of a trainer."""
    parser = make_parser(module.options, module.description, module.examples)
    modes = parser.add_argument_group("instead of training")
    modes.add_argument("--evaluate", metavar="RUN|MODEL", help="test a run folder's best weights, or a model by name: "
                       "accuracy, per class too, a confusion picture and, for ImageNet, timm's results row, "
                       "into --output (default: RUN/evaluation)")
    modes.add_argument("--weights", metavar="FILE", default="", help="with --evaluate MODEL: safetensors weights "
                       "(default: the model's own pretrained ones)")
    modes.add_argument("--learning-curves", metavar="RUN", nargs="+", help="draw loss and accuracy of run folders "
                       "into --output, PNG, SVG or PDF by its suffix (default: learning_curves.png)")
    modes.add_argument("--width", type=inches, metavar="3.3|6.75|N", help="of the curves in inches; text keeps "
                       "its 7 to 9 points (default: 6.75)")
    given = parse(parser, argv)
    target, weights, runs = given.pop("evaluate", ""), given.pop("weights"), given.pop("learning_curves", [])
    width = given.pop("width", None)
    if width is not None and not runs:
        raise UsageError("--width is that of the picture of --learning-curves, got it without")
    if runs:
        output = Path(given.get("output", "learning_curves.png"))
        from ea_vision.engine.curves import write_learning_curves  # matplotlib, which training does without

        write_learning_curves([Path(run) for run in runs], output, width)
        print(f"written: {output}")
        return 0
    if target:
        return evaluate_target(module, target, weights, given)
    if weights:
        raise UsageError("--weights goes with --evaluate MODEL")
    return train(module, *resolve(module.options, given))


def train(module: type[DataModule], config: TrainConfig, optional_kwargs: frozenset[str]) -> int:
    """Train to the end of the run that `config` describes, from where it stands; return 0.

    Args:
        optional_kwargs: model keywords that only the recipe asks for: a model that lacks them goes without.

    Raises:
        UsageError: something the user can mend; nothing was written.
        RunError: the run had to stop.
    """
    check_model_name(config.model)
    folder = Path(config.output or module.default_output(config))
    with join_world(config.device, config.dist_timeout) as world, StopRequest() as stop:
        log_to_stdout(world.rank)
        config = config.for_processes(world.size)
        complete = is_complete(folder, config, world.size)
        log.info("recipe      %s", describe_recipe(config.recipe))
        data = module(config, world, training=True)
        data.check()
        if complete:
            data.check_fingerprint(run_folder.read_config(folder, "data_fingerprint")[1]["data_fingerprint"], folder)
            if world.is_main:
                print(f"{folder} is complete")
            return 0
        if data.same_images:
            data.eval_split = "train"
            log.warning("the same images are trained and evaluated on: the figures say how well they are fitted")
        if not config.test and data.eval_split != "held_out":
            raise UsageError("--no-test needs training images held out (--holdout) to evaluate on, got none")
        under = provenance()
        check_same_everywhere(world, {"data": data.fingerprint, "commit": under["git_commit"], **under["versions"],
                                      **{name: value for name, value in config.as_dict().items()
                                         if name not in OWN_OF_A_NODE}})
        seed_everything(config.seed)
        model, kwargs = data.create_model(optional_kwargs)
        model.to(world.device)
        if config.grad_checkpointing:
            enable_checkpointing(model, config.model)
        keywords = data.loader_keywords(model)
        seed_everything(config.seed + 1 + world.rank)  # dropout must differ between processes
        train_loader, eval_loader = data.train_loader(**keywords), data.eval_loader(**keywords)
        test_loader = data.test_loader(**keywords) if data.eval_split == "held_out" else eval_loader
        step_log = None
        if world.is_main and config.logs_steps:
            step_log = StepLog(folder, tensorboard=config.tensorboard, wandb=config.wandb, config=config.as_dict())
        trainer = module.trainer(config, model, train_loader, eval_loader, num_classes=len(data.classes), world=world,
                               folder=folder, stop=stop, data_fingerprint=data.fingerprint, describe=data.describe,
                               bad_images=data.bad_images, step_log=step_log, eval_split=data.eval_split)
        if getattr(config, "teacher", ""):
            trainer.teacher = data.teacher(keywords["mean"], keywords["std"])
        preflight(model, config, folder=folder, world=world, batches=len(train_loader),
                  train_images=data.train_images, eval_images=data.eval_images, classes=len(data.classes),
                  ahead=data.batches_ahead, loss_of=module.trainer.loss_on_noise)
        if world.is_main and config.log_maps:
            trainer.after_epoch = maps_logger(config.log_maps, trainer.total_epochs, model, eval_loader,
                                              keywords["mean"], keywords["std"], folder, step_log)
        run = {
            "model_kwargs": kwargs, "classes": data.classes,
            "mean": list(keywords["mean"]), "std": list(keywords["std"]),
            "train_images": data.train_images, "eval_images": data.eval_images, "eval_split": data.eval_split,
            "measures": list(module.trainer.measures), **data.about, "data_fingerprint": data.fingerprint,
            "processes": world.size, "hardware": hardware(world.device, world.size),
            "command": " ".join(sys.argv), **under,
        }
        with run_folder.locked(folder, world):
            begin_or_resume(trainer, data, run)
            if step_log is not None:
                step_log.begin(trainer.progress.updates)
            trainer.fit()
            finish(trainer, data, test_loader, run)
            if step_log is not None:
                step_log.close()
    return 0


def evaluate_target(module: type[DataModule], target: str, weights: str, given: dict[str, Any]) -> int:
    """Evaluate a run folder, or a model by name, on the test images.

    Args:
        weights: safetensors file for a model by name; empty: its own pretrained weights.
        given: options of the command line.
    """
    config, run = resolve_target(module.options, target, given)
    with join_world(config.device, config.dist_timeout) as world:
        log_to_stdout(world.rank)
        data = module(config, world, training=False)
        data.same_images = data.same_images if run is None else data.trained_on(run_folder.read_config(run)[1])
        data.check()
        model, output = data.model_to_evaluate(target, run, weights)
        check_writable(output)
        model.to(world.device)
        if config.channels_last:
            lay_out(model, torch.channels_last)
        loader = data.eval_loader(**data.loader_keywords(model))
        result, plain = evaluate_weights(module.trainer, model, run, loader, world, config)
        if world.is_main:
            about = {"target": target, "model": config.model, "weights": weights or None, **data.about,
                     "amp": config.amp, "tta": views_of(config),
                     **({"plain_weights": data.numbers_of(plain)} if plain is not None else {}),
                     **({"eval_split": "train"} if data.same_images else {}),
                     "data_fingerprint": data.fingerprint, **provenance()}
            written = data.write_evaluation(output, model, result, about)
            print(f"{'fit to the training images: ' if data.same_images else ''}{data.line_of(result)}")
            if plain is not None:
                print(f"not averaged: {data.line_of(plain)}")
            print("written:", *written)
        data.bad_images.collect(world, output)
    return 0


def evaluate_weights(trainer: type[Trainer], model: nn.Module, run: Path | None, loader, world: World,
                     config: TrainConfig) -> tuple[Any, Any | None]:
    """Judge `model`, and where it is a run's whose best weights are averaged ones, the plain weights beside them.

    Args:
        model: as `DataModule.model_to_evaluate` gives it; it has the plain weights afterwards.
        run: the folder of `resolve_target`.

    Raises:
        UsageError: the run's best checkpoint, which has the plain weights, cannot be read.
    """
    common = {"num_classes": model.num_classes, "world": world, "config": config, "tta": views_of(config)}
    result = trainer.evaluate(model, loader, **common)
    best = None if run is None or not config.model_ema_decay else run / checkpoint.BEST
    if best is None or not best.exists():
        return result, None
    model.load_state_dict(_read_named(best)["model"])
    return result, trainer.evaluate(model, loader, **common)


def write_results_row(folder: Path, data: DataModule, model: nn.Module, top1: float, top5: float) -> list[Path]:
    """Write accuracies, in percent, in the columns of timm's results files; the data must have such a row."""
    path = folder / run_folder.RESULTS_ROW
    write_timm_results(path, [timm_row(data.config.model, model, top1, top5, *data.preprocessing)])
    return [path]


# ---- its steps --------------------------------------------------------------------------------------------------


def log_to_stdout(world_rank: int = 0) -> None:
    """Show the package's messages on stdout, those of rank 0 only."""
    handler = logging.StreamHandler(sys.stdout)
    handler.setFormatter(logging.Formatter("%(message)s"))
    logger = logging.getLogger("ea_vision")
    logger.handlers = [handler]
    logger.setLevel(logging.INFO if world_rank == 0 else logging.CRITICAL)


def seed_everything(seed: int) -> None:
    """Seed torch (all devices), NumPy and Python."""
    torch.manual_seed(seed)
    np.random.seed(seed % 2**32)
    random.seed(seed)


def enable_checkpointing(model: nn.Module, name: str) -> None:
    """Let a model compute activations again in backward.

    Raises:
        UsageError: it cannot.
    """
    try:
        model.set_grad_checkpointing(True)
    except (AttributeError, AssertionError, NotImplementedError) as error:
        raise UsageError(f"--grad-checkpointing needs a model that has it, {name} has not") from error


def check_same_everywhere(world: World, own: dict[str, Any]) -> None:
    """Raise UsageError, on every process, unless all processes of a run, on whatever node, say the same of themselves.

    own: what this process says, as text or numbers by name.
    """
    first, *others = world.gather({**own, "": socket.gethostname()})
    for rank, other in enumerate(others, start=1):
        for name in own:
            if other[name] != first[name]:
                raise UsageError(f"all processes must have the same {name}: process {rank} on {other['']} has "
                                 f"{other[name]!r}, process 0 on {first['']} {first[name]!r}")


def is_complete(folder: Path, config: TrainConfig, processes: int = 1) -> bool:
    """Whether `folder` holds this very run with all its epochs done, and resuming is wanted.

    Raises:
        UsageError: the folder holds a run and --resume none asks for a new one.
    """
    if not run_folder.holds_run(folder):
        return False
    if config.resume == "none":
        raise UsageError(f"{folder} holds a run: continue it with --resume auto, choose another --output, or delete it")
    results = run_folder.read_results(folder)
    if config.resume != "auto" or results is None:
        return False
    if config.test and "held_out_last" in results:  # all but the test is done
        return False
    saved, run = run_folder.read_config(folder)
    _require_same(config.differences(saved, processes, run.get("processes", processes)), folder)
    return results["epochs"] >= config.epochs


def _require_same(changed: list[str], source: Path) -> None:
    if changed:
        raise UsageError(f"{source} holds a run with other options ({'; '.join(changed)}): choose another --output, or "
                         "continue it with the new options by --resume PATH")


def begin_or_resume(trainer: Trainer, data: DataModule, run: dict[str, Any]) -> None:
    """Load the checkpoint that --resume names or finds, write config.yaml.

    Raises:
        UsageError: a checkpoint that does not fit; the folder is as it was.
    """
    config, folder, world = trainer.config, trainer.folder, trainer.world
    found = None
    if config.resume == "auto":
        if world.is_main:
            checkpoint.put_damaged_aside(folder, log.warning)
        world.barrier()
        found = checkpoint.newest_checkpoint(folder)
        updates = world.gather(None if found is None else found[1]["progress"]["updates"])
        if len(set(updates)) > 1:
            raise UsageError(f"{folder} must be on a disk that all processes share: they find checkpoints after "
                             f"updates {', '.join(map(str, updates))}")
    elif config.resume != "none":
        path = Path(config.resume)
        found = checkpoint.newest_checkpoint(path) if path.is_dir() else (path, _read_named(path))
        if found is None:
            raise UsageError(f"--resume {path}: no valid checkpoint in this folder")
    if found is not None:
        path, state = found
        try:
            checkpoint.check_complete(state, path)
        except checkpoint.DamagedCheckpoint as error:
            raise UsageError(str(error)) from error
        changes = config.differences(state["config"], world.size, state["world_size"])
        if config.resume == "auto":
            _require_same(changes, path)
        for change in changes:
            log.warning("continuing with a changed option: %s", change)
        data.check_fingerprint(state["data_fingerprint"], path)
        trainer.load(state, path)
        progress = trainer.progress
        epochs = state["config"].get("epochs", config.epochs)
        if epochs < progress.epoch < epochs + 1 and config.epochs > epochs:
            raise UsageError(f"{path} stands at the end of a run of {epochs:g} epochs, inside an epoch, from where "
                             f"more cannot be added: epochs must be {epochs:g}, got {config.epochs:g}")
        evaluated = not progress.rows or not math.isnan(progress.rows[-1][trainer.measures[0]])
        if progress.epoch >= trainer.total_epochs and not evaluated:
            raise UsageError(f"{path} stands after epoch {progress.epoch}, which --eval-epochs left out, so --epochs "
                             f"must be more than {progress.epoch}, got {config.epochs}")
        if epochs != config.epochs:
            log.warning("epochs were %s, now %s: the learning rate follows the new length", epochs, config.epochs)
        log.info("resumed from %s: epoch %d, update %d", path, trainer.progress.epoch, trainer.progress.updates)
    trainer.progress.begin(run)
    if world.is_main:
        (folder / run_folder.RESULTS).unlink(missing_ok=True)  # only a complete run has it
        run_folder.write_config(folder, config.as_dict(), {**run, "starts": trainer.progress.starts})
    world.barrier()


def _read_named(path: Path) -> dict[str, Any]:
    if not path.exists():
        raise UsageError(f"--resume {path}: no such checkpoint or run folder")
    try:
        return checkpoint.read_checkpoint(path)
    except checkpoint.DamagedCheckpoint as error:
        raise UsageError(str(error)) from error


def finish(trainer: Trainer, data: DataModule, test_loader, run: dict[str, Any]) -> None:
    """Test the best and the last weights, each image once; write results.json, which marks the run complete.

    With --no-test the test images are left alone, and the results are those on the images held out.
    """
    config, progress, folder = trainer.config, trainer.progress, trainer.folder
    last_row = progress.rows[-1]
    best_row = next(row for row in progress.rows if row["epoch"] == progress.best_epoch)
    tested = config.test and data.eval_split == "held_out"
    last = best = final_figures(trainer, last_row, test_loader if tested else None)
    if best_row is not last_row:
        if tested or views_of(config) != "none":
            trainer.world.barrier()
            trainer.best_model.load_state_dict(safetensors.torch.load_file(folder / run_folder.WEIGHTS))
        best = final_figures(trainer, best_row, test_loader if tested else None)
    split = "test" if tested else data.eval_split
    ends_inside_epoch = config.epochs < progress.epoch < config.epochs + 1
    results = {
        "model": config.model, "epochs": config.epochs if ends_inside_epoch else progress.epoch,
        "eval_split": data.eval_split, f"{split}_images": data.eval_images if split == "held_out" else data.test_images,
        f"{split}_best": _written(best), f"{split}_last": _written(last),
        "seconds_per_epoch": round(sum(r["seconds"] for r in progress.rows) / len(progress.rows), 3),
        "skipped_updates": progress.skipped, "hardware": run["hardware"],
    }
    if trainer.world.is_main:
        if split == "test" and data.preprocessing is not None:
            write_results_row(folder, data, trainer.model, best["top1"], best["top5"])
        write_json(folder / run_folder.RESULTS, results)
    trainer.world.barrier()
    said = {"test": f"test {trainer.quality}", "train": "fit to the training images",
            "held_out": f"{trainer.quality} on images held out"}
    log.info("%s: best weights (epoch %d) %s, last weights %s", said[split], best["epoch"], _shown(trainer, best),
             _shown(trainer, last))
    first = trainer.measures[0]
    if data.eval_split == "test" and sum(not math.isnan(row[first]) for row in progress.rows) > 1:
        log.info("the best epoch was chosen by the images that it is evaluated on: quote the last weights%s",
                 ", or hold images out (--holdout)" if hasattr(config, "holdout") else "")
    log.info("run folder: %s", folder)


def final_figures(trainer: Trainer, row: dict[str, float], test_loader) -> dict[str, Any]:
    """Return what results.json says of the trainer's present weights: epoch, measures in percent, top-1 by views.

    Args:
        row: of metrics.csv, of these weights' epoch.
        test_loader: the test images where others were held out and evaluated on, whose figures are named held_out_*.
    """
    views, first = views_of(trainer.config), trainer.measures[0]

    def evaluated(loader):
        return trainer.evaluate(trainer.best_model, loader, trainer.num_classes, trainer.world, trainer.config,
                                tta=views)

    figures = {"epoch": row["epoch"], **{name: row[name] for name in trainer.measures}}
    if views != "none":
        figures["views_top1"] = round(evaluated(trainer.eval_loader).views.top1, 4)
    if test_loader is None:
        return figures
    result = evaluated(test_loader)
    by_views = {"views_top1": round(result.views.top1, 4)} if views != "none" else {}
    return {"epoch": row["epoch"], **{name: round(x, 4) for name, x in result.figures().items()}, **by_views,
            **{f"held_out_{key}": figures[key] for key in (first, "views_top1") if key in figures}}


def views_of(config: TrainConfig) -> str:
    """Return the views of --tta, which classifiers have."""
    return getattr(config, "tta", "none")


def _shown(trainer: Trainer, figures: dict[str, Any]) -> str:
    views = f" ({views_of(trainer.config)} views {figures['views_top1']:.2f}%)" if "views_top1" in figures else ""
    return trainer.text_of(figures, " ") + views


def _written(figures: dict[str, float]) -> dict[str, float | None]:
    """Return figures as JSON can have them: null for those that do not exist, such as AP where no object is large."""
    return {name: None if math.isnan(value) else value for name, value in figures.items()}


def resolve_target(schema: type, target: str, given: dict[str, Any]) -> tuple[Any, Path | None]:
    """Options of an evaluation, and the run folder where `target` is one rather than a model's name.

    Args:
        schema: the trainer's config class.
        target: a run folder, whose options are the defaults, or the name of a model.
        given: options of the command line.

    Raises:
        UsageError: neither a run folder nor a model, or options that do not fit.
    """
    path = Path(target) / run_folder.CONFIG
    if path.is_file():
        saved, _ = run_folder.read_config(path.parent, "classes")
        for key in ("model", "model_kwargs"):
            if key in given and given[key] != saved.get(key):
                raise UsageError(f"--evaluate {target} is a run with {key} {saved.get(key)!r}, got {given[key]!r}")
        return resolve(schema, {"recipe": str(path), **given})[0], path.parent
    check_model_name(target, "or run folder ")
    if given.get("model", target) != target:
        raise UsageError(f"--evaluate {target} names the model, got --model {given['model']}")
    return resolve(schema, {**given, "model": target})[0], None


def model_to_evaluate(target: str, run: Path | None, weights: str, config: Any,
                      classes: list[str]) -> tuple[nn.Module, Path]:
    """The model that `target` names, for data of these classes, and the folder for its results.

    Args:
        run: the folder of `resolve_target`.
        weights: safetensors file for a model by name; empty: its own pretrained weights.

    Raises:
        UsageError: weights that are missing or do not fit, or other classes than those of the data.
    """
    expected, output = None, Path("runs") / f"evaluation-{target}"
    if run is not None:
        model, _, about = run_folder.load_run(run, "classes")
        expected, output = about["classes"], run / "evaluation"
    elif weights:
        model, _ = create_classifier(target, config.model_kwargs, num_classes=len(classes), img_size=config.img_size)
        load_weights(model, Path(weights))
    else:
        model = pretrained_model(target, config.model_kwargs)
        expected = pretrained_classes(model, classes)
    check_classes(model, classes, expected, target)
    return model, Path(config.output or output)
