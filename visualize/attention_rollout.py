#!/usr/bin/env python3
"""Attention over several layers together: `ea-vision rollout` from a checkout."""
import sys

from ea_vision.__main__ import run

if __name__ == "__main__":
    sys.exit(run("rollout"))
