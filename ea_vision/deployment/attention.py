"""Our attention layers for inference: the kernels of `ea_vision.ops` in PyTorch, plain operations in exported programs.

An exported layer has one matrix product for dot products and positions together,

    logits[i, j] = [q_i, q_i . height_rel[* - row(i)], q_i . width_rel[* - col(i)]]
                   . [k_j, row(j) one-hot, col(j) one-hot]

so that no position term is repeated to the size of a map, and the scale and the evolution's gates are in its weights.

Shape letters: B batch, C channels, H x W the attention map, N = H*W its pixels, T tokens, K heads, D width of a head.
"""
from __future__ import annotations

import torch
import torch.nn.functional as F
from timm.models import register_notrace_module
from torch import Tensor, nn

from ea_vision.deployment.evolution import FoldedEvolution, fold_evolution
from ea_vision.layers import AugmentedConv2d, TokenAttention, add_sine, append_coordinates, fit_rel_table
from ea_vision.layers.augmented_conv import normalise_heads
from ea_vision.ops.rel_pos import by_position


def exporting() -> bool:
    """Return whether torch.export or a tracer runs, whose programs must do without our kernels."""
    # torch.compile answers True to is_exporting
    return torch.jit.is_tracing() or torch.compiler.is_exporting() and not torch.compiler.is_dynamo_compiling()


def _scaled(tensor: Tensor, gain: Tensor) -> Tensor:
    """Return a tensor (K*D, ...) with each head's D rows times its gain (K,), in the tensor's type."""
    by_row = gain.to(tensor.device).repeat_interleave(tensor.shape[0] // len(gain))
    return (tensor.detach().double() * by_row.view(-1, *[1] * (tensor.dim() - 1))).to(tensor.dtype)


class _Folded(nn.Module):
    """A layer's projection to queries, with the scale and the evolution's factor in its weights."""

    def __init__(self, layer: AugmentedConv2d | TokenAttention, evolution: FoldedEvolution | None, width: int) -> None:
        super().__init__()
        self.evolution, gain = evolution, torch.full((layer.num_heads,), layer.scale, dtype=torch.float64)
        if evolution is not None:
            gain = gain * evolution.own_gain
        self.register_buffer("qk_gain", None, persistent=False)
        if (learned := getattr(layer, "qk_gain", None)) is not None:  # no weight before a norm holds a gain
            self.qk_gain = (learned.detach().double() * gain.to(learned.device)).to(learned.dtype)
            gain = torch.ones_like(gain)
        for name in ("weight", "bias"):
            whole = getattr(layer.qkv, name)
            query = None if whole is None else _scaled(whole[:width], gain)
            self.register_buffer(f"query_{name}", query, persistent=False)

    def attend(self, q: Tensor, k: Tensor, v: Tensor, prev_logits: Tensor | None) -> tuple[Tensor, Tensor]:
        """Attend: q (B, K, N, D) of the folded projection, k (B, K, D, N), v (B, K, N, E) -> (B, K, N, E), logits."""
        logits = q @ k
        if self.evolution is not None:
            logits = self.evolution(logits, prev_logits)
        return logits.softmax(-1) @ v, logits


class PortableAttention(_Folded):
    """The attention branch of an `AugmentedConv2d`, before its output projection, in plain operations."""

    def __init__(self, layer: AugmentedConv2d, evolution: FoldedEvolution | None) -> None:
        super().__init__(layer, evolution, layer.dim_qk)
        if layer.relative:
            H, W = layer.feat_size
            self.register_buffer("rows", self._table(layer.height_rel, H), persistent=False)
            self.register_buffer("cols", self._table(layer.width_rel, W), persistent=False)
            self.register_buffer("places", self._places(H, W).to(self.rows), persistent=False)

    @staticmethod
    def _table(table: Tensor, size: int) -> Tensor:
        """Lay out a table by offset, (2L-1, D), as (S, D, S): of each query's position, what every key's gives."""
        return by_position(fit_rel_table(table.detach(), size), size).transpose(1, 2).contiguous()

    @staticmethod
    def _places(H: int, W: int) -> Tensor:
        """Return (H + W, N): of each pixel its row and its column, one-hot."""
        rows, cols = torch.eye(H).repeat_interleave(W, 1), torch.eye(W).repeat(1, H)
        return torch.cat([rows, cols])

    def forward(self, layer: AugmentedConv2d, x: Tensor, prev_logits: Tensor | None) -> tuple[Tensor, Tensor]:
        """Attend: x (B, C, H', W'), the layer's input -> (B, dim_v, H, W) and the logits (B, K, N, N)."""
        for _ in range(layer.num_pools):
            x = F.avg_pool2d(x, 3, stride=2, padding=1, count_include_pad=False)
        if layer.position == "sine":
            x = add_sine(x)
        elif layer.position == "coord":
            x = append_coordinates(x)
        B, _, H, W = x.shape
        K, D, N = layer.num_heads, layer.dim_head_qk, H * W
        q = F.conv2d(x, self.query_weight, self.query_bias)
        kv = F.conv2d(x, layer.qkv.weight[layer.dim_qk:], layer.qkv.bias[layer.dim_qk:])
        k, v = kv.split([layer.dim_qk, layer.dim_v], 1)
        k, v = k.reshape(B, K, D, N), v.reshape(B, K, layer.dim_head_v, N)
        if self.qk_gain is not None:
            q, k = normalise_heads(torch.cat([q.reshape(B, K, D, N), k], 1), self.qk_gain).chunk(2, 1)
        q = q.reshape(B, K * D, H, W).permute(0, 2, 3, 1)  # (B, H, W, K*D)
        parts = [q.reshape(B, N, K, D)]
        if layer.relative:
            rows, cols, places = self.rows, self.cols, self.places
            if (H, W) != layer.feat_size:
                rows, cols = self._table(layer.height_rel, H), self._table(layer.width_rel, W)
                places = self._places(H, W).to(rows)
            parts.append((q.reshape(B, H, W * K, D) @ rows).reshape(B, N, K, H))
            parts.append((q.reshape(B, H, W, K, D) @ cols).reshape(B, N, K, W))
            k = torch.cat([k, places.expand(B, K, -1, -1)], 2)
        q = torch.cat(parts, 3).transpose(1, 2)  # (B, K, N, D + H + W)
        out, logits = self.attend(q, k, v.transpose(2, 3), prev_logits)
        return out.transpose(2, 3).reshape(B, layer.dim_v, H, W), logits


@register_notrace_module
class DeployedConv2d(AugmentedConv2d):
    """An `AugmentedConv2d` for inference, made by `DeployedConv2d.of`; its convolution may have a bias."""

    @classmethod
    def of(cls, layer: AugmentedConv2d) -> None:
        """Turn a layer, in place, into this one, unless it has windows or an evolution that cannot be folded."""
        evolution = fold_evolution(layer.evolution, layer.num_heads)
        if type(layer) is not AugmentedConv2d or layer.local or (evolution is None and layer.evolution is not None):
            return
        layer.__class__ = cls
        layer.portable = PortableAttention(layer, evolution)

    def attend(self, x: Tensor, prev_logits: Tensor | None, need_logits: bool = True) -> tuple[Tensor, Tensor | None]:
        """See `AugmentedConv2d.attend`."""
        if not exporting():
            return super().attend(x, prev_logits, need_logits)
        out, logits = self.portable(self, x, prev_logits)
        return F.conv2d(out, self.proj.weight, self.proj.bias), logits


class PortableTokenAttention(_Folded):
    """The attention of a `TokenAttention` in plain operations."""

    def __init__(self, layer: TokenAttention, evolution: FoldedEvolution | None) -> None:
        super().__init__(layer, evolution, layer.num_heads * layer.head_dim)

    def forward(self, layer: TokenAttention, x: Tensor, prev_logits: Tensor | None) -> tuple[Tensor, Tensor]:
        """Attend: x (B, T, C) -> (B, K, T, D) and the logits (B, K, T, T)."""
        weights = [self.query_weight, *layer.qkv.weight.chunk(3)[1:]]
        biases = [None] * 3 if layer.qkv.bias is None else [self.query_bias, *layer.qkv.bias.chunk(3)[1:]]
        B, T, _ = x.shape
        q, k, v = (F.linear(x, weight, bias).reshape(B, T, layer.num_heads, layer.head_dim).transpose(1, 2)
                   for weight, bias in zip(weights, biases, strict=True))
        return self.attend(q, k.transpose(2, 3), v, prev_logits)


@register_notrace_module
class DeployedTokenAttention(TokenAttention):
    """A `TokenAttention` for inference, made by `DeployedTokenAttention.of_layer`."""

    @classmethod
    def of_layer(cls, layer: TokenAttention) -> None:
        """Turn a layer, in place, into this one, unless its queries are normalised, its evolution cannot be folded, it
        mixes in the first layer's values, or it needs no maps at all: then torch's fused attention is best."""
        evolution = fold_evolution(layer.evolution, layer.num_heads)
        foreign = evolution is None and layer.evolution is not None or layer.value_residual is not None
        normed = any(not isinstance(norm, nn.Identity) for norm in (layer.q_norm, layer.k_norm))
        if type(layer) is not TokenAttention or foreign or normed or not (layer.evolution or layer.need_logits):
            return
        layer.__class__ = cls
        layer.portable = PortableTokenAttention(layer, evolution)

    def forward(
            self, x: Tensor, prev_logits: Tensor | None = None, feat_size: tuple[int, int] | None = None,
            first_values: Tensor | None = None,
    ) -> tuple[Tensor, Tensor | None]:
        """See `TokenAttention.forward`; such a layer reads neither feat_size nor first_values."""
        if not exporting():
            return super().forward(x, prev_logits, feat_size, first_values)
        out, logits = self.portable(self, x, prev_logits)
        out = self.norm(out.transpose(1, 2).flatten(2))
        if self.gate is not None:
            out = out * self.gate(x).sigmoid()
        return self.proj(out), logits
