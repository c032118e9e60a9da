"""An evolution as somebody outside the package would write it: the previous logits added with a learned gate."""

import torch
from torch import Tensor, nn

from ea_vision.layers import Evolution, register_evolution


@register_evolution("shared")
class ResidualMaps(Evolution):
    """out = logits + share * prev_logits, one gate per head."""

    part_names = ("shared_logits",)  # further maps that can be recorded
    identity_start = {"start": 0.0}  # the options with which it begins as the plain network

    def __init__(self, num_heads: int, start: float = 0.5, device=None, dtype=None) -> None:
        super().__init__()
        self.share = nn.Parameter(torch.full((num_heads, 1, 1), start, device=device, dtype=dtype))

    def forward(self, logits: Tensor, prev_logits: Tensor) -> Tensor:
        return logits + self.share * prev_logits

    def parts(self, logits: Tensor, prev_logits: Tensor, evolved: Tensor) -> dict[str, Tensor]:
        return {"shared_logits": evolved - logits}

    def gates(self) -> dict[str, Tensor]:
        return {"share": self.share}

    def changes_nothing(self) -> bool:
        return not self.share.any()
