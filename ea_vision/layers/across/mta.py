"""Convolutions over queries, keys and heads, before and after the softmax: multi-token attention, without a mask."""

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ea_vision.layers.evolution import Evolution, register_evolution
from ea_vision.ops.problem import reason_against_kernels


@register_evolution("mta")
class MultiTokenAttention(Evolution):
    """Convolve each head's map over queries and keys, and mix the heads, before and after the softmax.

        L = W (depthwise convolution of S),   A = softmax(L)
        A'[g, e] = sum_c M_g[c, e] A2[g, c],   A2 = depthwise convolution of A, in groups g of head_kernel heads

    Paper: `Multi-Token Attention` - https://arxiv.org/abs/2504.00927. The paper's attention is causal; here the kernels
    are centred and the maps padded with zeros. The paper also normalises and gates each head's output; these steps act
    on values, not on maps, and are left out. Every layer has the mechanism; nothing passes from layer to layer.

    Identity start (the paper's own): kernels with 1 in the middle, W = M = I.

    Args:
        num_heads: K.
        map_kernel: (queries, keys) of the convolutions, odd numbers; the paper has 6 and 11.
        head_kernel: heads in a group, a divisor of K; None is K.

    Raises:
        ValueError: an even kernel, or a head_kernel that does not divide the heads.
    """

    reads_previous = False
    mixes_attn = True
    part_names = ("softmax",)

    def __init__(
        self,
        num_heads: int,
        map_kernel: tuple[int, int] = (5, 11),
        head_kernel: int | None = None,
        device=None,
        dtype=None,
    ):
        super().__init__()
        head_kernel = num_heads if head_kernel is None else head_kernel
        are_odd = [side > 0 and side % 2 == 1 for side in map_kernel]
        if are_odd != [True, True]:
            raise ValueError(
                f"map_kernel must be two odd numbers (queries, keys), got {map_kernel}"
            )
        if head_kernel < 1 or num_heads % head_kernel:
            raise ValueError(f"head_kernel must divide num_heads={num_heads}, got {head_kernel}")
        dd = {"device": device, "dtype": dtype}
        kernel = torch.zeros(num_heads, 1, *map_kernel, **dd)
        row = map_kernel[0] // 2
        column = map_kernel[1] // 2
        kernel[:, :, row, column] = 1.0
        eye = torch.eye(num_heads, **dd)
        group = torch.eye(head_kernel, **dd)
        self.conv_before = nn.Parameter(kernel)
        self.conv_after = nn.Parameter(kernel.clone())
        self.heads_before = nn.Parameter(eye)
        self.heads_after = nn.Parameter(group.repeat(num_heads // head_kernel, 1, 1))

    def _convolve(self, maps: Tensor, weight: Tensor) -> Tensor:
        # channels last takes half the time on a CPU; torch.vmap does not know it
        if reason_against_kernels() is None:
            maps = maps.contiguous(memory_format=torch.channels_last)
        return F.conv2d(maps, weight, None, padding="same", groups=maps.shape[1])

    def forward(self, logits: Tensor, prev_logits: Tensor) -> Tensor:
        convolved = self._convolve(logits, self.conv_before)
        return torch.einsum("ab,nbij->naij", self.heads_before, convolved)

    def mix_attn(self, attn: Tensor) -> Tensor:
        convolved = self._convolve(attn, self.conv_after)
        grouped = convolved.unflatten(1, self.heads_after.shape[:2])
        mixed = torch.einsum("gce,ngcij->ngeij", self.heads_after, grouped)
        return mixed.flatten(1, 2)

    def changes_nothing(self) -> bool:
        num_heads = len(self.heads_before)
        start = type(self)(num_heads, self.conv_before.shape[2:], self.heads_after.shape[1])
        pairs = zip(self.parameters(), start.parameters(), strict=True)
        return all(torch.equal(now.detach().cpu().float(), then) for now, then in pairs)
