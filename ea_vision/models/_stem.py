"""The stem of small images: a 3x3 convolution in place of timm's 7x7 convolution and max-pooling of stride 2 each."""

from timm.models.resnet import ResNet
from torch import nn


def put_small_stem(network: ResNet, in_chans: int, stride: int, device=None, dtype=None) -> None:
    """Give a ResNet of timm a 3x3 convolution of `stride` for a stem, and no max-pooling.

    Its stages then reduce the image's sides by stride, 2 * stride, 4 * stride and 8 * stride; timm's reduce them by 4
    to 32. `feature_info` is updated.

    Raises:
        ValueError: a stride other than 1, 2 or 4.
    """
    if stride not in (1, 2, 4):
        raise ValueError(f"stem_stride must be 1, 2 or 4, got {stride!r}")
    network.conv1 = nn.Conv2d(
        in_chans,
        network.feature_info[0]["num_chs"],
        3,
        stride,
        padding=1,
        bias=False,
        device=device,
        dtype=dtype,
    )
    nn.init.kaiming_normal_(network.conv1.weight, mode="fan_out", nonlinearity="relu")
    network.maxpool = nn.Identity()
    for index, info in enumerate(network.feature_info):
        info["reduction"] = max(1, info["reduction"] // 4) * stride if index else stride
