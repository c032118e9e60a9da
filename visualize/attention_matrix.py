#!/usr/bin/env python3
"""Whole maps, queries by keys: `ea-vision matrix` from a checkout."""
import sys

from ea_vision.__main__ import run

if __name__ == "__main__":
    sys.exit(run("matrix"))
