"""What hand-written autograd functions share: work in parts, second derivatives, and when readable torch must do."""

from collections.abc import Callable, Iterator, Sequence

import torch
from torch import Tensor

CACHED_NUMBERS = 2**17  # half a megabyte in float32


def in_parts(*tensors: Tensor) -> Iterator[tuple[Tensor, ...]]:
    """Split tensors (B, ...) into some images at a time: as many as a CPU's cache holds, on other devices all."""
    first = tensors[0]
    images = max(1, len(first))
    if first.device.type == "cpu":
        images = max(1, images * CACHED_NUMBERS // max(1, first.numel()))
    return zip(*(tensor.split(images) for tensor in tensors), strict=True)


def differentiable_gradients(
    function: Callable,
    inputs: Sequence[Tensor | None],
    needed: Sequence[bool],
    grad_outputs: Tensor | Sequence[Tensor],
) -> tuple[Tensor | None, ...]:
    """Return the gradients of a readable function, with a graph of their own.

    A backward pass that is written by hand returns them where gradients are enabled in it (`create_graph=True`): second
    derivatives pass through what torch records there.

    Args:
        function: of the inputs; its outputs are those that `grad_outputs` belong to.
        needed: by input, whether its gradient is wanted; `ctx.needs_input_grad`.
    """
    learns = [x for x, wanted in zip(inputs, needed, strict=True) if wanted]
    gradients = torch.autograd.grad(function(*inputs), learns, grad_outputs, create_graph=True)
    remaining = iter(gradients)
    return tuple(next(remaining) if wanted else None for wanted in needed)
