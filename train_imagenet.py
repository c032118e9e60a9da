#!/usr/bin/env python3
"""Train on ImageNet or any images in class folders: `ea-vision train-imagenet` from a checkout."""

import sys

from ea_vision.__main__ import run

if __name__ == "__main__":
    sys.exit(run("train-imagenet"))
