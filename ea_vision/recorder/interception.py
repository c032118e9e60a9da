"""Watch the functions that form attention maps: softmax, scaled_dot_product_attention, nn.MultiheadAttention.

A `TorchFunctionMode` sees every call of a torch function in its thread, whichever module makes it. The functions run
as they are; fused ones, which never form the map, are followed by its computation from queries and keys.
"""

import threading
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode


def _softmax(
    result: Tensor,
    input: Tensor,
    dim: int | None = None,
    *_,
    **__,
) -> Tensor | None:
    """Return the result of a softmax over the last of at least three dimensions."""
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
    """Compute the map of torch.nn.functional.scaled_dot_product_attention, as torch's unfused form does, in float32;
    0 for a query whose keys are all masked."""
    if attn_mask is not None and attn_mask.dtype == torch.bool:
        allowed = attn_mask
        attn_mask = torch.zeros_like(allowed, dtype=torch.float32)
        attn_mask = attn_mask.masked_fill(~allowed, -torch.inf)
    by_torch = torch.ops.aten._scaled_dot_product_attention_math
    narrow = value[..., :1].float()
    with torch._C._DisableAutocast():
        _, attn = by_torch(
            query.float(),
            key.float(),
            narrow,
            attn_mask,
            is_causal=is_causal,
            **how,
        )
    return attn


def _multi_head(
    result: tuple[Tensor, Tensor | None],
    *args: Any,
    **kwargs: Any,
) -> Tensor:
    """Ask nn.MultiheadAttention's function for its maps, in a call of its own.

    That call gives NaN for a query whose keys are all masked; where the output is finite, its row is 0, as in
    scaled_dot_product_attention.
    """
    asked = {**kwargs, "need_weights": True, "average_attn_weights": False, "training": False}
    attn = F.multi_head_attention_forward(*args, **asked)[1]
    if result[0].isfinite().all():
        unseen = attn.isnan().all(-1, keepdim=True)
        attn = attn.masked_fill(unseen, 0.0)
    return attn


# from a function's result and arguments: (..., queries, keys)
FORMS: dict[Callable, Callable[..., Tensor | None]] = {
    torch.softmax: _softmax,
    torch.special.softmax: _softmax,
    Tensor.softmax: _softmax,
    F.softmax: _softmax,
    F.scaled_dot_product_attention: _scaled_dot_product,
    F.multi_head_attention_forward: _multi_head,
}

Take = Callable[[Tensor], None]


class Interception(TorchFunctionMode):
    """Hands each map that a thread forms to its recorders, each to the innermost of the watched layers that run."""

    def __init__(self):
        super().__init__()
        self.recorders: list[list[Take]] = []

    def __torch_function__(self, func, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        result = func(*args, **kwargs)
        if func in FORMS and any(self.recorders):
            with torch.no_grad(), torch._C.DisableTorchFunction():
                attn = FORMS[func](result, *args, **kwargs)
                for running in self.recorders:
                    if running and attn is not None:
                        running[-1](attn)
        return result


_this_thread = threading.local()  # mode: its Interception, while it records


@contextmanager
def intercepted() -> Iterator[list[Take]]:
    """Watch the functions in this thread; yield a recorder's list of what takes the running layers' maps, the innermost
    last.

    The recorders of a thread share one mode, so that none ends with another.

    Raises:
        RuntimeError: it ends before a recorder that began after it, or in another thread. All is in order then.
    """
    if not hasattr(_this_thread, "mode"):
        _this_thread.mode = Interception().__enter__()
    thread = threading.get_ident()
    recorders = _this_thread.mode.recorders
    running: list[Take] = []
    recorders.append(running)
    try:
        yield running
    finally:
        ended_last = recorders[-1] is running
        recorders[:] = [other for other in recorders if other is not running]
        if thread != threading.get_ident():
            raise RuntimeError("a recorder must be closed by the thread that opened it")
        if not recorders:
            _this_thread.mode.__exit__(None, None, None)
            del _this_thread.mode
        if not ended_last:
            raise RuntimeError(
                "recorders must be closed in the reverse order in which they were opened"
            )


_lock = threading.RLock()  # torch numbers hooks without one
_stances: list = []  # of those who asked for eager code: the first one's gives back the stance from before


@contextmanager
def compiled_code_runs_eagerly() -> Iterator[None]:
    """Run compiled code eagerly in all threads, until the last block that asked for it has ended."""
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
    """Hooks, until it closes, that heed only the thread that made this: the other threads' forwards of the same modules
    pass by."""

    def __init__(self):
        super().__init__()
        self.thread = threading.get_ident()

    def add(
        self,
        register: Callable,
        hook: Callable[..., None],
        **how: bool,
    ) -> None:
        """Call hook(module, args, kwargs[, output]) where a module's own method has it called, such as
        `module.register_forward_hook`; how: further keywords of that method. What the hook returns is not heeded."""

        def own(*given: Any) -> None:
            if threading.get_ident() == self.thread:
                hook(*given)

        with _lock:
            self.callback(register(own, with_kwargs=True, **how).remove)

    def after(
        self,
        module: nn.Module,
        method: str,
        hook: Callable[..., None],
    ) -> None:
        """Call hook(_, args, kwargs, results) after each call of a module's method. The method is a module of its own
        meanwhile, so that the hooks of all recorders follow it, in whatever order they end."""

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
