"""A depthwise convolution over a transformer's tokens: the cheap rival of mechanisms over maps."""

import torch
from torch import Tensor, nn


class TokenConv(nn.Module):
    """Add a depthwise 3x3 convolution over the patches to them: x + conv(x); prefix tokens pass.

    Paper: `Conditional Positional Encodings for Vision Transformers` - https://arxiv.org/abs/2102.10882, which has one
    after the first block; here one stands before each block but the first.

    Args:
        channels: C.
        num_prefix_tokens: tokens before the patches.
        identity: begin at a convolution of zeros, where nothing changes; else at torch's random kernels.
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
        return not any(p.any() for p in self.parameters())

    def forward(self, x: Tensor, feat_size: tuple[int, int]) -> Tensor:
        """Convolve the patches of (B, P + H*W, C) tokens, (H, W) in all."""
        prefix, patches = x[:, : self.num_prefix_tokens], x[:, self.num_prefix_tokens :]
        maps = patches.transpose(1, 2).unflatten(2, feat_size)  # (B, C, H, W)
        return torch.cat([prefix, patches + self.conv(maps).flatten(2).transpose(1, 2)], dim=1)
