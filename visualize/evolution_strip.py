#!/usr/bin/env python3
"""A map from layer to layer, part by part: `ea-vision strip` from a checkout."""
import sys

from ea_vision.__main__ import run

if __name__ == "__main__":
    sys.exit(run("strip"))
