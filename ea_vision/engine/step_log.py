"""The progress of a run within its epochs: speed.csv in the run folder, a line in the log if there is no progress bar
and, if asked for, TensorBoard and Weights & Biases.
"""

import logging
import math
import sys
import uuid
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path

import numpy as np
import psutil
import torch
from PIL import Image

from ea_vision.base.devices import peak_memory
from ea_vision.base.errors import as_usage_error, extra_required
from ea_vision.base.files import atomic_write
from ea_vision.base.units import MIB, duration
from ea_vision.engine import run_folder
from ea_vision.engine.config import TrainConfig

log = logging.getLogger(__name__)
COLUMNS = ("step", "epoch", "lr", "train_loss", "images_per_s", "data_wait_percent", "memory_mib")


def log_to_stdout(rank: int) -> None:
    """Show the package's messages on stdout, those of rank 0 only."""
    handler = logging.StreamHandler(sys.stdout)
    handler.setFormatter(logging.Formatter("%(asctime)s  %(message)s", "%m-%d %H:%M:%S"))
    logger = logging.getLogger("ea_vision")
    logger.handlers = [handler]
    logger.setLevel(logging.INFO if rank == 0 else logging.CRITICAL)


def memory_mib(device: torch.device) -> float:
    """Return the memory of this process in MiB: the peak on its GPU or, without one, main memory in use now."""
    used = peak_memory(device)
    if used is None:
        used = psutil.Process().memory_info().rss
    return used / MIB


def rounded(row: dict) -> dict:
    """Return a row with its floats rounded to six significant digits."""
    return {
        name: float(f"{value:.6g}") if isinstance(value, float) else value
        for name, value in row.items()
    }


class StepLog:
    """Writes speed.csv, TensorBoard and Weights & Biases, on the first process alone.

    Columns: step (updates so far), epoch (with its fraction), lr (per update), train_loss, images_per_s
    (all processes) and data_wait_percent (share of the time spent waiting for images) since the row before, memory_mib.

    updates: of the run so far; later rows of a run that was killed after them are dropped.

    Raises:
        UsageError: TensorBoard or Weights & Biases is not installed, or the latter refuses, for lack of a login.
    """

    def __init__(self, folder: Path, config: TrainConfig, updates: int):
        self.path = folder / run_folder.SPEED
        self.writer = None
        self.board = None
        self.warned: set[str] = set()  # what could not be written
        if config.tensorboard:
            with extra_required("--tensorboard", "tensorboard", "logging"):
                from torch.utils.tensorboard import SummaryWriter

            self.writer = SummaryWriter(str(folder / "tensorboard"), purge_step=updates + 1)
        if config.wandb:
            self.board = self._board(config)
        if config.log_steps:
            self._drop_rows_beyond(updates)

    def _drop_rows_beyond(self, updates: int) -> None:
        """Create speed.csv, or keep only its rows up to so many updates."""
        lines = [",".join(COLUMNS)]
        rows = []
        if self.path.exists():
            rows = self.path.read_text(encoding="utf-8").splitlines()[1:]
        for row in rows:
            whole = row.count(",") == len(COLUMNS) - 1  # a kill may have cut a row short
            if whole and int(row.partition(",")[0]) <= updates:
                lines.append(row)
        atomic_write(self.path, ("\n".join(lines) + "\n").encode())

    def _board(self, config: TrainConfig):
        """Return the run of Weights & Biases that shows this folder; a resumed run keeps its id."""
        with extra_required("--wandb", "wandb", "logging"):
            import wandb

        folder = self.path.parent.resolve()
        id_file = folder / "wandb_id.txt"
        number = id_file.read_text(encoding="utf-8") if id_file.exists() else uuid.uuid4().hex
        offline = "--wandb (WANDB_MODE=offline logs into the run folder only)"
        with as_usage_error(offline, wandb.Error):
            board = wandb.init(
                project=config.wandb,
                id=number,
                resume="allow",
                name=folder.name,
                dir=str(folder),
                config=asdict(config),
            )
        atomic_write(id_file, number.encode())
        return board

    def add(self, row: dict, seconds_left: float | None = None) -> None:
        """Add a row to speed.csv. Given the seconds that the run will still take, also log a line if there is no
        progress bar."""
        row = rounded(row)
        with self._optional("speed.csv"):
            self._append(row)
        if seconds_left is not None and not sys.stderr.isatty():
            log.info(
                "epoch %(epoch).2f  update %(step)d  its loss %(train_loss).4f  lr %(lr).3g  "
                "%(images_per_s).0f images/s  waiting for data %(data_wait_percent).0f%%  "
                "%(memory_mib).0f MiB used  %(left)s left",
                row | {"left": duration(seconds_left)},
            )
        self.send("train", row)

    def send(self, group: str, row: dict) -> None:
        """Send the numbers of a row to TensorBoard and Weights & Biases; its `step` is the number of updates."""
        step = row["step"]
        values = {
            f"{group}/{name}": value
            for name, value in row.items()
            if name != "step" and not math.isnan(value)
        }
        if self.writer:
            with self._optional("TensorBoard"):
                for name, value in values.items():
                    self.writer.add_scalar(name, value, step)
                self.writer.flush()
        if self.board:
            with self._optional("Weights & Biases"):
                self.board.log(values, step=step)

    def send_maps(self, path: Path, step: int) -> None:
        """Send a picture of maps to TensorBoard and Weights & Biases; step: the number of updates."""
        with Image.open(path) as image:
            pixels = np.asarray(image.convert("RGB"))
        if self.writer:
            with self._optional("TensorBoard"):
                self.writer.add_image("maps", pixels, step, dataformats="HWC")
                self.writer.flush()
        if self.board:
            import wandb

            with self._optional("Weights & Biases"):
                self.board.log({"maps": wandb.Image(pixels)}, step=step)

    def close(self) -> None:
        """End the run of Weights & Biases."""
        if self.board:
            with self._optional("Weights & Biases"):
                self.board.finish()

    def _append(self, row: dict) -> None:
        with open(self.path, "a", encoding="utf-8") as file:
            file.write(",".join(str(row[name]) for name in COLUMNS) + "\n")

    @contextmanager
    def _optional(self, where: str) -> Iterator[None]:
        """Warn, once per `where`, if the block fails: training goes on when its log cannot be written."""
        try:
            yield
        except Exception as error:  # TensorBoard and Weights & Biases raise classes of their own
            if where not in self.warned:
                log.warning("%s cannot be written, training goes on without: %s", where, error)
            self.warned.add(where)
