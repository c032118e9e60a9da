"""Checkpoints: files of torch.save, read without executing pickled code and only if their checksums match.

Files are written atomically (a temporary file is synced and renamed): after a kill or a power loss there is the old
file or the new one, never half of one.
"""

import io
import os
from collections.abc import Callable
from pathlib import Path

import torch

from ea_vision.zoo.weights_file import CHECKPOINT_FORMAT, DamagedCheckpoint, read_checkpoint

LAST = "last.ckpt"
PREVIOUS = "last.prev.ckpt"
BEST = "best.ckpt"
NAMES = (LAST, PREVIOUS, BEST)
# Parts of every checkpoint of a run. `buffers`, for processes with batch statistics of their own, may be missing.
PARTS = (
    "config",
    "data_fingerprint",
    "world_size",
    "progress",
    "random",
    "ema",
    "model",
    "optimizer",
    "scaler",
)


def encode(state: dict) -> bytes:
    """Return the bytes of a checkpoint file. `state` may hold tensors, dicts, lists, tuples, numbers, text and None."""
    file = io.BytesIO()
    torch.save({"format": CHECKPOINT_FORMAT, **state}, file)
    return file.getvalue()


def read_run_state(path: Path) -> dict:
    """Read the checkpoint of a run, with all parts that resuming needs.

    Raises:
        DamagedCheckpoint: as `read_checkpoint`, or a part is missing.
        UsageError: another release wrote it.
    """
    state = read_checkpoint(path)
    missing = [part for part in PARTS if part not in state]
    if missing:
        raise DamagedCheckpoint(f"{path} is not the checkpoint of a run: it has no {missing[0]}")
    if not isinstance(state["progress"], dict) or "updates" not in state["progress"]:
        raise DamagedCheckpoint(f"{path} does not say in its progress how many updates were made")
    return state


def newest_checkpoint(
    folder: Path, notice: Callable[[str], None] | None = None
) -> tuple[Path, dict] | None:
    """Return path and state of the checkpoint from which a run folder's run continues, or None.

    This is last.ckpt or, if that is missing or damaged, the one of the others with the most updates. (After going back
    by --resume best.ckpt, last.ckpt has fewer updates than the files that were left behind.)

    notice: if given, damaged files and those of other programs are renamed to NAME.damaged, so that none replaces a
        good one later, and `notice` is called with a line for each.
    """
    newest = None
    most = -1
    for path in (folder / name for name in NAMES):
        if not path.exists():
            continue
        try:
            state = read_run_state(path)
        except DamagedCheckpoint as error:
            if notice is not None:
                aside = path.with_name(path.name + ".damaged")
                os.replace(path, aside)
                notice(f"skipped: {error}; kept as {aside.name}")
            continue
        if path.name == LAST:
            return path, state
        updates = state["progress"]["updates"]
        if updates > most:
            newest = (path, state)
            most = updates
    return newest
