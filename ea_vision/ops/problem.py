"""The operator's arguments as one object, and the base class of its implementations."""

from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.autograd.forward_ad as forward_ad
from torch import Tensor

from ea_vision.ops.rel_pos import cover_offsets, fit_rel_table, reach

Size = tuple[int, int]  # (height, width)


@dataclass(eq=False)
class Problem:
    """The arguments of `ea_vision.ops.evolving_attention`, which describes them.

    After `checked`, tables fit the map or the window, feat_size and scale are set, and window is (height, width) or
    None. If nothing evolves, alpha and beta are 1, weight and bias None; without weight, num_prefix_tokens is 0.
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
            high = H if p.window is None else reach(H, p.window[0])
            wide = W if p.window is None else reach(W, p.window[1])
            p.height_rel = fit_rel_table(p.height_rel, high)
            if p.width_rel is not None:
                p.width_rel = fit_rel_table(p.width_rel, wide)
            _check_shape("height_rel", p.height_rel, (2 * high - 1, D))
            _check_shape("width_rel", p.width_rel, (2 * wide - 1, D))
        p.scale = D**-0.5 if p.scale is None else p.scale
        p.need_logits = p.need_logits and p.head_window == 1
        return p

    @property
    def local(self) -> bool:
        """Return whether a query sees only a part of the map, or other heads."""
        return self.window is not None or self.head_window > 1

    def tables(self) -> tuple[Tensor | None, Tensor | None]:
        """Return height_rel and width_rel with a row for every offset on the map, or (None, None)."""
        if self.height_rel is None:
            return None, None
        H, W = self.feat_size
        return cover_offsets(self.height_rel, H), cover_offsets(self.width_rel, W)

    def gates(self) -> Tensor | None:
        """Return alpha and beta per head, (2, K) in float32, or None if both are numbers.

        Raises:
            ValueError: a gate has neither 1 nor K values.
        """
        if not isinstance(self.alpha, Tensor) and not isinstance(self.beta, Tensor):
            return None
        return torch.stack([self._by_head(self.alpha), self._by_head(self.beta)])

    def _by_head(self, gate: float | Tensor) -> Tensor:
        """Return a gate per head, (K) in float32."""
        K = self.q.shape[1]
        if not isinstance(gate, Tensor):
            return self.q.new_full((K,), gate, dtype=torch.float32)
        if gate.numel() not in (1, K):
            raise ValueError(
                f"a gate must have 1 or num_heads={K} numbers, got shape {list(gate.shape)}"
            )
        return gate.float().reshape(-1).expand(K)

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

    def refuse(ctx, *_):
        raise RuntimeError(
            f"second derivatives are not supported by {backward._qualname}; the reference has them: "
            "with ea_vision.ops.use_implementation('reference')"
        )

    backward.register_autograd(refuse)


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


def check_prev_logits(
    prev_logits: Tensor | None, B: int, K: int, N: int, M: int | None = None
) -> Tensor:
    """Return the previous layer's logits if their shape is (B, K, N, M); M defaults to N.

    Raises:
        ValueError: they are missing or of another shape.
    """
    M = N if M is None else M
    if prev_logits is None:
        raise ValueError(
            f"this layer evolves the previous layer's maps: prev_logits of shape {[B, K, N, M]} required, got None"
        )
    if prev_logits.shape != (B, K, N, M):
        raise ValueError(
            f"prev_logits of shape {[B, K, N, M]} required, got {list(prev_logits.shape)}"
        )
    return prev_logits


def _check_shape(name: str, tensor: Tensor | None, shape: tuple[int, ...]) -> None:
    """Check a shape that kernels rely on when they read memory."""
    if tensor is None or tensor.shape != shape:
        received = None if tensor is None else list(tensor.shape)
        raise ValueError(f"{name} of shape {list(shape)} required, got {received}")
