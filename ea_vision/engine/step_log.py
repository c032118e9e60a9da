"""How a run goes between its epochs: speed.csv in the run folder, a line in the log where no bar is seen, and
TensorBoard where it is wanted.
"""

from __future__ import annotations

import csv
import logging
import math
import resource
import sys
from pathlib import Path
from typing import Any

import torch

from ea_vision.base.errors import UsageError
from ea_vision.base.units import duration
from ea_vision.engine.config import TrainConfig

log = logging.getLogger(__name__)
FILE = "speed.csv"
COLUMNS = ("step", "epoch", "lr", "train_loss", "images_per_s", "data_wait_percent", "memory_mib")


def memory_mib(device: torch.device) -> float:
    """Return the peak memory of this process in MiB: on its GPU where it has one, else in main memory."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device) / 2**20
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**10


class StepLog:
    """Rows of speed.csv, and what TensorBoard shows; kept by the first process, on others it does nothing.

    Columns: step (updates so far), epoch (with its fraction), lr (per update), train_loss, images_per_s
    (all processes) and data_wait_percent (share of the time spent waiting for images) since the row before, memory_mib.

    Raises:
        UsageError: TensorBoard is not installed.
    """

    def __init__(self, folder: Path, config: TrainConfig, is_main: bool):
        self.folder, self.is_main, self.steps, self.writer = folder, is_main, config.log_steps, None
        self.boards = is_main and config.tensorboard
        if self.boards:
            try:
                import torch.utils.tensorboard  # noqa: F401
            except ImportError as error:
                raise UsageError(f"--tensorboard needs tensorboard ({error}): pip install tensorboard") from error

    def begin(self, updates: int) -> None:
        """Start after `updates` updates: rows beyond them were written by a run that was killed later."""
        path, rows = self.folder / FILE, []
        if self.is_main and path.exists():
            rows = [row for row in csv.reader(path.read_text().splitlines()[1:])
                    if len(row) == len(COLUMNS) and int(row[0]) <= updates]  # a kill may have cut the last one
        if self.is_main and self.steps:
            with open(path, "w", newline="") as file:
                csv.writer(file, lineterminator="\n").writerows([COLUMNS, *rows])
        if self.boards:
            from torch.utils.tensorboard import SummaryWriter

            self.writer = SummaryWriter(str(self.folder / "tensorboard"), purge_step=updates + 1)

    def add(self, row: dict[str, Any], seconds_left: float | None = None) -> None:
        """Add a row of speed.csv; with the seconds that the run will take, also a line to the log where no progress bar
        is seen."""
        if not self.is_main:
            return
        row = {name: float(f"{row[name]:.6g}") if isinstance(row[name], float) else row[name] for name in COLUMNS}
        with open(self.folder / FILE, "a", newline="") as file:
            csv.DictWriter(file, COLUMNS, lineterminator="\n").writerow(row)
        if seconds_left is not None and not sys.stderr.isatty():
            log.info("epoch %.2f  update %d  its loss %.4f  lr %.3g  %.0f images/s  waiting for data %.0f%%  %.0f MiB "
                     "used  %s left", row["epoch"], row["step"], row["train_loss"], row["lr"], row["images_per_s"],
                     row["data_wait_percent"], row["memory_mib"], duration(seconds_left))
        self.send("train", row)

    def send(self, group: str, row: dict[str, Any]) -> None:
        """Show the numbers of a row, which has the updates as `step`, on TensorBoard."""
        if self.writer is None:
            return
        for name, value in row.items():
            if name != "step" and not math.isnan(value):
                self.writer.add_scalar(f"{group}/{name}", value, row["step"])
        self.writer.flush()

    def close(self) -> None:
        if self.writer is not None:
            self.writer.close()
