"""timm's ResNet-18 for 32x32 images: the plain network that the CIFAR tables set beside ours.

Its stem is a 3x3 convolution of stride 1 without max-pooling, as `Deep Residual Learning for Image Recognition`
(section 4.2, https://arxiv.org/abs/1512.03385) has it for CIFAR; the rest is timm's.
"""
from typing import Any

from timm.models import generate_default_cfgs
from timm.models.resnet import BasicBlock, ResNet
from torch import nn

from ea_vision.models._build import Network, register_networks

__all__ = ["ResNetCifar"]


class ResNetCifar(ResNet):
    """timm's ResNet with the stem of small images; keywords as there."""

    def __init__(self, *args: Any, in_chans: int = 3, device=None, dtype=None, **kwargs: Any) -> None:
        dd = {"device": device, "dtype": dtype}
        super().__init__(*args, in_chans=in_chans, **kwargs, **dd)
        self.conv1 = nn.Conv2d(in_chans, self.conv1.out_channels, 3, padding=1, bias=False, **dd)
        nn.init.kaiming_normal_(self.conv1.weight, mode="fan_out", nonlinearity="relu")
        self.maxpool = nn.Identity()
        for index, info in enumerate(self.feature_info):
            info["reduction"] = max(1, info["reduction"] // 4) if index else 1


default_cfgs = generate_default_cfgs({
    "resnet18_cifar": {
        "url": "",
        "num_classes": 10, "input_size": (3, 32, 32), "pool_size": (4, 4),
        "crop_pct": 1.0, "interpolation": "bilinear",
        "mean": (0.4914, 0.4822, 0.4465), "std": (0.2470, 0.2435, 0.2616),
        "first_conv": "conv1", "classifier": "fc",
        "license": "apache-2.0",
    },
})

register_networks(__name__, ResNetCifar, {
    "resnet18_cifar": Network("timm's ResNet-18 with the 3x3 stem of 32x32 images.",
                              {"block": BasicBlock, "layers": (2, 2, 2, 2), "num_classes": 10}),
})
