"""The mechanisms of `ea_vision.layers.across`, each against its equation, outputs and gradients."""

import math

import numpy as np
import pytest
import torch
import torch.nn.functional as F

from ea_vision.layers import TokenConv, ValueResidual, create_evolution
from tests.layers.oracle import assert_same, by_head, convolved, neighbours
from tests.refused import refused

K = 3
SIZE = (2, 3)
N = SIZE[0] * SIZE[1]


def maps(seed, *shape, side=N):
    generator = torch.Generator().manual_seed(seed)
    shape = shape or (2, K, side, side)
    drawn = torch.randn(shape, generator=generator, dtype=torch.float64)
    return drawn.requires_grad_()


def new(kind, **options):
    """Return a mechanism in float64 whose parameters are all random, since a start at zero would hide mistakes."""
    torch.manual_seed(0)
    mechanism = create_evolution(kind, K, dtype=torch.float64, **options)
    with torch.no_grad():
        for parameter in mechanism.parameters():
            parameter.add_(0.3 * torch.randn_like(parameter))
    return mechanism


def run(mechanism, logits, prev):
    """Return the maps that weigh the values."""
    attn = mechanism(logits, prev).softmax(-1)
    return mechanism.mix_attn(attn)


def assert_equation(module, actual, expected, *inputs):
    """Assert that outputs and the gradients of inputs and parameters equal those of the equation."""
    assert_same(actual, expected, [*inputs, *module.parameters()])


# ---- the equations, by sums over shifted maps


def mix_heads(weight, maps):
    """out[a] = sum_b weight[a, b] maps[b]"""
    return torch.einsum("ab,nb...->na...", weight, maps)


def batch_norm(norm, x):
    return F.batch_norm(x, None, None, norm.weight, norm.bias, training=True, eps=norm.eps)


def depthwise(weight, x):
    height, width = weight.shape[2:]
    taps = [by_head(weight[:, 0, u, w]) * seen for u, w, seen in neighbours(x, height, width)]
    return sum(taps)


def talking_heads(m, logits, prev):
    mixed = mix_heads(m.proj_l.weight, logits) + by_head(m.proj_l.bias)
    attn = mixed.softmax(-1)
    return mix_heads(m.proj_w.weight, attn) + by_head(m.proj_w.bias)


def reattention(m, logits, prev):
    attn = logits.softmax(-1)
    conv = m.reatten_matrix
    refined = 0.5 * batch_norm(m.var_norm, convolved(conv.weight, attn) + by_head(conv.bias))
    return refined if m.gain is None else attn + m.gain * refined


def refiner(m, logits, prev):
    attn = logits.softmax(-1)
    x = batch_norm(m.bn1, convolved(m.conv_exp.weight, attn)).clamp(0, 6)
    x = batch_norm(m.bn2, depthwise(m.depth_sep_conv.weight, x)).clamp(0, 6)
    x = attn + batch_norm(m.bn3, convolved(m.conv_pro.weight, x))
    refined = batch_norm(m.adapt_bn, x)
    return refined if m.gain is None else attn + m.gain * refined


def multi_token(m, logits, prev):
    mixed = mix_heads(m.heads_before, depthwise(m.conv_before, logits))
    attn = mixed.softmax(-1)
    return by_head(m.heads_after[:, 0, 0]) * depthwise(m.conv_after, attn)


def residual(m, logits, prev):
    alpha = by_head(m.alpha)
    self_share = 1 - alpha if m.mixture else 1.0
    return (self_share * logits + alpha * prev).softmax(-1)


@pytest.mark.parametrize(
    "equation,kind,options",
    [
        (residual, "residual", {}),
        (residual, "residual", {"mixture": True}),
        (residual, "residual", {"learnable": True}),
        (residual, "residual", {"mixture": True, "learnable": True}),
        (residual, "residual", {"learnable": "per_head"}),
        (talking_heads, "talking_heads", {}),
        (reattention, "reattention", {"scale": 0.5}),
        (reattention, "reattention", {"scale": 0.5, "gain": 0.7}),
        (refiner, "refiner", {"expansion": 2}),
        (refiner, "refiner", {"expansion": 2, "gain": 0.7}),
        (multi_token, "mta", {"map_kernel": (3, 5), "head_kernel": 1}),
    ],
)
def test_a_mechanism_is_its_equation(equation, kind, options):
    m = new(kind, **options)
    logits = maps(1)
    prev = maps(2)
    inputs = [logits, prev] if m.reads_previous else [logits]
    assert_equation(m, run(m, logits, prev), equation(m, logits, prev), *inputs)


def test_layers_without_bias_in_place_of_talking_heads_own_mix_as_they_are():
    m = new("talking_heads")
    for name in ("proj_l", "proj_w"):
        setattr(m, name, torch.nn.Linear(K, K, bias=False, dtype=torch.float64))
    logits = maps(1)
    attn = mix_heads(m.proj_l.weight, logits).softmax(-1)
    assert_equation(m, run(m, logits, None), mix_heads(m.proj_w.weight, attn), logits)
    assert not m.changes_nothing()


def test_residual_begins_as_the_papers():
    assert create_evolution("residual", K).alpha == 1.0
    assert create_evolution("residual", K, mixture=True).alpha == 0.5


@pytest.mark.parametrize("prefix", [0, 2])
def test_conv2d_convolves_four_dimensions_of_a_map_that_is_not_square(prefix):
    """The entry from pixel (y, x) to pixel (v, u) sees the neighbours of either."""
    m = new("conv2d")
    m.num_prefix_tokens = prefix
    logits = maps(1, side=N + prefix)
    prev = maps(2, side=N + prefix)
    mixed = logits + m.alpha * prev
    over_keys = mixed[:, :, prefix:, prefix:].reshape(2, K, *SIZE, *SIZE)
    other_first = (0, 1, 4, 5, 2, 3)
    over_queries = convolved(m.queries, over_keys.permute(other_first)).permute(other_first)
    total = convolved(m.keys, over_keys) + over_queries
    expected = mixed + F.pad(total.reshape(2, K, N, N), [prefix, 0, prefix, 0])
    evolved = m(logits, prev, SIZE)
    assert_equation(m, evolved, expected, logits, prev)
    above = m.parts(logits, prev, evolved)["conv_logits"]
    torch.testing.assert_close(above, expected - mixed)


@pytest.mark.parametrize("identity", [False, True])
def test_gated_attention_is_its_equation(identity):
    m = new("gated", channels=5, identity=identity)
    out = maps(1, 2, K, N, 4)
    x = maps(2, 2, N, 5)
    largest = 2.0 if identity else 1.0
    heads = []
    for k in range(K):
        below = -x @ m.gate.weight[k] - m.gate.bias[k]
        gate = largest / (1 + below.exp())
        heads.append(gate.unsqueeze(-1) * out[:, k])
    assert_equation(m, m.mix_output(out, None, x), torch.stack(heads, 1), out, x)


def test_value_residual_is_its_equation():
    module = ValueResidual(identity=False, dtype=torch.float64)
    with torch.no_grad():
        module.lambdas.add_(torch.tensor([0.2, -0.1], dtype=torch.float64))
    values = maps(1)
    first = maps(2)
    one, other = module.lambdas
    assert_equation(module, module(values, first), one * first + other * values, values, first)


def test_token_conv_sees_the_patches_neighbours_in_the_image():
    m = TokenConv(4, num_prefix_tokens=1, identity=False, dtype=torch.float64)
    x = maps(1, 2, 1 + N, 4)
    y = m(x, SIZE)
    assert torch.equal(y[:, :1], x[:, :1])
    image = x[:, 1:].mT.reshape(2, 4, *SIZE)
    expected = image + depthwise(m.conv.weight, image) + by_head(m.conv.bias)
    assert_equation(m, y[:, 1:], expected.flatten(2).mT, x)


@pytest.mark.parametrize(
    "kind,options,message",
    [
        ("conv2d", {"start": "zero"}, "start must be 'identity' or 'paper', got 'zero'"),
        ("ea", {"alpha": 1.5}, "alpha must lie between 0 and 1, got 1.5"),
        ("ea", {"alpha": "0.5"}, "alpha must lie between 0 and 1, got '0.5'"),
        ("ea", {"beta": -1}, "beta must lie between 0 and 1, got -1"),
        ("ea", {"alpha": math.inf, "learnable": True}, "alpha must be a finite number, got inf"),
        ("ea", {"alpha": "0.5", "learnable": True}, "alpha must be a finite number, got '0.5'"),
        ("ea", {"learnable": 2}, "False, True or 'per_head', got 2"),
        ("ea", {"kernel_size": 4}, "odd and positive, got 4"),
        ("pa", {"num_layers": -1}, "num_layers must be 0 or more, got -1"),
        ("mta", {"map_kernel": (4, 11)}, "two odd numbers .* got .4, 11."),
        ("mta", {"head_kernel": 2}, "must divide num_heads=3, got 2"),
        ("conv2d", {"kernel_size": 2}, "odd and positive, got 2"),
        ("residual", {"beta": 0.5}, "'residual' has alpha, mixture, learnable; got beta"),
        ("xa", {}, "one of 'ea', 'pa', .* or None, got 'xa'"),
        ("pa", {"beta": 0.5}, "beta"),
        (None, {"alpha": 0.5}, "alpha"),
        (["ea", "pa"], {}, "one of 'ea', 'pa', .* or None, got .'ea', 'pa'."),
    ],
)
def test_bad_starts_and_options_are_named(kind, options, message):
    with refused(message, ValueError):
        create_evolution(kind, K, **options)


def test_gates_may_be_numbers_of_numpy():
    for learnable in (False, True):
        evolution = create_evolution("ea", K, alpha=np.float32(0.5), learnable=learnable)
        assert evolution.gates()["alpha"] == 0.5
