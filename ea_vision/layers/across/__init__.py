"""Published mechanisms that change attention maps or carry attention from layer to layer, one class each.

Those over maps are evolutions (`evolution="..."` of the networks, `ea_vision.evolve(model, kind="...")`); `MRLALight`,
`ValueResidual` and `TokenConv` carry values and tokens, and are keywords of the networks that have a place for them.
"""
from ea_vision.layers.across.conv2d import FourDimensionalConvolution
from ea_vision.layers.across.mrla import MRLALight
from ea_vision.layers.across.mta import MultiTokenAttention
from ea_vision.layers.across.output import ExclusiveAttention, GatedAttention
from ea_vision.layers.across.reattention import ReAttention
from ea_vision.layers.across.refiner import Refiner
from ea_vision.layers.across.residual import ResidualAttention
from ea_vision.layers.across.talking_heads import TalkingHeads
from ea_vision.layers.across.token_conv import TokenConv
from ea_vision.layers.across.uniform import UniformMaps
from ea_vision.layers.across.value_residual import ValueResidual

__all__ = [
    "ExclusiveAttention",
    "FourDimensionalConvolution",
    "GatedAttention",
    "MRLALight",
    "MultiTokenAttention",
    "ReAttention",
    "Refiner",
    "ResidualAttention",
    "TalkingHeads",
    "TokenConv",
    "UniformMaps",
    "ValueResidual",
]
