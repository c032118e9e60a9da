"""Mechanisms that change the output of each attention head: exclusive self-attention and gated attention.

They do not change the maps, so every implementation can compute these.
"""

import torch
from torch import Tensor, nn

from ea_vision.layers.evolution import Evolution, all_zero, register_evolution
from ea_vision.ops import needs_readable
from ea_vision.ops.functions import differentiable_gradients, in_parts

LEAST_SQUARE = 1e-24  # lower bound of a value's squared length


class OutputMechanism(Evolution):
    """Base of mechanisms that do not change the maps and define `mix_output`."""

    reads_previous = False
    mixes_output = True

    def operands(self, prev_logits: Tensor | None) -> dict:
        return {}


def exclude_own_values(out: Tensor, values: Tensor, gain: Tensor | None) -> Tensor:
    """Subtract from each output its component along the token's own value.

    A value of 0 has no direction, and nothing is subtracted.

    Args:
        out: (B, K, T, D).
        values: (B, K, T, D).
        gain: (K), factor of the subtracted component, or None for 1.

    Returns:
        (B, K, T, D), computed in float32 at least.
    """
    wide_dtype = torch.promote_types(out.dtype, torch.float32)
    wide = out.to(wide_dtype)
    values = values.to(wide_dtype)
    square = (values * values).sum(-1, keepdim=True).clamp_min(LEAST_SQUARE)
    share = (wide * values).sum(-1, keepdim=True) / square
    if gain is not None:
        share = gain.view(-1, 1, 1) * share
    return (wide - share * values).to(out.dtype)


class _ExcludeOwnValues(torch.autograd.Function):
    """The autograd function of `exclude_own_values`: a few images at a time, in few passes over memory.

    With n = V . V, s = (O . V) / n and t = g (G . V) / n, G the gradient of Y = O - g s V:

        dO = G - t V,   dV = 2 t s V - t O - g s G,   dg = -s (G . V)
    """

    @staticmethod
    def forward(out: Tensor, values: Tensor, gain: Tensor | None):
        B, K, T, D = out.shape
        made = out.new_empty(B, T, K, D).transpose(1, 2)  # heads concatenate without a copy
        wide_dtype = torch.promote_types(out.dtype, torch.float32)
        square = out.new_empty(B, K, T, 1, dtype=wide_dtype)
        share = torch.empty_like(square)
        for o, v, to_made, to_square, to_share in in_parts(out, values, made, square, share):
            o = o.to(wide_dtype)
            v = v.to(wide_dtype)
            n = (v * v).sum(-1, keepdim=True).clamp_min_(LEAST_SQUARE)
            s = (o * v).sum(-1, keepdim=True).div_(n)
            to_square.copy_(n)
            to_share.copy_(s)
            to_made.copy_(torch.addcmul(o, v, _times(gain, s), value=-1))
        return made, square, share

    @staticmethod
    def setup_context(ctx, inputs, output) -> None:
        _, square, share = output
        ctx.mark_non_differentiable(square, share)
        ctx.save_for_backward(*inputs, square, share)

    @staticmethod
    def backward(ctx, grad: Tensor, *_) -> tuple[Tensor | None, ...]:
        out, values, gain, square, share = ctx.saved_tensors
        if torch.is_grad_enabled():
            inputs = (out, values, gain)
            return differentiable_gradients(exclude_own_values, inputs, ctx.needs_input_grad, grad)
        grad_out = torch.empty_like(out)
        grad_values = torch.empty_like(values)
        along = torch.empty_like(square)
        parts = in_parts(grad, out, values, square, share, grad_out, grad_values, along)
        for g, o, v, n, s, to_out, to_values, to_along in parts:
            g = g.to(n.dtype)
            o = o.to(n.dtype)
            v = v.to(n.dtype)
            product = (g * v).sum(-1, keepdim=True)
            to_along.copy_(product)
            t = _times(gain, product / n)
            to_out.copy_(torch.addcmul(g, v, t, value=-1))
            d_values = v * (2 * t * s)
            d_values.addcmul_(o, t, value=-1)
            d_values.addcmul_(g, _times(gain, s), value=-1)
            to_values.copy_(d_values)
        grad_gain = None
        if gain is not None:
            by_head = (share * along).sum((0, 2, 3))
            grad_gain = -by_head.to(gain.dtype)
        return grad_out, grad_values, grad_gain


def _times(gain: Tensor | None, numbers: Tensor) -> Tensor:
    """Multiply numbers (B, K, T, 1) by a gain (K), if there is one."""
    return numbers if gain is None else gain.view(-1, 1, 1) * numbers


@register_evolution("xsa")
class ExclusiveAttention(OutputMechanism):
    """XSA: subtract from each output its component along the token's own value.

        Y_i = O_i - g (O_i . u_i) u_i,   u_i = V_i / |V_i|,   O = A V

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
            start = torch.full((num_heads,), float(gain), device=device, dtype=dtype)
            self.gain = nn.Parameter(start)

    def mix_output(self, out: Tensor, values: Tensor, x: Tensor) -> Tensor:
        if needs_readable():
            return exclude_own_values(out, values, self.gain)
        mixed, _, _ = _ExcludeOwnValues.apply(out, values, self.gain)
        return mixed


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
        by_head = gate.transpose(1, 2).unsqueeze(-1)
        return (out * by_head).to(out.dtype)

    def changes_nothing(self) -> bool:
        return self.scale == 2.0 and all_zero(self.gate)
