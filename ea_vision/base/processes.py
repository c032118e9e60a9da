"""Processes of one run: torchrun starts them, gloo joins them on CPU, nccl on CUDA. Without torchrun there is one."""

from __future__ import annotations

import os
import queue
import re
import threading
import time
import uuid
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta
from typing import Any, TypeVar

import torch
import torch.distributed as dist

from ea_vision.base.errors import RunError, UsageError

# Processes or threads that decode images: more would only get into each other's way, and 100,000 bring a machine down.
MOST_WORKERS = max(64, 16 * (os.cpu_count() or 1))
JOIN_SECONDS = 600  # that processes have to join a run
Answer = TypeVar("Answer")


@dataclass(frozen=True)
class World:
    """The processes of a run, seen from one of them."""

    rank: int
    size: int
    device: torch.device
    store: dist.Store | None = None  # that all of them read and write

    @property
    def is_main(self) -> bool:
        return self.rank == 0

    def note(self, updates: int) -> None:
        """Note that this process begins its update after so many, for `missing`."""
        if self.store is not None:
            self.store.set(f"update/{self.rank}", str(updates))

    def missing(self, seconds: float = 3.0) -> str:
        """Return which processes do not answer, for the end of a message. Of the others each calls this within so many
        seconds; of those that do not, the ones that are behind in their updates are named, where some are."""
        def ask() -> tuple[list[int], list[int]]:
            self.store.set(f"waits/{self.rank}", "1")
            silent, deadline = set(range(self.size)), time.monotonic() + seconds
            while silent and time.monotonic() < deadline:
                time.sleep(0.05)
                silent = {rank for rank in silent if not self.store.check([f"waits/{rank}"])}
            return sorted(silent), [int(self.store.get(f"update/{rank}")) + 1
                                    if self.store.check([f"update/{rank}"]) else 0 for rank in range(self.size)]

        try:
            silent, begun = within(seconds + 2, ask)
        except TimeoutError:
            return "; process 0, which keeps their store, does not answer"
        except RuntimeError:  # the store went with its process
            return ""
        late = [rank for rank in silent if begun[rank] < max(begun)] or silent
        since = [f"update {update}" if update else "its start" for update in begun]
        return "".join(f"; process {rank} has not answered since {since[rank]}" for rank in late[:8])

    def is_told(self, seconds: float = 2.0) -> bool:
        """Return whether another process tells of the error that ends this one: the first one, where it meets it."""
        if self.store is None:
            return False

        def ask() -> bool:
            deadline = time.monotonic() + seconds
            while not self.is_main and time.monotonic() < deadline and not self.store.check(["told"]):
                time.sleep(0.05)
            return self.store.add("told", 1) > 1

        try:
            return within(seconds + 2, ask)
        except TimeoutError:  # the first process hangs: the second tells, and the first of every node
            return self.rank != 1 and os.environ.get("LOCAL_RANK") != "0"
        except RuntimeError:  # the store went with its process, which told
            return True

    def sum(self, tensor: torch.Tensor) -> torch.Tensor:
        """Sum over the processes, in place."""
        if self.size > 1:
            dist.all_reduce(tensor)
        return tensor

    def gather(self, value: Any) -> list[Any]:
        """The value of every process, in order of rank, in all of them."""
        if self.size == 1:
            return [value]
        values = [None] * self.size
        dist.all_gather_object(values, value)
        return values

    def barrier(self) -> None:
        if self.size > 1:
            dist.barrier()

    @contextmanager
    def main_first(self) -> Iterator[None]:
        """Let rank 0 do the block first: what it leaves in a cache, the others find."""
        if not self.is_main:
            self.barrier()
        yield
        if self.is_main:
            self.barrier()


def within(seconds: float, ask: Callable[[], Answer]) -> Answer:
    """Return `ask()`, which may hang: it is left alone then, in a thread that does not keep this process.

    Raises:
        TimeoutError: it has not returned in this time; also what it raises.
    """
    results: queue.SimpleQueue = queue.SimpleQueue()

    def answer() -> None:
        try:
            results.put((ask(), None))
        except Exception as error:  # raised below, where it is waited for
            results.put((None, error))

    threading.Thread(target=answer, daemon=True).start()
    try:
        result, error = results.get(timeout=seconds)
    except queue.Empty:
        raise TimeoutError(f"no answer within {seconds:g} s") from None
    if error is not None:
        raise error
    return result


def choose_device(name: str, local_rank: int = 0) -> torch.device:
    """The device of this process.

    Raises:
        UsageError: CUDA asked for and not there.
    """
    if name == "auto":
        name = "cuda" if torch.cuda.is_available() else "cpu"
    if name == "cuda":
        if not torch.cuda.is_available():
            raise UsageError("--device cuda needs a CUDA device and a torch build with CUDA; none was found")
        if local_rank >= torch.cuda.device_count():
            raise UsageError(f"process {local_rank} needs its own CUDA device, {torch.cuda.device_count()} found")
        torch.cuda.set_device(local_rank)
        torch.backends.cudnn.benchmark = True  # every batch has the same shape
        return torch.device("cuda", local_rank)
    return torch.device("cpu")


def fresh_store(store: dist.Store, rank: int, size: int, seconds: float = JOIN_SECONDS) -> dist.Store:
    """A part of the store that holds nothing of processes that torchrun has replaced.

    torchrun keeps its store when it restarts processes, with the addresses of the dead ones in it, and a process that
    is quicker than its peers would wait for those. So rank 0 names a new part, each rank answers there with a word of
    its own, and believes the name when rank 0 repeats that word.

    Raises:
        RunError: not all processes have answered in this time.
    """
    deadline = time.monotonic() + seconds
    own, others = uuid.uuid4().hex, range(1, size)
    if rank == 0:
        store.set("ea_vision/name", own)
        missing = set(others)
        while missing and time.monotonic() < deadline:
            for other in [other for other in missing if store.check([f"ea_vision/{own}/answer/{other}"])]:
                store.set(f"ea_vision/{own}/repeated/{other}", store.get(f"ea_vision/{own}/answer/{other}"))
                missing.discard(other)
            time.sleep(0.05)
        if missing:
            named = ", ".join(map(str, sorted(missing)[:8]))
            raise RunError(f"{len(missing)} of {size} processes did not join within {seconds:g} s: {named}")
        return dist.PrefixStore(f"ea_vision/{own}", store)
    while time.monotonic() < deadline:
        if store.check(["ea_vision/name"]):
            name = store.get("ea_vision/name").decode()
            store.set(f"ea_vision/{name}/answer/{rank}", own)
            repeated = f"ea_vision/{name}/repeated/{rank}"
            if store.check([repeated]) and store.get(repeated).decode() == own:
                return dist.PrefixStore(f"ea_vision/{name}", store)
        time.sleep(0.05)
    raise RunError(f"process {rank} of {size} did not hear from the first within {seconds:g} s")


@contextmanager
def join_world(device_name: str, timeout_minutes: float = 10.0) -> Iterator[World]:
    """Join the processes that torchrun started (it sets RANK, LOCAL_RANK and WORLD_SIZE), and leave them at the end.

    An error that a process meets alone is told by it; one that all meet by the first alone.

    Args:
        timeout_minutes: that processes wait for one that does not answer.
    """
    size = int(os.environ.get("WORLD_SIZE", "1"))
    rank = int(os.environ.get("RANK", "0"))
    device = choose_device(device_name, int(os.environ.get("LOCAL_RANK", "0")))
    if size == 1:
        yield World(0, 1, device)
        return
    backend = "nccl" if device.type == "cuda" else "gloo"
    store, _, _ = next(iter(dist.rendezvous("env://", rank, size, timeout=timedelta(seconds=JOIN_SECONDS))))
    store = fresh_store(store, rank, size)
    dist.init_process_group(backend, store=store, rank=rank, world_size=size,
                            timeout=timedelta(minutes=timeout_minutes))
    world = World(rank, size, device, store)
    try:
        yield world
    except (UsageError, RunError) as error:
        error.told = world.is_told()
        raise
    except RuntimeError as error:  # torch's, of a collective
        if not re.search(r"tim(ed )?(e)?out|connection (reset|closed|refused)|peer", str(error), re.IGNORECASE):
            raise
        failed = RunError(f"waited in vain for the other processes{world.missing()}")
        failed.told = world.is_told()
        raise failed from error
    finally:
        # gloo's threads need the interpreter's lock to drop the tensors of the last collective; the destructor of the
        # process group waits for them while it holds that lock, and so for ever, unless they are done before it runs.
        time.sleep(0.1)
        dist.destroy_process_group()
