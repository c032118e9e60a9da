"""A depthwise convolution over a transformer's tokens, a cheap rival of the mechanisms over maps."""

import torch
from torch import Tensor, nn

from ea_vision.layers.evolution import all_zero
from ea_vision.ops import Size


class TokenConv(nn.Module):
    """Add to the patches a depthwise 3x3 convolution over them: x + conv(x). Prefix tokens pass unchanged.

    Paper: `Conditional Positional Encodings for Vision Transformers` - https://arxiv.org/abs/2102.10882. The paper has
    one convolution, after the first block; here every block but the first begins with one.

    Args:
        channels: C.
        num_prefix_tokens: tokens before the patches.
        identity: whether the convolution begins at zero, so that the network begins unchanged; otherwise it begins with
            torch's random kernels.
    """

    def __init__(
        self,
        channels: int,
        num_prefix_tokens: int = 0,
        identity: bool = True,
        device=None,
        dtype=None,
    ):
        super().__init__()
        self.num_prefix_tokens = num_prefix_tokens
        self.conv = nn.Conv2d(
            channels, channels, 3, padding=1, groups=channels, device=device, dtype=dtype
        )
        if identity:
            nn.init.zeros_(self.conv.weight)
            nn.init.zeros_(self.conv.bias)

    def changes_nothing(self) -> bool:
        """Return whether the convolution is 0."""
        return all_zero(self.conv)

    def forward(self, x: Tensor, feat_size: Size) -> Tensor:
        """Return tokens (B, P + H*W, C) with convolved patches: P prefix tokens, then H*W patches."""
        prefix = x[:, : self.num_prefix_tokens]
        patches = x[:, self.num_prefix_tokens :]
        maps = patches.transpose(1, 2).unflatten(2, feat_size)  # (B, C, H, W)
        convolved = self.conv(maps).flatten(2).transpose(1, 2)
        return torch.cat([prefix, patches + convolved], dim=1)
