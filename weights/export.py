#!/usr/bin/env python3
"""Export a complete run to a weights file with its card: `ea-vision export` from a checkout."""
import sys

from ea_vision.__main__ import run

if __name__ == "__main__":
    sys.exit(run("export"))
