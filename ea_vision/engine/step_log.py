"""How a run goes between its epochs: speed.csv in the run folder, and a line in the log where no bar is seen; where
wanted TensorBoard and Weights & Biases.
"""

import csv
import importlib
import logging
import math
import resource
import sys
import uuid
from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch

from ea_vision.base.errors import UsageError
from ea_vision.base.files import atomic_write, csv_text
from ea_vision.base.units import duration
from ea_vision.engine.config import TrainConfig

log = logging.getLogger(__name__)
FILE = "speed.csv"
WANDB_ID = "wandb_id.txt"
COLUMNS = ("step", "epoch", "lr", "train_loss", "images_per_s", "data_wait_percent", "memory_mib")


def memory_mib(device: torch.device) -> float:
    """Return the peak memory of this process in MiB: on its GPU where it has one, else in main memory."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device) / 2**20
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**10


def rounded(row: Mapping[str, Any]) -> dict[str, Any]:
    """Return a row of numbers with fractions of six digits."""
    return {name: float(f"{value:.6g}") if isinstance(value, float) else value for name, value in row.items()}


def require(module: str, option: str):
    """Import what an option needs; raise UsageError where it is not installed."""
    try:
        return importlib.import_module(module)
    except ImportError as error:
        package = module.rpartition(".")[2]
        raise UsageError(f"{option} needs {package}, not installed ({error}): pip install {package}") from error


class StepLog:
    """Rows of speed.csv, and what the boards show; kept by the first process, on others it does nothing.

    Columns: step (updates so far), epoch (with its fraction), lr (per update), train_loss, images_per_s
    (all processes) and data_wait_percent (share of the time spent waiting for images) since the row before, memory_mib.

    Raises:
        UsageError: TensorBoard or Weights & Biases is not installed.
    """

    def __init__(self, folder: Path, config: TrainConfig, is_main: bool):
        self.folder, self.config, self.is_main = folder, config, is_main
        self.writer = self.board = None
        self.tensorboard = is_main and config.tensorboard and require("torch.utils.tensorboard", "--tensorboard")
        self.wandb = is_main and config.wandb and require("wandb", "--wandb")

    def begin(self, updates: int) -> None:
        """Start after `updates` updates: rows beyond them were written by a run that was killed later.

        Raises:
            UsageError: Weights & Biases refuses, for want of a login for example.
        """
        config, path = self.config, self.folder / FILE
        if not self.is_main:
            return
        if config.log_steps:
            rows = csv.DictReader(path.read_text().splitlines() if path.exists() else [])
            kept = [row for row in rows if row[COLUMNS[-1]] and int(row["step"]) <= updates]  # a kill may have cut one
            atomic_write(path, csv_text(kept, COLUMNS).encode())
        if self.tensorboard:
            self.writer = self.tensorboard.SummaryWriter(str(self.folder / "tensorboard"), purge_step=updates + 1)
        if self.wandb:
            known = self.folder / WANDB_ID  # a run that continues keeps its id
            if not known.exists():
                atomic_write(known, uuid.uuid4().hex.encode())
            try:
                self.board = self.wandb.init(
                    project=config.wandb, id=known.read_text(), resume="allow", name=self.folder.resolve().name,
                    dir=str(self.folder), config=asdict(config),
                    tags=config.wandb_tags.split(",") if config.wandb_tags else None)
            except self.wandb.Error as error:
                raise UsageError(f"--wandb: {error} (WANDB_MODE=offline logs into the run folder only)") from error

    def add(self, row: dict[str, Any], seconds_left: float | None = None) -> None:
        """Add a row of speed.csv; with the seconds that the run will take, also a line to the log where no progress bar
        is seen."""
        if not self.is_main:
            return
        row = rounded(row)
        with open(self.folder / FILE, "a", newline="") as file:
            csv.DictWriter(file, COLUMNS, lineterminator="\n").writerow(row)
        if seconds_left is not None and not sys.stderr.isatty():
            log.info("epoch %(epoch).2f  update %(step)d  its loss %(train_loss).4f  lr %(lr).3g  %(images_per_s).0f "
                     "images/s  waiting for data %(data_wait_percent).0f%%  %(memory_mib).0f MiB used  %(left)s left",
                     row | {"left": duration(seconds_left)})
        self.send("train", row)

    def send(self, group: str, row: dict[str, Any]) -> None:
        """Show the numbers of a row, which has the updates as `step`, on the boards."""
        values = {f"{group}/{name}": value for name, value in row.items() if name != "step" and not math.isnan(value)}
        if self.writer is not None:
            for name, value in values.items():
                self.writer.add_scalar(name, value, row["step"])
            self.writer.flush()
        if self.board is not None:
            self.board.log(values, step=row["step"])

    def close(self) -> None:
        if self.writer is not None:
            self.writer.close()
        if self.board is not None:
            self.board.finish()
