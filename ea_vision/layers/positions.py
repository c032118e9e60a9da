"""Absolute positions for the input of an attention branch: what the AA paper compares its relative ones with.

Papers:
* AA: `Attention Augmented Convolutional Networks`, section 4.5 - https://arxiv.org/abs/1904.09925
* sine: `Attention Is All You Need` - https://arxiv.org/abs/1706.03762, over two axes as in `Image Transformer`
* coordinates: `An intriguing failing of convolutional neural networks and the CoordConv solution`
  - https://arxiv.org/abs/1807.03247

The AA paper leaves open where they enter and how they are scaled. Here they enter at the branch's input, after pooling,
and are computed for the size of the map at hand: they have no weights and fit every size.

Shape letters: B batch, C channels, H x W the attention map.
"""

import torch
from torch import Tensor

POSITIONS = ("relative", "none", "sine", "coord")


def check_position(position: str) -> str:
    """Return the kind of position that is asked for.

    Raises:
        ValueError: no such kind.
    """
    if position not in POSITIONS:
        raise ValueError(
            f"position must be one of {', '.join(map(repr, POSITIONS))}, got {position!r}"
        )
    return position


def _axis(size: int, like: Tensor) -> Tensor:
    """Return 0 .. size - 1, in float32 at least."""
    dtype = torch.float64 if like.dtype == torch.float64 else torch.float32
    return torch.arange(size, device=like.device, dtype=dtype)


def add_sine(x: Tensor) -> Tensor:
    """Add sines and cosines of the pixel's row and column to (B, C, H, W), C a multiple of 4.

    C/4 periods of 2 pi * 10000**(4 i / C) pixels, i = 0 .. C/4 - 1, in the order of timm's `build_sincos2d_pos_embed`:
    the sines of the row, of the column, the cosines of the row, of the column.
    """
    C, H, W = x.shape[1], x.shape[2], x.shape[3]
    bands = 10000.0 ** (-_axis(C // 4, x) / (C // 4))  # radians a pixel
    down = (bands.unsqueeze(1) * _axis(H, x)).unsqueeze(2).expand(C // 4, H, W)
    right = (bands.unsqueeze(1) * _axis(W, x)).unsqueeze(1).expand(C // 4, H, W)
    return x + torch.cat([down.sin(), right.sin(), down.cos(), right.cos()]).to(x.dtype)


def append_coordinates(x: Tensor) -> Tensor:
    """Append CoordConv's channels to those of x: (B, C, H, W) -> (B, C + 3, H, W).

    The column and the row, each from -1 to 1 (0 where there is one alone), and their distance from the centre.
    """
    B, H, W = x.shape[0], x.shape[2], x.shape[3]
    rows = ((2 * _axis(H, x) - (H - 1)) / max(H - 1, 1)).unsqueeze(1).expand(H, W)
    cols = ((2 * _axis(W, x) - (W - 1)) / max(W - 1, 1)).unsqueeze(0).expand(H, W)
    channels = torch.stack([cols, rows, (rows**2 + cols**2).sqrt()]).to(x.dtype)
    return torch.cat([x, channels.unsqueeze(0).expand(B, 3, H, W)], dim=1)
