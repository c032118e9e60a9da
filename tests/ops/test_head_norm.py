"""The norm of queries and keys: its three forms against the equation. tests/ops/test_ops.py transforms it."""

import pytest
import torch

from ea_vision.ops import head_norm
from tests.layers.oracle import assert_exact, normalised


def equation(qk, gain):
    queries, keys = qk.mT.chunk(2, 1)
    return normalised(queries, gain.view(-1, 1, 1)), normalised(keys, 1.0)


@pytest.mark.parametrize("form", [head_norm.readable, head_norm.by_parts, head_norm.by_rms_norm])
@pytest.mark.parametrize(
    "dtype, size, tolerance",
    # float16 has no square of 1e3
    [(torch.float64, 3.0, 1e-12), (torch.bfloat16, 3.0, 1e-2), (torch.float16, 1e3, 2e-3)],
)
def test_every_form_is_the_equation(form, dtype, size, tolerance):
    qk = size * torch.randn(3, 4, 5, 6)
    qk = qk.to(dtype).requires_grad_()
    gain = torch.tensor([0.5, 2.0], dtype=dtype, requires_grad=True)
    assert_exact(form, equation, [qk, gain], tolerance)
    if dtype == torch.float64:
        for inputs in ((qk, gain), (qk.detach(), gain), (qk, gain.detach())):  # or one learns
            torch.autograd.gradgradcheck(form, inputs)
