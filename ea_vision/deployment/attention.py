"""Our attention layers for inference: the kernels of `ea_vision.ops` in PyTorch, plain operations in exported programs.

An exported layer has one matrix product for dot products and positions together,

    logits[i, j] = [q_i, q_i . height_rel[* - row(i)], q_i . width_rel[* - col(i)]]
                   . [k_j, row(j) one-hot, col(j) one-hot]

so no position term is repeated to the size of a map. The scale and the evolution's factor multiply the queries.

Shape letters: B batch, H x W the attention map, N = H*W its pixels, K heads, D width of a head.
"""

import torch
import torch.nn.functional as F
from timm.models import register_notrace_module
from torch import Tensor

from ea_vision.deployment.evolution import fold_evolution
from ea_vision.layers import AugmentedConv2d, MapsAttention, fit_rel_table
from ea_vision.layers.projection import Projection
from ea_vision.models.any_transformer import EvolvingVitAttention
from ea_vision.ops import Size, exporting
from ea_vision.ops.rel_pos import by_position


class DeployedProjection(Projection):
    """A `Projection` that is a convolution in an exported program."""

    def forward(self, x: Tensor) -> Tensor:
        if exporting():
            return F.conv2d(x, self.weight, self.bias)
        return super().forward(x)


class _Deployed:
    """A mixin for a layer's class: its attention for inference, see `make_portable`.

    Attributes:
        gain: (K, 1, 1), factor of the queries.
        folded: the folded evolution, or None.
        rows: (H, D, H), in an augmented convolution: the position table by the query's and the key's row.
        cols: (W, D, W), likewise by column.
        places: (H + W, N), the row and the column of each pixel, one-hot.
    """

    def _attend(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        prev_logits: Tensor | None,
        feat_size: Size | None,
        *more,
    ) -> tuple[Tensor, Tensor | None]:
        over_pixels = isinstance(self, AugmentedConv2d)
        if not exporting() or (over_pixels and feat_size != self.feat_size):
            return super()._attend(q, k, v, prev_logits, feat_size, *more)
        q = q * self.gain
        k = k.transpose(-2, -1)  # (B, K, D, N)
        if over_pixels and self.relative:
            q = self._with_positions(q, feat_size)
            places = self.places.expand(*k.shape[:2], -1, -1)
            k = torch.cat([k, places], 2)
        logits = q @ k
        if self.folded is not None:
            logits = self.folded(logits, prev_logits)
        return logits.softmax(-1) @ v, logits

    def _with_positions(self, q: Tensor, feat_size: Size) -> Tensor:
        """Append to queries (B, K, N, D) their position terms for each row and column: (B, K, N, D + H + W)."""
        B, K, N, D = q.shape
        H, W = feat_size
        q = q.transpose(1, 2)  # (B, N, K, D)
        row_terms = q.reshape(B, H, W * K, D) @ self.rows
        column_terms = q.reshape(B, H, W, K, D) @ self.cols
        row_terms = row_terms.reshape(B, N, K, H)
        column_terms = column_terms.reshape(B, N, K, W)
        extended = torch.cat([q, row_terms, column_terms], 3)
        return extended.transpose(1, 2)


@register_notrace_module
class DeployedConv2d(_Deployed, AugmentedConv2d):
    """An `AugmentedConv2d` for inference."""


@register_notrace_module
class DeployedVitAttention(_Deployed, EvolvingVitAttention):
    """An `EvolvingVitAttention` for inference."""


def make_portable(layer: AugmentedConv2d | MapsAttention) -> None:
    """Convert a layer, in place, to its form for inference.

    Layers with windows, with an evolution that cannot be folded, or of another class stay unchanged; so do layers whose
    maps nobody needs, for which torch's fused attention is best.
    """
    if type(layer) is EvolvingVitAttention:
        deployed = DeployedVitAttention
        if layer.evolution is None and not layer.need_logits:
            return
    elif type(layer) is AugmentedConv2d:
        deployed = DeployedConv2d
    else:
        return
    folded = fold_evolution(layer.evolution, layer.num_heads)
    if layer.local or (folded is None) != (layer.evolution is None):
        return
    layer.__class__ = deployed
    weight = next(layer.qkv.parameters())
    layer.folded = None if folded is None else folded.to(weight.device)
    gain = torch.full((layer.num_heads, 1, 1), layer.scale, dtype=torch.float64)
    if folded is not None:
        gain = gain * folded.own_gain
    tables = {"gain": gain}
    if deployed is DeployedConv2d:
        for projection in (layer.qkv, layer.proj):
            if type(projection) is Projection:  # an adapter (LoRA) stays unchanged
                projection.__class__ = DeployedProjection
        if layer.relative:
            H, W = layer.feat_size
            tables["rows"] = _table_by_query(layer.height_rel, H)
            tables["cols"] = _table_by_query(layer.width_rel, W)
            rows = torch.eye(H).repeat_interleave(W, 1)
            columns = torch.eye(W).repeat(1, H)
            tables["places"] = torch.cat([rows, columns])
    for name, table in tables.items():
        layer.register_buffer(name, table.to(weight), persistent=False)


def _table_by_query(table: Tensor, size: int) -> Tensor:
    """Return a position table by the query's and the key's row (or column): (query, D, key), `size` of each."""
    fitted = fit_rel_table(table.detach(), size)
    return by_position(fitted, size).transpose(1, 2).contiguous()
