#!/usr/bin/env python3
"""The same layers of several models side by side: `ea-vision heatmap --heads mean` from a checkout."""
import sys

from ea_vision.__main__ import run

if __name__ == "__main__":
    sys.exit(run("heatmap", ["--heads", "mean", "-o", "models.png", *sys.argv[1:]]))
