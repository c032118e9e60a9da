"""The operator's arguments as one object, and the base class of its implementations."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import NoReturn

import torch
import torch.autograd.forward_ad as forward_ad
from torch import Tensor

from ea_vision.ops.rel_pos import Size, tables_on_map


@dataclass(eq=False)
class Problem:
    """Attention whose logits evolve from the previous layer's: the arguments of `ea_vision.ops.evolving_attention`.

        own = scale * (q_i . k_j + q_i . height_rel[row(j) - row(i)] + q_i . width_rel[col(j) - col(i)])
        AA            logits = own                                                                (prev_logits None)
        EA            m = alpha * prev + (1 - alpha) * own;  logits = beta * relu(conv(m)) + (1 - beta) * m
        PA (predict)  logits = alpha * relu(conv(prev)) + (1 - alpha) * own
        out = softmax_j(logits) @ v

    AA paper, equation 4; EA paper, equations 3 and 4. Without `weight`, relu(conv(.)) is replaced by the identity.

    With windows (CSAN paper, here over both axes of an image), a query sees keys at most height // 2 rows and
    width // 2 columns from its own pixel, in heads at most head_window // 2 from its own. One softmax covers them all:

        out_i = sum_s sum_j softmax_{s,j}(logits[h, i, s, j]) v_j of head s

    Pixels outside the map are excluded, as in the authors' code (their paper pads with zeros). An evolution mixes
    whole maps; the window is applied afterwards.

    After `checked`, tables have a row for each offset on the map, feat_size and scale are set, and window is
    (height, width) or None. If nothing evolves, alpha and beta are 1, weight and bias None; without weight,
    num_prefix_tokens is 0.

    Attributes:
        q: (B, K, N, D), not scaled.
        k: (B, K, M, D). If M != N (the network reduces its keys), the reference runs, or `sdpa` if nothing evolves and
            no logits are needed; position tables, windows and prefix tokens are then errors.
        v: (B, K, M, E).
        height_rel: (2H-1, D), row 0 = offset -(H-1), or None for no position terms; other odd lengths are fitted to H.
            With a window of height h < 2H-1: (h, D), row 0 = offset -(h-1)/2.
        width_rel: (2W-1, D), likewise.
        prev_logits: (B, K, N, M), or None for attention that does not evolve.
        weight: (K, K, kernel, kernel) of the convolution over the maps, kernel odd.
        bias: (K) of this convolution.
        alpha: gate of the previous layer's maps: a number, or a tensor, () or (K) with one value per head.
        beta: EA's gate of the convolved maps, likewise.
        feat_size: (H, W); required only with tables.
        predict: PA instead of EA.
        num_prefix_tokens: number of tokens before those of the map. The convolution skips their rows and columns, where
            relu(conv(.)) is replaced by the identity.
        scale: factor of q; default D**-0.5.
        dropout_p: probability of dropping an attention probability.
        need_logits: whether to return the logits; otherwise they need not be stored.
        window: odd (height, width) in pixels, one number for both, or None for the whole map.
        head_window: odd number of neighbouring heads, centred on the query's own; not together with prev_logits.
        head_border: "clip": the first and last heads have fewer neighbours; "wrap": the heads are a ring.
    """

    q: Tensor
    k: Tensor
    v: Tensor
    height_rel: Tensor | None = None
    width_rel: Tensor | None = None
    prev_logits: Tensor | None = None
    weight: Tensor | None = None
    bias: Tensor | None = None
    alpha: float | Tensor = 0.5
    beta: float | Tensor = 1.0
    feat_size: Size | None = None
    predict: bool = False
    num_prefix_tokens: int = 0
    scale: float | None = None
    dropout_p: float = 0.0
    need_logits: bool = True
    window: int | Size | None = None
    head_window: int = 1
    head_border: str = "clip"

    def checked(self) -> "Problem":
        """Check and complete the problem, in place, and return it.

        Raises:
            ValueError: the shapes do not fit, or options contradict each other.
        """
        p = self
        B, K, N, D = p.q.shape
        M = p.k.shape[2]
        if p.feat_size is None and p.height_rel is not None:
            raise ValueError(
                f"feat_size (H, W) with H*W = {N} required for the position tables, got None"
            )
        if p.feat_size is None:
            p.feat_size = (1, N)
        H, W = p.feat_size
        if H * W != N or p.k.shape != (B, K, M, D) or p.v.shape[:3] != p.k.shape[:3]:
            raise ValueError(
                f"q (B, K, N, D), k (B, K, M, D) and v (B, K, M, E) with N = {H}*{W} required, "
                f"got {list(p.q.shape)}, {list(p.k.shape)}, {list(p.v.shape)}"
            )
        if not 0.0 <= p.dropout_p <= 1.0:
            raise ValueError(f"dropout_p must be a probability, from 0 to 1, got {p.dropout_p}")
        p.window = check_windows(p.window, p.head_window, p.head_border, K)
        if p.prev_logits is None:
            p.weight = p.bias = None
            p.alpha = p.beta = 1.0
        else:
            check_prev_logits(p.prev_logits, B, K, N, M)
            if p.head_window > 1:
                raise ValueError(f"head_window must be 1 where maps evolve, got {p.head_window}")
        if p.weight is None:
            p.num_prefix_tokens = 0
        else:
            side = p.weight.shape[-1] | 1  # odd
            _check_shape("weight", p.weight, (K, K, side, side))
            _check_shape("bias", p.bias, (K,))
            if not 0 <= p.num_prefix_tokens <= N:
                raise ValueError(
                    f"num_prefix_tokens must be 0 to N={N} tokens, got {p.num_prefix_tokens}"
                )
        if M != N and (p.height_rel is not None or p.local or p.num_prefix_tokens):
            raise ValueError(
                "position tables, windows and prefix tokens need as many keys as queries (an offset "
                f"between their pixels has no meaning otherwise), got {M} keys and {N} queries"
            )
        if p.height_rel is not None:
            p.height_rel, p.width_rel = tables_on_map(
                p.height_rel, p.width_rel, p.feat_size, p.window
            )
            _check_shape("height_rel", p.height_rel, (2 * H - 1, D))
            _check_shape("width_rel", p.width_rel, (2 * W - 1, D))
        p.scale = D**-0.5 if p.scale is None else p.scale
        p.need_logits = p.need_logits and p.head_window == 1
        return p

    @property
    def local(self) -> bool:
        """Return whether a query sees only a part of the map, or other heads."""
        return self.window is not None or self.head_window > 1

    def gates(self) -> Tensor | None:
        """Return alpha and beta per head, (2, K) in float32, or None if both are numbers; see `by_head`."""
        if not isinstance(self.alpha, Tensor) and not isinstance(self.beta, Tensor):
            return None
        return torch.stack([self.by_head(self.alpha), self.by_head(self.beta)])

    def by_head(self, gate: float | Tensor) -> Tensor:
        """Return a gate per head, (K) in float32.

        Raises:
            ValueError: it has neither 1 nor K values.
        """
        K = self.q.shape[1]
        if not isinstance(gate, Tensor):
            return self.q.new_full((K,), gate, dtype=torch.float32)
        if gate.numel() not in (1, K):
            raise ValueError(
                f"a gate must have 1 or num_heads={K} numbers, got shape {list(gate.shape)}"
            )
        return gate.to(self.q.device, torch.float32).reshape(-1).expand(K)

    def dropout_seed(self) -> Tensor | None:
        """Draw the dropout's seed, (1), from torch's generator; None without dropout.

        It is drawn outside the operators, so that a forward pass repeated by checkpointing draws the same seed again.
        """
        return torch.randint(2**62, (1,), device=self.q.device) if self.dropout_p > 0 else None


@torch.compiler.assume_constant_result  # torch.compile itself enters such transforms while it traces
def reason_against_kernels() -> str | None:
    """Return why no kernel may run now, or None. Kernels would lose forward-mode tangents."""
    if forward_ad._current_level >= 0 or torch._C._functorch.peek_interpreter_stack() is not None:
        return "forward-mode derivatives and transforms of torch.func (jvp, vmap, grad, ...) need readable torch"
    return None


def refuse_second_derivatives(backward: Callable) -> None:
    """Make differentiating a kernel's backward operator an error that names the reference."""
    backward.register_autograd(lambda ctx, *_: raise_without_second(backward._qualname))


def raise_without_second(kernel: str) -> NoReturn:
    """Raise the error of a kernel that has no second derivatives."""
    raise RuntimeError(
        f"second derivatives are not supported by {kernel}; the reference has them: "
        "with ea_vision.ops.use_implementation('reference')"
    )


class Implementation:
    """One way to solve a `Problem`. A subclass states what it supports and implements `forward`."""

    name = ""
    maps = True  # takes previous logits, and can return its own
    windows = False  # of pixels and heads
    fewer_keys = False  # takes M keys for N queries

    def reason_against(self, problem: Problem) -> str | None:
        """Return why it cannot solve the problem, or None if it can."""
        p = problem
        keys = p.k.shape[2]
        queries = p.q.shape[2]
        reasons = (
            (p.local and not self.windows, "it has no windows"),
            (
                keys != queries and not self.fewer_keys,
                f"it needs as many keys as queries, got {keys} and {queries}",
            ),
            (p.prev_logits is not None and not self.maps, "it has no place for previous logits"),
            (p.need_logits and not self.maps, "it does not return logits"),
            (
                not p.q.dtype == p.k.dtype == p.v.dtype,
                f"it needs q, k and v of one dtype, got {p.q.dtype}, {p.k.dtype} and {p.v.dtype}",
            ),
        )
        # a loop: older torch.compile does not know next() with a default
        for against, reason in reasons:
            if against:
                return reason
        return reason_against_kernels() or self.own_reason_against(p)

    def own_reason_against(self, problem: Problem) -> str | None:
        """Return a further reason against it (device, dtype, sizes), or None."""
        return None

    def forward(self, problem: Problem) -> tuple[Tensor, Tensor | None]:
        """Return out (B, K, N, E) and the logits (B, K, N, M), or None if they are not needed."""
        raise NotImplementedError


def check_windows(
    window: int | Size | None, head_window: int, head_border: str, num_heads: int
) -> Size | None:
    """Return the window's (height, width), or None.

    Raises:
        ValueError: a window is not odd, head_border is unknown, or head_window exceeds the heads of a ring.
    """
    sides = (window, window) if isinstance(window, int) else window
    if sides is not None and [_is_odd(side) for side in sides] != [True, True]:
        raise ValueError(
            f"window must be an odd number of pixels, two of them (height, width), or None, got {window}"
        )
    if not _is_odd(head_window):
        raise ValueError(f"head_window must be an odd number of heads, got {head_window}")
    if head_border not in ("clip", "wrap"):
        raise ValueError(f"head_border must be 'clip' or 'wrap', got {head_border!r}")
    if head_border == "wrap" and head_window > num_heads:
        raise ValueError(
            f"head_window must be at most num_heads={num_heads} where heads wrap around, "
            f"got {head_window}"
        )
    return None if sides is None else tuple(sides)


def _is_odd(number: int) -> bool:
    """Return whether a number is a positive odd integer."""
    return isinstance(number, int) and number > 0 and number % 2 == 1


def check_prev_logits(prev_logits: Tensor | None, B: int, K: int, N: int, M: int) -> None:
    """Raise ValueError if the previous layer's logits are missing, or their shape is not (B, K, N, M)."""
    if prev_logits is None:
        raise ValueError(
            f"this layer evolves the previous layer's maps: prev_logits of shape {[B, K, N, M]} required, got None"
        )
    _check_shape("prev_logits", prev_logits, (B, K, N, M))


def _check_shape(name: str, tensor: Tensor | None, shape: tuple[int, ...]) -> None:
    """Check a shape that kernels rely on when they read memory."""
    if tensor is None or tensor.shape != shape:
        received = None if tensor is None else list(tensor.shape)
        raise ValueError(f"{name} of shape {list(shape)} required, got {received}")
