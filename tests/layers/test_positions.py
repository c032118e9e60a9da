"""Absolute positions against loops over pixels, alone and within the layer."""

import itertools
import math

import pytest
import torch
from timm.layers import build_sincos2d_pos_embed
from torch.testing import assert_close

from ea_vision.layers import AugmentedConv2d, add_sine, append_coordinates
from tests.layers.oracle import doubles

SIZES = [(3, 5), (6, 2), (1, 4), (1, 1)]


def sine(C, size):
    """Return timm's table, (C, H, W)."""
    table = build_sincos2d_pos_embed(list(size), C).double()
    return table.t().reshape(C, *size)


def centred(index, size):
    return 2 * index / (size - 1) - 1 if size > 1 else 0


def loop_coordinates(H, W):
    """Return CoordConv's channels by a loop over pixels, (3, H, W)."""
    table = torch.zeros(3, H, W, dtype=torch.float64)
    for y, x in itertools.product(range(H), range(W)):
        down = centred(y, H)
        right = centred(x, W)
        table[:, y, x] = torch.tensor([right, down, math.hypot(right, down)])
    return table


def placed(x, position):
    """Return x (B, C, H, W) with positions added or concatenated."""
    size = x.shape[2:]
    if position == "sine":
        return x + sine(x.shape[1], size)
    coordinates = loop_coordinates(*size).expand(len(x), -1, -1, -1)
    return torch.cat([x, coordinates], 1)


@pytest.mark.parametrize("size", SIZES)
def test_they_equal_timms_and_the_loop(size):
    x = doubles(2, 8, *size)
    assert_close(add_sine(x), placed(x, "sine"), atol=1e-6, rtol=1e-6)
    assert_close(append_coordinates(x), placed(x, "coord"))


@pytest.mark.parametrize("position", ["sine", "coord"])
@pytest.mark.parametrize(
    "size,options",
    [((3, 5), {}), ((4, 2), {}), ((7, 6), {"stride": 2}), ((6, 9), {"pool_attention": True})],
)
def test_the_branch_reads_them_at_the_maps_size(position, size, options):
    """The layer equals one without positions whose input, at the map's size, already has them."""
    common = dict(dim_qk=4, dim_v=6, num_heads=2, feat_size=(3, 5))
    layer = AugmentedConv2d(4, 10, position=position, **common, **options).double()
    channels = 7 if position == "coord" else 4
    plain = AugmentedConv2d(channels, 10, position="none", **common).double()
    assert not layer.relative
    assert layer.height_rel is None
    plain.load_state_dict({**layer.state_dict(), "conv.weight": plain.conv.weight})
    x = doubles(2, 4, *size)
    pooled = x
    for _ in range(layer.num_pools):
        pooled = torch.nn.functional.avg_pool2d(pooled, 3, 2, 1, count_include_pad=False)
    assert_close(layer.attend(x, None), plain.attend(placed(pooled, position), None))
