"""Evolving attention in readable torch: tests compare outputs and gradients of all faster implementations with it.

`StepByStep` is the one reference. Layers of `ea_vision.layers` define its steps by their modules, and the operator by
its arguments. Layers run it if the reference is forced, if a hook needs the maps, and for evolutions that have only
`forward`.
"""

from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor

from ea_vision.ops.problem import Implementation, Problem, Size
from ea_vision.ops.rel_pos import by_position, fit_rel_table


def relative_logits(q: Tensor, height_rel: Tensor, width_rel: Tensor) -> tuple[Tensor, Tensor]:
    """Return the position terms of the attention logits, one per axis (AA paper, equation 4).

    Neither is repeated to N x N: the caller broadcasts them over the other axis of the keys.

    Args:
        q: (B, K, H, W, D) queries, already scaled.
        height_rel: (2H-1, D), row 0 = offset -(H-1); any other odd length is fitted to H first.
        width_rel: (2W-1, D), likewise for W.

    Returns:
        height_logits (B, K, H, W, H): q_i . height_rel[row(j) - row(i)] by query pixel and key row;
        width_logits (B, K, H, W, W): q_i . width_rel[col(j) - col(i)] by query pixel and key column.
    """
    H, W = q.shape[2:4]
    rows = by_position(fit_rel_table(height_rel, H), H)  # (H, H, D)
    columns = by_position(fit_rel_table(width_rel, W), W)  # (W, W, D)
    height_logits = torch.einsum("bkhwd,hpd->bkhwp", q, rows)
    width_logits = torch.einsum("bkhwd,wpd->bkhwp", q, columns)
    return height_logits, width_logits


def own_logits(
    q: Tensor,
    k: Tensor,
    height_rel: Tensor | None,
    width_rel: Tensor | None,
    scale: float,
    feat_size: Size,
    head_window: int = 1,
) -> Tensor:
    """Return dot products and position terms (AA paper, equation 4): q (B, K, N, D), k (B, K, M, D) -> (B, K, N, M).

    With tables M must be N; without them feat_size is not used. With a head_window, return those with the keys of each
    head's `neighbours`: (B, K, N, head_window * M).
    """
    if head_window > 1:
        by_neighbour = [
            own_logits(q, keys, height_rel, width_rel, scale, feat_size)
            for keys in neighbours(k, head_window)
        ]
        return torch.cat(by_neighbour, dim=-1)
    B, K, N, D = q.shape
    H, W = feat_size
    q = q * scale
    logits = q @ k.transpose(-2, -1)
    if height_rel is None or width_rel is None:
        return logits
    pixels = q.reshape(B, K, H, W, D)
    row_terms, column_terms = relative_logits(pixels, height_rel.to(q.dtype), width_rel.to(q.dtype))
    pixel_logits = logits.view(B, K, H, W, H, W)
    pixel_logits = pixel_logits + row_terms.unsqueeze(-1) + column_terms.unsqueeze(-2)
    return pixel_logits.view(B, K, N, N)


def mixed(gate: float | Tensor, one: Tensor, other: Tensor) -> Tensor:
    """Return gate * one + (1 - gate) * other of maps (B, K, N, M).

    gate: a number, or a tensor, () or (K) with one value per head.
    """
    if isinstance(gate, Tensor):
        gate = gate.view(-1, 1, 1)
    # a gate that learns is float32: maps in half precision keep their dtype
    return (gate * one + (1.0 - gate) * other).to(other.dtype)


def evolve_logits(
    logits: Tensor,
    prev_logits: Tensor,
    alpha: float | Tensor,
    beta: float | Tensor,
    predict: bool,
    convolve: Callable[[Tensor], Tensor],
) -> Tensor:
    """Return the logits (B, K, N, M) evolved from the layer's own and the previous layer's.

        EA            m = alpha * prev + (1 - alpha) * own;  logits = beta * relu(conv(m)) + (1 - beta) * m
        PA (predict)  logits = alpha * relu(conv(prev)) + (1 - alpha) * own

    EA paper, equations 3 and 4; PA paper, section 3.

    Args:
        alpha, beta: gates: a number, or a tensor, () or (K) with one value per head. PA does not use beta.
        convolve: relu(conv(.)) of maps, or the identity.
    """
    if predict:
        return mixed(alpha, convolve(prev_logits), logits)
    mixture = mixed(alpha, prev_logits, logits)
    return mixed(beta, convolve(mixture), mixture)


def among_patches(maps: Tensor, num_prefix_tokens: int) -> Tensor:
    """Return the maps without the first tokens' rows and columns: (B, K, N, N) -> (B, K, N - prefix, N - prefix)."""
    if num_prefix_tokens == 0:
        return maps
    return maps[:, :, num_prefix_tokens:, num_prefix_tokens:]


def with_prefix(maps: Tensor, patches: Tensor, num_prefix_tokens: int) -> Tensor:
    """Return `patches` with the first tokens' rows and columns of `maps` put back: the inverse of `among_patches`."""
    if num_prefix_tokens == 0:
        return patches
    rows = torch.cat([maps[:, :, num_prefix_tokens:, :num_prefix_tokens], patches], dim=-1)
    return torch.cat([maps[:, :, :num_prefix_tokens], rows], dim=-2)


def neighbours(x: Tensor, head_window: int) -> list[Tensor]:
    """Return S = head_window tensors (B, K, N, D): for each head h, the keys or values of heads h - S//2 to h + S//2.
    The heads form a ring."""
    return [x.roll(-offset, 1) for offset in range(-(head_window // 2), head_window // 2 + 1)]


def within_windows(
    logits: Tensor, feat_size: Size, window: Size | None, head_window: int, wrap: bool
) -> Tensor:
    """Set logits (B, K, N, S*N) to -inf for keys outside a query's window of pixels and, unless the heads form a ring
    (`wrap`), for neighbours beyond the first and last head."""
    B, K, N, M = logits.shape
    logits = logits.view(B, K, N, head_window, N)
    if window is not None:
        pixel = torch.arange(N, device=logits.device)
        above = _farther(pixel // feat_size[1], window[0] // 2)
        beside = _farther(pixel % feat_size[1], window[1] // 2)
        far = above | beside  # (query, key)
        logits = logits.masked_fill(far.unsqueeze(1), float("-inf"))
    if head_window > 1 and not wrap:
        head = torch.arange(K, device=logits.device).unsqueeze(1)
        offset = torch.arange(head_window, device=logits.device) - head_window // 2
        neighbour = head + offset  # (K, S)
        missing = (neighbour < 0) | (neighbour >= K)
        logits = logits.masked_fill(missing.view(K, 1, head_window, 1), float("-inf"))
    return logits.view(B, K, N, M)


def _farther(place: Tensor, most: int) -> Tensor:
    """Return whether two of N places on an axis are more than `most` apart: (N) -> (N, N)."""
    distance = (place.unsqueeze(0) - place.unsqueeze(1)).abs()
    return distance > most


def readable(
    logits: Tensor,
    causal: str = "none",
    key_padding: Tensor | None = None,
    query_padding: Tensor | None = None,
) -> Tensor | None:
    """Return which entries of a sequence's maps may be read: booleans that broadcast to (B, K, Q, N), or None for all.

    Args:
        logits: (B, K, Q, N), Q queries and N keys.
        causal: "self": a query reads no later key, the queries being the last Q of N tokens; "none", "cross": any key.
        key_padding: (B, N), True where a key is padding, or None.
        query_padding: (B, Q), True where a query is padding, or None; in self-attention the same as key_padding.
    """
    allowed: Tensor | None = None
    if causal == "self":
        Q, N = logits.shape[2], logits.shape[3]
        allowed = torch.ones(Q, N, dtype=torch.bool, device=logits.device).tril(N - Q)
    if key_padding is not None:
        keys = ~key_padding[:, None, None, :]
        allowed = keys if allowed is None else allowed & keys
    if query_padding is not None:
        queries = ~query_padding[:, None, :, None]
        allowed = queries if allowed is None else allowed & queries
    return allowed


def mask_logits(logits: Tensor, causal: str = "none", key_padding: Tensor | None = None) -> Tensor:
    """Set logits (B, K, Q, N) to -inf for keys that a query may not read; see `readable`.

    Only the softmax takes masked logits. The next layer gets them unmasked, since 0 * -inf is NaN.
    """
    allowed = readable(logits, causal, key_padding)
    return logits if allowed is None else logits.masked_fill(~allowed, float("-inf"))


def attention_of(logits: Tensor) -> Tensor:
    """Return the softmax over the keys, in float32 at least: (B, K, N, N) -> (B, K, N, N)."""
    return logits.softmax(dim=-1, dtype=torch.promote_types(logits.dtype, torch.float32))


class StepByStep:
    """Attention in readable torch, one step after another. Subclasses (layers, or a problem) define the steps.

    Attributes:
        evolution: (logits, prev_logits) -> logits, or None. If its attribute `spatial` is true, it also takes
            feat_size.
        attn_drop: dropout on the probabilities.
        local: whether a query sees only a part of the map, or other heads.
        window: (height, width) in pixels that a query sees, or None for the whole map.
        head_window: number of neighbouring heads that a query sees.
        head_border: "clip" or "wrap", see `Problem`.
    """

    local = False
    window: Size | None = None
    head_window = 1
    head_border = "clip"

    def logits_of(self, q: Tensor, k: Tensor, feat_size: Size) -> Tensor:
        """Return the logits before any evolution: q, k (B, K, N, D), q not scaled -> (B, K, N, N), or
        (B, K, N, head_window * N) with the neighbouring heads' keys."""
        raise NotImplementedError

    def evolved(self, logits: Tensor, prev_logits: Tensor, feat_size: Size) -> Tensor:
        """Return the logits evolved from the layer's own and the previous layer's, of the same shape."""
        size = (feat_size,) if self.evolution.spatial else ()
        return self.evolution(logits, prev_logits, *size)

    def attention_of(self, logits: Tensor, feat_size: Size) -> Tensor:
        """Return the probabilities of (evolved) logits, within the windows, of the same shape."""
        if self.local:
            wrap = self.head_border == "wrap"
            logits = within_windows(logits, feat_size, self.window, self.head_window, wrap)
        return attention_of(logits)

    def attend_step_by_step(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        prev_logits: Tensor | None,
        feat_size: Size | None,
        bias: Tensor | None = None,
    ) -> tuple[Tensor, Tensor | None]:
        """Attend: q, k (B, K, N, D), v (B, K, N, E), bias added to the logits.

        Returns:
            the heads' outputs (B, K, N, E), and the logits that entered the softmax, before a window; None with
            head_window > 1, since no layer evolves from such maps.
        """
        size = (1, q.shape[2]) if feat_size is None else feat_size
        logits = self.logits_of(q, k, size)
        if bias is not None:
            logits = logits + bias
        if self.evolution is not None:
            prev = logits if prev_logits is None else prev_logits
            logits = self.evolved(logits, prev, size)
        if self.head_window > 1:
            v = torch.cat(neighbours(v, self.head_window), dim=2)
        attn = self.attn_drop(self.attention_of(logits, size))
        return attn.to(v.dtype) @ v, logits if self.head_window == 1 else None


class _ProblemSteps(StepByStep):
    """The steps of a problem."""

    def __init__(self, problem: Problem):
        self.problem = problem
        self.local = problem.local
        self.window = problem.window
        self.head_window = problem.head_window
        self.head_border = problem.head_border
        self.evolution = None if problem.prev_logits is None else evolve_logits

    def attn_drop(self, attn: Tensor) -> Tensor:
        return F.dropout(attn, self.problem.dropout_p)

    def logits_of(self, q: Tensor, k: Tensor, feat_size: Size) -> Tensor:
        p = self.problem
        return own_logits(q, k, p.height_rel, p.width_rel, p.scale, feat_size, p.head_window)

    def evolved(self, logits: Tensor, prev_logits: Tensor, feat_size: Size) -> Tensor:
        """Compute EA or PA with the problem's gates and convolution."""
        p = self.problem
        return self.evolution(logits, prev_logits, p.alpha, p.beta, p.predict, self.convolve)

    def convolve(self, maps: Tensor) -> Tensor:
        p = self.problem
        if p.weight is None or p.num_prefix_tokens >= maps.shape[2]:
            return maps
        weight = p.weight.to(maps.dtype)
        bias = p.bias.to(maps.dtype)
        patches = among_patches(maps, p.num_prefix_tokens)
        convolved = F.relu(F.conv2d(patches, weight, bias, padding="same"))
        return with_prefix(maps, convolved, p.num_prefix_tokens)


class Reference(Implementation):
    """Readable torch, which solves every problem."""

    name = "reference"

    def reason_against(self, problem: Problem) -> str | None:
        return None

    def forward(self, problem: Problem) -> tuple[Tensor, Tensor | None]:
        p = problem
        steps = _ProblemSteps(p)
        out, logits = steps.attend_step_by_step(p.q, p.k, p.v, p.prev_logits, p.feat_size)
        return out, logits if p.need_logits else None
