"""Mechanisms on what attention puts out, a head at a time: exclusive self-attention and gated attention.

The maps stay as they are, so every implementation computes them.
"""

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ea_vision.layers.evolution import Evolution, register_evolution


class OutputMechanism(Evolution):
    """Base of mechanisms that leave the maps alone and have `mix_output`."""

    reads_previous = False
    mixes_output = True

    def operands(self, prev_logits: Tensor | None) -> dict:
        return {}


@register_evolution("xsa")
class ExclusiveAttention(OutputMechanism):
    """XSA: take from each output its component along the token's own value.

        Y_i = O_i - g (O_i . u_i) u_i,   u_i = V_i / |V_i|,   O = A V

    Paper: `Exclusive Self Attention` - https://arxiv.org/abs/2603.09078, where g = 1.

    Identity start: g = 0, learned, one a head; an addition of ours.

    Args:
        num_heads: K.
        gain: start of the learned g; None for the paper's 1, which is fixed.
    """

    identity_start = {"gain": 0.0}
    gate_names = ("gain",)

    def __init__(self, num_heads: int, gain: float | None = None, device=None, dtype=None):
        super().__init__()
        self.gain = None
        if gain is not None:
            self.gain = nn.Parameter(
                torch.full((num_heads,), float(gain), device=device, dtype=dtype)
            )

    def mix_output(self, out: Tensor, values: Tensor, x: Tensor) -> Tensor:
        unit = F.normalize(values, dim=-1)
        along = (out * unit).sum(-1, keepdim=True) * unit
        gain = self.gain
        return (out - along if gain is None else out - gain.view(-1, 1, 1) * along).to(out.dtype)


@register_evolution("gated")
class GatedAttention(OutputMechanism):
    """Gated attention: each head's output times a sigmoid of the layer's input.

        Y_i = s sigmoid(W x_i + b) O_i,   one number a head and token;   s = 1 (paper), s = 2 (identity)

    Paper: `Gated Attention for Large Language Models: Non-linearity, Sparsity, and Attention-Sink-Free` -
    https://arxiv.org/abs/2505.06708, its gate a head behind the attention (G1, headwise), which has no bias.

    Identity start: W = 0, b = 0 and s = 2, so that the gate is 1. The paper's: W as torch's Linear, b = 0, s = 1.

    Args:
        num_heads: K.
        channels: C of the layer's input, which the network knows.
        identity: begin at the identity.
    """

    identity_start = {"identity": True}

    def __init__(
        self, num_heads: int, channels: int = 1, identity: bool = False, device=None, dtype=None
    ):
        super().__init__()
        self.scale = 2.0 if identity else 1.0
        self.gate = nn.Linear(channels, num_heads, device=device, dtype=dtype)
        nn.init.zeros_(self.gate.bias)
        if identity:
            nn.init.zeros_(self.gate.weight)

    def mix_output(self, out: Tensor, values: Tensor, x: Tensor) -> Tensor:
        gate = self.scale * self.gate(x).sigmoid()  # (B, N, K)
        return (out * gate.transpose(1, 2).unsqueeze(-1)).to(out.dtype)

    def changes_nothing(self) -> bool:
        return self.scale == 2.0 and not self.gate.weight.any() and not self.gate.bias.any()
