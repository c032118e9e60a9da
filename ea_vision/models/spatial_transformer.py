"""A small network for digits that first turns, shifts and scales its input: a spatial transformer before a ResNet.

The ResNet is timm's with basic blocks, the stem for small images and a quarter of its width. `transform=False` is the
same network without the transformer, for comparison.

Paper: `Spatial Transformer Networks` - https://arxiv.org/abs/1506.02025 (its networks for MNIST differ)
"""

from collections import OrderedDict
from typing import Any

from timm.models import generate_default_cfgs
from timm.models.resnet import BasicBlock
from torch import nn

from ea_vision.layers import SpatialTransformer
from ea_vision.models._build import Network, cifar_cfg, register_networks
from ea_vision.models.plain_resnet import ResNetCifar


class SpatialTransformerNet(ResNetCifar):
    """ResNet for small images with a spatial transformer before its stem.

    Args:
        transform: whether it has one.
        hidden: width of the localisation network, see `SpatialTransformer`.
        **kwargs: those of timm's ResNet.
    """

    def __init__(
        self,
        *args: Any,
        transform: bool = True,
        hidden: int = 32,
        in_chans: int = 3,
        device=None,
        dtype=None,
        **kwargs: Any,
    ):
        dd = {"device": device, "dtype": dtype}
        super().__init__(*args, in_chans=in_chans, **kwargs, **dd)
        first = [("transform", SpatialTransformer(in_chans, hidden, **dd))] if transform else []
        self.conv1 = nn.Sequential(OrderedDict([*first, ("conv", self.conv1)]))


default_cfgs = generate_default_cfgs(
    {"stn_digits": cifar_cfg("conv1.conv", "fc", mean=(0.5, 0.5, 0.5), std=(0.5, 0.5, 0.5))}
)

register_networks(
    __name__,
    SpatialTransformerNet,
    {
        "stn_digits": Network(
            "A spatial transformer before a narrow ResNet-18, for 32x32 images of digits.",
            {
                "block": BasicBlock,
                "layers": (2, 2, 2, 2),
                "channels": (16, 32, 64, 128),
                "num_classes": 10,
            },
        )
    },
)
