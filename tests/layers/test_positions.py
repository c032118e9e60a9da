"""Absolute positions against timm's and loops over pixels; test_augmented_conv.py has them within the layer."""

import pytest
from torch.testing import assert_close

from ea_vision.layers import add_sine, append_coordinates
from tests.layers.oracle import doubles, placed

SIZES = [(3, 5), (6, 2), (1, 4), (1, 1)]


@pytest.mark.parametrize("size", SIZES)
def test_they_equal_timms_and_the_loop(size):
    x = doubles(2, 8, *size)
    assert_close(add_sine(x), placed(x, "sine"), atol=1e-6, rtol=1e-6)
    assert_close(append_coordinates(x), placed(x, "coord"))
