"""How a run goes between its epochs: speed.csv in the run folder; where wanted TensorBoard and Weights & Biases."""

from __future__ import annotations

import csv
import importlib
import math
import resource
import uuid
from pathlib import Path

import numpy as np
import torch
from PIL import Image

from ea_vision.base.errors import UsageError
from ea_vision.base.files import atomic_write

FILE = "speed.csv"
WANDB_ID = "wandb_id.txt"
COLUMNS = ("step", "epoch", "lr", "train_loss", "images_per_s", "data_wait_percent", "memory_mib")


def require(module: str, package: str, option: str):
    """Import what an option needs.

    Raises:
        UsageError: it is not installed.
    """
    try:
        return importlib.import_module(module)
    except ImportError as error:
        raise UsageError(f"{option} needs {package}, not installed ({error}): pip install {package}") from error


def memory_mib(device: torch.device) -> float:
    """Peak memory of this process in MiB: on its GPU where it has one, else in main memory, its workers apart."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device) / 2**20
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**10


def _begin_wandb(folder: Path, project: str, config: dict | None):
    """Begin a Weights & Biases run, or continue that of the run folder, which keeps its id.

    Raises:
        UsageError: it refuses, for want of a login for example.
    """
    import wandb

    known = folder / WANDB_ID
    if not known.exists():
        atomic_write(known, uuid.uuid4().hex.encode())
    try:
        return wandb.init(project=project, id=known.read_text(), name=folder.resolve().name, resume="allow",
                          dir=str(folder), config=config)
    except wandb.Error as error:
        raise UsageError(f"--wandb: {error} (WANDB_MODE=offline logs into the run folder only)") from error


class StepLog:
    """Rows of speed.csv; kept by the first process, and cut back when a run resumes. The trainer says when one is due.

    Columns: step (updates so far), epoch (with its fraction), lr (per update), train_loss, images_per_s
    (all processes) and data_wait_percent (share of the time spent waiting for images) since the row before, memory_mib.
    """

    def __init__(self, folder: Path, *, tensorboard: bool = False, wandb: str = "", config: dict | None = None):
        self.path = folder / FILE
        self._tensorboard, self._wandb = None, None
        self._begin = {"folder": folder, "tensorboard": tensorboard, "wandb": wandb, "config": config}
        if tensorboard:
            require("torch.utils.tensorboard", "tensorboard", "--tensorboard")
        if wandb:
            require("wandb", "wandb", "--wandb")

    def begin(self, updates: int) -> None:
        """Start after `updates` updates: rows beyond them were written by a run that was killed later."""
        rows = []
        if self.path.exists():  # damaged rows are left out
            text = self.path.read_text(encoding="ascii", errors="replace").replace("\0", "")
            whole = [row for line in text.splitlines() if len(row := line.split(",")) == len(COLUMNS)
                     and row[0].isdecimal()]
            rows = [row for row in whole if int(row[0]) <= updates]
        with open(self.path, "w", newline="") as file:
            csv.writer(file, lineterminator="\n").writerows([COLUMNS, *rows])
        begin = self._begin
        if begin["tensorboard"]:
            from torch.utils.tensorboard import SummaryWriter

            self._tensorboard = SummaryWriter(str(begin["folder"] / "tensorboard"), purge_step=updates + 1)
        if begin["wandb"]:
            self._wandb = _begin_wandb(begin["folder"], begin["wandb"], begin["config"])

    def add(self, row: dict[str, float]) -> None:
        """Add a row of speed.csv."""
        row = {name: float(f"{row[name]:.6g}") if isinstance(row[name], float) else row[name] for name in COLUMNS}
        with open(self.path, "a", newline="") as file:
            csv.DictWriter(file, COLUMNS, lineterminator="\n").writerow(row)
        self._send({f"train/{name}": value for name, value in row.items() if name != "step"}, row["step"])

    def add_epoch(self, row: dict[str, float]) -> None:
        """Add the row of metrics.csv to the boards."""
        self._send({f"epoch/{name}": value for name, value in row.items() if name != "step" and not math.isnan(value)},
                   row["step"])

    def add_picture(self, name: str, path: Path, step: int) -> None:
        """Show a picture on the boards."""
        if self._tensorboard is not None:
            with Image.open(path) as image:
                self._tensorboard.add_image(name, np.asarray(image.convert("RGB")), step, dataformats="HWC")
            self._tensorboard.flush()
        if self._wandb is not None:
            import wandb

            self._wandb.log({name: wandb.Image(str(path))}, step=step)

    def _send(self, values: dict[str, float], step: int) -> None:
        if self._tensorboard is not None:
            for name, value in values.items():
                self._tensorboard.add_scalar(name, value, step)
            self._tensorboard.flush()
        if self._wandb is not None:
            self._wandb.log(values, step=step)

    def close(self) -> None:
        if self._tensorboard is not None:
            self._tensorboard.close()
        if self._wandb is not None:
            self._wandb.finish()
