"""Durations and tables as people read them."""

import pytest

from ea_vision.base.tables import markdown
from ea_vision.base.units import duration


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


def test_tables():
    rows = [("a", "wide"), ("long", "1")]
    assert markdown(rows) == "| a    | wide |\n| ---- | ---- |\n| long | 1    |"
