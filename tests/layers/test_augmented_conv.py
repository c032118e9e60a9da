"""AugmentedConv2d against its definition, and the properties that make it attention."""

from itertools import product

import pytest
import torch
import torch.nn.functional as F
from torch.testing import assert_close

from ea_vision.layers import (
    AugmentedConv2d,
    EvolvingAttention,
    PredictiveAttention,
    evolution_class,
)
from ea_vision.layers.projection import Projection
from tests.layers.oracle import BRANCH, assert_defined, assert_same, doubles, make
from tests.refused import refused

SIZES = [  # of the image, and the keywords
    ((3, 4), {"feat_size": (3, 4)}),
    ((4, 2), {"feat_size": (4, 2)}),
    ((1, 5), {"feat_size": (1, 5)}),
    ((6, 7), {"feat_size": (3, 4), "stride": 2}),
    ((7, 5), {"feat_size": (4, 3), "stride": 2}),
    ((5, 6), {"feat_size": (3, 3), "pool_attention": True}),
    ((9, 7), {"feat_size": (3, 2), "stride": 2, "pool_attention": True}),
    ((12, 9), {"feat_size": (2, 2), "stride": 2, "pool_attention": 2}),
    ((4, 5), {"feat_size": (4, 5), "dilation": 2}),
    # with "concat", attention in place of the whole convolution
    ((3, 4), {"dim_v": 10}),
    ((7, 6), {"dim_v": 10, "feat_size": (2, 2), "stride": 2, "pool_attention": True}),
    ((5, 6), {"attn_channels": 10, "feat_size": (3, 3), "pool_attention": True}),
]


@pytest.mark.parametrize("fusion", ["concat", "add"])
@pytest.mark.parametrize("position", ["relative", "none", "sine", "coord"])
@pytest.mark.parametrize("size,options", SIZES)
def test_output_and_gradients_equal_the_definition(size, options, position, fusion):
    layer = make(position=position, fusion=fusion, **options)
    assert_defined(layer, doubles(2, 8, *size))


@pytest.mark.parametrize("stride", [1, 2])
def test_added_attention_stands_beside_a_grouped_convolution_that_it_keeps(stride):
    conv = torch.nn.Conv2d(4, 10, 3, stride, padding=2, dilation=2, groups=2, bias=False)
    before = conv.weight.clone()
    options = {**BRANCH, "feat_size": (4, 5) if stride == 1 else (2, 3)}
    layer = AugmentedConv2d(4, 10, 3, stride, **options, fusion="add", conv=conv)
    x = torch.randn(2, 4, 4, 5)
    assert layer.conv is conv
    assert torch.equal(conv.weight, before)
    assert torch.equal(layer(x)[0], conv(x))  # the projection is zero
    with torch.no_grad():
        layer.proj.weight.normal_()
    assert_defined(layer.double(), x.double())


NORM = {"dim_qk": 6, "qk_norm": True}


EVOLUTIONS = [
    *product([EvolvingAttention], [(0.5, 1.0, 3), (0.7, 0.3, 1), (0.3, 0.6, 5), (0.0, 0.0, 3)]),
    *product([PredictiveAttention], [(0.3, num_layers) for num_layers in range(4)]),
]


@pytest.mark.parametrize("options", [{}, NORM, {**NORM, "position": "none"}])
@pytest.mark.parametrize("kind, gates", EVOLUTIONS)
@pytest.mark.parametrize("fusion", ["concat", "add"])
def test_evolving_and_normalised_layers_equal_the_definition(fusion, kind, gates, options):
    x = doubles(2, 8, 3, 4)
    assert_defined(make(fusion=fusion, **options), x)
    layer = make(evolution=kind(2, *gates), fusion=fusion, **options)
    assert_defined(layer, x, doubles(2, 2, 12, 12))


def test_maps_that_are_mixed_after_the_softmax_weigh_the_values():
    assert_defined(make(evolution=evolution_class("reattention")(2)), doubles(2, 8, 3, 4))


def test_the_norm_is_off_by_default_and_its_gain_begins_at_1():
    plain = make()
    normed = AugmentedConv2d(8, 10, **BRANCH, qk_norm=True)
    assert normed.load_state_dict(plain.state_dict(), strict=False).missing_keys == ["qk_gain"]
    assert torch.equal(normed.qk_gain, torch.ones(2))


@pytest.mark.parametrize("shape", [(2, 3), (6, 7), (2, 9), (1, 1)])
def test_other_sizes_run_and_tables_fit(shape):
    layer = make(feat_size=(4, 5))
    y, logits = layer(doubles(1, 8, *shape))
    pixels = shape[0] * shape[1]
    assert y.shape == (1, 10, *shape)
    assert logits.shape == (1, 2, pixels, pixels)
    resized = make(feat_size=shape)
    resized.load_state_dict(layer.state_dict())  # fits the tables for good
    x = doubles(1, 8, *shape)
    assert_close(layer(x), resized(x))
    layer.set_feat_size(shape)
    assert_close(layer(x), resized(x))


def test_missing_or_wrong_prev_logits_is_an_error():
    layer = make(evolution=EvolvingAttention(2))
    x = doubles(2, 8, 3, 4)
    with refused(r"\[2, 2, 12, 12\] required, got None", ValueError):
        layer(x)
    for wrong in ((2, 2, 12, 11), (1, 2, 12, 12), (2, 1, 12, 12)):
        with refused(r"\[2, 2, 12, 12\] required, got", ValueError):
            layer(x, torch.zeros(wrong).double())


@pytest.mark.parametrize(
    "wrong,message",
    [
        ({"dim_qk": 5}, "dim_qk must be a positive multiple of num_heads=2, got 5"),
        ({"dim_v": 3}, "dim_v must be a positive multiple of num_heads=2, got 3"),
        ({"dim_v": 12}, "attn_channels must be 1 to out_channels=10, got 12"),
        ({"attn_channels": 0}, "attn_channels must be 1 to out_channels=10, got 0"),
        ({"fusion": "sum"}, "fusion must be 'concat' or 'add', got 'sum'"),
        ({"fusion": "add", "attn_channels": 5}, "attn_channels must be None .*, got 5"),
        ({"conv": torch.nn.Conv2d(8, 10, 3)}, "conv needs fusion='add', got fusion='concat'"),
        (
            {"fusion": "add", "conv": torch.nn.Conv2d(8, 12, 3)},
            r"\(in_channels, out_channels, stride\) = \(8, 10, 1\), got \(8, 12, 1\)",
        ),
        ({"stride": 3}, "stride must be 1 or 2, got 3"),
        ({"feat_size": (0, 3)}, "feat_size"),
        ({"num_heads": 0}, "num_heads"),
        ({"position": "polar"}, "one of 'relative', 'none', 'sine', 'coord', got 'polar'"),
        ({"position": "sine", "in_channels": 3}, "in_channels that 4 divides, got 3"),
        ({"window": (3, 0)}, "window must be an odd number of pixels"),
        ({"head_window": 2}, "head_window must be an odd number of heads, got 2"),
        ({"head_border": "zero"}, "head_border must be 'clip' or 'wrap', got 'zero'"),
        (
            {"head_window": 3, "head_border": "wrap"},
            "at most num_heads=2 where heads wrap around, got 3",
        ),
        (
            {"head_window": 3, "evolution": EvolvingAttention(2)},
            "head_window must be 1 where maps evolve, got 3",
        ),
    ],
)
def test_bad_arguments_are_named(wrong, message):
    with refused(message, ValueError):
        make(**wrong)


LAYOUTS = pytest.mark.parametrize("layout", [torch.contiguous_format, torch.channels_last])


@LAYOUTS
def test_the_output_lies_as_the_input(layout):
    layer = make(**NORM, feat_size=(5, 6), evolution=EvolvingAttention(2)).to(memory_format=layout)
    x = doubles(2, 8, 5, 6).to(memory_format=layout)
    prev = doubles(2, 2, 30, 30)
    assert layer(x, prev)[0].is_contiguous(memory_format=layout)
    assert_defined(layer, x, prev)


@LAYOUTS
@pytest.mark.parametrize("channels", [(5, 70), (64, 72)])
def test_a_projection_is_the_1x1_convolution_in_its_inputs_layout(channels, layout):
    projection = Projection(*channels, 1).to(memory_format=layout)
    x = torch.randn(2, channels[0], 3, 4).to(memory_format=layout)
    inputs = (x.requires_grad_(), projection.weight, projection.bias)
    y = projection(x)
    expected = F.conv2d(*inputs)
    assert y.is_contiguous(memory_format=layout)
    assert_same(y, expected, inputs)


def test_autocast_keeps_the_softmax_in_float32():
    seen = []
    layer = make().float()
    layer.attn_drop.register_forward_pre_hook(lambda module, args: seen.append(args[0]))
    with torch.autocast("cpu", dtype=torch.bfloat16):
        y, logits = layer(torch.randn(2, 8, 3, 4))
    assert seen[0].dtype == torch.float32
    assert_close(seen[0].sum(-1), torch.ones(2, 2, 12))  # far tighter than bfloat16 allows
    assert logits.dtype == y.dtype == torch.bfloat16


def test_attention_dropout_acts_in_training_only():
    layer = make(attn_drop=0.5, conv_drop=0.5)
    x = doubles(1, 8, 3, 4)
    assert not torch.equal(layer(x)[0], layer(x)[0])
    layer.eval()
    assert torch.equal(layer(x)[0], layer(x)[0])
