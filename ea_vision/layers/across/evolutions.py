"""The evolutions of this folder: importing this file registers them."""

from ea_vision.layers.across import (
    conv2d,
    mta,
    output,
    reattention,
    refiner,
    residual,
    talking_heads,
    uniform,
)

MECHANISMS = (conv2d, mta, output, reattention, refiner, residual, talking_heads, uniform)
