"""The C kernel of conv2d's maps against its torch, outputs and every gradient."""

from contextlib import nullcontext

import pytest
import torch

from ea_vision.layers import create_evolution
from ea_vision.ops import cpu_library, use_implementation
from tests.ops.oracle import same_bits

pytestmark = pytest.mark.skipif(isinstance(cpu_library.load(), str), reason=str(cpu_library.load()))
SHAPES = [
    (2, 3, (2, 3), 0, 3),
    (1, 1, (1, 1), 0, 3),
    (3, 4, (8, 8), 0, 3),
    (2, 6, (5, 7), 2, 3),
    (2, 2, (3, 1), 1, 5),
    (1, 9, (6, 17), 1, 3),
    (2, 8, (4, 4), 3, 1),
]  # images, heads, (H, W), prefix tokens, kernel's side


def problem(images, heads, feat_size, prefix, size, dtype=torch.float32):
    """A mechanism of which all counts, two maps, and weights of the result in a loss."""
    torch.manual_seed(0)
    mechanism = create_evolution("conv2d", heads, alpha=0.7, std=0.3, kernel_size=size)
    mechanism.num_prefix_tokens = prefix
    tokens = prefix + feat_size[0] * feat_size[1]
    return mechanism, *(torch.randn(images, heads, tokens, tokens).to(dtype) for _ in range(3))


def results(mechanism, own, prev, weights, feat_size, by=None) -> list[torch.Tensor]:
    """Output and gradients: own, prev, alpha, keys, queries."""
    own, prev = own.clone().requires_grad_(), prev.clone().requires_grad_()
    with use_implementation(by) if by else nullcontext():
        out = mechanism(own, prev, feat_size)
    assert out.grad_fn.name().startswith("GeneratedBackwardFor_ea_vision_cpu_planes") == (
        by is None
    )
    return [
        out.detach(),
        *torch.autograd.grad((out * weights).sum(), [own, prev, *mechanism.parameters()]),
    ]


def errors(shape, dtype) -> list[float]:
    """Largest error of each result beside its largest number, from torch in float64."""
    mechanism, *maps = problem(*shape, dtype)
    made = results(mechanism, *maps, shape[2])
    exact = results(mechanism.double(), *(x.double() for x in maps), shape[2], "reference")
    assert [x.dtype for x in made] == [dtype] * 3 + [torch.float32] * 3
    return [
        float((one - other).abs().max() / other.abs().max())
        for one, other in zip(made, exact, strict=True)
    ]


@pytest.mark.parametrize("shape", SHAPES)
def test_planes_are_the_references(shape):
    assert max(errors(shape, torch.float32)) < 3e-6
    assert max(errors(shape, torch.bfloat16)[:3]) < 2**-8  # rounded once


def test_the_same_bits_however_the_work_is_cut():
    maps, size = problem(*SHAPES[3]), SHAPES[3][2]
    out, *_ = same_bits(lambda: results(*maps, size))
    mechanism, own, prev, _ = maps
    assert torch.equal(mechanism(own[1:], prev[1:], size), out[1:])


def test_a_nan_stays_and_reaches_no_other_image():
    mechanism, own, prev, _ = problem(*SHAPES[2])
    prev[1, 2, 0, 0] = torch.nan
    out = mechanism(own, prev, (8, 8))
    assert out[1].isnan().any() and not out[[0, 2]].isnan().any()


def test_maps_of_another_size_are_refused():
    mechanism, own, prev, _ = problem(*SHAPES[0])
    with pytest.raises(
        ValueError, match=r"logits of shape \[2, 3, 12, 12\] required, got \[2, 3, 6, 6\]"
    ):
        mechanism(own, prev, (3, 4))
    with pytest.raises(
        ValueError, match=r"prev_logits of shape \[2, 3, 6, 6\] required, got \[1, 3, 6, 6\]"
    ):
        mechanism(own, prev[:1], (2, 3))
