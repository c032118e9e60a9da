"""Gradient checkpointing: the backward pass runs a block again, and running statistics move once."""

from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

import torch
from torch import nn
from torch.utils import checkpoint as torch_checkpoint


def recomputes() -> bool:
    """Return whether the backward pass is recomputing a block."""
    return not torch.compiler.is_compiling() and torch._C._current_graph_task_id() != -1


@contextmanager
def frozen_statistics(block: nn.Module) -> Iterator[None]:
    """Freeze the running statistics of a block's batch norms, which in training still normalise by the batch."""
    before = {}
    for module in block.modules():
        if isinstance(module, nn.modules.batchnorm._BatchNorm):
            before[module] = (module.momentum, module.num_batches_tracked)
            module.momentum = 0.0
            module.num_batches_tracked = None
    try:
        yield
    finally:
        for norm, (momentum, batches) in before.items():
            norm.momentum = momentum
            norm.num_batches_tracked = batches


def frozen_in_backward(block: nn.Module) -> AbstractContextManager:
    """Return `frozen_statistics` if the backward pass is recomputing the block, else a context that does nothing."""
    again = block.training and recomputes()
    return frozen_statistics(block) if again else nullcontext()


def checkpoint(block: nn.Module, *args: Any) -> Any:
    """Run block(*args) with gradient checkpointing; its recomputation does not update running statistics again."""
    options = {}
    if not torch.compiler.is_compiling():
        options["context_fn"] = lambda: (nullcontext(), frozen_statistics(block))
    return torch_checkpoint.checkpoint(block, *args, use_reentrant=False, **options)
