"""The norm of queries and keys: derivatives of every order and mode against plain torch operations."""

import pytest
import torch
from torch.autograd.functional import hvp
from torch.testing import assert_close

from ea_vision.layers import AugmentedConv2d
from ea_vision.ops import head_norm, use_implementation


@pytest.fixture
def layer():
    """A layer in float64 that uses the reference, with a norm that affects its output."""
    torch.manual_seed(0)
    sizes = dict(dim_qk=8, dim_v=4, num_heads=2, feat_size=(2, 3))
    return AugmentedConv2d(3, 10, **sizes, qk_norm=True, dtype=torch.float64)


@pytest.fixture
def x():
    return torch.randn(2, 3, 2, 3, dtype=torch.float64)


def loss_of(layer):
    def loss(x):
        y, _ = layer(x)
        return y.square().sum()

    return loss


def hessian_vector_of_weights(layer, x):
    """Return the product of the loss's Hessian and a vector, as PyHessian computes it."""
    weights = [layer.qkv.weight, layer.qk_gain]
    first = torch.autograd.grad(loss_of(layer)(x), weights, create_graph=True)
    vector = [torch.cos(weight.detach() + 1) for weight in weights]
    return torch.autograd.grad(first, weights, vector)


def vmap_of_gradients(layer, x):
    gradient = torch.func.grad(loss_of(layer))
    return torch.vmap(gradient)(torch.stack([x, x.sin()]))


DERIVATIVES = {
    "hvp": lambda layer, x: hvp(loss_of(layer), x, x.cos())[1],
    "Hessian of weights": hessian_vector_of_weights,
    "jvp": lambda layer, x: torch.func.jvp(loss_of(layer), (x,), (x.cos(),)),
    "jacrev": lambda layer, x: torch.func.jacrev(loss_of(layer))(x),
    "hessian": lambda layer, x: torch.func.hessian(loss_of(layer))(x),
    "vmap": vmap_of_gradients,
}


@pytest.mark.parametrize("name", DERIVATIVES)
def test_derivatives_are_the_references(layer, x, name):
    have = DERIVATIVES[name](layer, x)
    with use_implementation("reference"):
        assert_close(have, DERIVATIVES[name](layer, x))


@pytest.mark.parametrize("form", [head_norm.by_parts, head_norm.by_rms_norm])
@pytest.mark.parametrize("dtype, tolerance", [(torch.float64, 1e-12), (torch.bfloat16, 1e-2)])
def test_every_form_is_the_readable_one(form, dtype, tolerance):
    qk = 3 * torch.randn(3, 4, 5, 6)
    qk = qk.to(dtype).requires_grad_()
    gain = torch.tensor([0.5, 2.0], dtype=dtype, requires_grad=True)
    weights = [torch.randn(3, 2, 6, 5).to(dtype) for _ in range(2)]

    def results(normalise):
        normalised = normalise(qk, gain)
        assert [x.dtype for x in normalised] == [dtype] * 2
        return [*normalised, *torch.autograd.grad(normalised, (qk, gain), weights)]

    for have, want in zip(results(form), results(head_norm.readable), strict=True):
        assert (have - want).norm() <= tolerance * want.norm()
    if dtype == torch.float64:
        for inputs in (
            (qk, gain),
            (qk.detach(), gain),
            (qk, gain.detach()),
        ):  # or one of them learns
            torch.autograd.gradgradcheck(form, inputs)
