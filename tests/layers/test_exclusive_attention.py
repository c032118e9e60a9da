"""Exclusive self-attention: the paper's equation in every precision, and values of 0."""

import pytest
import timm
import torch

from ea_vision.layers import create_evolution

GAINS = [None, 0.6]


def mechanism(gain, dtype=torch.float64):
    return create_evolution("xsa", 3, gain=gain, dtype=dtype)


def inputs(dtype):
    """Attention's output and the values."""
    generator = torch.Generator().manual_seed(0)
    drawn = torch.randn(2, 2, 3, 5, 4, generator=generator).to(dtype)
    return [x.clone().requires_grad_() for x in drawn]


def equation(gain, out, values):
    """The paper's, with a gain for each head."""
    unit = values / values.norm(dim=-1, keepdim=True)
    along = torch.einsum("...td,...td->...t", out, unit)
    factor = 1.0 if gain is None else gain.view(-1, 1)
    return out - (factor * along).unsqueeze(-1) * unit


def results(result, inputs):
    """Return the output and the gradients of its weighted sum."""
    weights = torch.linspace(-1, 1, result.numel()).to(result.dtype)
    total = (result.flatten() * weights).sum()
    return [result, *torch.autograd.grad(total, inputs)]


@pytest.mark.parametrize("gain", GAINS)
@pytest.mark.parametrize(
    "dtype, tolerance",
    [(torch.float64, 1e-13), (torch.float32, 1e-6), (torch.bfloat16, 1e-2), (torch.float16, 2e-3)],
)
def test_every_precision_is_the_equation(gain, dtype, tolerance):
    m = mechanism(gain, dtype)
    exact = mechanism(gain)
    tensors = inputs(dtype)
    wide = [x.detach().double().requires_grad_() for x in tensors]
    have = results(m.mix_output(*tensors, None), [*tensors, *m.parameters()])
    want = results(equation(exact.gain, *wide), [*wide, *exact.parameters()])
    for one, other in zip(have, want, strict=True):
        assert one.dtype == dtype
        assert (one.double() - other).norm() <= tolerance * other.norm()


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32])
def test_values_of_0_take_nothing_in_any_precision(dtype):
    m = mechanism(0.6, dtype)
    out, values = inputs(dtype)
    with torch.no_grad():
        values[0] = 0
        values[1] *= 1e-3
    result = results(m.mix_output(out, values, None), [out, values, m.gain])
    assert all(x.isfinite().all() for x in result)
    assert torch.equal(result[0][0], out[0])


def test_a_black_image_in_float16():
    model = timm.create_model("ea_vit_tiny_patch16_224", evolution="xsa", img_size=32, depth=2)
    model = model.eval().half()
    for block in model.blocks:
        torch.nn.init.zeros_(block.attn.qkv.bias)
    y = model(torch.zeros(1, 3, 32, 32).half())
    assert y.isfinite().all()
