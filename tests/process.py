"""The root of the checkout, and Python in processes of its own there."""

import os
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]


def python(*words, **env):
    """Run Python with these words, in an environment with these variables; return the finished process."""
    env = {**os.environ, **env}
    return subprocess.run(
        [sys.executable, *words], capture_output=True, text=True, cwd=ROOT, env=env
    )
