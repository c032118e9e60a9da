"""Tables of relative positions, fitted to axes and windows.

Paper: `Attention Augmented Convolutional Networks`, section 3.1.1 - https://arxiv.org/abs/1904.09925

Shape letters: S and L pixels of an axis, D width of a head.
"""

import torch
import torch.nn.functional as F
from torch import Tensor

Size = tuple[int, int]  # (height, width)


def fit_rel_table(table: Tensor, size: int) -> Tensor:
    """Return the embedding table of an axis, fitted to an axis of another length.

    A shorter axis uses the table's middle, whose offsets mean the same; a longer one a linearly resized table
    (align_corners=False).

    Args:
        table: (2L-1, D), one row per offset, from -(L-1) to L-1.
        size: the new length S of the axis, in pixels.

    Returns:
        (2S-1, D); `table` itself where S = L.
    """
    old = table.shape[0]
    new = 2 * size - 1
    if new == old:
        return table
    if new < old:
        first = (old - new) // 2
        return table[first : first + new]
    rows = table.t().unsqueeze(0)  # (1, D, 2L-1)
    return F.interpolate(rows, size=new, mode="linear", align_corners=False).squeeze(0).t()


def reaches(feat_size: Size, window: Size | None) -> Size:
    """Return the most rows and columns that attention sees to one side on a map of (height, width), including the
    query's own.

    Tables have 2 * reach - 1 rows, one per offset. `window` is the window's odd (height, width), or None.
    """
    if window is None:
        return feat_size
    height, width = window
    return min(feat_size[0], (height + 1) // 2), min(feat_size[1], (width + 1) // 2)


def tables_on_map(
    height_rel: Tensor | None, width_rel: Tensor | None, feat_size: Size, window: Size | None
) -> tuple[Tensor | None, Tensor | None]:
    """Return position tables with a row for each offset on a map of (height, width), (2H-1, D) and (2W-1, D).

    They are fitted to the window, if there is one; rows of offsets beyond it are 0.
    """
    if height_rel is None or width_rel is None:
        return height_rel, width_rel
    high, wide = reaches(feat_size, window)
    return _on_axis(height_rel, feat_size[0], high), _on_axis(width_rel, feat_size[1], wide)


def _on_axis(table: Tensor, size: int, reach: int) -> Tensor:
    """Return a table fitted to a reach, with rows of zeros for the offsets beyond it on an axis of `size` pixels."""
    beyond = size - reach
    fitted = fit_rel_table(table, reach)
    return F.pad(fitted, [0, 0, beyond, beyond]) if beyond else fitted


def by_position(table: Tensor, size: int) -> Tensor:
    """Return a table by positions: (2S-1, D) by offset -> (S, S, D) by query and key; offset = key - query."""
    position = torch.arange(size, device=table.device)
    return table[position.unsqueeze(0) - position.unsqueeze(1) + (size - 1)]
