"""Two-dimensional relative position logits.

Paper: `Attention Augmented Convolutional Networks`, section 3.1.1 - https://arxiv.org/abs/1904.09925

Shape letters: B batch, K heads, H x W the attention map, N = H*W its pixels (row-major), D width of a head.
"""

import torch
import torch.nn.functional as F
from torch import Tensor


def fit_rel_table(table: Tensor, size: int) -> Tensor:
    """The embedding table of an axis, for an axis of another length.

    A shorter axis uses the table's middle, whose offsets mean the same; a longer one a linearly resized table
    (align_corners=False).

    Args:
        table: (2L-1, D), one row per offset, from -(L-1) to L-1.
        size: the new length S of the axis, in pixels.

    Returns:
        (2S-1, D); `table` itself where S = L.
    """
    old, new = table.shape[0], 2 * size - 1
    if new == old:
        return table
    if new < old:
        first = (old - new) // 2
        return table[first:first + new]
    rows = table.t().unsqueeze(0)  # (1, D, 2L-1)
    return F.interpolate(rows, size=new, mode="linear", align_corners=False).squeeze(0).t()


def reach(size: int, window: int | None) -> int:
    """How many pixels of an axis attention sees to one side, itself counted, at most: `size`, or fewer in a window (its
    odd side). Tables have 2 * reach - 1 rows, for the offsets that occur."""
    return size if window is None else min(size, (window + 1) // 2)


def cover_offsets(table: Tensor, size: int) -> Tensor:
    """Rows of zeros for the offsets that a window's table lacks: (2L-1, D) -> (2S-1, D) for an axis of S pixels."""
    missing = size - (table.shape[0] + 1) // 2
    return F.pad(table, [0, 0, missing, missing]) if missing else table


def by_position(table: Tensor, size: int) -> Tensor:
    """(2S-1, D) by offset -> (S, S, D) by query position and key position; offset = key - query."""
    position = torch.arange(size, device=table.device)
    return table[position.unsqueeze(0) - position.unsqueeze(1) + (size - 1)]


def relative_logits(q: Tensor, height_rel: Tensor, width_rel: Tensor) -> tuple[Tensor, Tensor]:
    """The position terms of the attention logits, one per axis (AA paper, equation 4).

    Neither is repeated to N x N: the caller broadcasts them over the other axis of the keys.

    Args:
        q: (B, K, H, W, D) queries, already scaled.
        height_rel: (2H-1, D), row 0 = offset -(H-1); any other odd length is fitted to H first.
        width_rel: (2W-1, D), likewise for W.

    Returns:
        height_logits (B, K, H, W, H): q_i . height_rel[row(j) - row(i)] by query pixel and key row;
        width_logits (B, K, H, W, W): q_i . width_rel[col(j) - col(i)] by query pixel and key column.
    """
    H, W = q.shape[2], q.shape[3]
    by_row = by_position(fit_rel_table(height_rel, H), H)
    by_col = by_position(fit_rel_table(width_rel, W), W)
    height_logits = torch.einsum("bkhwd,hpd->bkhwp", q, by_row)
    width_logits = torch.einsum("bkhwd,wpd->bkhwp", q, by_col)
    return height_logits, width_logits
