"""Processes of one run: torchrun starts them, gloo joins them on CPU, nccl on CUDA. Without torchrun there is one."""

import ctypes
import os
import queue
import re
import signal
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta
from functools import reduce
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from ea_vision.base.devices import choose_device
from ea_vision.base.errors import RunError, UsageError

PR_SET_PDEATHSIG = 1  # of <sys/prctl.h>
# What torch says about a collective that another process did not join.
WAITED_IN_VAIN = re.compile(
    r"tim(ed )?(e)?out|connection (reset|closed|refused)|peer", re.IGNORECASE
)
# What torch and Python raise when a worker has ended: errors of the signal handler, of the queue, and of the sockets
# that transfer tensors, which may notice first.
WORKER_ENDED = re.compile(r"DataLoader worker \(pid|Pin memory thread exited|DataLoader timed out")
WORKER_ENDS = (RuntimeError, ConnectionError, EOFError, FileNotFoundError, queue.Empty)
# Processes or threads that decode images: more would only get into each other's way, and 100,000 bring a machine down.
MOST_WORKERS = max(64, 16 * (os.cpu_count() or 1))


class WorkerLost(RunError):
    """A process that decodes images has ended."""


def worker_lost(error: Exception) -> WorkerLost | None:
    """Return the error to raise if `error` means that a worker process has ended, else None.

    torch reports this in a RuntimeError, from its signal handler at any place or from its queue. An error that a worker
    raised and passed on says "Caught ... in DataLoader worker process" and does not count.
    """
    text = " ".join(str(error).split())
    if not isinstance(error, WORKER_ENDS) or isinstance(error, RunError):
        return None
    if text.startswith("Caught "):
        return None
    if isinstance(error, RuntimeError) and not WORKER_ENDED.search(text):
        return None
    return WorkerLost(
        f"a process that decodes images has ended ({type(error).__name__}: {text}): the system "
        "kills processes when main memory runs out, and fewer --workers need less"
    )


@contextmanager
def workers_watched(kinds: type | tuple[type, ...] = WORKER_ENDS) -> Iterator[None]:
    """Turn every error that a dead worker process causes while a batch is fetched into a WorkerLost.

    torch's signal handler may raise again while a RunError is being handled; then that RunError is raised.

    kinds: the errors to look at; if the block does more than fetch batches, RuntimeError (torch's own) alone.
    """
    try:
        yield
    except kinds as error:
        lost = worker_lost(error)
        if lost is None:
            raise
        earlier = error.__context__
        while earlier is not None and not isinstance(earlier, RunError):
            earlier = earlier.__context__
        raise (earlier or lost) from error


def usable_cpus() -> int:
    """Return the number of CPUs that this process may use or, if the system does not say, of the machine."""
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


def start_method() -> str:
    """Return how worker processes start: by fork, the fastest, on Linux; by spawn where fork is missing or unsafe."""
    return "fork" if sys.platform == "linux" and hasattr(os, "fork") else "spawn"


def end_with_parent(signal_name: str) -> None:
    """On Linux, let the system send this process a signal when its parent has ended."""
    number = getattr(signal, signal_name, None)
    if sys.platform == "linux" and number is not None:
        ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, number)


@dataclass(frozen=True)
class World:
    """The processes of a run, seen from one of them."""

    rank: int
    size: int
    device: torch.device

    @property
    def is_main(self) -> bool:
        return self.rank == 0

    def sum(self, tensor: Tensor) -> Tensor:
        """Sum over the processes, in place."""
        if self.size > 1:
            dist.all_reduce(tensor)
        return tensor

    def gather(self, value: Any) -> list[Any]:
        """Return the values of all processes, in order of rank, on every process."""
        if self.size == 1:
            return [value]
        values = [None] * self.size
        dist.all_gather_object(values, value)
        return values

    def barrier(self) -> None:
        """Wait until all processes are here."""
        if self.size > 1:
            dist.barrier()

    @contextmanager
    def main_first(self) -> Iterator[None]:
        """Let rank 0 run the block first, so that the others find what it cached."""
        if not self.is_main:
            self.barrier()
        yield
        if self.is_main:
            self.barrier()


def mean_in_order(_: object, bucket: dist.GradBucket) -> torch.futures.Future[Tensor]:
    """Return a bucket of gradients, averaged over the processes in the order of ranks, for DDP's register_comm_hook.

    The order in which gloo adds three or more processes depends on a gradient's place in its bucket, and DDP rebuilds
    its buckets after the first update. Without this hook the last bits of a resumed run would differ from those of an
    uninterrupted one.
    """
    parts = [torch.empty_like(bucket.buffer()) for _ in range(dist.get_world_size())]
    dist.all_gather(parts, bucket.buffer())
    mean = torch.futures.Future()
    mean.set_result(reduce(Tensor.add_, parts).div_(len(parts)))
    return mean


def _of_environment(name: str, default: int) -> int:
    """Return a whole number from the environment; raise UsageError for other text."""
    text = os.environ.get(name) or str(default)
    if not text.isdecimal():
        raise UsageError(f"{name} must be a whole number, as torchrun sets it, got {text!r}")
    return int(text)


def _place_in_world() -> tuple[int, int, int]:
    """Return the size of the world, this process's rank, and its rank on this machine, as torchrun set them.

    Raises:
        UsageError: variables that contradict each other or are missing.
    """
    size = _of_environment("WORLD_SIZE", 1)
    rank = _of_environment("RANK", 0)
    local_rank = _of_environment("LOCAL_RANK", 0)
    if rank >= size:
        raise UsageError(f"RANK must be 0 to WORLD_SIZE - 1, got RANK {rank} of WORLD_SIZE {size}")
    needed = ("RANK", "MASTER_ADDR", "MASTER_PORT") if size > 1 else ()
    missing = [name for name in needed if not os.environ.get(name)]
    if missing:
        raise UsageError(
            f"WORLD_SIZE {size} needs {', '.join(missing)} too: start the processes by torchrun, "
            "which sets them"
        )
    return size, rank, local_rank


def _rendezvous(rank: int, size: int, timeout: timedelta) -> dist.Store:
    """Return the store by which the processes find each other."""
    store, _, _ = next(iter(dist.rendezvous("env://", rank, size, timeout=timeout)))
    # The agent's store keeps the addresses of processes that were replaced, so each attempt has its own prefix.
    if os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True":
        attempt = os.environ["TORCHELASTIC_RESTART_COUNT"]
        store = dist.PrefixStore(f"attempt {attempt}", store)
    return store


@contextmanager
def join_world(device_name: str, timeout_minutes: float = 10.0) -> Iterator[World]:
    """Join the processes that torchrun started (it sets RANK, LOCAL_RANK and WORLD_SIZE), and leave them at the end.

    Args:
        timeout_minutes: how long processes wait for one that does not answer.

    Raises:
        UsageError: the device is not available, or the environment's variables are missing or contradict each other.
        RunError: a process has ended or does not answer, with gloo (with NCCL its watchdog ends the process).
    """
    size, rank, local_rank = _place_in_world()
    if "TORCHELASTIC_RUN_ID" in os.environ:
        end_with_parent("SIGTERM")  # an agent that was killed cannot end its processes
    device = choose_device(device_name, local_rank, size)
    if size == 1:
        yield World(0, 1, device)
        return
    timeout = timedelta(minutes=timeout_minutes)
    dist.init_process_group(
        dist.get_default_backend_for_device(device.type),
        store=_rendezvous(rank, size, timeout),
        rank=rank,
        world_size=size,
        timeout=timeout,
    )
    try:
        yield World(rank, size, device)
    except RuntimeError as error:
        if isinstance(error, RunError) or not WAITED_IN_VAIN.search(str(error)):
            raise
        raise RunError(
            "gave up waiting for the other processes: one has ended or has not answered for "
            f"{timeout_minutes:g} min"
        ) from error
    finally:
        # gloo's threads need the interpreter's lock to drop the tensors of the last collective. The destructor of the
        # process group holds that lock while it waits for them: for ever, unless they are done before it runs.
        time.sleep(0.1)
        dist.destroy_process_group()
