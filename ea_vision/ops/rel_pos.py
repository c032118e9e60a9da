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


def reach(size: int, window: int | None) -> int:
    """Return the most pixels that attention sees to one side along an axis, including the query's own.

    Tables have 2 * reach - 1 rows, one per offset. `window` is the window's odd side, or None.
    """
    return size if window is None else min(size, (window + 1) // 2)


def tables_on_map(
    height_rel: Tensor | None, width_rel: Tensor | None, feat_size: Size, window: Size | None
) -> tuple[Tensor | None, Tensor | None]:
    """Return position tables with a row for each offset on a map of (height, width), (2H-1, D) and (2W-1, D).

    They are fitted to the window, if there is one; rows of offsets beyond it are 0.
    """
    if height_rel is None or width_rel is None:
        return height_rel, width_rel
    tables = []
    for table, size, side in zip(
        (height_rel, width_rel), feat_size, window or (None, None), strict=True
    ):
        fitted = fit_rel_table(table, reach(size, side))
        missing = size - (fitted.shape[0] + 1) // 2
        tables.append(F.pad(fitted, [0, 0, missing, missing]) if missing else fitted)
    return tables[0], tables[1]


def by_position(table: Tensor, size: int) -> Tensor:
    """Return a table by positions: (2S-1, D) by offset -> (S, S, D) by query and key; offset = key - query."""
    position = torch.arange(size, device=table.device)
    return table[position.unsqueeze(0) - position.unsqueeze(1) + (size - 1)]
