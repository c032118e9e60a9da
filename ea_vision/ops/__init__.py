"""Evolving attention behind one function: a readable reference, and faster implementations chosen by what they can run.

    out, logits = evolving_attention(q, k, v, height_rel, width_rel, prev_logits, weight, bias, alpha=0.5, beta=1.0,
                                     feat_size=(14, 14))

| implementation | runs                                             | never has in memory            |
| -------------- | ------------------------------------------------ | ------------------------------ |
| cpu            | on a CPU, a C kernel compiled on first use       | anything N x N but the logits  |
| triton         | chained attention (EA, PA) on CUDA               | anything N x N but the logits  |
| sdpa           | unchained attention (AA) on CUDA                 | anything N x N                 |
| flex           | windows of pixels and heads on CUDA              | anything N x N                 |
| gathered       | windows of pixels and heads                      | anything N x N                 |
| reference      | everywhere, readable torch                       |                                |

The choice can be forced: by argument, by `with use_implementation("reference")`, or by the environment variable
EA_VISION_IMPLEMENTATION, in this order. Why an implementation was taken is logged once, at level INFO.

Shape letters: B batch, K heads, H x W the map, N = H*W its pixels (row-major), D width of a query's head, E a value's.
"""

import logging
import os
from collections.abc import Iterator
from contextlib import contextmanager

import torch
import torch.nn.functional as F
from torch import Tensor

from ea_vision.ops import cpu, flex, gathered, reference, sdpa, triton_attention
from ea_vision.ops.rel_pos import fit_rel_table, reach

__all__ = ["IMPLEMENTATIONS", "check_windows", "evolving_attention", "halve", "use_implementation"]

IMPLEMENTATIONS = ("cpu", "triton", "sdpa", "flex", "gathered", "reference")

_logger = logging.getLogger(__name__)
_logged: set[tuple[str, ...]] = set()
_forced: list[str] = []
_BY_DEVICE = {"cpu": ("cpu",), "cuda": ("sdpa", "triton")}
_WINDOWS_BY_DEVICE = {"cpu": ("gathered",), "cuda": ("flex", "gathered")}


def _check_name(name: str, source: str) -> str:
    if name not in IMPLEMENTATIONS:
        raise ValueError(f"{source} must be one of {', '.join(IMPLEMENTATIONS)}, got {name!r}")
    return name


if os.environ.get("EA_VISION_IMPLEMENTATION"):
    _forced.append(_check_name(os.environ["EA_VISION_IMPLEMENTATION"], "EA_VISION_IMPLEMENTATION"))


@contextmanager
def use_implementation(name: str) -> Iterator[None]:
    """Force an implementation inside the `with` block, in the whole process.

    Raises:
        ValueError: no implementation of this name; inside the block, one that cannot run what it is given.
    """
    _forced.append(_check_name(name, "implementation"))
    try:
        yield
    finally:
        _forced.pop()


def _reason_against(
        name: str, q: Tensor, k: Tensor, v: Tensor, prev_logits: Tensor | None, weight: Tensor | None,
        feat_size: tuple[int, int] | None, dropout_p: float, need_logits: bool, num_prefix_tokens: int,
        local: bool,
) -> str | None:
    if name == "reference":
        return None
    if local and name not in ("flex", "gathered"):
        return "it has no windows"
    if dropout_p > 0 and name not in ("cpu", "sdpa", "triton"):
        return "it has no dropout on the attention probabilities"
    if name not in ("cpu", "sdpa", "triton") and num_prefix_tokens:
        return f"it convolves whole maps, and {num_prefix_tokens} prefix tokens are to stay out of the convolution"
    if name == "cpu":
        return cpu.reason_against(q, k, v, weight)
    if name == "flex":
        return flex.reason_against(q, k, v, prev_logits, feat_size, need_logits, local)
    if name == "gathered":
        return gathered.reason_against(local, prev_logits, need_logits)
    if name == "triton":
        return triton_attention.reason_against(q, k, v, prev_logits, weight, feat_size)
    return sdpa.reason_against(prev_logits, need_logits)


def _exporting() -> bool:
    """An exported program must run where ea_vision is not."""
    # torch.compile answers True to is_exporting
    return torch.jit.is_tracing() or torch.compiler.is_exporting() and not torch.compiler.is_dynamo_compiling()


def _as_number(gate: float | Tensor) -> float | Tensor:
    """The number, for which kernels have shortcuts, of a gate on the CPU that has one and needs no gradient."""
    if not isinstance(gate, Tensor):
        return float(gate)
    learns = torch.is_grad_enabled() and gate.requires_grad
    if learns or gate.numel() != 1 or gate.device.type != "cpu" or torch.compiler.is_compiling() or _exporting():
        return gate
    return gate.item()


def _gates_by_head(alpha: float | Tensor, beta: float | Tensor, num_heads: int) -> Tensor | None:
    """alpha and beta, each a number or a tensor () or (K), as (2, K) in float32; None where both are numbers.

    Raises:
        ValueError: another shape.
    """
    tensors = [gate for gate in (alpha, beta) if isinstance(gate, Tensor)]
    if not tensors:
        return None
    for gate in tensors:
        if gate.numel() not in (1, num_heads):
            raise ValueError(f"a gate must have 1 or num_heads={num_heads} numbers, got shape {list(gate.shape)}")
    return torch.stack([gate.float().reshape(-1).expand(num_heads) if isinstance(gate, Tensor) else
                        tensors[0].new_full((num_heads,), gate, dtype=torch.float32) for gate in (alpha, beta)])


def _choose(q: Tensor, *rest) -> str:
    """The first implementation of the device that can run this."""
    if _exporting():
        return "reference"
    against = []
    local = rest[-1]
    names = _WINDOWS_BY_DEVICE.get(q.device.type, ()) if local else _BY_DEVICE.get(q.device.type, ("triton",))
    for name in names:
        reason = _reason_against(name, q, *rest)
        if reason is None:
            break
        against.append(f"not {name}: {reason}")
    else:
        name = "reference"
    _log_choice(name, tuple(against), q.device.type, q.dtype)
    return name


@torch.compiler.assume_constant_result  # torch.compile calls it as it traces
def _log_choice(name: str, against: tuple[str, ...], device: str, dtype: torch.dtype) -> None:
    if (name, *against) not in _logged:
        _logged.add((name, *against))
        _logger.info("evolving attention on %s in %s by %r%s", device, dtype, name,
                     "".join(f"; {line}" for line in against))


def check_windows(
        window: int | tuple[int, int] | None, head_window: int, head_border: str, num_heads: int,
) -> tuple[int, int] | None:
    """The window's (height, width), or None.

    Raises:
        ValueError: a window that is not odd, another head_border, or more neighbours than a ring of heads has.
    """
    sides = (window, window) if isinstance(window, int) else window
    if sides is not None and (len(sides) != 2 or any(not isinstance(n, int) or n < 1 or n % 2 == 0 for n in sides)):
        raise ValueError(f"window must be an odd number of pixels, two of them (height, width), or None, got {window}")
    if not isinstance(head_window, int) or head_window < 1 or head_window % 2 == 0:
        raise ValueError(f"head_window must be an odd number of heads, got {head_window}")
    if head_border not in ("clip", "wrap"):
        raise ValueError(f"head_border must be 'clip' or 'wrap', got {head_border!r}")
    if head_border == "wrap" and head_window > num_heads:
        raise ValueError(f"head_window must be at most num_heads={num_heads} where heads wrap around, "
                         f"got {head_window}")
    return None if sides is None else (sides[0], sides[1])


def evolving_attention(
        q: Tensor,
        k: Tensor,
        v: Tensor,
        height_rel: Tensor | None = None,
        width_rel: Tensor | None = None,
        prev_logits: Tensor | None = None,
        weight: Tensor | None = None,
        bias: Tensor | None = None,
        alpha: float | Tensor = 0.5,
        beta: float | Tensor = 1.0,
        *,
        feat_size: tuple[int, int] | None = None,
        predict: bool = False,
        num_prefix_tokens: int = 0,
        scale: float | None = None,
        dropout_p: float = 0.0,
        need_logits: bool = True,
        window: int | tuple[int, int] | None = None,
        head_window: int = 1,
        head_border: str = "clip",
        implementation: str | None = None,
) -> tuple[Tensor, Tensor | None]:
    """Attention over the pixels of a map, or over any N tokens, whose logits evolve from the previous layer's.

        own = scale * (q_i . k_j + q_i . height_rel[row(j) - row(i)] + q_i . width_rel[col(j) - col(i)])
        AA            logits = own                                                                (prev_logits None)
        EA            m = alpha * prev + (1 - alpha) * own;  logits = beta * relu(conv(m)) + (1 - beta) * m
        PA (predict)  logits = alpha * relu(conv(prev)) + (1 - alpha) * own
        out = softmax_j(logits) @ v

    AA paper, equation 4; EA paper, equations 3 and 4. Without `weight`, m and prev take the place of relu(conv(.)).

    With windows (CSAN paper, over an image's two axes) a query of head h sees the keys within h/2 rows and w/2 columns
    of its own pixel and of the heads within head_window/2 of its own, all under one softmax:

        out_i = sum_s sum_j softmax_{s,j}(logits[h, i, s, j]) v_j of head s

    What lies outside the map does not take part (the paper pads with zeros, its authors' code excludes). An evolution
    mixes the whole maps; the window comes after it.

    Args:
        q, k: (B, K, N, D), q not scaled.
        v: (B, K, N, E).
        height_rel: (2H-1, D), row 0 = offset -(H-1), or None for no position terms; other odd lengths are fitted to H.
            In a window: the h rows from offset -(h-1)/2 on, where h < 2H-1.
        width_rel: (2W-1, D), likewise.
        prev_logits: (B, K, N, N), or None for attention that does not evolve.
        weight, bias: (K, K, kernel, kernel) and (K) of the convolution over the maps, kernel odd.
        alpha: share of the previous layer's maps; where it learns a tensor, () or (K) by heads.
        beta: EA: share of the convolved maps, likewise.
        feat_size: (H, W); needed with tables only.
        predict: PA in place of EA.
        num_prefix_tokens: how many tokens come before those of the map; their rows and columns stay out of the
            convolution: there m and prev take the place of relu(conv(.)).
        scale: of q; D**-0.5 unless given.
        dropout_p: dropout on the attention probabilities, a probability.
        need_logits: whether the logits are wanted; where not, they need no memory.
        window: odd (height, width) in pixels, one number for both, or None for the whole map.
        head_window: odd number of neighbouring heads, the own one in their middle; not together with prev_logits.
        head_border: "clip": the first and last heads have fewer neighbours; "wrap": the heads are a ring.
        implementation: one of `IMPLEMENTATIONS`; chosen unless given.

    Returns:
        out (B, K, N, E) and the logits (B, K, N, N) that entered the softmax, before a window; or None where not
        needed, and with head_window > 1.

    Raises:
        ValueError: shapes that do not fit, or an implementation that cannot run this.
    """
    B, K, N, D = q.shape
    if feat_size is None:
        if height_rel is not None:
            raise ValueError(f"feat_size (H, W) with H*W = {N} required for the position tables, got None")
        feat_size = (1, N)
    H, W = feat_size
    if H * W != N or k.shape != q.shape or v.shape[:3] != q.shape[:3]:
        raise ValueError(f"q and k (B, K, N, D) and v (B, K, N, E) with N = {H}*{W} required, "
                         f"got {list(q.shape)}, {list(k.shape)}, {list(v.shape)}")
    if prev_logits is not None:
        reference.check_prev_logits(prev_logits, B, K, N)
    if not 0.0 <= dropout_p <= 1.0:
        raise ValueError(f"dropout_p must be a probability, from 0 to 1, got {dropout_p}")
    window = check_windows(window, head_window, head_border, K)
    local = window is not None or head_window > 1
    if head_window > 1 and prev_logits is not None:
        raise ValueError(f"head_window must be 1 where maps evolve, got {head_window}")
    if height_rel is not None:
        high, wide = (H, W) if window is None else (reach(H, window[0]), reach(W, window[1]))
        height_rel, width_rel = fit_rel_table(height_rel, high), fit_rel_table(width_rel, wide)
    scale = D ** -0.5 if scale is None else scale
    alpha, beta = (_as_number(gate) if prev_logits is not None else 1.0 for gate in (alpha, beta))
    if prev_logits is None or weight is None:
        num_prefix_tokens = 0
    need_logits = need_logits and head_window == 1
    needs = (k, v, prev_logits, weight, None if height_rel is None else feat_size, dropout_p, need_logits,
             num_prefix_tokens, local)
    forced = implementation if implementation is not None else _forced[-1] if _forced else None
    if forced is None:
        chosen = _choose(q, *needs)
    else:
        chosen = _check_name(forced, "implementation")
        reason = _reason_against(chosen, q, *needs)
        if reason is not None:
            raise ValueError(f"implementation {chosen!r} cannot run this: {reason}")

    if chosen == "sdpa":
        return sdpa.attend(q, k, v, height_rel, width_rel, scale=scale, feat_size=feat_size, dropout_p=dropout_p), None
    windows = {"window": window, "head_window": head_window, "wrap": head_border == "wrap"}
    if chosen in ("flex", "gathered"):
        attend = flex.attend if chosen == "flex" else gathered.attend
        return attend(q, k, v, height_rel, width_rel, scale=scale, feat_size=feat_size, **windows), None
    arguments = (q, k, v, height_rel, width_rel, prev_logits, weight, bias, alpha, beta)
    options = {"predict": predict, "scale": scale, "feat_size": feat_size, "need_logits": need_logits}
    if chosen == "reference":
        return reference.attend(*arguments, dropout_p=dropout_p, num_prefix_tokens=num_prefix_tokens, **options,
                                **windows)
    gates = _gates_by_head(alpha, beta, K)
    if gates is not None:
        arguments = (*arguments[:-2], 1.0, 1.0)
    # drawn here: what is recomputed for backward under torch's checkpointing draws the same again
    seed = torch.randint(2 ** 62, (1,), device=q.device) if dropout_p > 0 else None
    options |= {"gates": gates, "dropout_p": dropout_p, "seed": seed}
    attend = cpu.attend if chosen == "cpu" else triton_attention.attend
    return attend(*arguments, **options, num_prefix_tokens=num_prefix_tokens)


def halve(x: Tensor) -> Tensor:
    """Average pooling, 3x3, stride 2, padding 1 that is not counted: (B, C, H, W) -> (B, C, ceil(H/2), ceil(W/2))."""
    if _forced[-1:] == ["reference"] or _exporting() or cpu.reason_against_pooling(x) is not None:
        return F.avg_pool2d(x, 3, stride=2, padding=1, count_include_pad=False)
    return cpu.pool(x)
