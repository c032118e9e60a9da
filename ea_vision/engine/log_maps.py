"""Pictures of attention maps while training (--log-maps): one query in the same few images, every so many epochs."""

from __future__ import annotations

import importlib
from collections.abc import Callable, Sequence
from contextlib import closing
from pathlib import Path

from torch import nn

from ea_vision.engine.step_log import StepLog

IMAGES = 4
DRAWN_BY = "ea_vision.visualize.training_maps"  # floors above: loaded by its name, where a run asks for pictures


def maps_logger(every: int, epochs: int, model: nn.Module, eval_loader, mean: Sequence[float], std: Sequence[float],
                folder: Path, step_log: StepLog | None) -> Callable[[nn.Module, int, int], None]:
    """Return a function of a network, the epochs and the updates so far, which draws in every `every`th epoch and the
    last into RUN/maps, and shows the picture on TensorBoard and W&B where the run has them.

    The images are the first of those that are evaluated on.

    Raises:
        UsageError: a network without attention that can be recorded.
    """
    with closing(eval_loader.batches()) as batches:
        images = next(iter(batches)).images[:IMAGES]
    maps = importlib.import_module(DRAWN_BY).TrainingMaps(folder, model, images, mean, std)

    def after_epoch(network: nn.Module, epoch: int, updates: int) -> None:
        if epoch % every == 0 or epoch >= epochs:
            picture = maps.draw(network, epoch)
            if step_log is not None:
                step_log.add_picture("attention maps", picture, updates)

    return after_epoch
