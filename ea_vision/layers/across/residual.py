"""The previous layer's logits added to a layer's own: RealFormer and ReViT."""

from torch import Tensor

from ea_vision.layers.evolution import Evolution, Operands, new_gate, register_evolution
from ea_vision.ops.reference import mixed


@register_evolution("residual")
class ResidualAttention(Evolution):
    """Add the previous layer's logits to this layer's, or mix the two.

        RealFormer        out = logits + alpha * prev_logits                    alpha = 1, fixed
        ReViT (mixture)   out = (1 - alpha) * logits + alpha * prev_logits      alpha = 0.5, learned

    Papers: `RealFormer: Transformer Likes Residual Attention` - https://arxiv.org/abs/2012.11747
            `ReViT: Enhancing Vision Transformers Feature Diversity with Attention Residual Connections` -
            https://arxiv.org/abs/2402.11301

    Identity start: alpha = 0, learned (neither paper begins there). ReViT's gate is 1 - alpha, one number for the whole
    network; here each layer has its own. RealFormer's running mean is the mixture with alpha = l / (l + 1) in layer l,
    counted from 0.

    Args:
        num_heads: K.
        alpha: gate of the previous logits; by default 1, and 0.5 for a mixture.
        mixture: whether to compute ReViT's form.
        learnable: whether alpha is a parameter: True for one per layer, "per_head" for one per head.

    Raises:
        ValueError: a fixed alpha outside 0..1, or a learnable one that is not finite.
    """

    identity_start = {"alpha": 0.0, "learnable": True}
    gate_names = ("alpha",)

    def __init__(
        self,
        num_heads: int,
        alpha: float | None = None,
        mixture: bool = False,
        learnable: bool | str = False,
        device=None,
        dtype=None,
    ):
        super().__init__()
        self.mixture = mixture
        if alpha is None:
            alpha = 0.5 if mixture else 1.0
        self.alpha = new_gate("alpha", alpha, learnable, num_heads, device=device, dtype=dtype)

    def forward(self, logits: Tensor, prev_logits: Tensor) -> Tensor:
        alpha = self.alpha
        if self.mixture:
            return mixed(alpha, prev_logits, logits)
        if isinstance(alpha, Tensor):
            return (logits + alpha.view(-1, 1, 1) * prev_logits).to(logits.dtype)
        return logits + alpha * prev_logits

    def operands(self, prev_logits: Tensor) -> Operands:
        """Return keywords for EA without a convolution. RealFormer's sum is EA's mixture, with gate 0.5, of 2 * logits
        and 2 * alpha * prev_logits."""
        if self.mixture:
            return {"prev_logits": prev_logits, "alpha": self.alpha, "own_scale": 1.0}
        twice = 2 * self.alpha
        if isinstance(twice, Tensor):
            prev_logits = (twice.view(-1, 1, 1) * prev_logits).to(prev_logits.dtype)
        else:
            prev_logits = twice * prev_logits
        return {"prev_logits": prev_logits, "alpha": 0.5, "own_scale": 2.0}
