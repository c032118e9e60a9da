"""Convolutions over the two planes of an image's four-dimensional attention maps."""

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ea_vision.layers.evolution import Evolution, check_kernel_size, register_evolution
from ea_vision.ops import by_torch, cpu, log_once
from ea_vision.ops.reference import among_patches, with_prefix


@register_evolution("conv2d")
class FourDimensionalConvolution(Evolution):
    """Convolve the mixed logits over the keys' plane and over the queries' plane.

        m = logits + alpha * prev_logits                       m[a, (y, x), (y', x')]: head a, query pixel, key pixel
        out[a, (y, x), (y', x')] = m[a, (y, x), (y', x')]
            + sum_{b, i, j} U[a, b, i, j] m[b, (y, x), (y' + i, x' + j)]
            + sum_{b, i, j} V[a, b, i, j] m[b, (y + i, x + j), (y', x')],    i, j = -1, 0, 1; 0 beyond the border

    Ours, no paper has it: EA's convolution takes the map for an image of N x N, where the end of a row of pixels is the
    neighbour of the next row's beginning, and sees no pixel above or below. There are no biases: the softmax cancels
    them. Rows and columns of prefix tokens pass: there out = m.

    Identity start: U = V = 0, which have a gradient at once, for no activation follows them. Otherwise they begin
    normal with std 0.02. alpha is learned from 0 by default.

    Args:
        num_heads: K.
        alpha: start of the learned gate of the previous logits.
        std: of the kernels' normal start; 0 is the identity.
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
        self.alpha = nn.Parameter(torch.full((), float(alpha), **dd))
        shape = num_heads, num_heads, kernel_size, kernel_size
        self.keys, self.queries = (nn.Parameter(std * torch.randn(shape, **dd)) for _ in range(2))

    def convolve(self, maps: Tensor, feat_size: tuple[int, int]) -> Tensor:
        """Return the sum of both convolutions of maps (B, K, N, N), N = H*W, of the same shape."""
        B, K, N = maps.shape[0], maps.shape[1], maps.shape[2]
        H, W = feat_size[0], feat_size[1]
        last = maps.permute(
            0, 2, 3, 1
        ).contiguous()  # (B, query, key, K): channels last, which takes half the time
        by_query = last.view(B * N, H, W, K).permute(0, 3, 1, 2)
        by_key = last.transpose(1, 2).reshape(B * N, H, W, K).permute(0, 3, 1, 2)
        over_keys = (
            F.conv2d(by_query, self.keys, None, padding="same")
            .permute(0, 2, 3, 1)
            .reshape(B, N, N, K)
        )
        over_queries = (
            F.conv2d(by_key, self.queries, None, padding="same")
            .permute(0, 2, 3, 1)
            .reshape(B, N, N, K)
        )
        return (over_keys + over_queries.transpose(1, 2)).permute(0, 3, 1, 2)

    def by_kernel(
        self, logits: Tensor, prev_logits: Tensor, feat_size: tuple[int, int]
    ) -> Tensor | None:
        """Return `forward` by the C kernel, or None where it cannot."""
        if by_torch():
            return None
        reason = cpu.reason_against_planes(logits, prev_logits)
        log_once(
            ("conv2d", str(reason)),
            f"maps of conv2d by {'torch, not cpu: ' + reason if reason else 'cpu'}",
        )
        if reason is not None:
            return None
        return cpu.planes(
            logits,
            prev_logits,
            self.alpha,
            self.keys,
            self.queries,
            feat_size,
            self.num_prefix_tokens,
        )

    def forward(self, logits: Tensor, prev_logits: Tensor, feat_size: tuple[int, int]) -> Tensor:
        evolved = self.by_kernel(logits, prev_logits, feat_size)
        if evolved is not None:
            return evolved
        mixed = (logits + self.alpha * prev_logits).to(logits.dtype)
        patches = among_patches(mixed, self.num_prefix_tokens)
        return with_prefix(
            mixed, patches + self.convolve(patches, feat_size), self.num_prefix_tokens
        )

    def parts(self, logits: Tensor, prev_logits: Tensor, evolved: Tensor) -> dict[str, Tensor]:
        """Return conv_logits: the sum of both convolutions, 0 where prefix tokens pass."""
        return {"conv_logits": evolved - (logits + self.alpha * prev_logits)}

    def changes_nothing(self) -> bool:
        return not any(p.any() for p in self.parameters())
