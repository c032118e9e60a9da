#!/usr/bin/env python3
"""Entropy, distance and other quantities by layer and head: `ea-vision statistics` from a checkout."""
import sys

from ea_vision.__main__ import run

if __name__ == "__main__":
    sys.exit(run("statistics"))
