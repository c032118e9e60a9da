"""Evolving attention behind one function: a readable reference, and faster implementations chosen by what they can run.

    out, logits = evolving_attention(q, k, v, height_rel, width_rel, prev_logits, weight, bias, alpha=0.5, beta=1.0,
                                     feat_size=(14, 14))

| implementation | runs                                             | never has in memory            |
| -------------- | ------------------------------------------------ | ------------------------------ |
| cpu            | on a CPU, a C kernel compiled on first use       | anything N x N but the logits  |
| triton         | chained attention (EA, PA), small maps, on CUDA  | anything N x N but the logits  |
| sdpa           | unchained attention (AA) if its logits are not   | anything N x N                 |
|                | needed: on CUDA for large maps, on mps, xpu, ... |                                |
| reference      | everywhere, readable torch                       |                                |

The choice can be forced by argument, by `with use_implementation("reference")`, or by the environment variable
EA_VISION_IMPLEMENTATION; the first of these counts. The reasons for a choice are logged once, at level INFO (WARNING if
the reference runs on CUDA).

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
from ea_vision.ops import cpu, head_norm, reference, sdpa, triton_attention
from ea_vision.ops.problem import (
    Implementation,
    Problem,
    Size,
    check_windows,
    reason_against_kernels,
)

IMPLEMENTATIONS: dict[str, Implementation] = {
    each.name: each
    for each in (cpu.Cpu(), triton_attention.Triton(), sdpa.Sdpa(), reference.Reference())
}
# tried in this order: on a CPU, and on cuda, mps, xpu, ...
ON_CPU = ("cpu",)
ON_ACCELERATORS = ("sdpa", "triton")
# AA with position tables prefers `triton` on maps of at most this many pixels: it makes half as many calls as `sdpa`,
# which builds wider queries and keys, and needs no more memory. On larger maps the logits that `triton` keeps need too
# much. Under torch.compile, inductor fuses what `sdpa` builds: a step of AA-50 takes 65.6 ms with `sdpa` and 75.4 with
# `triton` on an H200.
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

    In a layer, "reference" runs the layer's own modules one after another.

    Raises:
        ValueError: the name is unknown; inside the block, the implementation cannot run a call.
    """
    forced.append(_check_name(name, "implementation"))
    try:
        yield
    finally:
        forced.pop()


def exporting() -> bool:
    """Return whether torch.export or a tracer is running: its program must run without ea_vision."""
    if torch.jit.is_tracing():
        return True
    # torch.compile answers True to is_exporting
    return torch.compiler.is_exporting() and not torch.compiler.is_dynamo_compiling()


def _choose(problem: Problem) -> Implementation:
    """Return the first of the device's implementations that can solve the problem; log why the ones before cannot."""
    device = problem.q.device.type
    against = []
    names = ON_CPU if device == "cpu" else ON_ACCELERATORS
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
        B, K, N, _ = problem.q.shape
        megabytes = B * K * N * problem.k.shape[2] * problem.q.element_size() / 1e6
        lines.append(f"each of its maps takes {megabytes:,.0f} MB")
    log_once((device, name, *against), "; ".join(lines), level)
    return IMPLEMENTATIONS[name]


@torch.compiler.assume_constant_result  # torch.compile calls it as it traces
def log_once(key: tuple[str, ...], line: str, level: int = logging.INFO) -> None:
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
    *more: Tensor | None,
    implementation: str | None = None,
    **options,
) -> tuple[Tensor, Tensor | None]:
    """Attend over the pixels of a map, or over any N tokens, with logits that evolve from the previous layer's.

    Args:
        q, k, v, *more, **options: the fields of `Problem`, in order or by name; it has the equations.
        implementation: one of `IMPLEMENTATIONS`; chosen automatically by default.

    Returns:
        out (B, K, N, E), and the logits (B, K, N, M) that entered the softmax, before a window hides any. The logits
        are None if not needed, or if head_window > 1.

    Raises:
        ValueError: the shapes do not fit, or the implementation cannot run the call.
    """
    problem = Problem(q, k, v, *more, **options).checked()
    if problem.prev_logits is not None and not torch.compiler.is_compiling():
        log_large_map(q.shape[1], problem.feat_size)
    name = implementation
    if name is None and forced:
        name = forced[-1]
    elif name is None and exporting():
        name = "reference"
    if name is None:
        return _choose(problem).forward(problem)
    requested = IMPLEMENTATIONS[_check_name(name, "implementation")]
    reason = requested.reason_against(problem)
    if reason is not None:
        raise UsageError(f"implementation {name!r} cannot run this: {reason}")
    return requested.forward(problem)


def by_torch() -> bool:
    """Return whether torch's own operations must replace C kernels: if the reference is forced, or in an export."""
    return forced[-1:] == ["reference"] or exporting()


def halve(x: Tensor) -> Tensor:
    """Average-pool 3x3 with stride 2, padding 1 not counted: (B, C, H, W) -> (B, C, ceil(H/2), ceil(W/2))."""
    if by_torch() or cpu.reason_against_pooling(x) is not None:
        return F.avg_pool2d(x, 3, stride=2, padding=1, count_include_pad=False)
    return cpu.pool(x)


def normalise_heads(qk: Tensor, gain: Tensor) -> tuple[Tensor, Tensor]:
    """Normalise queries and keys (B, 2K, D, N), multiply queries by gain (K): (B, K, N, D) each; see `head_norm`."""
    # torch.compile fuses readable torch; forward-mode derivatives and transforms of torch.func need it
    if torch.compiler.is_compiling() or by_torch() or reason_against_kernels() is not None:
        return head_norm.readable(qk, gain)
    if qk.device.type == "cpu":
        return head_norm.by_parts(qk, gain)
    return head_norm.by_rms_norm(qk, gain)
