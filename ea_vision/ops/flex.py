"""Attention in windows of pixels and of heads by torch's FlexAttention: on CUDA, a kernel compiled for the mask.

A FlexAttention kernel skips the blocks of keys that the mask hides, and stores no N x N tensor. Its inputs:

* position terms are folded into q and k, as in `ea_vision.ops.sdpa`. (A score_mod could look them up, but then the
  gradients of q and of the tables would be summed by atomic additions.)
* neighbouring heads: FlexAttention's softmax covers one head's keys. So the keys and values of S neighbours are
  concatenated to S * N, and the mask hides neighbours beyond the first and last head.

The reference runs the rest: evolving maps (N x N tensors themselves), calls that need the logits, dropout on the
probabilities, float64 on CUDA, calls inside torch.compile (FlexAttention compiles its own kernel), and backward passes
on a CPU. Tests compare the mask and the folding with the reference on a CPU.

Paper: `Flex Attention` - https://arxiv.org/abs/2412.05496
"""

from functools import cache, lru_cache

import torch
from torch import Tensor
from torch.nn.attention.flex_attention import BlockMask, create_block_mask, flex_attention

from ea_vision.ops.problem import Implementation, Problem, Size
from ea_vision.ops.reference import neighbours
from ea_vision.ops.sdpa import folded, widened
from ea_vision.ops.triton_attention import INSTALLED

LEAST_WIDTH = 16  # of a head, in torch's kernels
MOST_WIDTH = 256
CAPABILITY = (8, 0)
SIZES = 64  # at most so many shapes (of maps, batches, ...) are compiled


@cache
def _compiled():
    return torch.compile(flex_attention, dynamic=False)


@lru_cache(maxsize=SIZES)
def block_mask(
    num_heads: int,
    feat_size: Size,
    window: Size | None,
    head_window: int,
    wrap: bool,
    device: torch.device,
) -> BlockMask:
    """Return which of S * N keys a query sees: the N keys of S = head_window heads in turn; see `within_windows`."""
    H, W = feat_size
    N = H * W
    high = H if window is None else window[0] // 2
    wide = W if window is None else window[1] // 2
    by_head = head_window > 1 and not wrap

    def seen(b: Tensor, h: Tensor, query: Tensor, key: Tensor) -> Tensor:
        pixel = key % N
        near = ((query // W - pixel // W).abs() <= high) & ((query % W - pixel % W).abs() <= wide)
        if not by_head:
            return near
        head = h + key // N - head_window // 2
        return near & (head >= 0) & (head < num_heads)

    with torch.inference_mode(False), torch.no_grad():  # a later backward pass may save it
        return create_block_mask(
            seen, None, num_heads if by_head else None, N, head_window * N, device=device
        )


class Flex(Implementation):
    """torch's FlexAttention."""

    name = "flex"
    windows = True
    maps = dropout = False

    def own_reason_against(self, problem: Problem) -> str | None:
        q = problem.q
        v = problem.v
        if not problem.local:
            return "it runs attention in windows only"
        if torch.compiler.is_compiling():
            return "it compiles its own kernel, outside of other compiled code"
        width = q.shape[-1] + (0 if problem.height_rel is None else sum(problem.feat_size))
        if max(width, v.shape[-1]) > MOST_WIDTH:
            return f"it takes heads up to {MOST_WIDTH} wide, got {width} with positions and values of {v.shape[-1]}"
        if q.device.type == "cpu":
            learns = torch.is_grad_enabled() and any(x.requires_grad for x in (q, problem.k, v))
            return "it has no backward pass on a CPU" if learns else None
        if q.device.type != "cuda":
            return f"it runs on CUDA and on a CPU, got {q.device.type}"
        if q.dtype not in (torch.float16, torch.bfloat16, torch.float32):
            return f"it takes float16, bfloat16 and float32, got {q.dtype}"
        if not INSTALLED:
            return "Triton is not installed"
        capability = torch.cuda.get_device_capability(q.device)
        if capability < CAPABILITY:
            return f"it needs compute capability {CAPABILITY}, got {capability}"
        return None

    def forward(self, problem: Problem) -> tuple[Tensor, None]:
        p = problem
        E = p.v.shape[-1]
        q, k = folded(p)
        width = max(LEAST_WIDTH, q.shape[-1])
        q = widened(q, width)
        k = widened(k, width)
        v = widened(p.v, max(LEAST_WIDTH, E))
        if p.head_window > 1:
            k = torch.cat(neighbours(k, p.head_window), dim=2)
            v = torch.cat(neighbours(v, p.head_window), dim=2)
        mask = block_mask(
            q.shape[1], p.feat_size, p.window, p.head_window, p.head_border == "wrap", q.device
        )
        # not compiled on a CPU: a C++ compiler may be missing
        if q.device.type == "cpu":
            return flex_attention(q, k, v, block_mask=mask, scale=1.0)[..., :E], None
        with torch._dynamo.config.patch(recompile_limit=SIZES):
            return _compiled()(q, k, v, block_mask=mask, scale=1.0)[..., :E], None
