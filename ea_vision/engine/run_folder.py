"""What a run leaves on disk: config.yaml, metrics.csv, gates.csv, checkpoints, model.safetensors, snapshots,
results.json.
"""

from __future__ import annotations

import csv
import fcntl
import json
import logging
import math
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

import timm
import torch
import yaml
from torch import nn

from ea_vision.base.errors import UsageError
from ea_vision.base.files import atomic_write, check_writable, create, csv_text
from ea_vision.base.networks import REFUSALS, check_model_name, encode_weights, load_weights
from ea_vision.base.processes import World
from ea_vision.engine.checkpoint import BEST, LAST, PREVIOUS

log = logging.getLogger(__name__)
CONFIG, METRICS, WEIGHTS, RESULTS = "config.yaml", "metrics.csv", "model.safetensors", "results.json"
GATES = "gates.csv"
RESULTS_ROW = "results.csv"  # of timm's results files
SNAPSHOTS = "snapshots"  # the folder of --snapshot-epochs
# What config.yaml's `run` section has, as far as it is read again.
RUN_KINDS = {"model_kwargs": dict, "classes": list, "eval_split": str, "data_fingerprint": str, "measures": list,
             "task": str, "category_ids": list, "train_images": int, "mean": list, "std": list, "starts": list}
MEASURES = ("top1", "top5")  # of an evaluation, in percent; another trainer may have others
COLUMNS = ("epoch", "step", "lr", "train_loss", *MEASURES, "images_per_s", "seconds")
CLASSIFICATION = "classification"  # what a run learns, unless its `run` section has another `task`


def holds_run(folder: Path) -> bool:
    """Whether a run has written into this folder."""
    return any((folder / name).exists() for name in (CONFIG, LAST, PREVIOUS, BEST))


@contextmanager
def locked(folder: Path, world: World) -> Iterator[None]:
    """Make the run folder and keep it for this run: two runs that write into one folder would spoil both.

    What an interrupted write left behind is deleted, and so is, at the end, a folder in which nothing was written.

    Raises:
        UsageError: the folder cannot be made or written to, or another process holds it.
    """
    if not world.is_main:
        yield
        return
    create(folder)
    check_writable(folder)
    handle, held = os.open(folder, os.O_RDONLY), False
    try:
        try:
            fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            raise UsageError(f"{folder} is in use by another run that has not ended yet") from error
        except OSError as error:  # some network file systems have no locks
            log.warning("%s cannot be locked: %s", folder, error.strerror)
        held = True
        for leftover in [*folder.glob(".*.tmp"), *folder.glob(f"{SNAPSHOTS}/.*.tmp")]:
            leftover.unlink(missing_ok=True)
        yield
    finally:
        os.close(handle)
        if held and not any(folder.iterdir()):  # else the run that holds it has only just begun
            folder.rmdir()


def write_config(folder: Path, config: dict[str, Any], run: dict[str, Any]) -> None:
    """Write the resolved options and, under `run`, what is needed to judge and repeat the run.

    The section speaks of the last start; its `starts` say from which update on each start, under another commit, other
    versions or other hardware, has made the run.
    """
    text = yaml.safe_dump({**config, "run": run}, sort_keys=False, width=120)
    atomic_write(folder / CONFIG, text.encode())


def read_config(folder: Path, *needed: str) -> tuple[dict[str, Any], dict[str, Any]]:
    """Return the options and the `run` section of a run folder.

    needed: what the section must have besides model_kwargs, of RUN_KINDS.

    Raises:
        UsageError: not a run folder, or not what a run writes.
    """
    path = folder / CONFIG
    try:
        config = yaml.safe_load(path.read_text())
    except OSError as error:
        raise UsageError(f"{folder} is not a run folder: it has no readable {CONFIG}") from error
    except (yaml.YAMLError, ValueError, RecursionError, AttributeError, IndexError) as error:  # the last two: bad tags
        raise UsageError(f"{path} is not the {CONFIG} of a run: it is not valid YAML") from error
    _require(path, config, {"model": str, "run": dict})
    run = config.pop("run")
    _require(path, run, {key: kind for key, kind in RUN_KINDS.items() if key in ("model_kwargs", *needed, *run)})
    return config, run


def _require(path: Path, value: Any, kinds: dict[str, type | tuple[type, ...]]) -> None:
    """Raise UsageError unless `value` is a mapping that has these keys with values of these kinds."""
    if not isinstance(value, dict):
        raise UsageError(f"{path} is not that of a run: a mapping is required, got {type(value).__name__}")
    for key, kind in kinds.items():
        if not isinstance(value.get(key), kind) or isinstance(value[key], bool):
            found = type(value[key]).__name__ if key in value else "nothing"
            names = " or ".join(k.__name__ for k in (kind if isinstance(kind, tuple) else (kind,)))
            raise UsageError(f"{path} is not that of a run: {key} must be of type {names}, got {found}")


def columns_with(measures: Sequence[str]) -> tuple[str, ...]:
    """The columns of metrics.csv of a trainer with these measures."""
    return (*COLUMNS[:4], *measures, *COLUMNS[-2:])


def write_metrics(folder: Path, rows: list[dict[str, float]], measures: Sequence[str] = MEASURES) -> None:
    """Write metrics.csv: one row per epoch; measures are nan where an epoch was not evaluated."""
    atomic_write(folder / METRICS, csv_text(rows, columns_with(measures)).encode())


def write_gates(folder: Path, rows: list[dict[str, float]]) -> None:
    """Write gates.csv: one row per epoch, epoch and step, then a column for every share that is a parameter."""
    atomic_write(folder / GATES, csv_text(rows).encode())


def read_gates(folder: Path) -> dict[str, list[float]]:
    """Return the columns of gates.csv as lists of numbers; {} where the run's model has no learnable gates.

    Raises:
        UsageError: a file that is not ours.
    """
    path = folder / GATES
    try:
        rows = list(csv.reader(path.read_text().splitlines()))
        names, *values = rows
        columns = dict(zip(names, zip(*([float(v) for v in row] for row in values), strict=True), strict=True))
        if names[:2] != ["epoch", "step"] or not all(math.isfinite(v) for column in columns.values() for v in column):
            raise ValueError("not the columns of a run")
        if any(later <= earlier for name in names[:2] for earlier, later in pairwise((0, *columns[name]))):
            raise ValueError("epochs and steps must rise")
    except FileNotFoundError:
        return {}
    except (OSError, ValueError, csv.Error) as error:
        raise UsageError(f"{path} is not a file of this trainer: it must have the columns epoch, step and gates with "
                         "a number in each") from error
    return {name: list(column) for name, column in columns.items()}


def read_metrics(folder: Path, measures: Sequence[str] = MEASURES) -> dict[str, list[float]]:
    """Return the columns of metrics.csv as lists of numbers.

    measures: of the run's trainer, as its `run` section names them.

    Raises:
        UsageError: no metrics, or a file that is not ours.
    """
    path, names = folder / METRICS, columns_with(measures)
    try:
        rows = list(csv.DictReader(path.read_text().splitlines()))
        if any(row.get(None) for row in rows):
            raise ValueError("a row is too long")
        columns = {name: [float(row[name]) for row in rows] for name in names}
    except OSError as error:
        raise UsageError(f"{folder} is not a run folder: it has no readable {METRICS}") from error
    except (KeyError, TypeError, ValueError, csv.Error) as error:
        raise UsageError(f"{path} is not a metrics file of this trainer: it must have the columns {', '.join(names)} "
                         "with a number in each") from error
    _check_metrics(path, columns, measures)
    return columns


def _check_metrics(path: Path, columns: dict[str, list[float]], measures: Sequence[str]) -> None:
    """Raise UsageError for numbers that no run writes; the measures are nan where --eval-epochs left an epoch out."""
    for name, values in columns.items():
        for value in values:
            if name in measures:
                possible = math.isnan(value) or 0 <= value <= 100
            elif name in ("epoch", "step"):
                possible = 0 < value < math.inf and value == int(value)
            else:
                possible = math.isfinite(value)
            if not possible:
                raise UsageError(f"{path} is damaged: {name} cannot be {value:g}")
    if any(later <= earlier for name in ("epoch", "step") for earlier, later in pairwise(columns[name])):
        raise UsageError(f"{path} is damaged: its epochs and steps must rise")


def write_weights(folder: Path, weights: dict[str, torch.Tensor]) -> None:
    """Write model.safetensors, for `timm.create_model(..., checkpoint_path=...)`."""
    _write_state(folder / WEIGHTS, weights, {})


def write_snapshot(folder: Path, weights: dict[str, torch.Tensor], epoch: int, kept: int = 0) -> None:
    """Write snapshots/epoch_NNNN.safetensors, weights like model.safetensors' that say their epoch.

    kept: how many remain, the latest; older ones are deleted. 0: all.
    """
    create(folder / SNAPSHOTS)
    _write_state(folder / SNAPSHOTS / f"epoch_{epoch:04d}.safetensors", weights, {"epoch": str(epoch)})
    for older in sorted((folder / SNAPSHOTS).glob("epoch_*.safetensors"))[:-kept] if kept else []:
        older.unlink()


def _write_state(path: Path, weights: dict[str, torch.Tensor], about: dict[str, str]) -> None:
    atomic_write(path, encode_weights(weights, about))


def read_results(folder: Path) -> dict[str, Any] | None:
    """Return results.json, which only a complete run has, or None.

    Raises:
        UsageError: it cannot be read, or is not the results of a run.
    """
    path = folder / RESULTS
    if not path.exists():
        return None
    try:
        results = json.loads(path.read_text())
    except (OSError, ValueError, RecursionError) as error:
        raise UsageError(f"cannot read {path}: {error}; without this file the run's own command writes it again") \
            from error
    try:
        _require(path, results, {"epochs": (int, float), "eval_split": str})
    except UsageError as error:
        raise UsageError(f"{error}; without this file the run's own command writes it again") from error
    return results


def load_run(folder: Path, *needed: str, task: str = CLASSIFICATION, create: Callable[..., nn.Module] =
             timm.create_model) -> tuple[nn.Module, dict[str, Any], dict[str, Any]]:
    """Build the model of a run with its best weights, in eval mode; return it with the run's options and `run` section.

    Args:
        needed: what the `run` section must have, see `read_config`.
        task: what the run must have learnt. create: what makes a model from the run's name and keywords of one.

    Raises:
        UsageError: not a run folder, a run of another task, or weights that do not fit the model.
    """
    config, run = read_config(folder, *needed)
    found = run.get("task", CLASSIFICATION)
    if found != task:
        raise UsageError(f"{folder} must be a run of {task}, got one of {found}")
    weights = folder / WEIGHTS
    if not weights.exists():
        raise UsageError(f"run {folder} has no {WEIGHTS} yet: it appears with the first evaluated epoch")
    check_model_name(config["model"])
    try:
        model = create(config["model"], **run["model_kwargs"])
    except REFUSALS as error:
        raise UsageError(f"run {folder}: model {config['model']} refuses {run['model_kwargs']}: {error}") from error
    load_weights(model, weights)
    return model.eval(), config, run


# ---- complete runs, for those that compare them ---------------------------------------------------------------------

# Options that do not belong to the experiment: where and how fast it runs, what it writes besides.
NOT_COMPARED = frozenset({
    "data_dir", "cache_dir", "output", "resume", "seed", "workers", "device", "download", "loader", "recipe",
    "channels_last", "compile", "compile_mode", "eval_batch_size", "eval_epochs", "checkpoint_steps", "snapshot_epochs",
    "log_steps", "tensorboard", "wandb", "on_nan", "verify_beton", "max_bad_images", "train_beton", "val_beton"})


@dataclass(frozen=True)
class FinishedRun:
    """A complete run of a classifier.

    split: what the last and best weights were judged on, "test" where the run was tested. images: how many these are.
    last, best: epoch, top1 and top5 (percent) of the last and of the best weights.
    best_top1: top-1 of the best weights on the images that they were chosen by.
    """

    folder: Path
    config: Mapping[str, Any]
    run: Mapping[str, Any]
    metrics: Mapping[str, list[float]]
    split: str
    eval_split: str
    images: int | None
    last: Mapping[str, float]
    best: Mapping[str, float]
    best_top1: float

    @property
    def seed(self) -> int:
        return self.config["seed"]

    @property
    def data(self) -> str:
        """Fingerprint of the data set."""
        return self.run["data_fingerprint"]

    @property
    def epochs(self) -> int:
        return int(self.metrics["epoch"][-1])

    @property
    def updates(self) -> int:
        return int(self.metrics["step"][-1])

    @property
    def seconds(self) -> float:
        """Of training, all epochs."""
        return sum(self.metrics["seconds"])

    @property
    def options(self) -> dict[str, Any]:
        """The options that make the experiment what it is."""
        return {key: value for key, value in self.config.items() if key not in NOT_COMPARED}


def read_finished(folder: Path) -> FinishedRun | None:
    """Return a complete run, or None where it is not complete.

    Raises:
        UsageError: not the folder of a classifier's run.
    """
    results = read_results(folder)
    if results is None:
        return None
    config, run = read_config(folder)
    if run.get("task", CLASSIFICATION) != CLASSIFICATION:
        raise UsageError(f"{folder} must be a run of {CLASSIFICATION}, got one of {run['task']}")
    metrics, eval_split = read_metrics(folder), results["eval_split"]
    split = "test" if "test_last" in results else eval_split
    last, best = results[f"{split}_last"], results[f"{split}_best"]
    best_top1 = dict(zip(metrics["epoch"], metrics["top1"], strict=True))[best["epoch"]]
    return FinishedRun(folder, config, run, metrics, split, eval_split, results.get(f"{split}_images"), last, best,
                       best_top1)


def difference(one: Mapping[str, Any], other: Mapping[str, Any]) -> dict[str, tuple[Any, Any]]:
    """Return the options that differ, with both values. An option that one of two releases lacks is not compared."""
    return {key: (one[key], other[key]) for key in one if key in other and one[key] != other[key]}
