"""The projections of attention over pixels: 1x1 convolutions, computed as matrix products where that is faster.

Shape letters: B batch, C channels, H x W the attention map.
"""

import torch
import torch.nn.functional as F
from torch import Tensor, nn


def is_channels_last(x: Tensor) -> bool:
    """Return whether x (B, C, H, W) is laid out channels last, and in no other way.

    It compares strides, since torch.vmap does not support memory formats.
    """
    B, C, H, W = x.shape
    return C > 1 and H * W > 1 and x.stride()[1:] == (1, W * C, C)


class Projection(nn.Conv2d):
    """A 1x1 convolution, on a CPU computed as a matrix product where that is not slower. A product needs no other
    layout of its input and, with few channels, computes gradients in a fraction of the convolution's time.

    It takes Conv2d's arguments, since tools such as PEFT create new layers from an old one's class. Kernel, stride,
    padding and groups must be those of a plain 1x1 convolution.
    """

    def forward(self, x: Tensor) -> Tensor:
        """Convolve x (B, in_channels, H, W) -> (B, out_channels, H, W), in the layout of x."""
        if x.device.type == "cpu" and x.is_contiguous():
            B, C, H, W = x.shape
            pixels = x.view(B, C, H * W)
            weight = self.weight.view(1, self.out_channels, C).expand(B, self.out_channels, C)
            if self.bias is None:
                y = torch.bmm(weight, pixels)
            else:
                y = torch.baddbmm(self.bias.unsqueeze(-1), weight, pixels)
            return y.view(B, self.out_channels, H, W)
        has_few_channels = min(self.in_channels, self.out_channels) < 64
        if x.device.type == "cpu" and has_few_channels and is_channels_last(x):
            y = F.linear(x.permute(0, 2, 3, 1), self.weight.flatten(1), self.bias)
            return y.permute(0, 3, 1, 2)
        return F.conv2d(x, self.weight, self.bias)
