"""Exclusive self-attention: the paper's equation, precisions, zero values, derivatives of every order and mode."""

import pytest
import timm
import torch
from torch.testing import assert_close

from ea_vision.layers import create_evolution
from ea_vision.ops import use_implementation

GAINS = [None, 0.6]


def mechanism(gain, dtype=torch.float64):
    return create_evolution("xsa", 3, gain=gain, dtype=dtype)


def inputs(dtype=torch.float64, tokens=5):
    """Attention's output and the values."""
    generator = torch.Generator().manual_seed(0)
    drawn = torch.randn(2, 2, 3, tokens, 4, generator=generator).to(dtype)
    return [x.clone().requires_grad_() for x in drawn]


def applied(m):
    """Return the mechanism as a function of attention's output and the values."""
    return lambda out, values: m.mix_output(out, values, None)


def equation(gain):
    """Return the paper's equation as a function of attention's output and the values."""

    def subtracted(out, values):
        unit = values / values.norm(dim=-1, keepdim=True)
        along = torch.einsum("...td,...td->...t", out, unit)
        factor = 1.0 if gain is None else gain.view(-1, 1)
        return out - (factor * along).unsqueeze(-1) * unit

    return subtracted


def results(function, out, values, parameters):
    """Return the output and the gradients of its weighted sum."""
    result = function(out, values)
    weights = torch.linspace(-1, 1, result.numel()).to(result.dtype)
    total = (result.flatten() * weights).sum()
    return [result, *torch.autograd.grad(total, [out, values, *parameters])]


@pytest.mark.parametrize("gain", GAINS)
@pytest.mark.parametrize(
    "dtype, tolerance",
    [(torch.float64, 1e-13), (torch.float32, 1e-6), (torch.bfloat16, 1e-2), (torch.float16, 2e-3)],
)
def test_every_precision_is_the_equation(gain, dtype, tolerance):
    m = mechanism(gain, dtype)
    out, values = inputs(dtype)
    have = results(applied(m), out, values, m.parameters())
    exact = mechanism(gain)
    wide = [x.detach().double().requires_grad_() for x in (out, values)]
    want = results(equation(exact.gain), *wide, exact.parameters())
    for one, other in zip(have, want, strict=True):
        assert one.dtype == dtype
        assert (one.double() - other).norm() <= tolerance * other.norm()


@pytest.mark.parametrize("by", ["reference", "cpu"])
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32])
def test_values_of_0_take_nothing_in_any_precision(by, dtype):
    m = mechanism(0.6, dtype)
    out, values = inputs(dtype)
    with torch.no_grad():
        values[0] = 0
        values[1] *= 1e-3
    with use_implementation(by):
        result = results(applied(m), out, values, [m.gain])
    assert all(x.isfinite().all() for x in result)
    assert torch.equal(result[0][0], out[0])


def test_a_black_image_in_float16():
    model = timm.create_model("ea_vit_tiny_patch16_224", evolution="xsa", img_size=32, depth=2)
    model = model.eval().half()
    for block in model.blocks:
        torch.nn.init.zeros_(block.attn.qkv.bias)
    assert model(torch.zeros(1, 3, 32, 32).half()).isfinite().all()


@pytest.mark.parametrize("gain", GAINS)
def test_second_derivatives(gain):
    m = mechanism(gain)

    def mixed(out, values, *_):
        return m.mix_output(out, values, None)

    assert torch.autograd.gradgradcheck(mixed, (*inputs(tokens=2), *m.parameters()))


def test_transforms_are_those_of_the_equation():
    m = mechanism(0.6)
    out, values = [x.detach() for x in inputs()]

    def all_of_them(function):
        def loss(out, values):
            return function(out, values).square().sum()

        return [
            torch.func.jvp(loss, (out, values), (values, out)),
            torch.func.hessian(loss, (0, 1))(out[:1, :1, :2], values[:1, :1, :2]),
            torch.vmap(torch.func.grad(loss))(out, values),
        ]

    assert_close(all_of_them(applied(m)), all_of_them(equation(m.gain)))


def test_compiles_in_one_graph():
    m = mechanism(0.6)
    function = applied(m)
    torch._dynamo.reset()
    compiled = torch.compile(function, backend="aot_eager", fullgraph=True)
    assert_close(results(compiled, *inputs(), [m.gain]), results(function, *inputs(), [m.gain]))
