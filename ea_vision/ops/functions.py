"""Helpers of hand-written autograd functions: work in parts that fit the cache, and second derivatives."""

from collections.abc import Callable, Iterator, Sequence

import torch
from torch import Tensor

CACHED_NUMBERS = 2**17  # half a megabyte in float32


def in_parts(*tensors: Tensor) -> Iterator[tuple[Tensor, ...]]:
    """Split tensors (B, ...) along the batch: on a CPU into parts that fit its cache, elsewhere into one part."""
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
    """Return the gradients of a readable function so that they can be differentiated again.

    A hand-written backward pass returns them if gradients are enabled inside it (`create_graph=True`). Second
    derivatives then follow the graph that torch records here.

    Args:
        function: maps the inputs to the outputs whose gradients are `grad_outputs`.
        needed: for each input, whether its gradient is needed (`ctx.needs_input_grad`).
    """
    learns = [x for x, wanted in zip(inputs, needed, strict=True) if wanted]
    gradients = torch.autograd.grad(function(*inputs), learns, grad_outputs, create_graph=True)
    remaining = iter(gradients)
    return tuple(next(remaining) if wanted else None for wanted in needed)
