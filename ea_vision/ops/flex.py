"""Attention in windows of pixels and of heads by torch's FlexAttention: on CUDA a kernel compiled for the mask.

A kernel of FlexAttention passes over the blocks of keys that the mask hides, and has no N x N tensor. What it is given:

* position: folded into q and k, as `ea_vision.ops.sdpa` does. (As a score_mod the terms could be looked up, but then
  the gradients of q and of the tables would be collected by atomic additions.)
* neighbouring heads: FlexAttention's softmax is over one head's keys, so the neighbours' keys and values are laid one
  after another, S * N of them for S neighbours, and the mask says which of these heads there are.

What it cannot do, so that the reference does: maps that evolve (an N x N tensor of their own), logits
that are wanted, dropout on the probabilities, float64 on CUDA, a trace by torch.compile (it compiles by itself), and on
a CPU a backward pass. There it is the test that the mask and the folding are right, as nothing here has run on a GPU.

Paper: `Flex Attention` - https://arxiv.org/abs/2412.05496
"""

from functools import cache, lru_cache

import torch
from torch import Tensor
from torch.nn.attention.flex_attention import BlockMask, create_block_mask, flex_attention

from ea_vision.ops.problem import Implementation, Problem
from ea_vision.ops.reference import neighbours
from ea_vision.ops.sdpa import folded, widened
from ea_vision.ops.triton_attention import INSTALLED

LEAST_WIDTH, MOST_WIDTH = 16, 256  # of a head, in torch's kernels
CAPABILITY = (8, 0)
SIZES = 64  # of maps, batches, ... for which it is compiled, at most


@cache
def _compiled():
    return torch.compile(flex_attention, dynamic=False)


@lru_cache(maxsize=SIZES)
def block_mask(
    num_heads: int,
    feat_size: tuple[int, int],
    window: tuple[int, int] | None,
    head_window: int,
    wrap: bool,
    device: torch.device,
) -> BlockMask:
    """Return which of the S * N keys a query sees, S = head_window heads one after another; see `within_windows`."""
    H, W = feat_size
    N, (high, wide) = H * W, (H, W) if window is None else (window[0] // 2, window[1] // 2)
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
        q, k, v = problem.q, problem.k, problem.v
        if not problem.local:
            return "it is for windows"
        if torch.compiler.is_compiling():
            return "it compiles its own kernel, outside of other compiled code"
        width = q.shape[-1] + (0 if problem.height_rel is None else sum(problem.feat_size))
        if max(width, v.shape[-1]) > MOST_WIDTH:
            return f"it takes heads up to {MOST_WIDTH} wide, got {width} with positions and values of {v.shape[-1]}"
        if q.device.type == "cpu":
            learns = torch.is_grad_enabled() and any(t.requires_grad for t in (q, k, v))
            return "it has no backward pass on a CPU" if learns else None
        if q.device.type != "cuda":
            return f"it runs on CUDA and on a CPU, got {q.device.type}"
        if q.dtype not in (torch.float16, torch.bfloat16, torch.float32):
            return f"it takes float16, bfloat16 and float32, got {q.dtype}"
        if not INSTALLED:
            return "Triton is not installed"
        capability = torch.cuda.get_device_capability(q.device)
        return (
            None
            if capability >= CAPABILITY
            else f"it needs compute capability {CAPABILITY}, got {capability}"
        )

    def forward(self, problem: Problem) -> tuple[Tensor, None]:
        p, E = problem, problem.v.shape[-1]
        q, k, v = (widened(x, max(LEAST_WIDTH, x.shape[-1])) for x in (*folded(p), p.v))
        if p.head_window > 1:
            k, v = (torch.cat(neighbours(x, p.head_window), dim=2) for x in (k, v))
        mask = block_mask(
            q.shape[1], p.feat_size, p.window, p.head_window, p.head_border == "wrap", q.device
        )
        if (
            q.device.type == "cpu"
        ):  # not compiled: a C++ compiler may be missing, and nobody needs it here
            return flex_attention(q, k, v, block_mask=mask, scale=1.0)[..., :E], None
        with torch._dynamo.config.patch(recompile_limit=SIZES):
            return _compiled()(q, k, v, block_mask=mask, scale=1.0)[..., :E], None
