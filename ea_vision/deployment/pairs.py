"""Read the graph of torch.fx: which BatchNorms can be folded into which convolutions, and which attention layers read
the logits of which others."""

import operator
from collections import Counter
from dataclasses import dataclass, field

from timm.layers import BatchNormAct2d
from timm.models import get_notrace_functions, get_notrace_modules
from torch import fx, nn

from ea_vision.layers import AugmentedConv2d, MapsAttention
from ea_vision.layers.augmented_conv import Projection
from ea_vision.layers.evolution import is_altered

ATTENTION = (AugmentedConv2d, MapsAttention)
CONVOLUTIONS = (nn.Conv1d, nn.Conv2d, nn.Conv3d)
NORMS = (nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d, nn.SyncBatchNorm, BatchNormAct2d)
KNOWN = (*CONVOLUTIONS, AugmentedConv2d, Projection)  # layers before a norm, and their parts
# modules that do nothing in evaluation mode
NOTHING = (nn.Identity, nn.Dropout, nn.Dropout1d, nn.Dropout2d, nn.Dropout3d)


class _Tracer(fx.Tracer):
    """Trace down to the layers that matter here; reads of weights are nodes."""

    proxy_buffer_attributes = True

    def is_leaf_module(self, module: nn.Module, name: str) -> bool:
        leaves = (*ATTENTION, *CONVOLUTIONS, *NORMS, *NOTHING, *get_notrace_modules())
        return isinstance(module, leaves) or super().is_leaf_module(module, name)


def watched(module: nn.Module) -> bool:
    """Return whether a call of a module does more than its class's `forward`: by hooks (such as those of pruning and
    weight_norm), a `forward` of its own, or parametrisations."""
    return is_altered(module) or nn.utils.parametrize.is_parametrized(module)


def parts_of(maker: nn.Module) -> list[nn.Module]:
    """Return the modules into whose weights a norm is folded, in the order of their channels."""
    if not isinstance(maker, AugmentedConv2d):
        return [maker]
    return [part for part in (maker.conv, maker.proj) if part is not None]


def _foldable(maker: nn.Module | None, norm: nn.Module) -> bool:
    """Return whether these are a convolution, augmented or not, and a norm, both of known classes."""
    if type(norm) not in NORMS or norm.running_mean is None:
        return False
    if not isinstance(maker, (*CONVOLUTIONS, AugmentedConv2d)):
        return False
    for part in (maker, *parts_of(maker)):
        kind = nn.utils.parametrize.type_before_parametrizations(part)
        if kind not in KNOWN:
            return False
    return True


@dataclass
class Findings:
    """Facts from the graph of a network in evaluation mode.

    pairs: (convolution or augmented convolution, BatchNorm) to fold. left: names of BatchNorms after convolutions that
    are not folded, and why. readers: for an attention layer whose logits are read only by attention layers, those
    layers.
    """

    pairs: list[tuple[nn.Module, nn.Module]] = field(default_factory=list)
    left: dict[str, str] = field(default_factory=dict)
    readers: dict[nn.Module, list[nn.Module]] = field(default_factory=dict)


class _Graph:
    """The graph of a network, without modules that do nothing in evaluation mode.

    calls: the module that a node runs. runs: how often each module runs. names: how many names each has. reads: by the
    id of a weight or buffer, the number of its names, and one more if a node of the graph reads it.
    """

    def __init__(self, model: nn.Module):
        tracer = _Tracer(autowrap_functions=tuple(get_notrace_functions()))
        graph = tracer.trace(model)
        modules = dict(model.named_modules())
        self.calls: dict[fx.Node, nn.Module] = {}
        for node in list(graph.nodes):
            if node.op != "call_module":
                continue
            module = modules[node.target]
            if type(module) in NOTHING and not watched(module):
                node.replace_all_uses_with(node.args[0])
                graph.erase_node(node)
            else:
                self.calls[node] = module
        self.runs = Counter(self.calls.values())
        named = model.named_modules(remove_duplicate=False)
        self.names = Counter(module for _, module in named)
        tensors = [
            *model.named_parameters(remove_duplicate=False),
            *model.named_buffers(remove_duplicate=False),
        ]
        self.reads = Counter(id(tensor) for _, tensor in tensors)
        read = {node.target for node in graph.nodes if node.op == "get_attr"}
        self.reads.update({id(operator.attrgetter(name)(model)) for name in read})

    def _is_augmented(self, node: object) -> bool:
        return isinstance(self.calls.get(node), AugmentedConv2d)

    def maker_of(self, norm: fx.Node) -> fx.Node | None:
        """Return the node whose output a norm takes; from an augmented convolution it takes (output, logits)[0]."""
        between = norm.args[0] if norm.args else None
        if _is_item(between, 0):
            maker = between.args[0]
            return maker if self._is_augmented(maker) else None
        return None if self._is_augmented(between) else between

    def reason_against(self, maker_node: fx.Node, norm_node: fx.Node) -> str | None:
        """Return why a norm cannot be folded into the layer before it, or None."""
        maker = self.calls[maker_node]
        norm = self.calls[norm_node]
        parts = {maker, norm, *parts_of(maker)}
        if self.runs[maker] > 1 or self.runs[norm] > 1:
            return "runs more than once"
        for part in parts:
            if watched(part):
                return "hooks, pruning or a parametrisation"
        for part in parts:
            if self.names[part] > 1:
                return "a second name"
        for part in parts:
            for tensor in (*part.parameters(recurse=False), *part.buffers(recurse=False)):
                if self.reads[id(tensor)] > 1:
                    return "weights that are read elsewhere"
        takers = [user for user in maker_node.users if _takes(user, 0)]
        between = norm_node.args[0]
        if len(takers) > 1 or len(between.users) > 1:
            return "an input that others read"
        return None

    def readers_of(self, node: fx.Node) -> list[nn.Module | None]:
        """Return the layers that read the logits of an attention layer; None for other readers."""
        readers = []
        for user in node.users:
            if not _takes(user, 1):
                continue
            if user.target is operator.getitem:
                readers += user.users
            else:
                readers.append(user)
        return [self.calls.get(reader) for reader in readers]


def look(model: nn.Module) -> Findings:
    """Return facts from the graph of a network in evaluation mode.

    A pair is folded only if each of the two has one name, runs once and does nothing but its `forward`, and nothing
    else reads their weights or the tensor between them.
    """
    findings = Findings()
    try:
        graph = _Graph(model)
    # any error is possible: the network's own code gets a tracer where it expects tensors
    except Exception as error:
        if any(isinstance(module, NORMS) for module in model.modules()):
            first_line = str(error).partition("\n")[0]
            findings.left["all"] = f"torch.fx cannot trace the network: {first_line}"
        return findings
    for node, module in graph.calls.items():
        if isinstance(module, ATTENTION) and graph.runs[module] == 1:
            readers = graph.readers_of(node)
            if all(isinstance(reader, ATTENTION) for reader in readers):
                findings.readers[module] = readers
        maker_node = graph.maker_of(node)
        maker = graph.calls.get(maker_node)
        if _foldable(maker, module):
            reason = graph.reason_against(maker_node, node)
            if reason is None:
                findings.pairs.append((maker, module))
            else:
                findings.left[node.target] = reason
    return findings


def _is_item(node: object, index: int) -> bool:
    """Return whether a node takes the item at this index of another node's output."""
    return getattr(node, "target", None) is operator.getitem and node.args[1] == index


def _takes(user: fx.Node, index: int) -> bool:
    """Return whether a node that reads a layer's (output, logits) takes the item at this index, or both."""
    return user.target is not operator.getitem or user.args[1] == index
