"""What a run leaves on disk: config.yaml, metrics.csv, checkpoints, model.safetensors, snapshots, results.json."""

from __future__ import annotations

import csv
import fcntl
import io
import json
import logging
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import safetensors.torch
import timm
import yaml
from torch import nn

from ea_vision.base.errors import RunError, UsageError
from ea_vision.base.files import atomic_write, create
from ea_vision.base.networks import load_weights
from ea_vision.base.processes import World
from ea_vision.engine.checkpoint import BEST, LAST, PREVIOUS

log = logging.getLogger(__name__)
CONFIG, METRICS, WEIGHTS, RESULTS = "config.yaml", "metrics.csv", "model.safetensors", "results.json"
RESULTS_ROW = "results.csv"  # of timm's results files
SNAPSHOTS = "snapshots"  # the folder of --snapshot-epochs
COLUMNS = ("epoch", "step", "lr", "train_loss", "top1", "top5", "images_per_s", "seconds")


def holds_run(folder: Path) -> bool:
    """Whether a run has written into this folder."""
    return any((folder / name).exists() for name in (CONFIG, LAST, PREVIOUS, BEST))


@contextmanager
def locked(folder: Path, world: World) -> Iterator[None]:
    """Make the run folder and keep it for this run: two runs that write into one folder would spoil both.

    What an interrupted write left behind is deleted, and so is, at the end, a folder in which nothing was written.

    Raises:
        UsageError: the folder cannot be made, or another process holds it.
    """
    if not world.is_main:
        yield
        return
    create(folder)
    handle = os.open(folder, os.O_RDONLY)
    try:
        try:
            fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            raise UsageError(f"{folder} is in use by another run that has not ended yet") from error
        except OSError as error:  # some network file systems have no locks
            log.warning("%s cannot be locked: %s", folder, error.strerror)
        for leftover in [*folder.glob(".*.tmp"), *folder.glob(f"{SNAPSHOTS}/.*.tmp")]:
            leftover.unlink()
        yield
    finally:
        os.close(handle)
        if not any(folder.iterdir()):
            folder.rmdir()


def write_config(folder: Path, config: dict[str, Any], run: dict[str, Any]) -> None:
    """Write the resolved options and, under `run`, what is needed to judge and repeat the run.

    The section speaks of the last start; its `starts` say from which update on each start, under another commit, other
    versions or other hardware, has made the run.
    """
    text = yaml.safe_dump({**config, "run": run}, sort_keys=False, width=120)
    atomic_write(folder / CONFIG, text.encode())


def read_config(folder: Path) -> tuple[dict[str, Any], dict[str, Any]]:
    """Return the options and the `run` section of a run folder.

    Raises:
        UsageError: not a run folder.
    """
    path = folder / CONFIG
    try:
        config = yaml.safe_load(path.read_text())
        return config, config.pop("run")
    except OSError as error:
        raise UsageError(f"{folder} is not a run folder: it has no readable {CONFIG}") from error
    except (yaml.YAMLError, AttributeError, KeyError) as error:
        raise UsageError(f"{path} is not the {CONFIG} of a run") from error


def write_metrics(folder: Path, rows: list[dict[str, float]]) -> None:
    """Write metrics.csv: one row per epoch; accuracies are nan where an epoch was not evaluated."""
    text = io.StringIO()
    writer = csv.DictWriter(text, COLUMNS, lineterminator="\n")
    writer.writeheader()
    writer.writerows(rows)
    atomic_write(folder / METRICS, text.getvalue().encode())


def read_metrics(folder: Path) -> dict[str, list[float]]:
    """Return the columns of metrics.csv as lists of numbers.

    Raises:
        UsageError: no metrics, or a file that is not ours.
    """
    path = folder / METRICS
    try:
        rows = list(csv.DictReader(path.read_text().splitlines()))
        return {name: [float(row[name]) for row in rows] for name in COLUMNS}
    except OSError as error:
        raise UsageError(f"{folder} is not a run folder: it has no readable {METRICS}") from error
    except (KeyError, TypeError, ValueError) as error:
        raise UsageError(f"{path} is not a metrics file of this trainer; its columns must be {', '.join(COLUMNS)}") \
            from error


def write_weights(folder: Path, model: nn.Module) -> None:
    """Write model.safetensors, for `timm.create_model(..., checkpoint_path=...)`."""
    _write_state(folder / WEIGHTS, model, {})


def write_snapshot(folder: Path, model: nn.Module, epoch: int) -> None:
    """Write snapshots/epoch_NNNN.safetensors, weights like model.safetensors' that say their epoch."""
    create(folder / SNAPSHOTS)
    _write_state(folder / SNAPSHOTS / f"epoch_{epoch:04d}.safetensors", model, {"epoch": str(epoch)})


def _write_state(path: Path, model: nn.Module, about: dict[str, str]) -> None:
    state = {name: value.detach().cpu().contiguous() for name, value in model.state_dict().items()}
    atomic_write(path, safetensors.torch.save(state, {"format": "pt", **about}))


def read_results(folder: Path) -> dict[str, Any] | None:
    """Return results.json, which only a complete run has, or None."""
    path = folder / RESULTS
    if not path.exists():
        return None
    try:
        return json.loads(path.read_text())
    except (OSError, ValueError) as error:
        raise RunError(f"cannot read {path}: {error}") from error


def load_run(folder: Path) -> tuple[nn.Module, dict[str, Any], dict[str, Any]]:
    """Build the model of a run with its best weights, in eval mode; return it with the run's options and `run` section.

    Raises:
        UsageError: not a run folder, or weights that do not fit the model.
    """
    config, run = read_config(folder)
    weights = folder / WEIGHTS
    if not weights.exists():
        raise UsageError(f"run {folder} has no {WEIGHTS} yet: it appears with the first evaluated epoch")
    model = timm.create_model(config["model"], **run["model_kwargs"])
    load_weights(model, weights)
    return model.eval(), config, run
