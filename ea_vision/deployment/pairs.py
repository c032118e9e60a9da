"""Which BatchNorm normalises which convolution, and which attention layer reads which one's logits: seen in one run."""
from __future__ import annotations

from dataclasses import dataclass, field

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_leaves

from ea_vision.layers import AugmentedConv2d, TokenAttention

CONVOLUTIONS = (nn.Conv1d, nn.Conv2d, nn.Conv3d)
ATTENTION = (AugmentedConv2d, TokenAttention)
_LOOKS = {"__get__", "size", "dim", "is_contiguous", "stride", "numel"}  # at a tensor, without reading its values


class _Uses(TorchFunctionMode):
    """Counts the functions that read a tensor."""

    def __init__(self) -> None:
        super().__init__()
        self.count: dict[int, int] = {}

    def __torch_function__(self, func, types, args=(), kwargs=None):
        if func.__name__ not in _LOOKS:
            for leaf in tree_leaves((args, kwargs)):
                if isinstance(leaf, Tensor):
                    self.count[id(leaf)] = self.count.get(id(leaf), 0) + 1
        return func(*args, **(kwargs or {}))


@dataclass
class Seen:
    """What one run of a network shows.

    norms: (convolution or augmented convolution, BatchNorm), where nothing else reads what the first gives.
    readers: by an attention layer, the attention layers that take its logits.
    """

    norms: list[tuple[nn.Module, nn.Module]] = field(default_factory=list)
    readers: dict[nn.Module, list[nn.Module]] = field(default_factory=dict)


@torch.no_grad()
def watch(model: nn.Module, example: Tensor) -> Seen:
    """Run the model, in evaluation mode, on an example and return what was seen."""
    makers: dict[int, nn.Module] = {}  # by the id of what they gave
    kept: list[Tensor] = []  # alive, so that no id is used twice
    uses = _Uses()

    def keep(module: nn.Module, output: Tensor) -> None:
        kept.append(output)
        makers[id(output)], uses.count[id(output)] = module, 0

    runs: dict[nn.Module, int] = {}
    norms, seen = [], Seen()

    def after(module: nn.Module, inputs: tuple, output) -> None:
        runs[module] = runs.get(module, 0) + 1
        if isinstance(module, ATTENTION):
            if len(inputs) > 1 and id(inputs[1]) in makers:
                seen.readers.setdefault(makers[id(inputs[1])], []).append(module)
            if output[1] is not None:
                keep(module, output[1])
            output = output[0]
        if isinstance(module, nn.modules.batchnorm._BatchNorm):
            if id(inputs[0]) in makers:
                norms.append((makers[id(inputs[0])], module, inputs[0]))
        else:
            keep(module, output)

    kinds = (*CONVOLUTIONS, *ATTENTION, nn.modules.batchnorm._BatchNorm)
    hooks = [module.register_forward_hook(after) for module in model.modules() if isinstance(module, kinds)]
    try:
        with uses:
            outputs = model(example)
    finally:
        for hook in hooks:
            hook.remove()
    returned = {id(leaf) for leaf in tree_leaves(outputs)}
    seen.norms = [(maker, norm) for maker, norm, tensor in norms if runs[maker] == runs[norm] == 1
                  and uses.count[id(tensor)] == 1 and id(tensor) not in returned]
    return seen
