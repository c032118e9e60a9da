"""Main memory and processor time of a process and of those that it started, Linux."""

from __future__ import annotations

import os
import threading
from pathlib import Path


def tree_memory(pid: int) -> int:
    """Bytes of main memory of a process and those it started, shared pages divided among their users."""
    total = 0
    try:
        for line in Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines():
            if line.startswith("Pss:"):
                total = int(line.split()[1]) * 1024
        children = Path(f"/proc/{pid}/task/{pid}/children").read_text().split()
    except OSError:  # it has ended
        return total
    return total + sum(tree_memory(int(child)) for child in children)


def tree_seconds(pid: int) -> float:
    """Processor seconds of a process, of those it started, and of those of them that have ended."""
    try:
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
        children = Path(f"/proc/{pid}/task/{pid}/children").read_text().split()
    except OSError:  # it has ended
        return 0.0
    own = sum(map(int, fields[11:15])) / os.sysconf("SC_CLK_TCK")  # user and system, its own and its ended children's
    return own + sum(tree_seconds(int(child)) for child in children)


class PeakMemory:
    """Samples `tree_memory` of a process while active; `peak` in bytes.

    Args:
        every: seconds between samples.
        pid: of the process; None: this one.
    """

    def __init__(self, every: float = 1.0, pid: int | None = None):
        self.every, self.pid = every, os.getpid() if pid is None else pid

    def __enter__(self) -> PeakMemory:
        self.peak, self._done = 0, threading.Event()
        self._thread = threading.Thread(target=self._sample)
        self._thread.start()
        return self

    def _sample(self) -> None:
        while True:
            self.peak = max(self.peak, tree_memory(self.pid))
            if self._done.wait(self.every):
                return

    def __exit__(self, *_) -> None:
        self._done.set()
        self._thread.join()
