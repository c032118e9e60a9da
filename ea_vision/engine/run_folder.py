"""The files of a run: config.yaml, metrics.csv, checkpoints, model.safetensors, snapshots, results.json."""

import csv
import json
import logging
import math
import os
import socket
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import timm
import yaml
from filelock import FileLock, Timeout, UnixFileLock
from torch import Tensor, nn

from ea_vision.base.errors import UsageError
from ea_vision.base.files import atomic_write, create, csv_text
from ea_vision.base.networks import (
    MADE_WITH,
    REFUSALS,
    check_model_name,
    encode_weights,
    load_weights,
    set_image_statistics,
    with_note,
)
from ea_vision.base.processes import World
from ea_vision.models import EVOLVED, list_networks

log = logging.getLogger(__name__)
FORMAT = 1  # of a run folder, in config.yaml
CONFIG = "config.yaml"
METRICS = "metrics.csv"
WEIGHTS = "model.safetensors"
RESULTS = "results.json"
# entries of a run's `about` section that the metadata of its weights repeat
SAID_BY_WEIGHTS = ("model_kwargs", "task", "classes", "category_ids", "mean", "std")
LOCK = ".lock"
OWNER = ".owner"  # which process holds the lock
SNAPSHOTS = "snapshots"  # the folder of --snapshot-epochs
MEASURES = ("top1", "top5")  # of an evaluation, in percent; another trainer may have others
CLASSIFICATION = "classification"  # what a run learns, unless `about` has another `task`


@contextmanager
def locked(folder: Path, world: World) -> Iterator[None]:
    """Make the run folder and lock it, since two runs that write into one folder would spoil both.

    Temporary files of interrupted writes are deleted. If nothing was written, the folder is deleted at the end.

    Raises:
        UsageError: the folder cannot be made or written to, or another process holds it.
    """
    if not world.is_main:
        yield
        return
    create(folder)
    owner = folder / OWNER
    lock, problem = _acquired(folder)
    if problem is not None:
        log.warning("%s cannot be locked: %s", folder, problem)
    try:
        for leftover in folder.rglob(".*.tmp"):
            leftover.unlink(missing_ok=True)
        who = f"process {os.getpid()} on {socket.gethostname()}"
        atomic_write(owner, who.encode())
        yield
    finally:
        owner.unlink(missing_ok=True)
        if isinstance(lock, UnixFileLock):  # others remove their file themselves
            (folder / LOCK).unlink(missing_ok=True)
        lock.release()
        if not any(folder.iterdir()):
            with suppress(OSError):  # another run has just begun here
                folder.rmdir()


def check_free(folder: Path, world: World) -> None:
    """Raise UsageError if another process holds the run folder. Call this before data and networks are loaded."""
    if world.is_main and (folder / LOCK).exists():
        lock, _ = _acquired(folder)
        lock.release()


def _acquired(folder: Path) -> tuple[FileLock, Exception | None]:
    """Return the run folder's lock, and the error if it could not be taken: some network file systems have no locks.

    Raises:
        UsageError: another process holds it.
    """
    lock = FileLock(folder / LOCK)
    try:
        lock.acquire(timeout=0)
    except Timeout as error:
        owner = _named(folder / OWNER)
        raise UsageError(
            f"{folder} is in use by another run that has not ended yet{owner}"
        ) from error
    except (OSError, NotImplementedError) as error:
        return lock, error
    return lock, None


def _named(owner: Path) -> str:
    """Return the end of an error message that names the process that holds a run folder; "" if it is unknown."""
    try:
        return f": {owner.read_text(encoding='utf-8')}"
    except (OSError, ValueError):
        return ""


# ---- config.yaml ----------------------------------------------------------------------------------------------------


def write_config(folder: Path, config: dict, about: dict) -> None:
    """Write the resolved options and, under `about`, what is needed to judge and repeat the run.

    The section describes the last start. Its `starts` list every start with another command, commit, versions or
    hardware, and the first update that it made.
    """
    content = {**config, "about": {"format": FORMAT, **about}}
    atomic_write(folder / CONFIG, yaml.safe_dump(content, sort_keys=False, width=120).encode())


def read_config(folder: Path) -> tuple[dict, dict]:
    """Return the options and the `about` section of a run folder.

    Raises:
        UsageError: not a run folder, or one of another format.
    """
    try:
        config = _read_config(folder)
    except (OSError, yaml.YAMLError, ValueError, TypeError, LookupError) as error:
        raise UsageError(f"{folder} is not a run folder: it has no readable {CONFIG}") from error
    about = config.pop("about")
    if about.get("format") != FORMAT:
        raise UsageError(
            f"{folder} must be a run folder of format {FORMAT}, got {about.get('format')}: another "
            "release wrote it"
        )
    return config, about


def _read_config(folder: Path) -> dict:
    """Return the content of config.yaml, which has a mapping `about`."""
    config = yaml.safe_load((folder / CONFIG).read_text(encoding="utf-8"))
    if not isinstance(config["about"], dict):
        raise ValueError("a run's about is a mapping")
    return config


def folder_of_file(path: Path) -> Path:
    """Return the folder in which a checkpoint, weights or a snapshot of a run lie."""
    return path.parent.parent if path.parent.name == SNAPSHOTS else path.parent


def run_of_file(path: Path) -> Path | None:
    """Return the run folder that holds a checkpoint, weights or a snapshot. None if there is none: the config.yaml
    beside the file may be another program's."""
    folder = folder_of_file(path)
    try:
        return folder if "format" in _read_config(folder)["about"] else None
    except (OSError, yaml.YAMLError, ValueError, TypeError, LookupError):
        return None


# ---- metrics.csv ----------------------------------------------------------------------------------------------------


def write_metrics(
    folder: Path, rows: list[dict[str, float]], measures: Sequence[str] = MEASURES
) -> None:
    """Write metrics.csv: one row per epoch, with nan as measures if the epoch was not evaluated. The rows' further
    columns, of attention layers and learnable gates, come last."""
    names = ["epoch", "step", "lr", "train_loss", "eval_loss", *measures, "images_per_s", "seconds"]
    for row in rows:
        names.extend(row)
    columns = dict.fromkeys(names, math.nan)
    lines = [columns | row for row in rows]
    atomic_write(folder / METRICS, csv_text(lines, list(columns)).encode())


def read_metrics(folder: Path) -> dict[str, list[float]]:
    """Return the columns of metrics.csv as lists of numbers.

    Raises:
        UsageError: no metrics, or they are damaged.
    """
    columns = {}
    try:
        rows = csv.reader((folder / METRICS).read_text(encoding="utf-8").splitlines())
        for name, *column in zip(*rows, strict=True):
            columns[name] = [float(value) for value in column]
        if "epoch" not in columns:
            raise ValueError("no column epoch")
    except (OSError, ValueError, csv.Error) as error:
        raise UsageError(f"{folder} is not a run folder: it has no readable {METRICS}") from error
    return columns


# ---- weights and results --------------------------------------------------------------------------------------------


def made_with(folder: Path) -> dict[str, Any] | None:
    """Return the model's name and the SAID_BY_WEIGHTS entries of a run's config.yaml; None without that file."""
    if not (folder / CONFIG).is_file():
        return None
    config, about = read_config(folder)
    said = {key: about[key] for key in SAID_BY_WEIGHTS if key in about}
    return {"model": config.get("model"), **said}


def _encode(folder: Path, weights: dict[str, Tensor], about: dict[str, str]) -> bytes:
    """Return a file of a run's weights. Those of ea_vision's classifiers include the note that these networks check."""
    said = made_with(folder)
    if said is None:
        return encode_weights(weights, about)
    note = json.dumps(said)
    checks_notes = said["model"] in (*list_networks(), EVOLVED)
    if checks_notes and said.get("task", CLASSIFICATION) == CLASSIFICATION:
        weights = with_note(weights, note)
    return encode_weights(weights, {**about, MADE_WITH: note})


def write_weights(folder: Path, weights: dict[str, Tensor]) -> None:
    """Write model.safetensors, for `timm.create_model(..., checkpoint_path=...)`."""
    atomic_write(folder / WEIGHTS, _encode(folder, weights, {}))


def write_snapshot(folder: Path, weights: dict[str, Tensor], epoch: int) -> None:
    """Write snapshots/epoch_NNNN.safetensors: weights as in model.safetensors, with the epoch in their metadata."""
    create(folder / SNAPSHOTS)
    atomic_write(
        folder / SNAPSHOTS / f"epoch_{epoch:04d}.safetensors",
        _encode(folder, weights, {"epoch": str(epoch)}),
    )


def read_results(folder: Path) -> dict | None:
    """Return results.json, which only a complete run has, or None.

    Raises:
        UsageError: it cannot be read.
    """
    path = folder / RESULTS
    if not path.exists():
        return None
    try:
        results = json.loads(path.read_text(encoding="utf-8"))
        if not isinstance(results, dict) or "epochs" not in results:
            raise ValueError("it does not say the epochs of a run")
    except (OSError, ValueError) as error:
        raise UsageError(
            f"cannot read {path}: {error}; delete this file and the run's command writes it again"
        ) from error
    return results


def load_run(
    folder: Path,
    *,
    task: str = CLASSIFICATION,
    create: Callable[..., nn.Module] = timm.create_model,
) -> tuple[nn.Module, dict, dict]:
    """Build the model of a run with its best weights, in eval mode; return it with the run's options and `about`.

    Args:
        task: that the run must have. create: function that makes a model from its name and keywords.

    Raises:
        UsageError: not a run folder, a run of another task, or weights that do not fit the model.
    """
    config, about = read_config(folder)
    found = about.get("task", CLASSIFICATION)
    if found != task:
        raise UsageError(f"{folder} must be a run of {task}, got one of {found}")
    weights = folder / WEIGHTS
    if not weights.exists():
        raise UsageError(
            f"run {folder} has no {WEIGHTS} yet: it appears with the first evaluated epoch"
        )
    check_model_name(config["model"])
    try:
        model = create(config["model"], **about["model_kwargs"])
    except REFUSALS as error:
        raise UsageError(
            f"run {folder}: model {config['model']} refuses {about['model_kwargs']}: {error}"
        ) from error
    load_weights(model, weights)
    if hasattr(model, "pretrained_cfg"):  # a classifier
        set_image_statistics(model, about)
    return model.eval(), config, about
