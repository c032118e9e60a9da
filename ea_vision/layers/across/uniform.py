"""Uniform maps: the control that shows how much a network gains from attention."""

import torch
from torch import Tensor

from ea_vision.layers.evolution import Evolution, register_evolution


@register_evolution("uniform")
class UniformMaps(Evolution):
    """Attend to all N tokens equally: logits of 0, probabilities of 1 / N.

    This is a control, not a mechanism: it has no identity start and no parameters, and the gradients of queries and
    keys are 0.
    """

    reads_previous = False

    def __init__(self, num_heads: int, device=None, dtype=None):
        super().__init__()

    def forward(self, logits: Tensor, prev_logits: Tensor) -> Tensor:
        return torch.zeros_like(logits) + 0.0 * logits
