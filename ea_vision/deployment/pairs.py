"""Which BatchNorm can be folded into which convolution, and which attention layer reads which one's logits: seen in one
run, in which every operation tells whose memory it reads."""
from __future__ import annotations

from collections import Counter, defaultdict
from dataclasses import dataclass, field

import torch
import torch.nn.utils.parametrize
from timm.layers import BatchNormAct2d
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from ea_vision.layers import AugmentedConv2d, TokenAttention
from ea_vision.layers.augmented_conv import Projection
from ea_vision.ops import use_implementation

ATTENTION = (AugmentedConv2d, TokenAttention)
CONVOLUTIONS = (nn.Conv1d, nn.Conv2d, nn.Conv3d)
NORMS = (nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d, nn.SyncBatchNorm, BatchNormAct2d)
_WATCHED = (*ATTENTION, *CONVOLUTIONS, nn.modules.batchnorm._BatchNorm)
_EXITS = {"numpy", "tolist", "__array__", "__dlpack__", "data_ptr", "storage"}  # values go where no operation is seen


class _Operations(TorchDispatchMode):
    """Notes of each memory while which of the watched modules it was read, and whether values decide what is run."""

    supports_higher_order_operators = True

    def __init__(self) -> None:
        super().__init__()
        self.running: list[nn.Module] = []
        self.readers: dict[int, set[tuple[nn.Module, ...]]] = defaultdict(set)
        self.values_decide = False

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        tensors = [leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, Tensor)]
        for tensor in tensors:
            self.readers[memory(tensor)].add(tuple(self.running))
        tags = getattr(func, "tags", ())
        by_numbers = func is torch.ops.aten.index.Tensor and all(tensor.dtype != torch.bool for tensor in tensors[1:])
        if torch.Tag.data_dependent_output in tags or torch.Tag.dynamic_output_shape in tags and not by_numbers:
            self.values_decide = True
        return func(*args, **(kwargs or {}))

    def only_within(self, tensor: Tensor, modules: list[nn.Module]) -> bool:
        """Return whether a tensor's memory was read nowhere but while one of these modules ran."""
        return all(set(modules) & set(running) for running in self.readers[memory(tensor)])


class _Exits(TorchFunctionMode):
    """Notes calls of `_EXITS`."""

    def __init__(self, operations: _Operations) -> None:
        super().__init__()
        self.operations = operations

    def __torch_function__(self, func, types, args=(), kwargs=None):
        self.operations.values_decide |= func.__name__ in _EXITS
        return func(*args, **(kwargs or {}))


def memory(tensor: Tensor) -> int:
    """Return a number of the memory that a tensor lies in, as its views do."""
    return tensor.untyped_storage()._cdata if tensor.layout is torch.strided else id(tensor)


@dataclass
class Seen:
    """What one run of a network shows.

    norms: (convolution or augmented convolution, BatchNorm) to fold.
    left: names of BatchNorms that are left alone, and why, where their convolution can be folded in general.
    readers: by an attention layer whose logits nothing else reads, the attention layers that take them.
    """

    norms: list[tuple[nn.Module, nn.Module]] = field(default_factory=list)
    left: dict[str, str] = field(default_factory=dict)
    readers: dict[nn.Module, list[nn.Module]] = field(default_factory=dict)


def watched(module: nn.Module) -> bool:
    """Return whether a module's call does more than its `forward`: hooks (pruning and weight_norm are such), another
    `forward` of this object, parametrisations."""
    return bool(module._forward_hooks or module._forward_pre_hooks or "forward" in module.__dict__
                or nn.utils.parametrize.is_parametrized(module))


def _parts(maker: nn.Module) -> list[nn.Module]:
    """Return the modules whose weights a norm would go into, and the module itself."""
    return [maker] + ([part for part in (maker.conv, maker.proj) if part is not None]
                      if isinstance(maker, AugmentedConv2d) else [])


def _known(maker: nn.Module, norm: nn.Module) -> bool:
    kinds = {nn.Conv1d, nn.Conv2d, nn.Conv3d, AugmentedConv2d, Projection}
    types = {type(part).__mro__[nn.utils.parametrize.is_parametrized(part)] for part in _parts(maker)}
    return types <= kinds and type(norm) in NORMS and norm.running_mean is not None


@torch.no_grad()
def watch(model: nn.Module, images: Tensor) -> Seen:
    """Run a network, in evaluation mode, on images and return what was seen.

    A pair is folded where all is sure: each of the two has one name, runs once and does nothing but its `forward`,
    nothing else reads their weights or what is between them, and no value decides what is run.
    """
    operations, runs, seen = _Operations(), Counter(), Seen()
    made: dict[int, tuple[nn.Module, Tensor]] = {}  # by the id of what they gave; kept, so that no id is used twice
    pairs: list[tuple[nn.Module, nn.Module, Tensor]] = []
    taken: list[tuple[nn.Module, nn.Module, Tensor]] = []

    def before(module: nn.Module, inputs: tuple) -> None:
        operations.running.append(module)

    def give(module: nn.Module, output: Tensor) -> None:
        made[id(output)] = module, output
        operations.readers.pop(memory(output), None)

    def after(module: nn.Module, inputs: tuple, output) -> None:
        operations.running.pop()
        runs[module] += 1
        if isinstance(module, ATTENTION):
            if len(inputs) > 1 and id(inputs[1]) in made:
                taken.append((made[id(inputs[1])][0], module, inputs[1]))
            if output[1] is not None:
                give(module, output[1])
            output = output[0]
        if isinstance(module, nn.modules.batchnorm._BatchNorm) and inputs and id(inputs[0]) in made:
            pairs.append((made[id(inputs[0])][0], module, inputs[0]))
        if isinstance(output, Tensor):
            give(module, output)

    units = [module for module in model.modules() if isinstance(module, _WATCHED)]
    hooks = [module.register_forward_pre_hook(before) for module in units]
    hooks += [module.register_forward_hook(after) for module in units]
    try:
        with use_implementation("reference"), _Exits(operations), operations:
            outputs = model(images)
    finally:
        for hook in hooks:
            hook.remove()
    returned = {memory(leaf) for leaf in tree_leaves(outputs) if isinstance(leaf, Tensor)}

    names = Counter(module for _, module in model.named_modules(remove_duplicate=False))
    for maker, norm, between in pairs:
        if not _known(maker, norm):
            continue
        parts = [*_parts(maker), norm]
        weights = [tensor for part in parts for tensor in (*part.parameters(False), *part.buffers(False))]
        reasons = {
            "values decide what is run": operations.values_decide,
            "runs more than once": runs[maker] > 1 or runs[norm] > 1,
            "hooks, pruning or a parametrisation": any(map(watched, parts)),
            "a second name": any(names[part] > 1 for part in parts),
            "weights that are read elsewhere": not all(
                operations.only_within(tensor, [maker, norm]) for tensor in weights),
            "read past": memory(between) in returned or not operations.only_within(between, [norm])}
        against = [reason for reason, holds in reasons.items() if holds]
        if against:
            seen.left[next(name for name, module in model.named_modules() if module is norm)] = against[0]
        else:
            seen.norms.append((maker, norm))
    for maker, _, logits in taken:
        readers = [reader for other, reader, _ in taken if other is maker]
        if runs[maker] == 1 and memory(logits) not in returned and operations.only_within(logits, readers):
            seen.readers[maker] = readers
    return seen
