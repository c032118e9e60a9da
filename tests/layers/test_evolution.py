"""The evolution modules against DESIGN's equations, and what they refuse."""
import pytest
import torch

from ea_vision.layers import EvolvingAttention, PredictiveAttention, create_evolution
from tests.layers.oracle import loop_map_conv


@pytest.mark.parametrize("alpha,beta,kernel_size", [(0.5, 1.0, 3), (0.7, 0.3, 1), (0.0, 0.4, 5), (1.0, 0.0, 3)])
def test_evolving_attention_is_the_papers_equation(alpha, beta, kernel_size):
    module = EvolvingAttention(3, alpha, beta, kernel_size).double()
    logits, prev = torch.randn(2, 2, 3, 7, 7, dtype=torch.float64)
    mixed = alpha * prev + (1 - alpha) * logits
    convolved = torch.stack([loop_map_conv(m, module.convs[0]) for m in mixed])
    torch.testing.assert_close(module(logits, prev), beta * convolved + (1 - beta) * mixed)


@pytest.mark.parametrize("num_layers", [0, 1, 2, 3])
def test_predictive_attention_is_the_papers_equation(num_layers):
    module = PredictiveAttention(3, 0.2, num_layers).double()
    logits, prev = torch.randn(2, 2, 3, 7, 7, dtype=torch.float64)
    predicted = prev
    for conv in module.convs:
        predicted = torch.stack([loop_map_conv(m, conv) for m in predicted])
    assert len(module.convs) == num_layers
    torch.testing.assert_close(module(logits, prev), 0.2 * predicted + 0.8 * logits)


def test_bad_options_are_named():
    with pytest.raises(ValueError, match="alpha must lie between 0 and 1, got 1.5"):
        EvolvingAttention(4, alpha=1.5)
    with pytest.raises(ValueError, match="beta must lie between 0 and 1, got -1"):
        EvolvingAttention(4, beta=-1)
    with pytest.raises(ValueError, match="odd and positive, got 4"):
        EvolvingAttention(4, kernel_size=4)
    with pytest.raises(ValueError, match="num_layers must be 0 or more, got -1"):
        PredictiveAttention(4, num_layers=-1)
    with pytest.raises(ValueError, match="one of 'ea', 'pa' or None, got 'xa'"):
        create_evolution("xa", 4)
    with pytest.raises(ValueError, match="beta"):
        create_evolution("pa", 4, beta=0.5)
    with pytest.raises(ValueError, match="alpha"):
        create_evolution(None, 4, alpha=0.5)
