#!/usr/bin/env python3
"""Train on small images: `ea-vision train-cifar` from a checkout."""

import sys

from ea_vision.__main__ import run

if __name__ == "__main__":
    sys.exit(run("train-cifar"))
