"""Marks: parameters that only `make test-slow` (CI) runs, and tests that need FFCV or Unix."""

import sys
from importlib.util import find_spec

import pytest

FFCV = find_spec("ffcv") is not None
needs_ffcv = pytest.mark.skipif(not FFCV, reason="needs FFCV: pip install .[ffcv]")


def unix_only():
    """Skip the rest of a test module on systems without Unix's signals or fork."""
    if sys.platform == "win32":
        pytest.skip("needs signals and processes of Unix", allow_module_level=True)


def slow_but(kept, values):
    """Return a test's parameters, all marked as slow except those in `kept`."""
    return [
        value if value in kept else pytest.param(value, marks=pytest.mark.slow) for value in values
    ]
