"""How attention over pixels knows positions: learned tables by offset, or absolute positions in the branch's input.

Papers:
* AA: `Attention Augmented Convolutional Networks`, sections 3.1.1 and 4.5 - https://arxiv.org/abs/1904.09925
* sine: `Attention Is All You Need` - https://arxiv.org/abs/1706.03762, over two axes as in `Image Transformer`
* coordinates: `An intriguing failing of convolutional neural networks and the CoordConv solution`
  - https://arxiv.org/abs/1807.03247

The AA paper compares its tables with absolute positions, and does not say where these enter or how they are scaled.
Here they enter at the branch's input, after pooling. They have no weights and are computed for the size of each map, so
they fit every size, as the tables do.

Shape letters: B batch, C channels, H x W the attention map, D width of a head.
"""

import torch
from torch import Tensor, nn

from ea_vision.ops import Size, log_large_map
from ea_vision.ops.rel_pos import fit_rel_table, reaches

POSITIONS = ("relative", "none", "sine", "coord")


def check_position(position: str) -> str:
    """Return the position.

    Raises:
        ValueError: it is not one of POSITIONS.
    """
    if position not in POSITIONS:
        positions = ", ".join(repr(name) for name in POSITIONS)
        raise ValueError(f"position must be one of {positions}, got {position!r}")
    return position


def branch_channels(in_channels: int, position: str) -> int:
    """Return the channels of a branch's input with positions.

    Raises:
        ValueError: 4 does not divide in_channels for "sine".
    """
    if position == "sine" and in_channels % 4:
        raise ValueError(f"position='sine' needs in_channels that 4 divides, got {in_channels}")
    return in_channels + 3 if position == "coord" else in_channels


def _axis(size: int, like: Tensor) -> Tensor:
    """Return 0 .. size - 1 on the device of `like`, in float32, or in float64 if `like` is."""
    dtype = torch.float64 if like.dtype == torch.float64 else torch.float32
    return torch.arange(size, device=like.device, dtype=dtype)


def add_sine(x: Tensor) -> Tensor:
    """Add sines and cosines of each pixel's row and column to x (B, C, H, W), C a multiple of 4.

    The C/4 periods are 2 pi * 10000**(4 i / C) pixels, i = 0 .. C/4 - 1. The channels have the order of timm's
    `build_sincos2d_pos_embed`: sines of the row, sines of the column, cosines of the row, cosines of the column.
    """
    _, C, H, W = x.shape
    periods = C // 4
    radians_per_pixel = 10000.0 ** (-_axis(periods, x) / periods)
    row_angles = radians_per_pixel.unsqueeze(1) * _axis(H, x)  # (C/4, H)
    column_angles = radians_per_pixel.unsqueeze(1) * _axis(W, x)  # (C/4, W)
    rows = row_angles.unsqueeze(2).expand(periods, H, W)
    columns = column_angles.unsqueeze(1).expand(periods, H, W)
    waves = torch.cat([rows.sin(), columns.sin(), rows.cos(), columns.cos()])
    return x + waves.to(x.dtype)


def _centred_axis(size: int, like: Tensor) -> Tensor:
    """Return `size` numbers from -1 to 1, or 0 if size is 1."""
    return (2 * _axis(size, like) - (size - 1)) / max(size - 1, 1)


def append_coordinates(x: Tensor) -> Tensor:
    """Append CoordConv's channels to those of x: (B, C, H, W) -> (B, C + 3, H, W).

    They are the column, the row, each from -1 to 1 (0 if there is only one), and the distance from the centre.
    """
    B, _, H, W = x.shape
    rows = _centred_axis(H, x).unsqueeze(1).expand(H, W)
    columns = _centred_axis(W, x).unsqueeze(0).expand(H, W)
    distance = (rows**2 + columns**2).sqrt()
    channels = torch.stack([columns, rows, distance]).to(x.dtype)
    return torch.cat([x, channels.expand(B, 3, H, W)], dim=1)


class PositionTables:
    """A mixin for an attention layer with `num_heads`, `dim_head_qk` (D), `evolution`, `window`, and `relative`, which
    says whether it has tables.

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
        high, wide = reaches(feat_size, self.window)
        return [("height_rel", high), ("width_rel", wide)]

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
