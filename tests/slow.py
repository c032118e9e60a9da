"""Parameters of which `make test` takes few, and `make test-slow` (CI) the others."""
from collections.abc import Container, Iterable

import pytest


def slow_but(kept: Container, values: Iterable) -> list:
    """Return a test's parameters, marked as slow but for those that are kept."""
    return [value if value in kept else pytest.param(value, marks=pytest.mark.slow) for value in values]
