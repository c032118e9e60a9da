"""Versions, git commit and hardware, which are stored with results."""

import platform
import re
import subprocess
from pathlib import Path

import timm
import torch
import torchvision

from ea_vision import __version__
from ea_vision.base.devices import device_name

PACKAGE = Path(__file__).parents[1]


def _git(*words: str) -> str:
    """Return the output of a git command in the package's folder."""
    return subprocess.check_output(
        ["git", *words], cwd=PACKAGE, stderr=subprocess.DEVNULL, encoding="utf-8"
    )


def provenance() -> dict:
    """Return versions, hardware and, in a checkout, the git commit (with `+changes` where files differ from it)."""
    commit = None
    try:
        # The environment may be inside a git repository of the user's that is not the package's.
        _git("ls-files", "--error-unmatch", "__init__.py")
        changes = _git("status", "--porcelain", "-uno", "--", ".")
        commit = _git("rev-parse", "HEAD").strip() + ("+changes" if changes else "")
    except (OSError, subprocess.CalledProcessError):
        pass  # an installed package has no commit; its version says as much
    return {
        "versions": {
            "ea_vision": __version__,
            "torch": str(torch.__version__),
            "timm": timm.__version__,
            "torchvision": torchvision.__version__,
            "python": platform.python_version(),
        },
        "git_commit": commit,
    }


def hardware(device: torch.device, processes: int) -> str:
    """Return one line: the device, the number of processes and, on a CPU, of threads."""
    if device.type != "cpu":
        return f"{processes} x {device_name(device)}"
    model = platform.processor() or platform.machine()
    cpuinfo = Path("/proc/cpuinfo")
    if cpuinfo.exists():
        match = re.search(r"model name\s*: (.*)", cpuinfo.read_text(encoding="utf-8"))
        model = match[1] if match else model
    return f"{model}, {processes} process(es) x {torch.get_num_threads()} threads"
