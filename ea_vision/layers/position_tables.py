"""Learned tables of relative positions, which fit maps of every size.

Paper: `Attention Augmented Convolutional Networks`, section 3.1.1 - https://arxiv.org/abs/1904.09925

Shape letters: H x W the attention map, D width of a head.
"""

from typing import Any

import torch
from torch import Tensor, nn

from ea_vision.layers.windows import SeesWindows
from ea_vision.ops import Size, log_large_map
from ea_vision.ops.rel_pos import fit_rel_table, tables_on_map


class PositionTables(SeesWindows):
    """A mixin for an attention layer with `num_heads`, `dim_head_qk` (D), `evolution`, and `relative`: whether it has
    tables.

    Attributes:
        feat_size: (H, W) of the map for which the tables are made.
        height_rel: (2H-1, D), row 0 is the offset -(H-1), or None; fewer rows with a window.
        width_rel: (2W-1, D), likewise.
    """

    def add_tables(self, feat_size: Size, device, dtype) -> None:
        """Create the tables, without values."""
        self.feat_size = (int(feat_size[0]), int(feat_size[1]))
        self.height_rel = None
        self.width_rel = None
        for name, size in self.table_sizes(self.feat_size):
            table = torch.empty(2 * size - 1, self.dim_head_qk, device=device, dtype=dtype)
            setattr(self, name, nn.Parameter(table))

    def table_sizes(self, feat_size: Size) -> list[tuple[str, int]]:
        """Return (name, number of offsets to one side) of each position table for a map of (height, width)."""
        if not self.relative:
            return []
        high, wide = self.reaches(feat_size)
        return [("height_rel", high), ("width_rel", wide)]

    def tables_on(self, feat_size: Size) -> tuple[Tensor | None, Tensor | None]:
        """Return the tables with a row for each offset of a map of (height, width)."""
        return tables_on_map(self.height_rel, self.width_rel, feat_size, self.window)

    def on_map(self, feat_size: Size) -> dict[str, Any]:
        return {
            "height_rel": self.height_rel,
            "width_rel": self.width_rel,
            "feat_size": feat_size,
            "window": self.window,
            "head_window": self.head_window,
            "head_border": self.head_border,
        }

    def set_feat_size(self, feat_size: Size) -> None:
        """Fit the position tables to another (height, width) of the map, permanently."""
        self.feat_size = (int(feat_size[0]), int(feat_size[1]))
        if self.evolution is not None:
            log_large_map(self.num_heads, self.feat_size)
        for name, size in self.table_sizes(self.feat_size):
            table = getattr(self, name)
            fitted = fit_rel_table(table.detach(), size).contiguous()
            setattr(self, name, nn.Parameter(fitted, requires_grad=table.requires_grad))

    @torch.no_grad()
    def fill_offsets_beyond(self, feat_size: Size) -> None:
        """Copy the table rows of the farthest offsets on a map of (height, width) to all larger offsets, in place.

        Maps of this size have not trained larger offsets. A larger map then begins with the nearest trained values.
        """
        for name, size in self.table_sizes(feat_size):
            table = getattr(self, name)
            beyond = (table.shape[0] + 1) // 2 - size
            if beyond > 0:
                table[:beyond] = table[beyond]
                table[-beyond:] = table[-beyond - 1]
