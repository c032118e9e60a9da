"""The evolution modules against the papers' equations (docs/how-it-works.md), and what they refuse."""

import pytest
import torch
from torch import nn
from torch.testing import assert_close

from ea_vision.deployment.evolution import fold_evolution
from ea_vision.layers import AugmentedConv2d, EvolvingAttention, create_evolution
from ea_vision.ops import evolving_attention, use_implementation
from tests.layers.oracle import assert_same, doubles, evolved_maps
from tests.refused import refused


@pytest.mark.parametrize("keys, prefix", [(7, 0), (5, 0), (7, 2)])
@pytest.mark.parametrize("learnable", [True, "per_head"])
@pytest.mark.parametrize("kind, options", [("ea", {}), ("pa", {}), ("pa", {"num_layers": 2})])
def test_learnable_gates_satisfy_the_equations_and_have_their_gradients(
    kind, options, learnable, keys, prefix
):
    """Also where a network has pooled keys and values: maps (B, K, N, M)."""
    module = create_evolution(kind, 3, alpha=0.3, learnable=learnable, **options).double()
    module.num_prefix_tokens = prefix
    values = torch.linspace(-0.4, 1.7, 3, dtype=torch.float64)  # outside 0 to 1, too
    with torch.no_grad():
        for place, gate in enumerate(module.gates().values()):
            gate.copy_(values.roll(place) if learnable == "per_head" else values[place])
    q = doubles(2, 3, 7, 4)
    k, v = doubles(2, 2, 3, keys, 4)
    logits = q @ k.mT / 2
    prev = doubles(2, 3, 7, keys)
    expected = evolved_maps(module, logits, prev)
    parameters = list(module.parameters())
    assert_same(module(logits, prev), expected, parameters)
    by_operator = evolving_attention(q, k, v, **module.operands(prev))
    assert_same(by_operator, (expected.softmax(-1) @ v, expected), parameters)


@pytest.mark.parametrize("kind", ["ea", "pa"])
def test_weights_with_learned_gates_load_where_gates_are_fixed(kind):
    module = create_evolution(kind, 3, learnable=True)
    fixed = create_evolution(kind, 3)
    keys = fixed.load_state_dict(module.state_dict(), strict=False)
    assert keys.unexpected_keys == list(module.gates())
    assert not keys.missing_keys


@pytest.mark.parametrize("learnable", [True, "per_head"])
def test_half_maps_keep_their_dtype_with_learnable_gates(learnable):
    module = EvolvingAttention(3, 0.3, 0.6, learnable=learnable).bfloat16().float()
    logits, prev = torch.randn(2, 2, 3, 7, 7)
    with torch.autocast("cpu", torch.bfloat16):
        evolved = module(logits.bfloat16(), prev.bfloat16())
    assert evolved.dtype == torch.bfloat16
    assert_close(evolved.float(), module(logits, prev), atol=0.05, rtol=0.05)


def test_convolutions_begin_by_he():
    torch.manual_seed(3)
    plain = EvolvingAttention(3)
    torch.manual_seed(3)
    torch.nn.Conv2d(3, 3, 3)  # the constructor's first draws
    weight = torch.empty(3, 3, 3, 3)
    expected = nn.init.kaiming_normal_(weight, mode="fan_out", nonlinearity="relu")
    assert torch.equal(plain.convs[0].weight, expected)


def layer_and_inputs(evolution):
    """Return a layer over the pixels of a 4x3 map, and what it is called with."""
    sizes = dict(dim_qk=8, dim_v=4, num_heads=2, feat_size=(4, 3))
    layer = AugmentedConv2d(16, 8, **sizes, evolution=evolution)
    prev = torch.randn(2, 2, 12, 12, requires_grad=True)
    return layer, [torch.randn(2, 16, 4, 3, requires_grad=True), prev]


@torch.no_grad()
def as_reference(layer, args):
    """Return the output, which must be the reference's to the bit."""
    output = layer(*args)
    with use_implementation("reference"):
        assert_close(layer(*args), output, rtol=0, atol=0)
    return output


def parametrised():
    """Return an evolution whose convolution is not a plain Conv2d but has equivalent weights."""
    evolution = create_evolution("ea", 2)
    nn.utils.parametrizations.weight_norm(evolution.convs[0])
    return evolution


@pytest.mark.parametrize(
    "how, reason",
    [
        ("conv2d", "FourDimensionalConvolution defines only forward, which the others cannot run"),
        ("talking_heads", "TalkingHeads defines only forward, which the others cannot run"),
        ("parametrised", "the others take the weights of a Conv2d; got ParametrizedConv2d"),
    ],
)
def test_a_forced_implementation_never_gives_way_to_modules(how, reason, log):
    """Without a forced implementation the modules run, as in the reference, and the log gives the reason."""
    evolution = parametrised() if how == "parametrised" else create_evolution(how, 2)
    layer, args = layer_and_inputs(evolution)
    for name in ("cpu", "triton", "sdpa"):
        with use_implementation(name), pytest.raises(ValueError) as error:
            layer(*args)
        assert str(error.value) == f"implementation {name!r} cannot run this: {reason}"
    output = as_reference(layer, args)
    assert f"evolving attention by 'reference': {reason}" in log.messages
    layer.attn_drop.register_forward_hook(lambda *_: None)  # asks for the modules themselves
    with torch.no_grad(), use_implementation("cpu"):
        assert_close(layer(*args), output, rtol=0, atol=0)


OTHER_CONVOLUTIONS = (
    dict(padding=2, dilation=2),
    dict(padding=1, padding_mode="circular"),
    dict(padding=1, groups=2),
    dict(padding=1, bias=False),
)


@pytest.mark.parametrize("options", OTHER_CONVOLUTIONS, ids=str)
@pytest.mark.parametrize("kind", ["ea", "pa"])
def test_another_convolution_in_place_of_ours_runs_as_itself(kind, options):
    evolution = create_evolution(kind, 2)
    evolution.convs[0] = nn.Conv2d(2, 2, 3, **options)
    layer, args = layer_and_inputs(evolution)
    as_reference(layer, args)
    with use_implementation("cpu"), refused("a Conv2d with a bias and zero", ValueError):
        layer(*args)
    assert fold_evolution(evolution, 2) is None


@pytest.mark.parametrize("kind", ["ea", "pa"])
def test_a_map_convolution_with_its_own_forward_or_backward_hook_runs_as_itself(kind):
    """Kernels read its weight alone; tools that offload weights replace the forward of an object."""
    evolution = create_evolution(kind, 2)
    conv = evolution.convs[0]
    layer, args = layer_and_inputs(evolution)
    seen = []
    hook = conv.register_full_backward_hook(lambda module, *gradients: seen.append(module))
    layer(*args)[0].sum().backward()
    assert seen == [conv]
    hook.remove()
    plain = layer(*args)[0]
    plain_forward = conv.forward
    conv.forward = lambda maps: 2 * plain_forward(maps)
    with use_implementation("reference"):
        expected = layer(*args)[0]
    assert_close(layer(*args)[0], expected)
    assert not torch.allclose(plain, expected)


@pytest.mark.parametrize(
    "options",
    [
        {},
        dict(alpha=0.3, learnable=True),
        dict(alpha=-0.2, learnable="per_head"),
        dict(mixture=True),
        dict(mixture=True, learnable=True),
    ],
)
def test_residual_runs_on_the_kernels(options):
    layer, args = layer_and_inputs(create_evolution("residual", 2, **options))
    with use_implementation("cpu"):
        actual = layer(*args)
    with use_implementation("reference"):
        expected = layer(*args)
    inputs = [*args, *layer.parameters()]
    assert_same(actual, expected, inputs, atol=1e-4, rtol=1e-4)
