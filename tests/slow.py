"""What is left out: parameters of which `make test` takes few and `make test-slow` (CI) the others; what needs FFCV."""

import sys
from importlib.util import find_spec

import pytest

FFCV = find_spec("ffcv") is not None
needs_ffcv = pytest.mark.skipif(not FFCV, reason="needs FFCV: pip install .[ffcv]")


def unix_only():
    """Skip the rest of a test module where the system has no signals, or no fork, of Unix."""
    if sys.platform == "win32":
        pytest.skip("needs signals and processes of Unix", allow_module_level=True)


def slow_but(kept, values):
    """Return a test's parameters, marked as slow but for those that are kept."""
    return [
        value if value in kept else pytest.param(value, marks=pytest.mark.slow) for value in values
    ]
