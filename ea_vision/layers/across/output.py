"""Mechanisms that change the output of each attention head: exclusive self-attention and gated attention.

They do not change the maps, so every implementation can compute these.
"""

import torch
from torch import Tensor, nn

from ea_vision.layers.evolution import Evolution, all_zero, new_gate, register_evolution

LEAST_SQUARE = 1e-24  # lower bound of a value's squared length


class OutputMechanism(Evolution):
    """Base of mechanisms that do not change the maps and define `mix_output`."""

    reads_previous = False
    mixes_output = True

    def operands(self, prev_logits: Tensor | None) -> dict:
        return {}


@register_evolution("xsa")
class ExclusiveAttention(OutputMechanism):
    """XSA: subtract from each output its component along the token's own value.

        Y_i = O_i - g (O_i . u_i) u_i,   u_i = V_i / |V_i|,   O = A V

    It is computed in float32 at least. A value of 0 has no direction, and nothing is subtracted.

    Paper: `Exclusive Self Attention` - https://arxiv.org/abs/2603.09078, where g = 1.

    Identity start: g = 0, learned, one number per head; not in the paper.

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
            dd = {"device": device, "dtype": dtype}
            self.gain = new_gate("gain", gain, "per_head", num_heads, **dd)

    def mix_output(self, out: Tensor, values: Tensor, x: Tensor) -> Tensor:
        wide_dtype = torch.promote_types(out.dtype, torch.float32)
        wide = out.to(wide_dtype)
        values = values.to(wide_dtype)
        square = (values * values).sum(-1, keepdim=True).clamp_min(LEAST_SQUARE)
        share = (wide * values).sum(-1, keepdim=True) / square
        if self.gain is not None:
            share = self.gain.view(-1, 1, 1) * share
        return (wide - share * values).to(out.dtype)


@register_evolution("gated")
class GatedAttention(OutputMechanism):
    """Gated attention: each head's output times a sigmoid of the layer's input.

        Y_i = s sigmoid(W x_i + b) O_i,   one number per head and token;   s = 1 (paper), s = 2 (identity)

    Paper: `Gated Attention for Large Language Models: Non-linearity, Sparsity, and Attention-Sink-Free` -
    https://arxiv.org/abs/2505.06708, its headwise gate behind the attention (G1), which has no bias.

    Identity start: W = 0, b = 0 and s = 2, so that the gate is 1. The paper's: W as torch's Linear, b = 0, s = 1.

    Args:
        num_heads: K.
        channels: C of the layer's input, set by the network.
        identity: whether to begin at the identity.
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
        head_gate = gate.transpose(1, 2).unsqueeze(-1)
        return (out * head_gate).to(out.dtype)

    def changes_nothing(self) -> bool:
        return self.scale == 2.0 and all_zero(self.gate)
