"""Main memory and processor time of a process and of those that it started."""

from __future__ import annotations

import contextlib
import os
import threading

import psutil


def _tree(pid: int) -> list[psutil.Process]:
    """Return a process and those that it started; without those that have ended."""
    try:
        process = psutil.Process(pid)
        return [process, *process.children(recursive=True)]
    except psutil.NoSuchProcess:
        return []


def tree_memory(pid: int) -> int:
    """Return bytes of main memory of a process and those it started, shared pages divided among their users (where the
    system does not say, each in full)."""
    total = 0
    for process in _tree(pid):
        with contextlib.suppress(psutil.NoSuchProcess, psutil.AccessDenied):
            full = process.memory_full_info()
            total += getattr(full, "pss", full.rss)
    return total


def tree_seconds(pid: int) -> float:
    """Return processor seconds of a process, of those it started, and of those of them that have ended."""
    total = 0.0
    for process in _tree(pid):
        with contextlib.suppress(psutil.NoSuchProcess):
            total += sum(process.cpu_times()[:4])  # user and system, the process's and its ended children's
    return total


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
