"""How maps go from layer to layer, between the blocks and the stages of a network.

What a layer hands on waits in the network's `Relay`, in a store of its own for each thread, which is emptied at the
beginning and at the end of a forward. So hooks, copies and wrappers may replace the tensors on the way. Where parts run
without their network's forward (nn.Sequential, FX), or are run again by gradient checkpointing, the maps are found by
the tensor with which they came, as long as it lives. Blocks that are compiled one by one share one store, so only one
thread at a time may run them.
"""

import copy
import threading
import weakref
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, fx, nn
from torch.utils.weak import WeakTensorKeyDictionary

from ea_vision.layers.recomputing import frozen_in_backward, recomputes
from ea_vision.ops import Size

LOST = (
    "this layer reads the maps of the layer before it, and they are lost: parts that run without "
    "their network's forward must pass on the very tensor that they return, and gradient "
    "checkpointing needs use_reentrant=False"
)


def thread_of_forward() -> int:
    """Return the running thread's id (0 under torch.compile)."""
    return 0 if torch.compiler.is_compiling() else threading.get_ident()


def whole(x: Tensor) -> Tensor:
    """Return the base of a view of all of it, else x: a full backward hook makes such views of a module's input and
    output."""
    base = None if torch.compiler.is_compiling() else x._base
    if base is None or base.shape != x.shape or base.stride() != x.stride():
        return x
    return base


def check_found(evolution: nn.Module | None, prev_logits: Tensor | None) -> None:
    """Raise ValueError if a layer's evolution reads maps that did not arrive."""
    if prev_logits is None and evolution is not None and evolution.reads_previous:
        raise ValueError(LOST)


def is_symbolic(x: Tensor) -> bool:
    """Return whether a tensor stands for one in a graph, so that it cannot be recognised again."""
    return torch.compiler.is_compiling() or isinstance(x, fx.Proxy)


@dataclass(frozen=True)
class Handed:
    """What a layer hands on to the next.

    Attributes:
        number: the layer's place in its chain, counted from 1; 0 is the patch embedding.
        feat_size: (H, W) of the patches; None for sequences and packed images.
        logits: (B, K, Q, N), if the next layer reads them.
        first_values: (B, K, N, D), the values of the first layer, for value residuals.
        with_gradients: whether gradients were on; a reentrant checkpoint computes without.
    """

    number: int = 0
    feat_size: Size | None = None
    logits: Tensor | None = None
    first_values: Tensor | None = None
    with_gradients: bool = True

    def beside(self, x: Tensor) -> "Handed":
        """Return the same on a tensor's device: parts of a network may lie on several."""
        logits, values = (
            None if maps is None else maps.to(x.device) for maps in (self.logits, self.first_values)
        )
        return replace(self, logits=logits, first_values=values)


class Relay:
    """The way of the maps through one network, or through one chain of its layers.

    Attributes:
        depth: the number of layers; the last hands nothing on. 0 if layers are not counted.
        running: the threads in which a forward of the network runs.
        store: what is on its way, by thread.
        sizes: (H, W) of the patches that the first block will take, by thread.
        by_tensor: what came with a tensor.
        network: returns the network, if it is known and alive.
    """

    def __init__(self, depth: int = 0):
        self.depth = depth
        self.running: set[int] = set()
        self.store: dict[int, Handed] = {}
        self.sizes: dict[int, Size | None] = {}
        self.by_tensor = WeakTensorKeyDictionary()
        self.network: Callable[[], nn.Module | None] = lambda: None

    def belong_to(self, network: nn.Module) -> None:
        """Set the network, whose copies get a relay of their own."""
        self.network = weakref.ref(network)

    def __reduce__(self) -> tuple:
        return type(self), (self.depth,)

    def __deepcopy__(self, memo: dict) -> "Relay":
        """Return a relay of its own for a copied network, and the relay itself for a copy of one of its parts."""
        network = self.network()
        if network is not None and id(network) not in memo:
            return self
        relay_class, arguments = self.__reduce__()
        memo[id(self)] = relay = relay_class(*copy.deepcopy(arguments, memo))
        if network is not None:  # known until it is pickled
            relay.belong_to(memo[id(network)])
        return relay

    def watch(self, module: nn.Module) -> None:
        """Empty the store at the beginning and at the end of the forward of a module that runs the layers."""
        module.register_forward_pre_hook(self.begin)
        module.register_forward_hook(self.end, always_call=True)

    def begin(self, *_: Any) -> None:
        """Begin a forward of the network in this thread."""
        thread = self._empty()
        if not torch.compiler.is_compiling():
            self.running.add(thread)

    def end(self, *_: Any) -> None:
        """End a forward of the network in this thread."""
        thread = self._empty()
        if not torch.compiler.is_compiling():
            self.running.discard(thread)
            self.sizes.pop(thread, None)

    def _empty(self) -> int:
        """Empty this thread's store, and that of blocks that are compiled one by one; return the thread."""
        thread = thread_of_forward()
        for key in (thread, 0):
            self.store.pop(key, None)
        return thread

    def note_size(self, feat_size: Size | None) -> None:
        """Note the patches' (H, W) for the first block."""
        self.sizes[thread_of_forward()] = feat_size

    def find(self, x: Tensor) -> Handed:
        """Return what was handed on last in this forward. Outside of a forward and in a recomputation, return what came
        with a part's input.

        A tensor that enters a part in two checkpointed forwards before their backward passes has the maps of the later.

        Raises:
            ValueError: gradients would not reach it, since a reentrant checkpoint made it.
        """
        thread = thread_of_forward()
        waiting = self.store.pop(thread, None)
        start = Handed(feat_size=self.sizes.pop(thread, None))
        if is_symbolic(x):
            return waiting or start
        tensor = whole(x)
        if thread in self.running and not recomputes():
            handed = waiting or start
        else:
            handed = self.by_tensor.get(tensor) or start
        if not handed.with_gradients and x.requires_grad and not x.is_leaf:
            raise ValueError(
                "maps must have gradients where the tensors beside them have: gradient checkpointing "
                "with use_reentrant=False required"
            )
        if torch.is_grad_enabled():
            self.by_tensor[tensor] = handed  # for a recomputation of the part
        return handed.beside(x)

    def hand_on(self, y: Tensor, handed: Handed) -> None:
        """Hand on what goes with a part's output, unless it is the last part's."""
        is_last = 0 < self.depth <= handed.number
        if is_last or (handed.logits is None and handed.first_values is None):
            return
        thread = thread_of_forward()
        if is_symbolic(y) or (thread in self.running and not recomputes()):
            self.store[thread] = handed
        else:
            self.by_tensor[whole(y)] = handed


class HandingBlock:
    """A mixin for the class of a transformer's block: it runs the block's own forward on tokens (B, T, C), which gets
    what the block before has handed on.

    Attributes:
        relays: one for each chain with a layer in the block.
        token_conv: runs before the block, or None.
    """

    def grid(self, handed: Handed, tokens: Tensor) -> Size:
        """Return the patches' (H, W) for `token_conv`."""
        if handed.feat_size is None:
            raise ValueError(
                "token_conv needs the patches' (height, width): images (B, C, H, W) required"
            )
        return handed.feat_size

    def forward(self, tokens: Tensor, *args: Any, **kwargs: Any) -> Any:
        thread = thread_of_forward()
        x = tokens
        try:
            for relay in self.relays:
                relay.store[thread] = relay.find(tokens)
            if self.token_conv is not None:
                x = self.token_conv(x, self.grid(self.relays[0].store[thread], x))
            with frozen_in_backward(self):
                result = super().forward(x, *args, **kwargs)
        finally:
            left = [relay.store.pop(thread, None) for relay in self.relays]
        y = result[0] if isinstance(result, tuple) else result
        for relay, handed in zip(self.relays, left, strict=True):
            if handed is not None:
                relay.hand_on(y, handed)
        return result


def remove_hooks(module: nn.Module) -> None:
    """Remove a module's hooks that belong to a `Relay`."""
    for hooks in (module._forward_hooks, module._forward_pre_hooks):
        for key, hook in list(hooks.items()):
            if isinstance(getattr(hook, "__self__", None), Relay):
                del hooks[key]
                module._forward_pre_hooks_with_kwargs.pop(key, None)
                module._forward_hooks_always_called.pop(key, None)
