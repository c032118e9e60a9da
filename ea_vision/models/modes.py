"""The mode, the memory format and the wrappers of networks."""

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import nn


@contextmanager
def evaluating(model: nn.Module) -> Iterator[None]:
    """Keep evaluation mode inside the block, and restore each module's own mode after it."""
    modes = [(module, module.training) for module in model.modules()]
    model.eval()
    try:
        yield
    finally:
        for module, training in modes:
            module.training = training


def lay_out(model: nn.Module, memory_format: torch.memory_format) -> nn.Module:
    """Give a model's 4-D tensors (the weights of 2-D convolutions) this memory format, in place; return the model.

    `model.to(memory_format=torch.channels_last)` refuses networks with weights of 5 dimensions, as timm's lambda
    networks have.
    """
    for tensor in (*model.parameters(), *model.buffers()):
        if tensor.dim() == 4:
            tensor.data = tensor.data.contiguous(memory_format=memory_format)
    return model


def unwrap(model: nn.Module) -> nn.Module:
    """Return the network inside DistributedDataParallel and torch.compile, in any order."""
    while isinstance(model, nn.parallel.DistributedDataParallel) or hasattr(model, "_orig_mod"):
        model = getattr(model, "_orig_mod", None) or model.module
    return model
