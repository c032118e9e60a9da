"""An evolution as somebody outside the package would write it: the previous logits added with a learned share."""
import torch
from torch import Tensor, nn

from ea_vision.layers import Evolution, register_evolution


@register_evolution("shared")
class ResidualMaps(Evolution):
    """out = logits + share * prev_logits, one share a head."""

    part_names = ("shared_logits",)

    def __init__(self, num_heads: int, start: float = 0.5, device=None, dtype=None) -> None:
        super().__init__()
        self.share = nn.Parameter(torch.full((num_heads, 1, 1), start, device=device, dtype=dtype))

    def forward(self, logits: Tensor, prev_logits: Tensor) -> Tensor:
        return logits + self.share * prev_logits

    @torch.jit.ignore
    def parts(self, logits: Tensor, prev_logits: Tensor, evolved: Tensor) -> dict[str, Tensor]:
        return {"shared_logits": evolved - logits}
