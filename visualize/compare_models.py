#!/usr/bin/env python3
"""The same layers of several models side by side: `ea-vision compare` from a checkout."""
import sys

from ea_vision.__main__ import run

if __name__ == "__main__":
    sys.exit(run("compare"))
