"""Exclusive self-attention: the paper's equation in every precision, and values of 0."""

import pytest
import torch

from ea_vision.layers import create_evolution
from tests.layers.oracle import assert_exact, gradients


def equation(out, values, gain=None):
    """The paper's, with a gain for each head."""
    unit = values / values.norm(dim=-1, keepdim=True)
    along = torch.einsum("...td,...td->...t", out, unit)
    factor = 1.0 if gain is None else gain.view(-1, 1)
    return [out - (factor * along).unsqueeze(-1) * unit]


@pytest.mark.parametrize("gain", [None, 0.6])
@pytest.mark.parametrize(
    "dtype, tolerance",
    [(torch.float64, 1e-13), (torch.float32, 1e-6), (torch.bfloat16, 1e-2), (torch.float16, 2e-3)],
)
def test_every_precision_is_the_equation_and_values_of_0_take_nothing(gain, dtype, tolerance):
    m = create_evolution("xsa", 3, gain=gain, dtype=dtype)
    out, values = torch.randn(2, 2, 3, 5, 4).to(dtype)

    def mixed(out, values, *_):
        return [m.mix_output(out, values, None)]

    tensors = [out.requires_grad_(), values.requires_grad_(), *m.parameters()]
    assert_exact(mixed, equation, tensors, tolerance)
    with torch.no_grad():
        values[0] = 0
        values[1] *= 1e-3
    [result] = mixed(*tensors)
    assert torch.equal(result[0], out[0])
    for x in [result, *gradients([result], tensors)]:
        assert x.isfinite().all()
