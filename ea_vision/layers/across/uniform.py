"""Uniform maps: the control that says what attention is worth in a network."""

import torch
from torch import Tensor

from ea_vision.layers.evolution import Evolution, register_evolution


@register_evolution("uniform")
class UniformMaps(Evolution):
    """Attend to all tokens alike: logits of 0, a map of 1 / N.

    A control and no mechanism: it has no identity start and no parameters, and the gradients of queries and keys are 0.
    """

    reads_previous = False

    def __init__(self, num_heads: int, device=None, dtype=None):
        super().__init__()

    def forward(self, logits: Tensor, prev_logits: Tensor) -> Tensor:
        return torch.zeros_like(logits) + 0.0 * logits
