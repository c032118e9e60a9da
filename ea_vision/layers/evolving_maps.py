"""The maps of an attention layer, over pixels or tokens: computed by the fastest implementation or step by step.

Shape letters: B batch, C channels, K heads, N pixels or tokens, D width of a head.
"""

from typing import Any

from torch import Tensor

from ea_vision.base.errors import UsageError
from ea_vision.layers.evolution import Operands, is_altered
from ea_vision.ops import Size, evolving_attention, forced, log_once
from ea_vision.ops.problem import check_prev_logits, reason_against_kernels
from ea_vision.ops.reference import StepByStep, own_logits
from ea_vision.ops.sdpa import fused_attention


class EvolvingMaps(StepByStep):
    """The maps of an attention layer; a mixin for a module with `num_heads`, `scale` and `attn_drop`.

    Attributes:
        evolution: the mechanism over its maps, or None.
        need_logits: whether another layer reads its logits.
    """

    def is_watched(self) -> bool:
        """Return whether a hook on the layer, such as a recorder's, reads its logits."""
        return bool(self._forward_hooks) and self.evolution is not None

    def logits_of(self, q: Tensor, k: Tensor, feat_size: Size) -> Tensor:
        """Return the layer's logits before any evolution; see `StepByStep`."""
        return own_logits(q, k, None, None, self.scale, feat_size)

    def on_map(self, feat_size: Size | None) -> dict[str, Any]:
        """Return the keywords of `evolving_attention` that depend on pixels' places; {} if tokens have none."""
        return {}

    def attention_of(self, logits: Tensor, feat_size: Size) -> Tensor:
        """Return the probabilities of (evolved) logits, mixed if the evolution mixes them."""
        attn = super().attention_of(logits, feat_size)
        if self.evolution is not None and self.evolution.mixes_attn:
            attn = self.evolution.mix_attn(attn.to(logits.dtype))
        return attn

    def parts_of(self, logits: Tensor, prev_logits: Tensor, evolved: Tensor) -> dict[str, Tensor]:
        """Return the evolution's further maps of the running call, for a recorder; see `Evolution.parts`."""
        return self.evolution.parts(logits, prev_logits, evolved)

    def attend_heads(
        self,
        x: Tensor,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        prev_logits: Tensor | None,
        feat_size: Size | None,
        need_logits: bool,
        bias: Tensor | None = None,
    ) -> tuple[Tensor, Tensor | None]:
        """Attend, and let the evolution mix the heads' outputs.

        Args:
            x: the layer's input, (B, Q, C) or (B, C, H, W).
            q: (B, K, Q, D), not scaled.
            k, v: (B, K, N, D); the queries' own are the last Q.
            prev_logits, feat_size, need_logits, bias: see `attend` of the layers.

        Returns:
            the heads' outputs (B, K, Q, D), and the logits (B, K, Q, N), or None if no layer reads them.
        """
        if self.evolution is not None and self.evolution.reads_previous:
            check_prev_logits(prev_logits, *q.shape[:3], k.shape[2])
        out, logits = self._attend(q, k, v, prev_logits, feat_size, bias, need_logits)
        if self.evolution is not None and self.evolution.mixes_output:
            tokens = x if x.ndim == 3 else x.flatten(2).transpose(1, 2)
            out = self.evolution.mix_output(out, v[:, :, -q.shape[2] :], tokens)
        return out, logits

    def _attend(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        prev_logits: Tensor | None,
        feat_size: Size | None,
        bias: Tensor | None,
        need_logits: bool,
    ) -> tuple[Tensor, Tensor | None]:
        """Return the heads' outputs, and the logits if they are needed, else None. Recorders follow this method."""
        self._check_loaded()
        operands = None
        if forced[-1:] != ["reference"]:
            operands = self._operands(prev_logits)
        if operands is None:
            return self.attend_step_by_step(q, k, v, prev_logits, feat_size, bias)
        need_logits = need_logits or self.is_watched()
        dropout_p = self.attn_drop.p if self.training else 0.0
        operands = {**operands, **self.on_map(feat_size)}
        if not operands and not need_logits and reason_against_kernels() is None:
            return fused_attention(q, k, v, bias, dropout_p, self.scale), None
        if bias is not None:
            return self.attend_step_by_step(q, k, v, prev_logits, feat_size, bias)
        scale = self.scale * operands.pop("own_scale", 1.0)
        return evolving_attention(
            q, k, v, **operands, scale=scale, need_logits=need_logits, dropout_p=dropout_p
        )

    def _check_loaded(self) -> None:
        """Raise ValueError if parameters that the evolution reads outside of its `forward` are offloaded."""
        evolution = self.evolution
        mixes = evolution is not None and (evolution.mixes_attn or evolution.mixes_output)
        if not mixes or not is_altered(evolution):
            return
        if any(parameter.is_meta for parameter in evolution.parameters(recurse=False)):
            raise ValueError(
                f"weights of {type(evolution).__name__} are offloaded while its maps are computed: accelerate must "
                f"load those of a layer together, preload_module_classes=[{type(self).__name__!r}]"
            )

    def _operands(self, prev_logits: Tensor | None) -> Operands | None:
        """Return the keywords with which `evolving_attention` computes the evolution.

        None if it cannot compute what the modules compute, or if a hook on one of them needs the maps.

        Raises:
            ValueError: an implementation is forced, and cannot compute what the modules compute.
        """
        if is_altered(self.attn_drop):
            return None
        evolution = self.evolution
        if evolution is None:
            return {}
        if any(map(is_altered, evolution.modules())):
            return None
        operands = evolution.operands(prev_logits)
        if operands is not None:
            return operands
        reason = evolution.reason_against()
        if forced:
            raise UsageError(f"implementation {forced[-1]!r} cannot run this: {reason}")
        log_once(("reference", reason), f"evolving attention by 'reference': {reason}")
        return None
