"""Durations and sizes have the unit that a reader would choose."""
import pytest

from ea_vision.base.units import counted, duration, memory_size


@pytest.mark.parametrize("seconds, text", [
    (0.0001, "0.0001 s"), (1.98, "2 s"), (99, "99 s"), (100.8, "1.7 min"), (5400, "90 min"), (7200, "2 hours"),
    (100000, "28 hours"), (86400 * 10.04, "10 days")])
def test_durations(seconds, text):
    assert duration(seconds) == text


@pytest.mark.parametrize("count, text", [
    (0, "0.0 MiB"), (5 * 2**20, "5.0 MiB"), (2**30 - 1, "1024.0 MiB"), (3.5 * 2**30, "3.50 GiB")])
def test_sizes(count, text):
    assert memory_size(count) == text


def test_counts():
    assert [counted(number, "epoch") for number in (1, 2, 4.5)] == ["1 epoch", "2 epochs", "4.5 epochs"]
