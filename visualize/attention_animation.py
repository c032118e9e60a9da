#!/usr/bin/env python3
"""A map over layers, or over a training run: `ea-vision animation` from a checkout."""
import sys

from ea_vision.__main__ import run

if __name__ == "__main__":
    sys.exit(run("animation"))
