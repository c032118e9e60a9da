"""Evolving attention behind one function: a readable reference, and faster implementations chosen by what they can run.

    out, logits = evolving_attention(q, k, v, height_rel, width_rel, prev_logits, weight, bias, alpha=0.5, beta=1.0,
                                     feat_size=(14, 14))

| implementation | runs                                             | never has in memory            |
| -------------- | ------------------------------------------------ | ------------------------------ |
| cpu            | on a CPU, a C kernel compiled on first use       | anything N x N but the logits  |
| triton         | chained attention (EA, PA), small maps, on CUDA  | anything N x N but the logits  |
| sdpa           | unchained attention (AA): on CUDA of large maps, | anything N x N                 |
|                | on mps, xpu, ... where no logits are wanted      |                                |
| flex           | windows of pixels and heads on CUDA              | anything N x N                 |
| reference      | everywhere, readable torch                       |                                |

The choice can be forced: by argument, by `with use_implementation("reference")`, or by the environment variable
EA_VISION_IMPLEMENTATION, in this order. Why an implementation was taken is logged once, at level INFO.

Shape letters: B batch, K heads, H x W the map, N = H*W its pixels (row-major), M keys (N unless keys are reduced),
D width of a query's head, E a value's.
"""

import logging
import os
from collections.abc import Iterator
from contextlib import contextmanager

import torch
import torch.nn.functional as F
from torch import Tensor

from ea_vision.base.errors import UsageError
from ea_vision.ops import cpu, flex, head_norm, reference, sdpa, triton_attention
from ea_vision.ops.problem import (
    Implementation,
    Problem,
    Size,
    check_windows,
    reason_against_kernels,
)

IMPLEMENTATIONS: dict[str, Implementation] = {
    each.name: each
    for each in (
        cpu.Cpu(),
        triton_attention.Triton(),
        sdpa.Sdpa(),
        flex.Flex(),
        reference.Reference(),
    )
}
BY_DEVICE = {"cpu": ("cpu",), "cuda": ("sdpa", "triton", "flex")}  # in this order
OTHER_DEVICES = ("sdpa", "triton")  # mps, xpu, ...
# AA with position tables on maps of at most so many pixels: `triton` makes half of the calls of `sdpa`, which builds
# wider queries and keys, and needs no more memory. Of larger maps the logits that it keeps count. Under torch.compile
# inductor fuses what `sdpa` builds: a step of AA-50 takes 65.6 ms by `sdpa` and 75.4 by `triton` on an H200.
FEW_PIXELS = 256
FEW_CALLS = ("triton", "sdpa")
LARGE_MAP = 2500  # pixels

_logger = logging.getLogger(__name__)
_logged: set[tuple[str, ...]] = set()
forced: list[str] = []  # the last one counts


def _check_name(name: str, source: str) -> str:
    if name not in IMPLEMENTATIONS:
        raise UsageError(f"{source} must be one of {', '.join(IMPLEMENTATIONS)}, got {name!r}")
    return name


if os.environ.get("EA_VISION_IMPLEMENTATION"):
    forced.append(_check_name(os.environ["EA_VISION_IMPLEMENTATION"], "EA_VISION_IMPLEMENTATION"))


@contextmanager
def use_implementation(name: str) -> Iterator[None]:
    """Force an implementation inside the `with` block, in the whole process.

    "reference" in a layer is the layer's own modules, one after another.

    Raises:
        ValueError: no implementation of this name; inside the block, one that cannot run what it is given.
    """
    forced.append(_check_name(name, "implementation"))
    try:
        yield
    finally:
        forced.pop()


def exporting() -> bool:
    """Return whether torch.export or a tracer runs, whose programs must run where ea_vision is not."""
    if torch.jit.is_tracing():
        return True
    # torch.compile answers True to is_exporting
    return torch.compiler.is_exporting() and not torch.compiler.is_dynamo_compiling()


def _as_number(gate: float | Tensor) -> float | Tensor:
    """Return a gate as a number, for which kernels have shortcuts, if it is on the CPU and needs no gradient."""
    if not isinstance(gate, Tensor):
        return float(gate)
    learns = torch.is_grad_enabled() and gate.requires_grad
    is_readable = gate.numel() == 1 and gate.device.type == "cpu" and not learns
    traced = torch.compiler.is_compiling() or exporting()
    if not is_readable or traced or reason_against_kernels() is not None:
        return gate
    return gate.item()


def _choose(problem: Problem) -> Implementation:
    """Return the device's first implementation that can solve this; the log says why not those before it."""
    device = problem.q.device.type
    against = []
    names = BY_DEVICE.get(device, OTHER_DEVICES)
    small = problem.height_rel is not None and problem.q.shape[2] <= FEW_PIXELS
    is_plain = problem.prev_logits is None and not problem.local
    if device == "cuda" and small and is_plain and not torch.compiler.is_compiling():
        names = FEW_CALLS
    for name in (*names, "reference"):
        reason = IMPLEMENTATIONS[name].reason_against(problem)
        if reason is None:
            break
        against.append(f"not {name}: {reason}")
    choice = f"evolving attention on {device} in {problem.q.dtype} by {name!r}"
    lines = [choice, *against]
    level = logging.INFO
    if device == "cuda" and name == "reference":
        level = logging.WARNING
        lines.append(f"each of its maps takes {_map_megabytes(problem):,.0f} MB")
    log_once((name, *against), "; ".join(lines), level)
    return IMPLEMENTATIONS[name]


def _map_megabytes(problem: Problem) -> float:
    """Return the memory of one (B, K, N, M) tensor in the problem's type."""
    B, K, N, _ = problem.q.shape
    M = problem.k.shape[2]
    return B * K * N * M * problem.q.element_size() / 1e6


@torch.compiler.assume_constant_result  # torch.compile calls it as it traces
def log_once(
    key: tuple[str, ...],
    line: str,
    level: int = logging.INFO,
) -> None:
    """Log which implementation runs, and why, once for each key."""
    if key not in _logged:
        _logged.add(key)
        _logger.log(level, "%s", line)


def log_large_map(num_heads: int, feat_size: Size) -> None:
    """Log once per size how much memory handed-on maps need above 2,500 pixels."""
    H, W = feat_size
    N = H * W
    if N <= LARGE_MAP:
        return
    megabytes = num_heads * N**2 * 4 / 1e6
    log_once(
        ("large map", f"{num_heads} {H} {W}"),
        f"a map of {H} x {W} takes {megabytes:,.0f} MB per image and layer in float32; "
        "map_reduction=32, attn_stages or smaller images take less",
    )


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
    feat_size: Size | None = None,
    predict: bool = False,
    num_prefix_tokens: int = 0,
    scale: float | None = None,
    dropout_p: float = 0.0,
    need_logits: bool = True,
    window: int | Size | None = None,
    head_window: int = 1,
    head_border: str = "clip",
    implementation: str | None = None,
) -> tuple[Tensor, Tensor | None]:
    """Attend over the pixels of a map, or over any N tokens, with logits that evolve from the previous layer's.

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
        q: (B, K, N, D), not scaled.
        k: (B, K, M, D). M keys for N queries, as where a network reduces its keys, run on the reference, or by `sdpa`
            where nothing evolves and no logits are needed; without position tables, windows and prefix tokens.
        v: (B, K, M, E).
        height_rel: (2H-1, D), row 0 = offset -(H-1), or None for no position terms; other odd lengths are fitted to H.
            In a window: the h rows from offset -(h-1)/2 on, where h < 2H-1.
        width_rel: (2W-1, D), likewise.
        prev_logits: (B, K, N, M), or None for attention that does not evolve.
        weight, bias: (K, K, kernel, kernel) and (K) of the convolution over the maps, kernel odd.
        alpha: gate of the previous layer's maps: a number, or where it learns a tensor, () or (K) by heads.
        beta: EA: gate of the convolved maps, likewise.
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
        out (B, K, N, E) and the logits (B, K, N, M) that entered the softmax, before a window; or None where not
        needed, and with head_window > 1.

    Raises:
        ValueError: shapes that do not fit, or an implementation that cannot run this.
    """
    problem = Problem(
        q,
        k,
        v,
        height_rel,
        width_rel,
        prev_logits,
        weight,
        bias,
        _as_number(alpha),
        _as_number(beta),
        feat_size,
        predict,
        num_prefix_tokens,
        scale,
        dropout_p,
        need_logits,
        window,
        head_window,
        head_border,
    ).checked()
    if problem.prev_logits is not None and not torch.compiler.is_compiling():
        log_large_map(q.shape[1], problem.feat_size)
    name = implementation
    if name is None and forced:
        name = forced[-1]
    elif name is None and exporting():
        name = "reference"
    if name is None:
        return _choose(problem).forward(problem)
    chosen = IMPLEMENTATIONS[_check_name(name, "implementation")]
    reason = chosen.reason_against(problem)
    if reason is not None:
        raise UsageError(f"implementation {name!r} cannot run this: {reason}")
    return chosen.forward(problem)


def by_torch() -> bool:
    """Return whether torch's own operations must do what a C kernel could: the reference is forced, or an export."""
    return forced[-1:] == ["reference"] or exporting()


def needs_readable() -> bool:
    """Return whether readable torch must do what an autograd function could: for a compiler, which fuses it, where the
    reference is forced, in an export, in forward-mode derivatives and in transforms of torch.func."""
    return torch.compiler.is_compiling() or by_torch() or reason_against_kernels() is not None


def halve(x: Tensor) -> Tensor:
    """Pool the average, 3x3, stride 2, padding 1 not counted: (B, C, H, W) -> (B, C, ceil(H/2), ceil(W/2))."""
    if by_torch() or cpu.reason_against_pooling(x) is not None:
        return F.avg_pool2d(x, 3, stride=2, padding=1, count_include_pad=False)
    return cpu.pool(x)


def normalise_heads(qk: Tensor, gain: Tensor) -> tuple[Tensor, Tensor]:
    """Normalise queries and keys (B, 2K, D, N), the queries times gain (K): (B, K, N, D) each; see `head_norm`."""
    if needs_readable():
        return head_norm.readable(qk, gain)
    if qk.device.type == "cpu":
        return head_norm.by_parts(qk, gain)
    return head_norm.by_rms_norm(qk, gain)
