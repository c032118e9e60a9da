"""timm's ResNets in further sizes: the plain networks that tables compare with those with attention.

`resnet18_cifar`, for 32x32 images, has a 3x3 stem of stride 1 without max-pooling, as in `Deep Residual Learning for
Image Recognition` (section 4.2, https://arxiv.org/abs/1512.03385) for CIFAR; the rest is timm's. Use `stem_stride=2`
for images of 64 pixels; `layers=[3,4,6,3]` makes it a ResNet-34. `resnet34_050` is timm's ResNet-34 at half its width.
"""

from typing import Any

from timm.models import generate_default_cfgs
from timm.models.resnet import BasicBlock, ResNet

from ea_vision.models._build import Network, cifar_cfg, register_networks, scenes_cfg
from ea_vision.models._stem import put_small_stem


class ResNetCifar(ResNet):
    """timm's ResNet with a 3x3 stem of stride `stem_stride` and no max-pooling; other keywords are timm's."""

    def __init__(
        self,
        *args: Any,
        in_chans: int = 3,
        stem_stride: int = 1,
        device=None,
        dtype=None,
        **kwargs: Any,
    ):
        super().__init__(*args, in_chans=in_chans, **kwargs, device=device, dtype=dtype)
        put_small_stem(self, in_chans, stem_stride, device, dtype)


default_cfgs = generate_default_cfgs(
    {"resnet18_cifar": cifar_cfg("conv1", "fc"), "resnet34_050": scenes_cfg("conv1", "fc")}
)

register_networks(
    __name__,
    ResNetCifar,
    {
        "resnet18_cifar": Network(
            "timm's ResNet-18 with the 3x3 stem of 32x32 images.",
            {"block": BasicBlock, "layers": (2, 2, 2, 2), "num_classes": 10},
        )
    },
)
register_networks(
    __name__,
    ResNet,
    {
        "resnet34_050": Network(
            "timm's ResNet-34, stages of half the width.",
            {
                "block": BasicBlock,
                "layers": (3, 4, 6, 3),
                "channels": (32, 64, 128, 256),
                "num_classes": 6,
            },
        )
    },
)
