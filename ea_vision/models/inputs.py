"""What images a network is built for: their channels and their size."""

import math

from timm.layers import SpaceToDepth, to_2tuple
from torch import nn

from ea_vision.base.errors import UsageError
from ea_vision.ops import Size

COMMON_CHANNELS = 4  # up to which the input of a convolution is taken for an image


def input_channels(model: nn.Module) -> int:
    """Return the number of channels of a network's images, from its first convolution or its configuration.

    Raises:
        UsageError: it has neither.
    """
    config = getattr(model, "pretrained_cfg", None) or {}
    # TResNet moves pixels into channels before its first convolution
    moved = [module.bs**2 for module in model.modules() if isinstance(module, SpaceToDepth)]
    first = dict(model.named_modules()).get(str(config.get("first_conv")))  # as timm names it
    if isinstance(first, nn.Conv2d):
        return first.in_channels // math.prod(moved)
    convolutions = [
        module.in_channels
        for name, module in model.named_modules()
        if isinstance(module, nn.Conv2d) and ".evolution." not in name  # evolutions take maps
    ]
    channel_counts = [channels for channels in convolutions if channels <= COMMON_CHANNELS]
    if channel_counts:
        return channel_counts[0]
    if config.get("input_size"):
        return config["input_size"][0]
    if convolutions:
        return convolutions[0] // math.prod(moved)
    raise UsageError(
        f"a network that begins with a convolution is required, got {type(model).__name__}"
    )


def built_size(model: nn.Module) -> Size | None:
    """Return (height, width) in pixels of the images that a network is built for, or None if it does not state it."""
    owners = [*model.modules(), getattr(model, "config", None)]
    for name in ("img_size", "image_size"):  # timm's; torchvision's and transformers'
        for owner in owners:
            size = getattr(owner, name, None)
            if size:
                height, width = to_2tuple(size)
                return int(height), int(width)
    return None
