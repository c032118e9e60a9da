"""The evolutions of this folder: importing this file registers them."""

from ea_vision.layers.across import (  # noqa: F401
    conv2d,
    mta,
    output,
    reattention,
    refiner,
    residual,
    talking_heads,
    uniform,
)
