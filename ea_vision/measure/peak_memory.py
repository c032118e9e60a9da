"""Peak memory of real training steps: allocated by torch on a GPU; on a CPU resident, in a process of its own."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from dataclasses import asdict
from pathlib import Path

import psutil
import torch

from ea_vision.base.errors import RunError, exit_code
from ea_vision.measure.steps import Bench, Runner, Setting

MIB = 2**20
# glibc hands freed blocks back to the system, and each new one is zeroed page by page: on some machines more work than
# the arithmetic, and not the same every time. Times are taken with these settings, memory is not.
KEEP_MEMORY = {"MALLOC_TOP_PAD_": "1000000000", "MALLOC_MMAP_MAX_": "0", "MALLOC_TRIM_THRESHOLD_": "20000000000"}
# What a process that measures memory gets: malloc would otherwise hold half as much again in gaps between blocks.
RETURN_MEMORY = {"MALLOC_MMAP_THRESHOLD_": "65536", "MALLOC_TRIM_THRESHOLD_": "65536"}


def memory_on_gpu(runner: Runner) -> int:
    """Peak allocated bytes of a training step: the network's weights and optimiser state included, others' not."""
    for _ in range(2):
        runner.train()
    runner.optimizer.zero_grad()
    own = [*runner.model.parameters(), *runner.model.buffers(),
           *(t for averages in runner.optimizer.state_dict()["state"].values() for t in averages.values()
             if torch.is_tensor(t))]
    before = torch.cuda.memory_allocated() - sum(t.nbytes for t in own)
    torch.cuda.reset_peak_memory_stats()
    runner.train()
    runner.optimizer.zero_grad()
    return torch.cuda.max_memory_allocated() - before


def memory_in_own_process(name: str, setting: Setting, grad_checkpointing: bool = False,
                          system_malloc: bool = False) -> int | None:
    """Peak resident bytes of three training steps on a CPU, less what was there before the network was made.

    They run in a process without this one's malloc settings: with those that return freed memory, or the system's own.

    Returns:
        None where there is no /proc to read it from.

    Raises:
        RunError: that process failed.
    """
    if not Path("/proc/self/status").exists():
        return None
    environment = {key: value for key, value in os.environ.items() if key not in KEEP_MEMORY}
    done = subprocess.run(
        [sys.executable, "-m", "ea_vision.measure.peak_memory", name, json.dumps(asdict(setting)),
         json.dumps(grad_checkpointing)],
        stdout=subprocess.PIPE, text=True, env={**environment, **({} if system_malloc else RETURN_MEMORY)})
    if done.returncode:
        raise RunError(f"the process that measures the memory of {name} ended with code {done.returncode}")
    return int(done.stdout.splitlines()[-1])


def _peak_resident() -> int:
    """Return the most bytes of main memory that this process has had, which psutil does not know on Linux.

    Not getrusage's maximum: after a fork that begins with the parent's.
    """
    return int(re.search(r"^VmHWM:\s*(\d+) kB$", Path("/proc/self/status").read_text(), re.MULTILINE)[1]) * 1024


def _measure_this_process(name: str, setting: Setting, grad_checkpointing: bool) -> int:
    with setting.active():
        bench = Bench(setting)
        before = psutil.Process().memory_info().rss
        runner = Runner(bench, setting.network(name, grad_checkpointing))
        for _ in range(3):
            runner.train()
    print(_peak_resident() - before)
    return 0


if __name__ == "__main__":
    name, setting, grad_checkpointing = sys.argv[1:]
    sys.exit(exit_code(lambda: _measure_this_process(
        name, Setting(**json.loads(setting)), json.loads(grad_checkpointing))))
