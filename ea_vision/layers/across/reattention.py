"""Maps mixed across heads and normalised after the softmax: DeepViT's re-attention."""

from torch import Tensor, nn

from ea_vision.layers.evolution import Evolution, new_gate, register_evolution


class Gained(Evolution):
    """Base of mechanisms after the softmax whose papers have no identity start: `refine` with an optional gain.

    Args:
        gain: start of the learned gain; None for the paper's form, without one.
    """

    reads_previous = False
    mixes_attn = True
    identity_start = {"gain": 0.0}
    gate_names = ("gain",)
    part_names = ("softmax",)

    def __init__(self, gain: float | None, device=None, dtype=None):
        super().__init__()
        self.gain = None
        if gain is not None:
            self.gain = new_gate("gain", gain, True, 1, device=device, dtype=dtype)

    def refine(self, attn: Tensor) -> Tensor:
        """Return the paper's maps from the probabilities, (B, K, N, N) each."""
        raise NotImplementedError

    def mix_attn(self, attn: Tensor) -> Tensor:
        refined = self.refine(attn)
        return refined if self.gain is None else attn + self.gain * refined

    def restore_start(self) -> None:
        for module in self.children():
            module.reset_parameters()


@register_evolution("reattention")
class ReAttention(Gained):
    """Regenerate the probabilities from those of all heads.

        R = scale * BatchNorm(sum_b Theta[a, b] A[b] + bias[a]);   A' = R (paper),   A' = A + gain * R (with a gain)

    Paper: `DeepViT: Towards Deeper Vision Transformer` - https://arxiv.org/abs/2103.11886; the bias follows the
    authors' code. The values of A' may be negative, and rows do not sum to 1. Every layer has the mechanism; nothing
    passes from layer to layer.

    Identity start: the paper's form has none. This package adds a learned gain, which begins at 0.

    Args:
        num_heads: K.
        scale: factor of R. The authors' `transform_scale` is head_dim ** -0.5, only in DeepViT's smallest network.
        gain: start of the learned gain; None for the paper's form.
    """

    def __init__(
        self, num_heads: int, scale: float = 1.0, gain: float | None = None, device=None, dtype=None
    ):
        dd = {"device": device, "dtype": dtype}
        super().__init__(gain, **dd)
        self.scale = scale
        self.reatten_matrix = nn.Conv2d(num_heads, num_heads, 1, **dd)
        self.var_norm = nn.BatchNorm2d(num_heads, **dd)

    def refine(self, attn: Tensor) -> Tensor:
        return self.var_norm(self.reatten_matrix(attn)) * self.scale
