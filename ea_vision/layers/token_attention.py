"""A transformer's attention over tokens, whose maps may evolve from block to block.

Shape letters: B batch, C channels, K heads, T tokens (prefix tokens and patches), D width of a head.
"""
import threading
from dataclasses import dataclass, replace

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ea_vision.layers.augmented_conv import AugmentedConv2d
from ea_vision.layers.evolution import EvolvingMaps
from ea_vision.ops import evolving_attention
from ea_vision.ops.problem import check_prev_logits


@dataclass(frozen=True)
class Carried:
    """What a block hands on: (H, W) of the patches, its logits (B, K, T, T), the first block's values (B, K, T, D)."""

    feat_size: tuple[int, int] | None
    logits: Tensor | None = None
    first_values: Tensor | None = None


def this_thread() -> int:
    """Return whose forward runs: what a layer keeps for its length is kept by thread."""
    return 0 if torch.compiler.is_compiling() else threading.get_ident()


class TokenAttention(EvolvingMaps):
    """The maps of an attention layer over tokens, beside timm's or torch's class, whose forward calls `attended`.

    That class has `num_heads`, `scale` and `attn_drop`.

    value_residual: mixes the first layer's values in, or None.
    is_first: whether the layer's values are the first ones.
    carried: by thread, what the block before hands on, while the layer's block runs.
    """

    fused_attn = True

    def _attend(
            self, q: Tensor, k: Tensor, v: Tensor, prev_logits: Tensor | None, feat_size: tuple[int, int] | None,
            bias: Tensor | None = None,
    ) -> tuple[Tensor, Tensor | None]:
        """Return the heads' outputs and, where somebody reads them, the logits. A recorder follows this method."""
        operands = self._operands(prev_logits) if self.fused_attn else None
        need_logits = self.need_logits or bool(self._forward_hooks and self.evolution is not None)
        dropout_p = self.attn_drop.p if self.training else 0.0
        if operands is not None and not operands and not need_logits:
            return F.scaled_dot_product_attention(q, k, v, attn_mask=bias, dropout_p=dropout_p), None
        if operands is None or bias is not None:
            return self._attend_by_modules(q, k, v, prev_logits, feat_size, bias)
        scale = self.scale * operands.pop("own_scale", 1.0)
        return evolving_attention(
            q, k, v, **operands, scale=scale, need_logits=need_logits, dropout_p=dropout_p)

    def attended(self, x: Tensor, q: Tensor, k: Tensor, v: Tensor, bias: Tensor | None = None) -> Tensor:
        """Attend, with the layer's mechanisms.

        Args:
            x: (B, T, C), the layer's input.
            q, k, v: (B, K, T, D), q not scaled.
            bias: added to the logits, or a mask for mechanisms that leave the maps alone.

        Returns:
            (B, T, K*D), heads concatenated.

        Raises:
            ValueError: something missing or of another shape that the mechanisms read of the blocks before.
        """
        carried, evolution = self.carried[this_thread()], self.evolution
        if evolution is not None and evolution.reads_previous:
            check_prev_logits(carried.logits, *q.shape[:3])
        if evolution is not None and evolution.spatial and carried.feat_size is None:
            raise ValueError("this evolution needs the patches' (height, width): images (B, C, H, W) required")
        if self.value_residual is not None:
            if carried.first_values is None:
                raise ValueError("the first block's values required, got tokens that no block has made")
            v = self.value_residual(v, carried.first_values)
        out, logits = self._attend(q, k, v, carried.logits, carried.feat_size, bias)
        if evolution is not None and evolution.mixes_output:
            out = evolution.mix_output(out, v, x)
        first_values = v if self.is_first else carried.first_values
        self.carried[this_thread()] = replace(carried, logits=logits, first_values=first_values)
        return out.transpose(1, 2).flatten(2)

    def checked(self, attn_mask: Tensor | None, is_causal: bool) -> Tensor | None:
        """Return the mask as a bias.

        Raises:
            ValueError: a mask where maps evolve, or a causal one.
        """
        if is_causal or attn_mask is not None and (self.need_logits or self.evolution is not None and not
                                                   self.evolution.mixes_output):
            raise ValueError("maps that evolve take no mask (their convolutions would read what it hides): "
                             "attn_mask=None and is_causal=False required")
        if attn_mask is None or attn_mask.dtype != torch.bool:
            return attn_mask
        return torch.zeros_like(attn_mask, dtype=self.proj.weight.dtype).masked_fill(~attn_mask, float("-inf"))


def attention_layers(model: nn.Module) -> list[AugmentedConv2d | TokenAttention]:
    """Return the layers of a network whose attention branches are ours, in order."""
    return [layer for layer in model.modules() if isinstance(layer, (AugmentedConv2d, TokenAttention))]
