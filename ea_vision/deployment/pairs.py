"""What the graph that torch.fx traces shows: which BatchNorm can be folded into which convolution, and which attention
layers read the logits of which."""

import operator
from collections import Counter

from timm.layers import BatchNormAct2d
from timm.models import get_notrace_functions, get_notrace_modules
from torch import fx, nn

from ea_vision.layers import AugmentedConv2d, MapsAttention
from ea_vision.layers.augmented_conv import Projection

ATTENTION = (AugmentedConv2d, MapsAttention)
CONVOLUTIONS = (nn.Conv1d, nn.Conv2d, nn.Conv3d)
NORMS = (nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d, nn.SyncBatchNorm, BatchNormAct2d)
NOTHING = (nn.Identity, nn.Dropout, nn.Dropout1d, nn.Dropout2d, nn.Dropout3d)  # in evaluation mode


class _Tracer(fx.Tracer):
    """Traces down to the layers that count here; reads of weights are nodes."""

    proxy_buffer_attributes = True

    def is_leaf_module(self, module: nn.Module, name: str) -> bool:
        leaves = (*ATTENTION, *CONVOLUTIONS, *NORMS, *NOTHING, *get_notrace_modules())
        return isinstance(module, leaves) or super().is_leaf_module(module, name)


def watched(module: nn.Module) -> bool:
    """Return whether a module's call does more than its `forward`: hooks (pruning and weight_norm are such), another
    `forward` of this object, parametrisations."""
    return bool(
        module._forward_hooks
        or module._forward_pre_hooks
        or "forward" in module.__dict__
        or nn.utils.parametrize.is_parametrized(module)
    )


def parts_of(maker: nn.Module) -> list[nn.Module]:
    """Return the modules whose weights a norm goes into, in the order of their channels."""
    if not isinstance(maker, AugmentedConv2d):
        return [maker]
    return [part for part in (maker.conv, maker.proj) if part is not None]


def _foldable(maker: nn.Module | None, norm: nn.Module) -> bool:
    """Return whether these are a convolution, augmented or not, and a norm of kinds that are known here."""
    if (
        type(norm) not in NORMS
        or norm.running_mean is None
        or not isinstance(maker, (*CONVOLUTIONS, AugmentedConv2d))
    ):
        return False
    classes = [
        type(part).__mro__[nn.utils.parametrize.is_parametrized(part)]
        for part in (maker, *parts_of(maker))
    ]
    return {*classes} <= {*CONVOLUTIONS, AugmentedConv2d, Projection}


def look(
    model: nn.Module,
) -> tuple[list[tuple[nn.Module, nn.Module]], dict[str, str], dict[nn.Module, list[nn.Module]]]:
    """Return what the graph of a network in evaluation mode shows.

    A pair is folded where all is sure: each of the two has one name, runs once and does nothing but its `forward`,
    and nothing else reads their weights or what is between them.

    Returns:
        (convolution or augmented convolution, BatchNorm) to fold; names of BatchNorms behind convolutions that are left
        alone, and why; by an attention layer whose logits nothing else reads, the attention layers that do.
    """
    pairs, left, readers, modules = [], {}, {}, dict(model.named_modules())
    try:
        graph = _Tracer(autowrap_functions=tuple(get_notrace_functions())).trace(model)
    except (
        Exception
    ) as error:  # of any kind: the network's own code meets a tracer where it expects tensors
        if any(isinstance(module, NORMS) for module in modules.values()):
            left["all"] = f"torch.fx cannot trace the network: {str(error).partition(chr(10))[0]}"
        return pairs, left, readers
    calls = {node: modules[node.target] for node in graph.nodes if node.op == "call_module"}
    for node, module in list(calls.items()):
        if type(module) in NOTHING and not watched(module):
            node.replace_all_uses_with(node.args[0])
            graph.erase_node(node)
            del calls[node]

    runs, names = (
        Counter(calls.values()),
        Counter(module for _, module in model.named_modules(remove_duplicate=False)),
    )
    reads = Counter(
        id(tensor)
        for _, tensor in [
            *model.named_parameters(remove_duplicate=False),
            *model.named_buffers(remove_duplicate=False),
        ]
    )
    reads.update(
        {
            id(operator.attrgetter(node.target)(model))
            for node in graph.nodes
            if node.op == "get_attr"
        }
    )
    for node, norm in calls.items():
        between = maker_node = node.args[0] if node.args else None
        if getattr(between, "target", None) is operator.getitem and between.args[1] == 0:
            maker_node = between.args[0]
        maker = calls.get(maker_node)
        if not _foldable(maker, norm) or isinstance(maker, AugmentedConv2d) == (
            maker_node is between
        ):
            continue
        parts = {maker, *parts_of(maker), norm}
        reasons = {
            "runs more than once": runs[maker] > 1 or runs[norm] > 1,
            "hooks, pruning or a parametrisation": any(map(watched, parts)),
            "a second name": any(names[part] > 1 for part in parts),
            "weights that are read elsewhere": any(
                reads[id(tensor)] > 1
                for part in parts
                for tensor in (*part.parameters(False), *part.buffers(False))
            ),
            "read past": len(between.users) > 1
            or sum(_takes(user, 0) for user in maker_node.users) > 1,
        }
        reason = next((reason for reason, holds in reasons.items() if holds), None)
        if reason:
            left[node.target] = reason
        else:
            pairs.append((maker, norm))
    for node, layer in calls.items():
        if isinstance(layer, ATTENTION) and runs[layer] == 1:
            takers = [
                calls.get(reader)
                for user in node.users
                if _takes(user, 1)
                for reader in (user.users if user.target is operator.getitem else [user])
            ]
            if all(isinstance(reader, ATTENTION) for reader in takers):
                readers[layer] = takers
    return pairs, left, readers


def _takes(user: fx.Node, index: int) -> bool:
    """Return whether a node that reads a layer's (output, logits) takes the one of this index, or both."""
    return user.target is not operator.getitem or user.args[1] == index
