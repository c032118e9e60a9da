"""EA and PA in an exported program: their gates are folded into the weights around them.

Shape letters: B batch, K heads, N pixels or tokens of a map.
"""

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ea_vision.layers import Evolution, EvolvingAttention, PredictiveAttention
from ea_vision.layers.evolution import reason_against_conv
from ea_vision.ops.reference import among_patches, with_prefix

SMALLEST = 0.05  # if no |alpha| is smaller, the mixture is divided by alpha
BLOCK = 16  # output channels that ONNX Runtime computes together, with AVX-512 and on ARM


def in_phases(weight: Tensor, phases: int) -> Tensor:
    """Expand a kernel (L, K, R, S) to (L*phases, K, R + phases - 1, S): with stride `phases` it gives as many rows."""
    placed = [F.pad(weight, (0, 0, above, phases - 1 - above)) for above in range(phases)]
    return torch.stack(placed, 1).flatten(0, 1)


def _by_head(gate: Tensor | float, num_heads: int) -> Tensor:
    """Return a gate as (K, 1, 1) in float64."""
    values = exact(torch.as_tensor(gate))
    return values.reshape(-1).expand(num_heads).view(-1, 1, 1)


def exact(values: Tensor) -> Tensor:
    """Return a tensor in float64 on the CPU, without gradients; mps has no float64."""
    return values.detach().cpu().double()


class FoldedEvolution(nn.Module):
    """Mix maps as `EvolvingAttention` and `PredictiveAttention` do, with as few passes over them as possible.

        EA   alpha * prev + (1 - alpha) * own = alpha * (prev + own * (1 - alpha) / alpha): alpha and |beta| are folded
             into the convolution (a factor >= 0 passes through ReLU), and the factor of own into the queries
        PA   |alpha| is folded into the last convolution, 1 - alpha into the queries

    Attributes:
        own_gain: (K, 1, 1) in float64, the factor of the queries.
    """

    def __init__(self, evolution: EvolvingAttention | PredictiveAttention, num_heads: int):
        super().__init__()
        self.predict = evolution.predict
        self.num_prefix_tokens = evolution.num_prefix_tokens
        alpha = _by_head(evolution.alpha, num_heads)
        beta = _by_head(evolution.beta, num_heads)
        share = alpha if self.predict else beta  # factor of the convolution's output
        divides = not self.predict and bool((alpha.abs() >= SMALLEST).all())
        # the convolution's input is this times the mixture of `forward`
        unit = alpha if divides else torch.ones_like(alpha)
        self.own_gain = (1 - alpha) / unit
        convs = evolution.convs
        self.num_convs = len(convs)
        self._keep("prev", alpha / unit, 1)
        self._keep("rest", (1 - beta) * unit, 0)
        self._buffer("passing", share * unit)
        self._keep("sign", share.sign(), 1)
        self.phases = [*(phases for phases in (4, 2) if phases * num_heads <= BLOCK), 1]
        for number, conv in enumerate(convs):
            weight = exact(conv.weight)
            bias = exact(conv.bias)
            if number == 0:
                weight = weight * unit
            if number == self.num_convs - 1:
                size = share.abs()
                weight = weight * size.unsqueeze(-1)
                bias = bias * size.flatten()
            for phases in self.phases:
                self._buffer(f"weight{number}_{phases}", in_phases(weight, phases))
            self._buffer(f"bias{number}", bias)
        self.to(convs[0].weight.dtype if convs else torch.float32)

    def _buffer(self, name: str, value: Tensor | None) -> None:
        self.register_buffer(name, value, persistent=False)

    def _keep(self, name: str, gain: Tensor, idle: float) -> None:
        """Keep a factor as a buffer, or None if it is `idle` for all heads, which changes nothing."""
        self._buffer(name, None if (gain == idle).all() else gain)

    def _convolve(self, maps: Tensor) -> Tensor:
        """Apply all convolutions to maps (B, K, N, N), each with its activation.

        With few heads a block of output channels would be half empty. So a convolution computes several rows at once,
        as phases: two of them take 12 products per output, a half-empty block 18.
        """
        B, K, rows, cols = maps.shape
        phases = next(phases for phases in self.phases if rows % phases == 0)
        for number in range(self.num_convs):
            weight = getattr(self, f"weight{number}_{phases}")
            bias = getattr(self, f"bias{number}").repeat_interleave(phases)
            padding = weight.shape[-1] // 2
            maps = F.relu(F.conv2d(maps, weight, bias, (phases, 1), padding))
            if phases > 1:  # (B, K*phases, N/phases, N)
                apart = maps.reshape(B, K, phases, rows // phases, cols)
                maps = apart.transpose(2, 3).reshape(B, K, rows, cols)
        return maps if self.sign is None else self.sign * maps

    def forward(self, own: Tensor, prev: Tensor) -> Tensor:
        """Return this layer's logits from own (B, K, N, N), by queries times `own_gain`, and the previous layer's."""
        mixed = prev
        if not self.predict:
            mixed = own + (prev if self.prev is None else self.prev * prev)
        if not self.num_convs:
            out = self.passing * mixed
        else:
            out = self._convolve(among_patches(mixed, self.num_prefix_tokens))
            if self.num_prefix_tokens:
                out = with_prefix(self.passing * mixed, out, self.num_prefix_tokens)
        if self.predict:
            return out + own
        return out if self.rest is None else out + self.rest * mixed


def fold_evolution(evolution: Evolution | None, num_heads: int) -> FoldedEvolution | None:
    """Return the folded form of an evolution of an image's maps, or None if it cannot be folded.

    Only EA and PA can (not their subclasses), with convolutions as they create them.
    """
    if type(evolution) not in (EvolvingAttention, PredictiveAttention):
        return None
    if evolution.causal != "none":
        return None
    for conv in evolution.convs:
        if reason_against_conv(conv) is not None:
            return None
    return FoldedEvolution(evolution, num_heads)
