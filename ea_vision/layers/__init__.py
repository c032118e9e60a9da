"""The attention layers and the evolutions of their maps; their arithmetic is `ea_vision.ops`."""

from ea_vision.base.lazy import import_later
from ea_vision.layers.augmented_conv import AugmentedConv2d
from ea_vision.layers.evolution import (
    Evolution,
    EvolvingAttention,
    PredictiveAttention,
    create_evolution,
    evolution_class,
    evolution_kinds,
    evolution_options,
    learnable_gates,
    register_evolution,
)
from ea_vision.layers.fusion import check_fusion
from ea_vision.layers.positions import POSITIONS, add_sine, append_coordinates, check_position
from ea_vision.layers.spatial_transformer import SpatialTransformer, sample_affine
from ea_vision.layers.token_attention import MapsAttention, attention_layers
from ea_vision.ops.reference import relative_logits
from ea_vision.ops.rel_pos import fit_rel_table

__getattr__, __dir__ = import_later(
    __name__,
    {
        "TokenConv": "ea_vision.layers.across:TokenConv",
        "ValueResidual": "ea_vision.layers.across:ValueResidual",
    },
)
