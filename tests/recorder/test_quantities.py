"""Quantities of maps whose values are known by hand."""

import csv
import io
import math
from itertools import product

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
from tests.recorder.networks import SWIN, TINY, made, recorded, timms, tiny


def test_entropy_of_one_pixel_and_of_all_pixels():
    for maps, entropy in ((torch.eye(12), 0.0), (torch.full((12, 12), 1 / 12), math.log(12))):
        assert_close(attention_entropy(maps.expand(2, 3, 12, 12)), torch.full((2, 3), entropy))


@needs_attn_layer
def test_measures_of_differential_attention_are_of_distributions_or_not_numbers():
    """Maps without negative entries, whose rows sum to 1 - lambda, are divided by that; the others have no entropy."""
    model, x = (
        timm.create_model("vit_tiny_patch16_224", attn_layer="diff", **TINY).eval(),
        torch.randn(2, 3, 32, 32),
    )
    torch.nn.init.normal_(model.blocks[2].attn.qkv.weight)
    maps, measured = recorded(model, x), measure(model, [x])
    for layer in measured:
        attn = maps[layer.number].attn
        signed = attn.amin((-2, -1)) < 0
        rows = attn / attn.sum(-1, keepdim=True)
        assert signed.all() == (layer.number == 3)
        assert (attn.sum(-1) < 0.9).all()
        entropies = -(rows * rows.log()).sum(-1)
        for found, expected in ((layer.entropies, entropies), (layer.prefixes, rows[..., 0])):
            expected = expected.mean(-1).masked_fill(signed, torch.nan)
            assert_close(found, expected, equal_nan=True)
        assert torch.equal(layer.distances.isnan(), signed) and layer.positions.isfinite().all()
    assert [row["entropy_nats"] == "nan" for row in rows_of(measured)] == [False] * 6 + [True] * 3


def rows_of(measured):
    return list(csv.DictReader(io.StringIO(quantities_csv({"a": measured}))))


def test_distance_of_a_known_shift_in_pixels_of_the_input():
    itself = torch.eye(4 * 5).view(1, 1, 4, 5, 4, 5)
    shifted = itself.roll(2, -1)  # columns 0 to 2 look 2 to the right, 3 and 4 look 3 to the left
    assert_close(
        attention_distance(shifted, (7.0, 10.0)), torch.tensor([[10 * (3 * 2 + 2 * 3) / 5]])
    )
    assert attention_distance(itself).item() == 0


UNIFORM = {  # networks, their image's sides, the cell's side, prefix tokens
    **{
        f"window {window}": (
            lambda window=window: nn.Sequential(
                AugmentedConv2d(
                    3,
                    8,
                    dim_qk=4,
                    dim_v=2,
                    num_heads=2,
                    feat_size=(4, 6),
                    position="none",
                    window=window,
                )
            ),
            (4, 6),
            window,
            0,
        )
        for window in (None, (3, 3), (1, 5))
    },
    "vit": (lambda: timms("vit_tiny_patch16_224", **TINY, reg_tokens=2), (4, 4), None, 3),
    "swin": (
        lambda: timms("swin_tiny_patch4_window7_224", **SWIN, img_size=(36, 28)),
        (18, 14),
        "shifted",
        0,
    ),
}


@pytest.mark.parametrize("name", UNIFORM)
def test_references_are_those_of_uniform_attention_also_in_windows(name):
    """A network whose logits are 0: what `measure` finds is what uniform attention has, by hand."""
    make, (H, W), window, prefix = UNIFORM[name]
    model, cell = make().eval(), 8 if name == "vit" else 2 if name == "swin" else 1
    with torch.no_grad():
        for key, parameter in model.named_parameters():
            if "qkv" in key or "relative_position_bias" in key:
                parameter.zero_()
    measured = measure(model, [torch.rand(2, 3, H * cell, W * cell)] * 2)
    for layer in measured:
        for found, uniform in (
            (layer.entropies, layer.uniform_entropy),
            (layer.distances, layer.uniform_distance),
        ):
            assert_close(found, torch.full_like(found, uniform), atol=0, rtol=1e-4)
    if name == "swin":
        return
    high, wide = window or (99, 99)
    distance = 0.0
    entropy = 0.0
    pixels = list(product(range(H), range(W)))
    for y, x in pixels:
        seen = [b for b in pixels if abs(b[0] - y) <= high // 2 and abs(b[1] - x) <= wide // 2]
        apart = [cell * math.dist((y, x), b) for b in seen]
        distance += sum(apart) / len(seen)
        entropy += math.log(len(seen) + prefix)
    assert layer.uniform_distance == pytest.approx(distance / (H * W))
    assert layer.uniform_entropy == pytest.approx(entropy / (H * W))
    assert_close(layer.prefixes, torch.full_like(layer.prefixes, prefix / (H * W + prefix)))


def test_correlation_of_a_map_with_itself_its_opposite_and_a_constant():
    maps = torch.rand(2, 3, 8, 8)
    for other, expected in ((3 * maps + 1, 1.0), (-maps, -1.0), (torch.ones_like(maps), math.nan)):
        assert_close(map_correlation(maps, other), torch.full((2, 3), expected), equal_nan=True)


def test_rollout_through_a_pooling_stays_in_place():
    maps = {
        side: LayerMaps(1, "a", (0,), Layout((side, side)), attn=torch.eye(side**2)[None, None])
        for side in (4, 2)
    }
    corner = attention_rollout(maps)[0, 1].view(4, 4)  # the new map's upper right cell
    expected = torch.zeros(4, 4)
    expected[:2, 2:] = 0.25
    assert_close(corner, expected)


@pytest.mark.parametrize("name", ["vit_small_patch14_reg4_dinov2", "pvt"])
def test_rollout_multiplies_later_layers_from_the_left(name):
    """Of all tokens; reduced keys go to their cells alike, and rows sum to 1."""
    maps = recorded(*made(name))
    rollout = attention_rollout(maps)
    assert_close(rollout.sum(-1), torch.ones(rollout.shape[:2]))
    if name == "pvt":
        assert rollout.shape == (2, 6, 16 * 24)
    else:
        first, second, third = (
            0.5 * layer.attn.mean(1) + 0.5 * torch.eye(21) for layer in maps.values()
        )
        assert_close(rollout, third @ second @ first)


def test_measure_does_not_depend_on_the_batches():
    model, images = tiny(), torch.randn(6, 3, 16, 16)
    whole, parts, maps = (
        measure(model, [images]),
        measure(model, images.split((1, 3, 2))),
        recorded(model, images),
    )
    for a, b in zip(whole, parts, strict=True):
        assert a.images == b.images == 6 and (a.correlations is None) == (a.number in (1, 4))
        assert_close(*({**vars(one), "name": 0} for one in (a, b)), equal_nan=True)
        assert_close(a.entropies, attention_entropy(maps[a.number].attn))
    with pytest.raises(ValueError, match="at least one batch"):
        measure(model, [])

    rows = rows_of(whole)
    assert (
        len(rows) == 6 * 4
        and rows[0]["map"] == "4x4"
        and rows[0]["correlation_with_previous"] == ""
    )
    entropies = attention_entropy(maps[2].attn)[:, 1]
    assert float(rows[5]["entropy_nats"]) == pytest.approx(entropies.mean().item(), abs=1e-5)
    assert float(rows[5]["entropy_nats_std"]) == pytest.approx(entropies.std().item(), abs=1e-5)
