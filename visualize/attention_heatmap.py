#!/usr/bin/env python3
"""Attention of query points by head: `ea-vision heatmap` from a checkout."""
import sys

from ea_vision.__main__ import run

if __name__ == "__main__":
    sys.exit(run("heatmap"))
