#!/usr/bin/env python3
"""Whole maps, queries by keys: a figure of ea_vision.visualize.matrix."""

import sys
from pathlib import Path

sys.path[0] = str(
    Path(__file__).resolve().parents[1]
)  # not this folder, whose statistics.py hides Python's

from ea_vision.base.errors import exit_code  # noqa: E402
from ea_vision.visualize.matrix import main  # noqa: E402

if __name__ == "__main__":
    sys.exit(exit_code(main))
