"""Self-attention over the pixels of a map (AA paper, section 3.1), whose logits may evolve from layer to layer.

1. a 1x1 projection of the input gives queries, keys and values;
2. logits = (q k + q height_rel[row offset] + q width_rel[column offset]) / sqrt(D), for each head;
3. the evolution mixes in the previous layer's logits (PA and EA, `ea_vision.layers.evolution`);
4. out = softmax(logits) v, heads concatenated and projected.

Steps 2 to 4 are `ea_vision.ops.evolving_attention`, unless a hook wants to see the maps. With windows of pixels and of
neighbouring heads, a query sees only some entries.

Paper of windows: `Convolutional Self-Attention Networks` - https://arxiv.org/abs/1904.03107 (there they are of text)

Shape letters: B batch, C channels, H x W the attention map, N = H*W its pixels (row-major), K heads, D width of a head.
"""

from typing import Any

import torch
from torch import Tensor, nn

from ea_vision.layers.evolving_maps import EvolvingMaps
from ea_vision.layers.positions import (
    PositionTables,
    add_sine,
    append_coordinates,
    branch_channels,
    check_position,
)
from ea_vision.layers.projection import Projection
from ea_vision.ops import Size, check_windows, log_large_map, normalise_heads
from ea_vision.ops.reference import own_logits
from ea_vision.ops.rel_pos import reaches, tables_on_map


class PixelAttention(PositionTables, EvolvingMaps):
    """The attention branch of an augmented convolution: a mixin for `nn.Module`.

    Attributes:
        window: odd (height, width) in pixels, or None for the whole map.
        head_window: odd number of neighbouring heads under one softmax.
        head_border: "clip" or "wrap".
        local: whether a query sees only a part of the map, or other heads.
    """

    def add_attention(
        self,
        in_channels: int,
        attn_channels: int,
        *,
        dim_qk: int,
        dim_v: int,
        num_heads: int = 8,
        feat_size: Size,
        position: str = "relative",
        qk_norm: bool | None = None,
        evolution: nn.Module | None = None,
        attn_drop: float = 0.0,
        window: int | Size | None = None,
        head_window: int = 1,
        head_border: str = "clip",
        device=None,
        dtype=None,
    ) -> None:
        """Create the branch's modules, without values; the errors are those of `AugmentedConv2d`.

        Args:
            in_channels, attn_channels: channels of the branch's input and output.
            dim_qk: width of queries and of keys, all heads together.
            dim_v: width of values, all heads together.
            num_heads: K.
            feat_size: (height, width) of the attention map; it determines the size of the position tables. The layer
                also runs on other sizes: a smaller map uses the middle of the tables, a larger one a resized copy.
            position: how attention knows positions. "relative": terms of the logits by offset, with learned tables;
                "none"; "sine": sines and cosines added to the branch's input; "coord": coordinates appended to it (both
                after pooling, see `ea_vision.layers.positions`).
            qk_norm: whether each head's queries and keys are divided by the root of their mean square, in float32,
                before scale and position terms. The parameter `qk_gain` (K), which begins at 1, multiplies the queries.
                None: only if a loaded checkpoint has `qk_gain`. False: never; loading such a checkpoint is an error.
            evolution: `Evolution` of a layer that has a predecessor in its chain, or None.
            attn_drop: dropout probability of the attention probabilities.
            window: odd side in pixels, or (height, width), of the area around its pixel that a query sees, or None for
                the whole map; position tables cover the offsets inside. With `evolution`, whole maps evolve and are
                handed on; the window is applied afterwards.
            head_window: odd number of neighbouring heads, centred on the query's own, whose keys a query sees under one
                softmax (CSAN).
            head_border: "clip": the first and the last heads have fewer neighbours; "wrap": the heads form a ring.
        """
        for name, width in (("dim_qk", dim_qk), ("dim_v", dim_v)):
            if num_heads < 1 or width < num_heads or width % num_heads:
                raise ValueError(
                    f"{name} must be a positive multiple of num_heads={num_heads}, got {width}"
                )
        if len(feat_size) != 2 or min(feat_size) < 1:
            raise ValueError(
                f"feat_size must be a positive (height, width), got {tuple(feat_size)}"
            )
        self.position = check_position(position)
        self.relative = position == "relative"
        self.num_heads = num_heads
        self.dim_qk = dim_qk
        self.dim_v = dim_v
        self.dim_head_qk = dim_qk // num_heads
        self.dim_head_v = dim_v // num_heads
        self.scale = self.dim_head_qk**-0.5
        self.window = check_windows(window, head_window, head_border, num_heads)
        self.head_window = head_window
        self.head_border = head_border
        self.local = self.window is not None or head_window > 1
        if evolution is not None and head_window > 1:
            raise ValueError(f"head_window must be 1 where maps evolve, got {head_window}")
        if evolution is not None and window is not None and evolution.mixes_attn:
            raise ValueError(
                f"window must be None with {type(evolution).__name__}, which mixes maps after the "
                f"softmax and would reach beyond the window; got {window}"
            )
        self.need_logits = evolution is not None or not self.local

        dd = {"device": device, "dtype": dtype}
        self.qkv = Projection(branch_channels(in_channels, position), 2 * dim_qk + dim_v, 1, **dd)
        self.add_tables(feat_size, **dd)
        self.qk_norm = qk_norm
        self.qk_gain = nn.Parameter(torch.empty(num_heads, **dd)) if qk_norm else None
        self.evolution = evolution
        if evolution is not None:
            log_large_map(num_heads, self.feat_size)
        self.attn_drop = nn.Dropout(attn_drop)
        self.proj = Projection(dim_v, attn_channels, 1, **dd)

    def reset_attention(self) -> None:
        """Initialise projections by Glorot, tables normal with std dim_head_qk**-0.5 (AA code), and the queries' gains
        with 1."""
        for projection in (self.qkv, self.proj):
            nn.init.xavier_uniform_(projection.weight)
            nn.init.zeros_(projection.bias)
        for name, _ in self.table_sizes(self.feat_size):
            nn.init.normal_(getattr(self, name), std=self.scale)
        if self.qk_gain is not None:
            nn.init.ones_(self.qk_gain)

    def is_watched(self) -> bool:
        return super().is_watched() or (bool(self._forward_hooks) and not self.local)

    def branch_input(self, x: Tensor) -> Tensor:
        """Return the input of the projection `qkv`: x (B, C, H, W) with absolute positions."""
        if self.position == "sine":
            return add_sine(x)
        if self.position == "coord":
            return append_coordinates(x)
        return x

    def heads_of(self, projected: Tensor) -> tuple[Tensor, Tensor, Tensor, Size]:
        """Return queries, keys and values, and the map's size.

        Args:
            projected: (B, 2 * dim_qk + dim_v, H, W), the output of `qkv`.

        Returns:
            q and k (B, K, N, D), normalised with qk_norm, q not scaled; v (B, K, N, Dv); (H, W).
        """
        B, _, H, W = projected.shape
        qk, v = projected.split([2 * self.dim_qk, self.dim_v], dim=1)
        qk = qk.reshape(B, 2 * self.num_heads, self.dim_head_qk, H * W)
        if self.qk_gain is None:
            q, k = qk.transpose(-2, -1).chunk(2, dim=1)
        else:
            q, k = normalise_heads(qk, self.qk_gain)
        v = v.reshape(B, self.num_heads, self.dim_head_v, H * W).transpose(-2, -1)
        return q, k, v, (H, W)

    def on_map(self, feat_size: Size) -> dict[str, Any]:
        return {
            "height_rel": self.height_rel,
            "width_rel": self.width_rel,
            "feat_size": feat_size,
            "window": self.window,
            "head_window": self.head_window,
            "head_border": self.head_border,
        }

    def map_elements(self, feat_size: Size) -> int:
        """Return the number of query-key pairs that attention reads on a map of (height, width), in all heads."""
        K = self.num_heads
        heads = K * self.head_window
        if self.head_border == "clip":
            heads = _count_pairs(K, min(K, self.head_window // 2 + 1))
        high, wide = reaches(feat_size, self.window)
        rows = _count_pairs(feat_size[0], high)
        columns = _count_pairs(feat_size[1], wide)
        return heads * rows * columns

    def logits_of(self, q: Tensor, k: Tensor, feat_size: Size) -> Tensor:
        """Return the layer's logits before any evolution; see `EvolvingMaps`."""
        tables = tables_on_map(self.height_rel, self.width_rel, feat_size, self.window)
        return own_logits(q, k, *tables, self.scale, feat_size, self.head_window)

    def attend(
        self, x: Tensor, prev_logits: Tensor | None, need_logits: bool = True
    ) -> tuple[Tensor, Tensor | None]:
        """Return the branch's output (B, attn_channels, H, W), and the logits (B, K, N, N), or None if not needed."""
        branch_input = self.branch_input(x)
        q, k, v, feat_size = self.heads_of(self.qkv(branch_input))
        out, logits = self.attend_heads(branch_input, q, k, v, prev_logits, feat_size, need_logits)
        # heads concatenated
        out = out.transpose(-2, -1).reshape(x.shape[0], self.dim_v, *feat_size)
        if x.stride(1) == 1 and not x.is_contiguous():  # channels last
            out = out.permute(0, 2, 3, 1).contiguous().permute(0, 3, 1, 2)
        return self.proj(out), logits


def _count_pairs(size: int, most: int) -> int:
    """Count the ordered pairs among `size` positions that are less than `most` apart."""
    return sum(size - abs(offset) for offset in range(1 - most, most))
