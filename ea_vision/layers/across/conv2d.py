"""Convolutions over the two planes of an image's four-dimensional attention maps."""

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ea_vision.layers.evolution import (
    Evolution,
    all_zero,
    check_kernel_size,
    new_gate,
    register_evolution,
)
from ea_vision.ops import Size
from ea_vision.ops.reference import among_patches, with_prefix


@register_evolution("conv2d")
class FourDimensionalConvolution(Evolution):
    """Convolve the mixed logits over the keys' plane and over the queries' plane.

        m = logits + alpha * prev_logits                       m[a, (y, x), (y', x')]: head a, query pixel, key pixel
        out[a, (y, x), (y', x')] = m[a, (y, x), (y', x')]
            + sum_{b, i, j} U[a, b, i, j] m[b, (y, x), (y' + i, x' + j)]
            + sum_{b, i, j} V[a, b, i, j] m[b, (y + i, x + j), (y', x')],    i, j = -1, 0, 1; 0 beyond the border

    No paper has this mechanism. EA's convolution treats the map as an image of N x N: there the last pixel of a row
    neighbours the first pixel of the next row, and a kernel sees no pixel above or below. The kernels have no biases,
    since the softmax cancels them. Rows and columns of prefix tokens pass unchanged: there out = m.

    Identity start: U = V = 0. They have a gradient at once, since no activation follows them. Otherwise they are drawn
    from a normal distribution with std 0.02. alpha is learned and begins at 0 by default.

    Args:
        num_heads: K.
        alpha: start of the learned gate of the previous logits.
        std: standard deviation of the kernels at the start; 0 is the identity.
        kernel_size: odd side of both kernels.

    Raises:
        ValueError: an even kernel_size.
    """

    spatial = True
    identity_start = {"std": 0.0}
    gate_names = ("alpha",)
    part_names = ("conv_logits",)

    def __init__(
        self,
        num_heads: int,
        alpha: float = 0.0,
        std: float = 0.02,
        kernel_size: int = 3,
        device=None,
        dtype=None,
    ):
        super().__init__()
        check_kernel_size(kernel_size)
        dd = {"device": device, "dtype": dtype}
        self.num_prefix_tokens = 0
        self.alpha = new_gate("alpha", alpha, True, num_heads, **dd)
        shape = (num_heads, num_heads, kernel_size, kernel_size)
        self.keys = nn.Parameter(std * torch.randn(shape, **dd))
        self.queries = nn.Parameter(std * torch.randn(shape, **dd))

    def convolve(self, maps: Tensor, feat_size: Size) -> Tensor:
        """Return the sum of both convolutions of maps (B, K, N, N), N = H*W, of the same shape."""
        # (B, query, key, K): channels last, where a convolution takes half the time
        heads_last = maps.permute(0, 2, 3, 1).contiguous()
        transposed = heads_last.transpose(1, 2)
        over_keys = self._over_plane(heads_last, self.keys, feat_size)
        over_queries = self._over_plane(transposed, self.queries, feat_size)
        total = over_keys + over_queries.transpose(1, 2)
        return total.permute(0, 3, 1, 2)

    @staticmethod
    def _over_plane(maps: Tensor, weight: Tensor, feat_size: Size) -> Tensor:
        """Convolve maps (B, N, H*W, K) over their plane of (H, W); return the same shape."""
        B, N, _, K = maps.shape
        H, W = feat_size
        planes = maps.reshape(B * N, H, W, K).permute(0, 3, 1, 2)
        convolved = F.conv2d(planes, weight, padding="same")
        return convolved.permute(0, 2, 3, 1).reshape(B, N, N, K)

    def forward(self, logits: Tensor, prev_logits: Tensor, feat_size: Size) -> Tensor:
        mixed = (logits + self.alpha * prev_logits).to(logits.dtype)
        patches = among_patches(mixed, self.num_prefix_tokens)
        convolved = patches + self.convolve(patches, feat_size)
        return with_prefix(mixed, convolved, self.num_prefix_tokens)

    def parts(self, logits: Tensor, prev_logits: Tensor, evolved: Tensor) -> dict[str, Tensor]:
        """Return conv_logits: the sum of both convolutions, 0 where prefix tokens pass."""
        return {"conv_logits": evolved - (logits + self.alpha * prev_logits)}

    def changes_nothing(self) -> bool:
        return all_zero(self)
