"""Results of updates, read some updates later, so that the host never waits for the device that is computing."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field

import torch


@dataclass
class StepResult:
    """The result of an update.

    step counts within the epoch, updates since the beginning of the run, both from 1; epoch from 0.
    """

    epoch: int
    step: int
    updates: int
    lr: float
    ids: list[torch.Tensor] = field(repr=False)  # of this process's samples, on the CPU
    loss: float = 0.0  # mean over the processes
    norm: float = 0.0  # of the gradient
    stop: bool = False  # a process was asked to stop
    unreadable: bool = False  # a process has met images that it cannot read

    @property
    def name(self) -> str:
        return f"update {self.step} of epoch {self.epoch + 1}"


def to_host(numbers: torch.Tensor) -> tuple[torch.Tensor, torch.cuda.Event | None]:
    """Copy numbers from a GPU into pinned memory while the host goes on; return the copy and what says that it is done.

    Waiting for that event waits for this copy alone, and not for what the device was given since.
    """
    if numbers.device.type != "cuda":
        return numbers.cpu(), None
    copied = torch.empty(numbers.shape, dtype=numbers.dtype, pin_memory=True)
    copied.copy_(numbers, non_blocking=True)
    arrived = torch.cuda.Event()
    arrived.record()
    return copied, arrived


class StepResults:
    """A queue of results whose numbers are on their way from the device to the host."""

    def __init__(self):
        self._queue: deque[tuple[StepResult, torch.Tensor, torch.cuda.Event | None]] = deque()

    def __len__(self) -> int:
        return len(self._queue)

    def add(self, result: StepResult, numbers: torch.Tensor) -> None:
        """Send the numbers of an update to the host: loss, processes asked to stop, unreadable images, norm; (4,)."""
        self._queue.append((result, *to_host(numbers)))

    def collect(self, under_way: int = 0) -> list[StepResult]:
        """Return the results of finished updates, oldest first, without waiting for the latest `under_way`."""
        results = []
        while len(self._queue) > under_way:
            result, numbers, arrived = self._queue.popleft()
            if arrived is not None:
                arrived.synchronize()
            result.loss, stops, unreadable, result.norm = numbers.tolist()
            result.stop, result.unreadable = stops > 0, unreadable > 0
            results.append(result)
        return results

    def clear(self) -> None:
        """Forget the results that were not collected."""
        self._queue.clear()
