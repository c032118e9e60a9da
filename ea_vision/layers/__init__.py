"""Attention layers in readable torch: the reference that every faster path is held to."""
from ea_vision.layers.augmented_conv import AugmentedConv2d
from ea_vision.layers.evolution import EvolvingAttention, PredictiveAttention, create_evolution
from ea_vision.ops.rel_pos import fit_rel_table, relative_logits

__all__ = [
    "AugmentedConv2d",
    "EvolvingAttention",
    "PredictiveAttention",
    "create_evolution",
    "fit_rel_table",
    "relative_logits",
]
