"""EA and PA in an exported program: their gates are in the weights around them.

Shape letters: B batch, K heads, N pixels or tokens of a map.
"""
from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ea_vision.layers import Evolution, EvolvingAttention, PredictiveAttention
from ea_vision.ops.reference import among_patches, with_prefix

SMALLEST = 0.05  # where all |alpha| are larger, the mixture is divided by alpha
BLOCK = 16  # output channels that ONNX Runtime computes together, with AVX-512 and on ARM


def in_phases(weight: Tensor, phases: int) -> Tensor:
    """Lay out (L, K, R, S) as (L*phases, K, R + phases - 1, S), which with a stride of `phases` gives as many rows."""
    taps = weight.shape[2]
    placed = [F.pad(weight, (0, 0, phase, phases - 1 - phase)) for phase in range(phases)]
    return torch.stack(placed, 1).reshape(-1, weight.shape[1], taps + phases - 1, weight.shape[3])


class FoldedEvolution(nn.Module):
    """Mixes maps as `EvolvingAttention` and `PredictiveAttention` do, with as few passes over them as they allow.

        EA   alpha * prev + (1 - alpha) * own = alpha * (prev + own * (1 - alpha) / alpha): alpha and beta go into the
             convolution, which ReLU lets them pass, and the factor of own into the queries
        PA   alpha goes into the last convolution, 1 - alpha into the queries

    own_gain: (K,) in float64, the factor that the queries take.
    """

    def __init__(self, evolution: EvolvingAttention | PredictiveAttention, num_heads: int) -> None:
        super().__init__()

        def by_head(gate: float | Tensor) -> Tensor:
            return torch.as_tensor(gate).detach().double().cpu().reshape(-1).expand(num_heads)

        self.predict, self.num_prefix_tokens = evolution.predict, evolution.num_prefix_tokens
        alpha, beta = by_head(evolution.alpha), by_head(evolution.beta)
        taken = torch.ones_like(alpha)  # what the convolution takes is this times what `forward` mixes
        self.own_gain, share = 1 - alpha, beta  # share: of what the convolution gives
        if self.predict:
            share = alpha
        elif bool((alpha.abs() >= SMALLEST).all()):
            self.own_gain, taken = (1 - alpha) / alpha, alpha
        self.num_convs = len(evolution.convs) if bool(share.any()) else 0
        inside = self.num_convs > 0 and bool((share >= 0).all())  # share * relu(x) = relu(share * x)
        dtype = evolution.convs[0].weight.dtype if len(evolution.convs) else torch.float32
        for name, gain in {"prev": alpha / taken, "rest": (1 - beta) * taken, "passing": share * taken,
                           "convolved": torch.ones_like(share) if inside else share}.items():
            value = gain.view(-1, 1, 1).to(dtype) if bool((gain != gain[0]).any()) else gain[0].to(dtype)
            self.register_buffer(name, value, persistent=False)
        self.idle = {name for name in ("prev", "rest", "passing", "convolved") if not getattr(self, name).any()}
        self.plain = {name for name in ("prev", "convolved") if bool((getattr(self, name) == 1).all())}
        for number, conv in enumerate(evolution.convs[:self.num_convs]):
            weight, bias = conv.weight.detach().double().cpu(), conv.bias.detach().double().cpu()
            if number == 0:
                weight = weight * taken.view(1, -1, 1, 1)
            if number == self.num_convs - 1 and inside:
                weight, bias = weight * share.view(-1, 1, 1, 1), bias * share
            self.register_buffer(f"weight{number}", weight.to(dtype), persistent=False)
            self.register_buffer(f"bias{number}", bias.to(dtype), persistent=False)
            for phases in self._phases(weight):
                self.register_buffer(f"weight{number}_{phases}", in_phases(weight, phases).to(dtype), persistent=False)

    def _phases(self, weight: Tensor) -> list[int]:
        """In how many phases of rows a convolution's channels fit into one block, the most first."""
        return [phases for phases in (4, 2) if phases * len(weight) <= BLOCK]

    def _times(self, name: str, maps: Tensor) -> Tensor:
        return maps if name in self.plain else getattr(self, name) * maps

    def _convolve(self, maps: Tensor) -> Tensor:
        """Convolve (B, K, N, N), each convolution with its activation.

        Few heads leave a block of output channels half empty, so a convolution gives several rows at once, as phases:
        for two of them 12 products an output that is kept, where an empty half costs 18.
        """
        B, _, rows, cols = maps.shape
        for number in range(self.num_convs):
            weight, bias = getattr(self, f"weight{number}"), getattr(self, f"bias{number}")
            phases = next((phases for phases in self._phases(weight) if rows % phases == 0), 1)
            pad = weight.shape[-1] // 2
            if phases > 1:
                weight, bias = getattr(self, f"weight{number}_{phases}"), bias.repeat_interleave(phases)
            maps = F.relu(F.conv2d(maps, weight, bias, (phases, 1), pad))
            if phases > 1:  # (B, K*phases, N/phases, N)
                maps = maps.reshape(B, -1, phases, rows // phases, cols).transpose(2, 3).reshape(B, -1, rows, cols)
        return self._times("convolved", maps)

    def forward(self, own: Tensor, prev: Tensor) -> Tensor:
        """Mix own (B, K, N, N), of queries times `own_gain`, and the previous layer's logits -> this layer's."""
        before = prev
        if not self.predict:
            before = own if "prev" in self.idle else own + self._times("prev", prev)
        rest = own if self.predict else None if "rest" in self.idle else self.rest * before
        if self.num_convs:
            out = self._convolve(among_patches(before, self.num_prefix_tokens))
            if self.num_prefix_tokens:
                out = with_prefix(self.passing * before, out, self.num_prefix_tokens)
        elif "passing" in self.idle:
            return self.rest * before if rest is None else rest
        else:
            out = self.passing * before
        return out if rest is None else out + rest


def fold_evolution(evolution: Evolution | None, num_heads: int) -> FoldedEvolution | None:
    """Return the folded form of an evolution of an image's maps, or None for one that is not known here.

    EA and PA are known, no subclasses of them, with torch's own convolutions.
    """
    if type(evolution) not in (EvolvingAttention, PredictiveAttention) or evolution.causal != "none":
        return None
    if any(type(conv) is not nn.Conv2d or conv.bias is None for conv in evolution.convs):
        return None
    return FoldedEvolution(evolution, num_heads)
