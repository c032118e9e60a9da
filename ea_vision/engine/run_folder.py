"""The files of a run: config.yaml, metrics.csv, checkpoints, model.safetensors, snapshots, results.json."""

import json
import logging
import math
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from itertools import chain
from pathlib import Path

import yaml
from filelock import FileLock, Timeout, UnixFileLock
from torch import Tensor

from ea_vision.base.errors import UsageError, as_usage_error
from ea_vision.base.files import atomic_write, create, csv_text
from ea_vision.base.processes import World
from ea_vision.engine import checkpoint
from ea_vision.models import EVOLVED, list_networks
from ea_vision.models.note import NOTE, with_note
from ea_vision.zoo.preparation import OPTIONS
from ea_vision.zoo.source import CLASSIFICATION, CONFIG, FORMAT, SNAPSHOTS, WEIGHTS, read_config
from ea_vision.zoo.weights_file import encode_weights

log = logging.getLogger(__name__)
METRICS = "metrics.csv"
SPEED = "speed.csv"
RESULTS = "results.json"
CARD = "model.md"  # of model.safetensors
# entries of a run's `about` section that the note in its weights repeats
NOTE_ENTRIES = ("model_kwargs", "task", "classes", "category_ids", "mean", "std")
LOCK = ".lock"
FILES = (CONFIG, METRICS, SPEED, WEIGHTS, *checkpoint.NAMES, RESULTS, CARD)
MEASURES = ("top1", "top5")  # of an evaluation, in percent; another trainer may have others


@contextmanager
def locked(folder: Path, world: World) -> Iterator[None]:
    """Make the run folder and lock it, since two runs that write into one folder would spoil both.

    At the end, folders that it made and into which nothing was written are deleted.

    Raises:
        UsageError: the folder cannot be made or written to, another process holds it, or one of FILES is a folder.
    """
    if not world.is_main:
        yield
        return
    new_folders = [path for path in (folder, *folder.parents) if not path.exists()]
    create(folder)
    for name in FILES:
        if (folder / name).is_dir():
            raise UsageError(f"{folder / name} must be a file of the run, and it is a folder")
    lock = FileLock(folder / LOCK)
    try:
        lock.acquire(timeout=0)
    except Timeout as error:
        raise UsageError(f"{folder} is in use by another run that has not ended yet") from error
    except (OSError, NotImplementedError) as error:  # some network file systems have no locks
        log.warning("%s cannot be locked: %s", folder, error)
    try:
        yield
    finally:
        if isinstance(lock, UnixFileLock):  # others remove their file themselves
            with suppress(OSError):  # the disk has become read-only
                (folder / LOCK).unlink(missing_ok=True)
        lock.release()
        with suppress(OSError):  # one of them holds something
            for path in new_folders:
                path.rmdir()


# ---- config.yaml ----------------------------------------------------------------------------------------------------


def write_config(folder: Path, config: dict, about: dict) -> None:
    """Write the resolved options and, under `about`, what is needed to judge and repeat the run.

    The section describes the last start. Its `starts` list every start with another command, commit, versions or
    hardware, and the first update that it made.
    """
    content = {**config, "about": {"format": FORMAT, **about}}
    atomic_write(folder / CONFIG, yaml.safe_dump(content, sort_keys=False, width=120).encode())


# ---- metrics.csv ----------------------------------------------------------------------------------------------------


def write_metrics(
    folder: Path, rows: list[dict[str, float]], measures: Sequence[str] = MEASURES
) -> None:
    """Write metrics.csv: one row per epoch, with nan as measures if the epoch was not evaluated. The rows' further
    columns, of attention layers and learnable gates, come last."""
    names = ["epoch", "step", "lr", "train_loss", "eval_loss", *measures, "images_per_s", "seconds"]
    columns = dict.fromkeys(chain(names, *rows), math.nan)
    lines = [columns | row for row in rows]
    atomic_write(folder / METRICS, csv_text(lines, list(columns)).encode())


# ---- weights and results --------------------------------------------------------------------------------------------


def _encode(folder: Path, weights: dict[str, Tensor], metadata: dict[str, str]) -> bytes:
    """Return a file of a run's weights, with a note from its config.yaml: the model's name, NOTE_ENTRIES, and how
    images to evaluate on are prepared. Weights of ea_vision's classifiers include the note, which these networks check.
    """
    if not (folder / CONFIG).is_file():
        return encode_weights(weights, metadata)
    config, about = read_config(folder)
    entries = {key: about[key] for key in NOTE_ENTRIES if key in about}
    evaluation = {key: config[key] for key in OPTIONS if key in config}
    note = {"model": config.get("model"), **entries, "evaluation": evaluation}
    text = json.dumps(note)
    checks_notes = note["model"] in (*list_networks(), EVOLVED)
    if checks_notes and note.get("task", CLASSIFICATION) == CLASSIFICATION:
        weights = with_note(weights, text)
    return encode_weights(weights, {**metadata, NOTE: text})


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
    problem = f"cannot read {path}: delete it, and the run's command writes it again"
    with as_usage_error(problem):
        results = json.loads(path.read_text(encoding="utf-8"))
        if not isinstance(results, dict) or "epochs" not in results:
            raise ValueError("it does not say the epochs of a run")
    return results
