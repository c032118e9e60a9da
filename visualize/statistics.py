#!/usr/bin/env python3
"""Entropy, distance and other quantities by layer and head: `ea-vision statistics` from a checkout."""

import sys
from pathlib import Path

# not this folder, whose statistics.py hides Python's
sys.path[0] = str(Path(__file__).resolve().parents[1])

from ea_vision.__main__ import run  # noqa: E402

if __name__ == "__main__":
    sys.exit(run("statistics"))
