"""Attention of a ResNet's block to the block before, over groups of channels: MRLA, light."""

import math

import torch
from torch import Tensor, nn


class MRLALight(nn.Module):
    """Return what a residual block's output x gains from the layers before it (without their stochastic depth):

        y = mean of x over pixels;   Q, K = convolutions of y over channels;   V = depthwise 3x3 convolution of x
        BatchNorm(sigmoid(Q_g . K_g / sqrt(D)) V_g + lambda * shortcut),   g: groups of D channels

    Paper: `Cross-Layer Retrospective Retrieving via Layer Attention` - https://arxiv.org/abs/2302.03985; the equation's
    output of the layer before is the block's shortcut in the authors' code, and here.

    Args:
        channels: C of the block's output, which dim_group divides.
        dim_group: D.
        identity: the norm's scale begins at 0, where nothing changes; else at the paper's 1.

    Raises:
        ValueError: channels that dim_group does not divide.
    """

    def __init__(
        self, channels: int, dim_group: int = 32, identity: bool = True, device=None, dtype=None
    ):
        super().__init__()
        if channels % dim_group:
            raise ValueError(
                f"MRLA needs channels that dim_group={dim_group} divides, got {channels}"
            )
        dd = {"device": device, "dtype": dtype}
        reach = int((math.log2(channels) + 1) / 2)
        reach += reach % 2 == 0
        self.dim_group = dim_group
        self.query = nn.Conv1d(1, 1, reach, padding=reach // 2, bias=False, **dd)
        self.key = nn.Conv1d(1, 1, reach, padding=reach // 2, bias=False, **dd)
        self.value = nn.Conv2d(channels, channels, 3, padding=1, groups=channels, bias=False, **dd)
        nn.init.kaiming_normal_(self.value.weight, mode="fan_out", nonlinearity="relu")
        self.shortcut_scale = nn.Parameter(torch.randn(channels, 1, 1, **dd))
        self.bn = nn.BatchNorm2d(channels, **dd)
        if identity:
            nn.init.zeros_(self.bn.weight)

    def forward(self, x: Tensor, shortcut: Tensor) -> Tensor:
        """Return what (B, C, H, W), a block's output, gains: its own values and the shortcut's, (B, C, H, W)."""
        y = x.mean((2, 3)).unsqueeze(1)  # (B, 1, C)
        products = (
            (self.query(y) * self.key(y)).unflatten(2, (-1, self.dim_group)).sum(-1)
        )  # (B, 1, groups)
        share = (products * self.dim_group**-0.5).sigmoid().repeat_interleave(self.dim_group, dim=2)
        return self.bn(
            share.view(x.shape[0], -1, 1, 1) * self.value(x) + self.shortcut_scale * shortcut
        )
