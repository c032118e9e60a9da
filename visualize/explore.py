#!/usr/bin/env python3
"""One HTML page: click a pixel, see every head of every layer: `ea-vision explore` from a checkout."""
import sys

from ea_vision.__main__ import run

if __name__ == "__main__":
    sys.exit(run("explore"))
