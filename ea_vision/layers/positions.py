"""Absolute positions for the input of an attention branch; the AA paper compares its relative positions with them.

Papers:
* AA: `Attention Augmented Convolutional Networks`, section 4.5 - https://arxiv.org/abs/1904.09925
* sine: `Attention Is All You Need` - https://arxiv.org/abs/1706.03762, over two axes as in `Image Transformer`
* coordinates: `An intriguing failing of convolutional neural networks and the CoordConv solution`
  - https://arxiv.org/abs/1807.03247

The AA paper does not say where they enter or how they are scaled. Here they enter at the branch's input, after pooling.
They have no weights and are computed for the size of each map, so they fit every size.

Shape letters: B batch, C channels, H x W the attention map.
"""

import torch
from torch import Tensor

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


def with_position(x: Tensor, position: str) -> Tensor:
    """Return the branch's input (B, C, H, W) with absolute positions; "relative" and "none" add none."""
    if position == "sine":
        return add_sine(x)
    if position == "coord":
        return append_coordinates(x)
    return x


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
