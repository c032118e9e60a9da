"""Evolving attention in readable torch: what every faster implementation is held to, outputs and gradients.

The papers' equations stand here, once: `evolving_attention` and the evolution modules of `ea_vision.layers` call them.
"""

import torch
import torch.nn.functional as F
from torch import Tensor

from ea_vision.ops.rel_pos import cover_offsets, relative_logits


def own_logits(
        q: Tensor, k: Tensor, height_rel: Tensor | None, width_rel: Tensor | None, scale: float,
        feat_size: tuple[int, int],
) -> Tensor:
    """Dot product and position (AA paper, equation 4): q, k (B, K, N, D) -> (B, K, N, N).

    Without tables feat_size is not looked at.
    """
    B, K, N, D = q.shape
    H, W = feat_size
    q = q * scale
    logits = q @ k.transpose(-2, -1)
    if height_rel is not None and width_rel is not None:
        by_row, by_col = relative_logits(q.reshape(B, K, H, W, D), height_rel.to(q.dtype), width_rel.to(q.dtype))
        logits = logits.view(B, K, H, W, H, W) + by_row.unsqueeze(-1) + by_col.unsqueeze(-2)
        logits = logits.view(B, K, N, N)
    return logits


def check_prev_logits(prev_logits: Tensor | None, B: int, K: int, N: int) -> Tensor:
    """The previous layer's logits, if they are (B, K, N, N).

    Raises:
        ValueError: they are missing or of another shape.
    """
    if prev_logits is None:
        raise ValueError(
            f"this layer evolves the previous layer's maps: prev_logits of shape {[B, K, N, N]} required, got None")
    if prev_logits.shape != (B, K, N, N):
        raise ValueError(f"prev_logits of shape {[B, K, N, N]} required, got {list(prev_logits.shape)}")
    return prev_logits


def mixed(share: float | Tensor, one: Tensor, other: Tensor) -> Tensor:
    """share * one + (1 - share) * other, maps (B, K, N, N) each; share a number, or a tensor (), or (K) by heads."""
    if isinstance(share, Tensor):
        share = share.view(-1, 1, 1)
        return (share * one + (1.0 - share) * other).to(other.dtype)  # of half maps, too, the share is in float32
    return share * one + (1.0 - share) * other


def before_convolution(
        logits: Tensor, prev_logits: Tensor, alpha: float | Tensor, predict: bool,
) -> Tensor:
    """The maps that the convolution takes, (B, K, N, N) each.

        EA            alpha * prev + (1 - alpha) * own      (EA paper, equation 3)
        PA (predict)  prev
    """
    return prev_logits if predict else mixed(alpha, prev_logits, logits)


def after_convolution(
        logits: Tensor, before: Tensor, convolved: Tensor, alpha: float | Tensor, beta: float | Tensor, predict: bool,
) -> Tensor:
    """The evolved logits, from the layer's own, what the convolution took and what it gave; (B, K, N, N) each.

        EA            beta * convolved + (1 - beta) * before      (EA paper, equation 4)
        PA (predict)  alpha * convolved + (1 - alpha) * own
    """
    return mixed(alpha, convolved, logits) if predict else mixed(beta, convolved, before)


def among_patches(maps: Tensor, num_prefix_tokens: int) -> Tensor:
    """The maps without the rows and columns of the first tokens: (B, K, N, N) -> (B, K, N - prefix, N - prefix)."""
    return maps[:, :, num_prefix_tokens:, num_prefix_tokens:] if num_prefix_tokens > 0 else maps


def with_prefix(maps: Tensor, patches: Tensor, num_prefix_tokens: int) -> Tensor:
    """The rows and columns of the first tokens from `maps`, the others from `patches`; see `among_patches`."""
    if num_prefix_tokens == 0:
        return patches
    rows = torch.cat([maps[:, :, num_prefix_tokens:, :num_prefix_tokens], patches], dim=-1)
    return torch.cat([maps[:, :, :num_prefix_tokens], rows], dim=-2)


def neighbours_logits(
        q: Tensor, k: Tensor, height_rel: Tensor | None, width_rel: Tensor | None, scale: float,
        feat_size: tuple[int, int], head_window: int,
) -> Tensor:
    """`own_logits` of each head's queries with the keys of the heads around it: (B, K, N, D) -> (B, K, N, S*N), S =
    head_window neighbours one after another, from head h - S//2 to h + S//2; the heads are a ring."""
    logits = [own_logits(q, k.roll(-offset, 1), height_rel, width_rel, scale, feat_size)
              for offset in range(-(head_window // 2), head_window // 2 + 1)]
    return torch.cat(logits, dim=-1)


def neighbours_values(v: Tensor, head_window: int) -> Tensor:
    """The values that belong to `neighbours_logits`: (B, K, N, E) -> (B, K, S*N, E)."""
    return torch.cat([v.roll(-offset, 1) for offset in range(-(head_window // 2), head_window // 2 + 1)], dim=2)


def within_windows(
        logits: Tensor, feat_size: tuple[int, int], window: tuple[int, int] | None, head_window: int, wrap: bool,
) -> Tensor:
    """-inf for the keys outside a query's window of pixels and, unless the heads are a ring (`wrap`), for those of
    heads that there are not: (B, K, N, S*N) -> the same."""
    B, K, N, M = logits.shape
    logits = logits.view(B, K, N, head_window, N)
    if window is not None:
        pixel = torch.arange(N, device=logits.device)
        row, col = pixel // feat_size[1], pixel % feat_size[1]
        far = (row.unsqueeze(0) - row.unsqueeze(1)).abs() > window[0] // 2
        far = far | ((col.unsqueeze(0) - col.unsqueeze(1)).abs() > window[1] // 2)
        logits = logits.masked_fill(far.unsqueeze(1), float("-inf"))
    if head_window > 1 and not wrap:
        head = torch.arange(K, device=logits.device).unsqueeze(1)
        head = head + torch.arange(head_window, device=logits.device) - head_window // 2  # (K, S)
        logits = logits.masked_fill(((head < 0) | (head >= K)).view(K, 1, head_window, 1), float("-inf"))
    return logits.view(B, K, N, M)


def readable(
        logits: Tensor, causal: str = "none", key_padding: Tensor | None = None, query_padding: Tensor | None = None,
) -> Tensor | None:
    """Which entries of a sequence's maps may be read: booleans that broadcast to (B, K, Q, N), or None for all.

    Args:
        logits: (B, K, Q, N), Q queries and N keys.
        causal: "self": no key after its query, the queries being the last Q of the N; "none", "cross": any.
        key_padding: (B, N), True where a key is padding, or None.
        query_padding: (B, Q) likewise; in self-attention the same.
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
    """-inf on the keys that a query may not read, for the softmax; see `readable`. (B, K, Q, N) -> (B, K, Q, N).

    What one layer hands to the next is not masked: 0 * -inf is not a number.
    """
    allowed = readable(logits, causal, key_padding)
    return logits if allowed is None else logits.masked_fill(~allowed, float("-inf"))


def attention_of(logits: Tensor) -> Tensor:
    """Softmax over the keys, in float32 at least: (B, K, N, N) -> (B, K, N, N)."""
    half = logits.dtype == torch.float16 or logits.dtype == torch.bfloat16
    return logits.softmax(dim=-1, dtype=torch.float32 if half else logits.dtype)


def attend(
        q: Tensor, k: Tensor, v: Tensor, height_rel: Tensor | None, width_rel: Tensor | None,
        prev_logits: Tensor | None, weight: Tensor | None, bias: Tensor | None, alpha: float | Tensor,
        beta: float | Tensor, *, predict: bool, scale: float, feat_size: tuple[int, int], dropout_p: float,
        need_logits: bool, num_prefix_tokens: int = 0, window: tuple[int, int] | None = None, head_window: int = 1,
        wrap: bool = False,
) -> tuple[Tensor, Tensor | None]:
    """See `ea_vision.ops.evolving_attention`."""
    if height_rel is not None and width_rel is not None:
        height_rel, width_rel = cover_offsets(height_rel, feat_size[0]), cover_offsets(width_rel, feat_size[1])
    if head_window > 1:
        logits = neighbours_logits(q, k, height_rel, width_rel, scale, feat_size, head_window)
        v = neighbours_values(v, head_window)
    else:
        logits = own_logits(q, k, height_rel, width_rel, scale, feat_size)
    if prev_logits is not None:
        before = convolved = before_convolution(logits, prev_logits, alpha, predict)
        if weight is not None:
            patches = among_patches(before, num_prefix_tokens)
            patches = F.relu(F.conv2d(patches, weight.to(before.dtype), bias.to(before.dtype),
                                      padding=weight.shape[-1] // 2))
            convolved = with_prefix(before, patches, num_prefix_tokens)
        logits = after_convolution(logits, before, convolved, alpha, beta, predict)
    seen = logits
    if window is not None or head_window > 1:
        seen = within_windows(logits, feat_size, window, head_window, wrap)
    attn = F.dropout(attention_of(seen), dropout_p)
    return attn.to(v.dtype) @ v, logits if need_logits else None
