"""Watching the functions that form attention maps: softmax, scaled_dot_product_attention, nn.MultiheadAttention.

A `TorchFunctionMode` sees every call of a torch function in its thread, whichever module makes it. The functions run
as they are; fused ones, which never form the map, are followed by its computation from queries and keys.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.overrides import TorchFunctionMode

Formed = tuple[Tensor, Tensor | None]  # probabilities (..., queries, keys), and logits where they are known
WRITES_ITS_HEADS = ("num_heads", "num_attention_heads", "n_heads", "nhead", "heads")


def _softmax(result: Tensor, input: Tensor, dim: int | None = None, *_, **__) -> Formed | None:
    """A softmax over the last of at least three dimensions."""
    return (result, input) if input.ndim > 2 and dim in (-1, input.ndim - 1) else None


def _scaled_dot_product(_, query: Tensor, key: Tensor, value: Tensor, attn_mask: Tensor | None = None,
                        dropout_p: float = 0.0, is_causal: bool = False, scale: float | None = None,
                        enable_gqa: bool = False) -> Formed:
    """See torch.nn.functional.scaled_dot_product_attention, whose documentation has the same lines."""
    with torch.autocast(query.device.type, enabled=False):
        if enable_gqa:
            key = key.repeat_interleave(query.shape[-3] // key.shape[-3], -3)
        logits = query.float() @ key.float().transpose(-2, -1)
        logits *= query.shape[-1] ** -0.5 if scale is None else scale
        if is_causal:
            future = torch.ones(logits.shape[-2:], dtype=torch.bool, device=logits.device).triu(1)
            logits = logits.masked_fill(future, -torch.inf)
        if attn_mask is not None:
            logits = logits.masked_fill(~attn_mask, -torch.inf) if attn_mask.dtype == torch.bool else logits + attn_mask
        return logits.softmax(-1), logits


_MULTI_HEAD = inspect.signature(F.multi_head_attention_forward)


def _multi_head(_, *args: Any, **kwargs: Any) -> Formed:
    """nn.MultiheadAttention's function gives its maps when asked: it is asked in a call of its own."""
    bound = _MULTI_HEAD.bind(*args, **kwargs)
    bound.arguments.update(need_weights=True, average_attn_weights=False, training=False)
    return F.multi_head_attention_forward(*bound.args, **bound.kwargs)[1], None


FORMS: dict[Callable, Callable[..., Formed | None]] = {
    torch.softmax: _softmax, Tensor.softmax: _softmax, F.softmax: _softmax, torch.special.softmax: _softmax,
    F.scaled_dot_product_attention: _scaled_dot_product,
    F.multi_head_attention_forward: _multi_head,
}


class Interception(TorchFunctionMode):
    """Hands what is formed while a watched layer runs to the innermost of them, the last of `running`."""

    def __init__(self) -> None:
        super().__init__()
        self.running: list[Callable[[Tensor, Tensor | None], None]] = []

    def __torch_function__(self, func, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        result = func(*args, **kwargs)
        if self.running and func in FORMS:
            with torch.no_grad(), torch._C.DisableTorchFunction():  # other recorders see no more than the network
                formed = FORMS[func](result, *args, **kwargs)
                if formed is not None:
                    self.running[-1](*formed)
        return result


def heads_of(module: torch.nn.Module) -> int | None:
    """Return the number of heads that a module says it has."""
    values = (getattr(module, name, None) for name in WRITES_ITS_HEADS)
    return next((value for value in values if isinstance(value, int) and value > 0), None)


def calls_attention(module: torch.nn.Module) -> bool:
    """Return whether a module's forward names scaled_dot_product_attention."""
    code = getattr(type(module).forward, "__code__", None)
    return code is not None and "scaled_dot_product_attention" in code.co_names
