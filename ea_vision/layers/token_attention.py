"""timm's attention over a transformer's tokens, whose maps may evolve from block to block.

Shape letters: B batch, C channels, K heads, T tokens (prefix tokens and patches), D width of a head.
"""

import torch
from torch import Tensor, nn

from ea_vision.layers.augmented_conv import AugmentedConv2d
from ea_vision.layers.evolution import Operands
from ea_vision.layers.evolving_maps import EvolvingMaps
from ea_vision.layers.handing_on import Handed
from ea_vision.ops import Size


class MapsAttention(EvolvingMaps):
    """The maps of a layer over tokens; a mixin for a class with `num_heads`, `scale` and `attn_drop`.

    Attributes:
        fused_attn: whether another implementation than the reference may run; timm's layers set it.
        value_residual: a module that mixes in the first layer's values, or None.
        number: the layer's place in its chain, counted from 1.
    """

    fused_attn = True

    def _operands(self, prev_logits: Tensor | None) -> Operands | None:
        return super()._operands(prev_logits) if self.fused_attn else None

    def attend(
        self,
        x: Tensor | None,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        handed: Handed,
        feat_size: Size | None,
        bias: Tensor | None = None,
    ) -> tuple[Tensor, Handed]:
        """Attend, with the layer's mechanisms.

        Args:
            x: (B, Q, C), the layer's input, if the evolution reads it.
            q: (B, K, Q, D), not scaled.
            k, v: (B, K, N, D).
            handed: what the layer before has handed on.
            feat_size: (H, W) of the patches, for a `spatial` evolution.
            bias: added to the logits; it may be a mask only if the mechanisms do not change the maps.

        Returns:
            (B, Q, K, D), and what the layer hands on.

        Raises:
            ValueError: an input from another block is missing or has the wrong shape.
        """
        is_spatial = self.evolution is not None and self.evolution.spatial
        if is_spatial and feat_size is None:
            raise ValueError(
                "this evolution needs the patches' (height, width): images (B, C, H, W) required"
            )
        first_values = handed.first_values
        if self.value_residual is not None:
            if first_values is None:
                raise ValueError(
                    "the first block's values required, got tokens that passed through no block"
                )
            v = self.value_residual(v, first_values)
        out, logits = self.attend_heads(
            x, q, k, v, handed.logits, feat_size, self.need_logits, bias
        )
        if self.number == 1:
            first_values = v
        gradients = torch.is_grad_enabled()
        handed = Handed(self.number, handed.feat_size, logits, first_values, gradients)
        return out.transpose(1, 2), handed

    def finish(self, out: Tensor, x: Tensor) -> Tensor:
        """Apply timm's steps after attention (norm, gate, projection): out (B, T, K*D), the layer's input x (B, T, C)
        -> (B, T, C)."""
        out = self.norm(out)
        if self.gate is not None:
            out = out * self.gate(x).sigmoid()
        return self.proj_drop(self.proj(out))


def attention_layers(model: nn.Module) -> list[AugmentedConv2d | MapsAttention]:
    """Return the attention layers of a network whose maps this package computes, in order."""
    kinds = (AugmentedConv2d, MapsAttention)
    return [layer for layer in model.modules() if isinstance(layer, kinds)]
