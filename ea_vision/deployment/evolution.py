"""EA and PA in an exported program: their gates are in the weights around them.

Shape letters: B batch, K heads, N pixels or tokens of a map.
"""

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ea_vision.layers import Evolution, EvolvingAttention, PredictiveAttention
from ea_vision.ops.reference import among_patches, with_prefix

SMALLEST = 0.05  # where all |alpha| are larger, the mixture is divided by alpha
BLOCK = 16  # output channels that ONNX Runtime computes together, with AVX-512 and on ARM


def in_phases(weight: Tensor, phases: int) -> Tensor:
    """Lay out (L, K, R, S) as (L*phases, K, R + phases - 1, S), which with a stride of `phases` gives as many rows."""
    placed = [F.pad(weight, (0, 0, phase, phases - 1 - phase)) for phase in range(phases)]
    return torch.stack(placed, 1).flatten(0, 1)


class FoldedEvolution(nn.Module):
    """Mixes maps as `EvolvingAttention` and `PredictiveAttention` do, with as few passes over them as they allow.

        EA   alpha * prev + (1 - alpha) * own = alpha * (prev + own * (1 - alpha) / alpha): alpha and |beta| go into the
             convolution, which ReLU lets them pass, and the factor of own into the queries
        PA   |alpha| goes into the last convolution, 1 - alpha into the queries

    own_gain: (K, 1, 1) in float64, the factor that the queries take.
    """

    def __init__(self, evolution: EvolvingAttention | PredictiveAttention, num_heads: int):
        super().__init__()
        self.predict, self.num_prefix_tokens = evolution.predict, evolution.num_prefix_tokens
        alpha, beta = (
            torch.as_tensor(gate)
            .detach()
            .double()
            .cpu()
            .reshape(-1)
            .expand(num_heads)
            .view(-1, 1, 1)
            for gate in (evolution.alpha, evolution.beta)
        )
        self.own_gain, share = (
            1 - alpha,
            alpha if self.predict else beta,
        )  # share: of what the convolution gives
        unit = torch.ones_like(
            alpha
        )  # what the convolution takes is this times what `forward` mixes
        if not self.predict and bool((alpha.abs() >= SMALLEST).all()):
            self.own_gain, unit = (1 - alpha) / alpha, alpha
        dtype = next((conv.weight.dtype for conv in evolution.convs), torch.float32)
        for name, gain, idle in (
            ("prev", alpha / unit, 1),
            ("rest", (1 - beta) * unit, 0),
            ("passing", share * unit, None),
            ("sign", share.sign(), 1),
        ):
            value = None if idle is not None and bool((gain == idle).all()) else gain.to(dtype)
            self.register_buffer(name, value, persistent=False)
        self.phases = [phases for phases in (4, 2, 1) if phases == 1 or phases * num_heads <= BLOCK]
        self.num_convs = len(evolution.convs)
        for number, conv in enumerate(evolution.convs):
            weight, bias = conv.weight.detach().double().cpu(), conv.bias.detach().double().cpu()
            if number == 0:
                weight = weight * unit
            if number == self.num_convs - 1:
                weight, bias = weight * share.abs().unsqueeze(-1), bias * share.abs().flatten()
            for phases in self.phases:
                self.register_buffer(
                    f"weight{number}_{phases}",
                    in_phases(weight, phases).to(dtype),
                    persistent=False,
                )
            self.register_buffer(f"bias{number}", bias.to(dtype), persistent=False)

    def _convolve(self, maps: Tensor) -> Tensor:
        """Convolve (B, K, N, N), each convolution with its activation.

        Few heads leave a block of output channels half empty, so a convolution gives several rows at once, as phases:
        for two of them 12 products an output that is kept, where an empty half costs 18.
        """
        B, K, rows, cols = maps.shape
        phases = next(phases for phases in self.phases if rows % phases == 0)
        for number in range(self.num_convs):
            weight = getattr(self, f"weight{number}_{phases}")
            bias = getattr(self, f"bias{number}").repeat_interleave(phases)
            maps = F.relu(F.conv2d(maps, weight, bias, (phases, 1), weight.shape[-1] // 2))
            if phases > 1:  # (B, K*phases, N/phases, N)
                maps = (
                    maps.reshape(B, K, phases, rows // phases, cols)
                    .transpose(2, 3)
                    .reshape(B, K, rows, cols)
                )
        return maps if self.sign is None else self.sign * maps

    def forward(self, own: Tensor, prev: Tensor) -> Tensor:
        """Mix own (B, K, N, N), of queries times `own_gain`, and the previous layer's logits -> this layer's."""
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
    """Return the folded form of an evolution of an image's maps, or None for one that is not known here.

    EA and PA are known, no subclasses of them, with torch's own convolutions.
    """
    if (
        type(evolution) not in (EvolvingAttention, PredictiveAttention)
        or evolution.causal != "none"
    ):
        return None
    if any(type(conv) is not nn.Conv2d or conv.bias is None for conv in evolution.convs):
        return None
    return FoldedEvolution(evolution, num_heads)
