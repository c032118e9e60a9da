"""Durations, sizes and tables as people read them."""

import pytest

from ea_vision.base.tables import markdown
from ea_vision.base.units import duration, memory_size


@pytest.mark.parametrize(
    "seconds, text",
    [
        (0.0001, "0.0001 s"),
        (1.98, "2 s"),
        (99, "99 s"),
        (100.8, "1.7 min"),
        (5400, "90 min"),
        (7200, "2 hours"),
        (100000, "28 hours"),
        (86400 * 10.04, "10 days"),
    ],
)
def test_durations(seconds, text):
    assert duration(seconds) == text


@pytest.mark.parametrize(
    "count, text",
    [(0, "0.0 MiB"), (5 * 2**20, "5.0 MiB"), (2**30 - 1, "1024.0 MiB"), (3.5 * 2**30, "3.50 GiB")],
)
def test_sizes_of_memory(count, text):
    assert memory_size(count) == text


def test_tables():
    rows = [("a", "wide"), ("long", "1")]
    assert markdown(rows) == "| a    | wide |\n| ---- | ---- |\n| long | 1    |"
