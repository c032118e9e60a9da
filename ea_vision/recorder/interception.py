"""Watch the functions that form attention maps: softmax, scaled_dot_product_attention, nn.MultiheadAttention.

A `TorchFunctionMode` sees every call of a torch function in its thread, from any module. The functions run unchanged.
After a fused one, which never forms the map, the map is computed from queries and keys.
"""

import threading
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode


def _softmax(result: Tensor, input: Tensor, dim: int | None = None, *_, **__) -> Tensor | None:
    """Return the result of a softmax over the last of at least three dimensions; None for other softmaxes."""
    over_last = dim in (-1, input.ndim - 1)
    return result if over_last and input.ndim > 2 else None


def _scaled_dot_product(
    _,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    **how: Any,
) -> Tensor:
    """Compute the map of torch.nn.functional.scaled_dot_product_attention in float32, by torch's unfused form. A query
    whose keys are all masked has a row of 0."""
    if attn_mask is not None and attn_mask.dtype == torch.bool:
        allowed = attn_mask
        attn_mask = torch.zeros_like(allowed, dtype=torch.float32)
        attn_mask = attn_mask.masked_fill(~allowed, -torch.inf)
    unfused = torch.ops.aten._scaled_dot_product_attention_math
    narrow = value[..., :1].float()
    with torch._C._DisableAutocast():
        _, attn = unfused(query.float(), key.float(), narrow, attn_mask, is_causal=is_causal, **how)
    return attn


def _multi_head(result: tuple[Tensor, Tensor | None], *args: Any, **kwargs: Any) -> Tensor:
    """Call nn.MultiheadAttention's function once more, for its maps.

    This call returns NaN for a query whose keys are all masked. If the first call's output was finite, the row becomes
    0, as in scaled_dot_product_attention.
    """
    options = {**kwargs, "need_weights": True, "average_attn_weights": False, "training": False}
    attn = F.multi_head_attention_forward(*args, **options)[1]
    if result[0].isfinite().all():
        unseen = attn.isnan().all(-1, keepdim=True)
        attn = attn.masked_fill(unseen, 0.0)
    return attn


# from a function's result and arguments to its map (..., queries, keys), or None
FORMS: dict[Callable, Callable[..., Tensor | None]] = {
    torch.softmax: _softmax,
    torch.special.softmax: _softmax,
    Tensor.softmax: _softmax,
    F.softmax: _softmax,
    F.scaled_dot_product_attention: _scaled_dot_product,
    F.multi_head_attention_forward: _multi_head,
}

# functions that join tokens or change their order
MOVES = {torch.cat, torch.concat, torch.concatenate, torch.gather, Tensor.gather}

Take = Callable[[Tensor], None]


@dataclass(eq=False)
class Recorder:
    """What a recorder wants to know of the calls of its thread.

    Attributes:
        running: the functions that take the maps of the layers that run, the innermost last.
        note_move: called with function, result, arguments and keywords after each of MOVES.
    """

    running: list[Take] = field(default_factory=list)
    note_move: Callable[[Callable, Tensor, tuple, dict], None] | None = None


class Interception(TorchFunctionMode):
    """Pass each map that a thread forms to all its recorders: in each to the innermost watched layer that runs."""

    def __init__(self):
        super().__init__()
        self.recorders: list[Recorder] = []

    def __torch_function__(self, func, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        result = func(*args, **kwargs)
        if func in FORMS and any(recorder.running for recorder in self.recorders):
            with torch.no_grad(), torch._C.DisableTorchFunction():
                attn = FORMS[func](result, *args, **kwargs)
                for recorder in self.recorders:
                    if recorder.running and attn is not None:
                        recorder.running[-1](attn)
        elif func in MOVES:
            with torch.no_grad(), torch._C.DisableTorchFunction():
                for recorder in self.recorders:
                    if recorder.note_move is not None:
                        recorder.note_move(func, result, args, kwargs)
        return result


_this_thread = threading.local()  # mode: its Interception, while it records


@contextmanager
def intercepted() -> Iterator[Recorder]:
    """Watch the functions in this thread; yield the Recorder that is told of them.

    The recorders of a thread share one mode, so that closing one does not end another.

    Raises:
        RuntimeError: it is closed before a recorder that was opened after it, or in another thread. It has ended then.
    """
    if not hasattr(_this_thread, "mode"):
        _this_thread.mode = Interception().__enter__()
    thread = threading.get_ident()
    recorders = _this_thread.mode.recorders
    recorder = Recorder()
    recorders.append(recorder)
    try:
        yield recorder
    finally:
        ended_last = recorders[-1] is recorder
        recorders.remove(recorder)
        if thread != threading.get_ident():
            raise RuntimeError("a recorder must be closed by the thread that opened it")
        if not recorders:
            _this_thread.mode.__exit__(None, None, None)
            del _this_thread.mode
        if not ended_last:
            raise RuntimeError(
                "recorders must be closed in the reverse order in which they were opened"
            )


_lock = threading.RLock()  # torch's numbering of hooks is not thread-safe
_stances: list = []  # the first block's stance, once per open block; closing it restores the stance from before


@contextmanager
def compiled_code_runs_eagerly() -> Iterator[None]:
    """Run compiled code eagerly in all threads, until the last of these blocks has ended."""
    with _lock:
        _stances.append(_stances[0] if _stances else torch.compiler.set_stance("force_eager"))
    try:
        yield
    finally:
        with _lock:
            stance = _stances.pop()
            if not _stances:
                stance.__exit__(None, None, None)


class Hooks(ExitStack):
    """Hooks that are removed when it closes. They run only in the thread that created it: forwards of the same modules
    in other threads are ignored."""

    def __init__(self):
        super().__init__()
        self.thread = threading.get_ident()

    def add(self, register: Callable, hook: Callable[..., None], **how: bool) -> None:
        """Register hook(module, args, kwargs[, output]) by a method such as `module.register_forward_hook`; how: more
        keywords of that method. The hook's return value is ignored."""

        def in_this_thread(*args: Any) -> None:
            if threading.get_ident() == self.thread:
                hook(*args)

        with _lock:
            self.callback(register(in_this_thread, with_kwargs=True, **how).remove)

    def after(self, module: nn.Module, method: str, hook: Callable[..., None]) -> None:
        """Call hook(_, args, kwargs, results) after each call of a module's method. Meanwhile a module replaces the
        method, so that several recorders can hook it and end in any order."""

        def end() -> None:
            with _lock:
                if method in vars(module) and not vars(module)[method]._forward_hooks:
                    delattr(module, method)

        with _lock:
            if method not in vars(module):
                followed = nn.Module()
                followed.forward = getattr(module, method)
                vars(module)[method] = followed  # not among the network's modules
            self.callback(end)
            self.add(vars(module)[method].register_forward_hook, hook)
