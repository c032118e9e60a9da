"""Attention of a ResNet's block to the block before, over groups of channels: MRLA, light."""

import math

import torch
from torch import Tensor, nn


class MRLALight(nn.Module):
    """Attend from a residual block's output x to the layers before it; `forward` returns what the network adds to x:

        y = mean of x over pixels;   Q, K = convolutions of y over channels;   V = depthwise 3x3 convolution of x
        BatchNorm(sigmoid(Q_g . K_g / sqrt(D)) V_g + lambda * shortcut),   g: groups of D channels

    Paper: `Cross-Layer Retrospective Retrieving via Layer Attention` - https://arxiv.org/abs/2302.03985. As in the
    authors' code, the block's shortcut replaces the previous layer's output in the equation. The network may add the
    authors' stochastic depth.

    Args:
        channels: C of the block's output, which dim_group divides.
        dim_group: D.
        identity: whether the norm's scale begins at 0, so that the network begins unchanged; otherwise at 1, as in
            the paper.

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
        if reach % 2 == 0:
            reach += 1
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
        """Return the addition (B, C, H, W) to the block's output x (B, C, H, W), from x and its shortcut (likewise)."""
        means = x.mean((2, 3)).unsqueeze(1)  # (B, 1, C)
        products = self.query(means) * self.key(means)
        by_group = products.unflatten(2, (-1, self.dim_group)).sum(-1)  # (B, 1, groups)
        gate = (by_group * self.dim_group**-0.5).sigmoid()
        by_channel = gate.repeat_interleave(self.dim_group, dim=2)
        weight = by_channel.view(x.shape[0], -1, 1, 1)
        values = weight * self.value(x)
        return self.bn(values + self.shortcut_scale * shortcut)
