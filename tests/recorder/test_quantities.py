"""Quantities of maps, compared with values computed by hand."""

import csv
import io
import math
from itertools import product

import numpy as np
import pytest
import timm
import torch
from torch import nn
from torch.testing import assert_close

from ea_vision.layers import AugmentedConv2d
from ea_vision.recorder.layouts import Layout
from ea_vision.recorder.quantities import (
    attention_distance,
    attention_entropy,
    attention_rollout,
    map_correlation,
    measure,
    quantities_csv,
)
from ea_vision.recorder.recording import LayerMaps
from tests.models.test_vision_transformer import needs_attn_layer
from tests.recorder.networks import (
    TINY,
    made,
    recorded,
    small_swin,
    timms,
    tiny,
    transformers_model,
)
from tests.refused import refused


def rows_of(measured):
    return list(csv.DictReader(io.StringIO(quantities_csv({"a": measured}))))


@needs_attn_layer
def test_measures_of_differential_attention_are_of_distributions_or_not_numbers():
    """Maps without negative entries, whose rows sum to 1 - lambda, are divided by that; the others have no entropy."""
    model = timm.create_model("vit_tiny_patch16_224", attn_layer="diff", **TINY).eval()
    x = torch.randn(2, 3, 32, 32)
    torch.nn.init.normal_(model.blocks[2].attn.qkv.weight)
    maps = recorded(model, x)
    measured = measure(model, [x])
    for layer in measured:
        attn = maps[layer.number].attn
        sums = attn.sum(-1, keepdim=True)
        assert (sums < 0.9).all()
        rows = attn / sums
        signed = attn.amin((-2, -1)) < 0
        assert signed.all() == (layer.number == 3)
        terms = rows * rows.log()
        entropies = -terms.sum(-1).mean(-1)
        prefixes = rows[..., 0].mean(-1)
        assert_close(layer.entropies, entropies.masked_fill(signed, torch.nan), equal_nan=True)
        assert_close(layer.prefixes, prefixes.masked_fill(signed, torch.nan), equal_nan=True)
        assert torch.equal(layer.distances.isnan(), signed)
        assert layer.positions.isfinite().all()
    missing = [row["entropy_nats"] == "nan" for row in rows_of(measured)]
    assert missing == [False] * 6 + [True] * 3


def test_distance_of_a_known_shift_in_pixels_of_the_input():
    itself = torch.eye(4 * 5).view(1, 1, 4, 5, 4, 5)
    shifted = itself.roll(2, -1)  # columns 0 to 2 look 2 to the right, 3 and 4 look 3 to the left
    expected = 10 * (3 * 2 + 2 * 3) / 5
    assert attention_distance(shifted, (7.0, 10.0)).item() == pytest.approx(expected)
    assert attention_distance(itself).item() == 0


def windowed(window):
    options = {"dim_qk": 4, "dim_v": 2, "num_heads": 2, "feat_size": (4, 6), "position": "none"}
    return nn.Sequential(AugmentedConv2d(3, 8, window=window, **options))


def vit():
    return timms("vit_tiny_patch16_224", **TINY, reg_tokens=2)


def test_distances_are_in_pixels_of_the_input_where_patches_leave_a_rest():
    """Patches of 8 pixels, of which 3 x 4 fit into 30x39."""
    model = transformers_model("Dinov2")
    whole = measure(model, [torch.zeros(1, 3, 24, 32)])[0]
    cut = measure(model, [torch.zeros(1, 3, 30, 39)])[0]
    assert cut.uniform_distance == whole.uniform_distance
    assert_close(cut.distances, whole.distances)


@pytest.mark.parametrize(
    "make, grid, side, window, prefix",
    [
        (lambda: windowed(None), (4, 6), 1, (99, 99), 0),
        (lambda: windowed((3, 3)), (4, 6), 1, (3, 3), 0),
        (lambda: windowed((1, 5)), (4, 6), 1, (1, 5), 0),
        (vit, (4, 4), 8, (99, 99), 3),
        (lambda: small_swin((36, 28)), (18, 14), 2, None, 0),
    ],
    ids=["all", "window 3x3", "window 1x5", "vit", "swin"],
)
def test_references_are_those_of_uniform_attention_also_in_windows(
    make, grid, side, window, prefix
):
    """The logits of the network are 0, so `measure` must return the values of uniform attention, computed by hand."""
    height, width = grid
    model = make().eval()
    with torch.no_grad():
        for key, parameter in model.named_parameters():
            if "qkv" in key or "relative_position_bias" in key:
                parameter.zero_()
    measured = measure(model, [torch.rand(2, 3, height * side, width * side)] * 2)
    for layer in measured:
        np.testing.assert_allclose(layer.entropies, layer.uniform_entropy, rtol=1e-4)
        np.testing.assert_allclose(layer.distances, layer.uniform_distance, rtol=1e-4)
    if window is None:
        return
    distances = []
    entropies = []
    cells = list(product(range(height), range(width)))
    for y, x in cells:
        apart = []
        for other_y, other_x in cells:
            if abs(other_y - y) <= window[0] // 2 and abs(other_x - x) <= window[1] // 2:
                apart.append(side * math.hypot(other_y - y, other_x - x))
        distances.append(np.mean(apart))
        entropies.append(math.log(len(apart) + prefix))
    assert layer.uniform_distance == pytest.approx(np.mean(distances))
    assert layer.uniform_entropy == pytest.approx(np.mean(entropies))
    np.testing.assert_allclose(layer.prefixes, prefix / (len(cells) + prefix), rtol=1e-5)


def test_correlation_of_a_map_with_itself_its_opposite_and_a_constant():
    maps = torch.rand(2, 3, 8, 8)
    for other, expected in ((3 * maps + 1, 1.0), (-maps, -1.0), (torch.ones_like(maps), math.nan)):
        assert_close(map_correlation(maps, other), torch.full((2, 3), expected), equal_nan=True)


def test_rollout_through_a_pooling_keeps_the_class_token():
    first = torch.rand(1, 2, 17, 17).softmax(-1)
    second = torch.rand(1, 2, 5, 5).softmax(-1)
    layers = []
    for number, (size, attn) in enumerate([((4, 4), first), ((2, 2), second)], start=1):
        layers.append(LayerMaps(number, "", (0, 1), Layout(size, prefix_names=("cls",)), attn=attn))
    rollout = attention_rollout(dict(enumerate(layers)))
    [one] = (first.mean(1) + torch.eye(17)) / 2
    cells = one[1:].view(2, 2, 2, 2, 17)  # 2 rows of 2 pixels, 2 columns of 2 pixels
    pooled = torch.cat([one[:1], cells.mean((1, 3)).view(4, 17)])
    expected = (second.mean(1) + torch.eye(5)) / 2 @ pooled
    assert_close(rollout, expected)


def test_rollout_of_reduced_keys():
    """A reduced key's attention is spread evenly over its cells, and rows sum to 1."""
    rollout = attention_rollout(recorded(*made("pvt")))
    assert rollout.shape == (2, 6, 16 * 24)
    assert_close(rollout.sum(-1), torch.ones(2, 6))


def test_measure_does_not_depend_on_the_batches():
    model = tiny()
    images = torch.randn(6, 3, 16, 16)
    whole = measure(model, [images])
    parts = measure(model, images.split((1, 3, 2)))
    maps = recorded(model, images)
    for a, b in zip(whole, parts, strict=True):
        assert a.images == b.images == 6
        assert a.name == b.name
        assert (a.correlations is None) == (a.number in (1, 4))
        assert_close({**vars(a), "name": 0}, {**vars(b), "name": 0}, equal_nan=True)
        assert_close(a.entropies, attention_entropy(maps[a.number].attn))
    with refused("at least one batch", ValueError):
        measure(model, [])

    rows = rows_of(whole)
    assert len(rows) == 6 * 4
    assert rows[0]["map"] == "4x4"
    assert rows[0]["correlation_with_previous"] == ""
    entropies = attention_entropy(maps[2].attn)[:, 1]
    assert float(rows[5]["entropy_nats"]) == pytest.approx(entropies.mean().item(), abs=1e-5)
    assert float(rows[5]["entropy_nats_std"]) == pytest.approx(entropies.std().item(), abs=1e-5)
