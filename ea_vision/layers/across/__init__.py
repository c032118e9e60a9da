"""Published mechanisms that change attention maps or carry attention from layer to layer, one class each.

Those over maps are evolutions (`evolution="..."` of the networks, `ea_vision.evolve(model, kind="...")`);
`ValueResidual` and `TokenConv` act on values and tokens; keywords of the networks switch them on.
"""

from ea_vision.layers.across.token_conv import TokenConv
from ea_vision.layers.across.value_residual import ValueResidual
