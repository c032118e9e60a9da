"""Versions, git commit and hardware, which results are stored with."""

from __future__ import annotations

import platform
import subprocess
from pathlib import Path
from typing import Any

import timm
import torch
import torchvision

from ea_vision import __version__


def provenance() -> dict[str, Any]:
    """Return versions, hardware and, in a checkout, the git commit (with `+changes` where files differ from it)."""
    here = Path(__file__).parents[1]
    git = ["git", "-C", str(here)]
    commit = None
    try:
        found = subprocess.run([*git, "rev-parse", "HEAD"], capture_output=True, text=True, check=True).stdout.strip()
        changes = subprocess.run([*git, "status", "--porcelain", "-uno", "--", "."], capture_output=True, text=True)
        commit = found + ("+changes" if changes.stdout.strip() else "")
    except (OSError, subprocess.CalledProcessError):
        pass  # an installed package has no commit; its version says as much
    return {
        "versions": {"ea_vision": __version__, "torch": str(torch.__version__), "timm": timm.__version__,
                     "torchvision": torchvision.__version__, "python": platform.python_version()},
        "git_commit": commit,
    }


def hardware(device: torch.device, processes: int) -> str:
    """Return one line: the device, how many of them, and threads on a CPU."""
    if device.type == "cuda":
        return f"{processes} x {torch.cuda.get_device_name(device)}"
    model = platform.processor() or platform.machine()
    cpuinfo = Path("/proc/cpuinfo")
    if cpuinfo.exists():
        names = [line.split(":", 1)[1].strip() for line in cpuinfo.read_text().splitlines() if "model name" in line]
        model = names[0] if names else model
    return f"{model}, {processes} process(es) x {torch.get_num_threads()} threads"
