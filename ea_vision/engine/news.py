"""What the host learns of an update some updates later, so that it never waits for the device that is computing."""

from __future__ import annotations

from dataclasses import dataclass, field

import torch


class Mailbox:
    """A few numbers from the device at a time, which come to the host when the device gets there.

    On a GPU they are copied into pinned memory while the host goes on; `receive` waits for that copy alone, not for
    what the device was given since.

    Args:
        count: of the numbers, float32.
        places: how many messages may be under way.
    """

    def __init__(self, device: torch.device, count: int, places: int):
        self.on_gpu = device.type == "cuda"
        self._places = torch.zeros(places, count, pin_memory=self.on_gpu)
        self._arrived = [torch.cuda.Event() for _ in range(places)] if self.on_gpu else []
        self._sent = self._received = 0

    def send(self, numbers: torch.Tensor) -> None:
        """Give a message (count,) on its way.

        Raises:
            RuntimeError: all places are taken.
        """
        if self._sent - self._received == len(self._places):
            raise RuntimeError(f"at most {len(self._places)} messages may be under way")
        place = self._sent % len(self._places)
        self._places[place].copy_(numbers, non_blocking=True)
        if self.on_gpu:
            self._arrived[place].record()
        self._sent += 1

    def receive(self) -> list[float]:
        """The oldest message that was not received yet."""
        if self._sent == self._received:
            raise RuntimeError("no message is under way")
        place = self._received % len(self._places)
        if self.on_gpu:
            self._arrived[place].synchronize()
        self._received += 1
        return self._places[place].tolist()

    def clear(self) -> None:
        """Forget what is under way."""
        self._received = self._sent


@dataclass
class Made:
    """An update that was made. What the device says of it is added when it has come.

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
