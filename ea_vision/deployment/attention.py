"""Our attention layers for inference: the kernels of `ea_vision.ops` in PyTorch, plain operations in exported programs.

An exported layer has one matrix product for dot products and positions together,

    logits[i, j] = [q_i, q_i . height_rel[* - row(i)], q_i . width_rel[* - col(i)]]
                   . [k_j, row(j) one-hot, col(j) one-hot]

so that no position term is repeated to the size of a map; the scale and the evolution's factor multiply the queries.

Shape letters: B batch, H x W the attention map, N = H*W its pixels, K heads, D width of a head.
"""

import torch
import torch.nn.functional as F
from timm.models import register_notrace_module
from torch import Tensor

from ea_vision.deployment.evolution import fold_evolution
from ea_vision.layers import AugmentedConv2d, TokenAttention, fit_rel_table
from ea_vision.layers.augmented_conv import Projection
from ea_vision.ops import exporting
from ea_vision.ops.rel_pos import by_position


class DeployedProjection(Projection):
    """A `Projection` that is a convolution in an exported program."""

    def forward(self, x: Tensor) -> Tensor:
        return F.conv2d(x, self.weight, self.bias) if exporting() else super().forward(x)


class _Deployed:
    """Beside the class of a layer: its attention for inference, made by `make_portable`.

    gain: (K, 1, 1), what multiplies the queries.
    folded: the evolution, or None.
    rows, cols: (S, D, S), of an augmented convolution: of each query's row or column what every key's gives.
    places: (H + W, N), of each pixel its row and its column, one-hot.
    """

    def _attend(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        prev_logits: Tensor | None,
        feat_size: tuple[int, int] | None,
        *more,
    ) -> tuple[Tensor, Tensor | None]:
        over_pixels = isinstance(self, AugmentedConv2d)
        if not exporting() or over_pixels and feat_size != self.feat_size:
            return super()._attend(q, k, v, prev_logits, feat_size, *more)
        q, k = q * self.gain, k.transpose(-2, -1)  # (B, K, N, D), (B, K, D, N)
        if over_pixels and self.relative:
            (B, K, N, D), (H, W) = q.shape, feat_size
            q = q.transpose(1, 2)  # (B, N, K, D)
            by_row = (q.reshape(B, H, W * K, D) @ self.rows).reshape(B, N, K, H)
            by_col = (q.reshape(B, H, W, K, D) @ self.cols).reshape(B, N, K, W)
            q = torch.cat([q, by_row, by_col], 3).transpose(1, 2)
            k = torch.cat([k, self.places.expand(B, K, -1, -1)], 2)
        logits = q @ k
        if self.folded is not None:
            logits = self.folded(logits, prev_logits)
        return logits.softmax(-1) @ v, logits


@register_notrace_module
class DeployedConv2d(_Deployed, AugmentedConv2d):
    """An `AugmentedConv2d` for inference; its convolution may have a bias."""


@register_notrace_module
class DeployedTokenAttention(_Deployed, TokenAttention):
    """A `TokenAttention` for inference."""


def make_portable(layer: AugmentedConv2d | TokenAttention) -> None:
    """Turn a layer, in place, into its form for inference, unless it has windows or an evolution that cannot be folded,
    or needs no maps at all: then torch's fused attention is best."""
    over_tokens, evolution = (
        type(layer) is TokenAttention,
        fold_evolution(layer.evolution, layer.num_heads),
    )
    if type(layer) not in (AugmentedConv2d, TokenAttention) or (evolution is None) != (
        layer.evolution is None
    ):
        return
    if not (layer.evolution or layer.need_logits) if over_tokens else layer.local:
        return
    layer.__class__, layer.folded = (
        DeployedTokenAttention if over_tokens else DeployedConv2d,
        evolution,
    )
    gain = torch.full((layer.num_heads, 1, 1), layer.scale, dtype=torch.float64)
    tables = {"gain": gain if evolution is None else gain * evolution.own_gain}
    if not over_tokens:
        layer.qkv.__class__ = layer.proj.__class__ = DeployedProjection
        if layer.relative:
            H, W = layer.feat_size
            for name, table, size in (("rows", layer.height_rel, H), ("cols", layer.width_rel, W)):
                tables[name] = (
                    by_position(fit_rel_table(table.detach(), size), size)
                    .transpose(1, 2)
                    .contiguous()
                )
            tables["places"] = torch.cat(
                [torch.eye(H).repeat_interleave(W, 1), torch.eye(W).repeat(1, H)]
            )
    for name, table in tables.items():
        layer.register_buffer(name, table.to(layer.qkv.weight), persistent=False)
