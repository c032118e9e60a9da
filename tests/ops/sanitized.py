"""Runs the C kernel as each argument, a compiler, compiles it; then reads beyond a tensor.

For a process that has the address sanitizer loaded.
"""
import os
import random
import sys

import torch

from ea_vision.ops import cpu, cpu_library
from ea_vision.ops.problem import Problem


def attend(draw: random.Random, dtype: torch.dtype, kernel: int, prev: bool, predict: bool) -> None:
    """Forward and backward of two images of a random shape."""
    H, W, K, D, E = draw.choice((1, 2, 3, 5)), draw.choice((1, 3, 4, 9, 17)), *draw.choices(range(1, 10), k=3)
    N = H * W
    generator = torch.Generator().manual_seed(draw.randrange(1 << 30))

    def new(*shape, dtype=torch.float32):
        return torch.randn(shape, generator=generator).to(dtype).requires_grad_()

    shapes = (2, K, N, D), (2, K, N, D), (2, K, N, E)
    if draw.random() < 0.5:
        q, k, v = (new(B, N, K, D, dtype=dtype).transpose(1, 2) for B, K, N, D in shapes)  # channels last
    else:
        q, k, v = (new(*shape, dtype=dtype) for shape in shapes)
    further = {}
    if draw.random() < 0.5:
        further |= {"height_rel": new(2 * H - 1, D), "width_rel": new(2 * W - 1, D)}
    if prev:
        further["prev_logits"] = new(2, K, N, N, dtype=dtype)
    if kernel:
        further |= {"weight": new(K, K, kernel, kernel), "bias": new(K)}
    alpha, beta = (0.3, draw.choice((0.6, 1.0))) if draw.random() < 0.5 else new(2, K)
    out, logits = cpu.CPU.forward(Problem(
        q=q, k=k, v=v, **further, alpha=alpha, beta=beta, feat_size=(H, W), predict=predict,
        num_prefix_tokens=draw.choice((0, 0, min(2, N))), dropout_p=draw.choice((0.0, 0.3)),
        need_logits=draw.random() < 0.5, window=draw.choice((None, None, 1, (3, 5)))).checked())
    loss = out.float().square().sum()
    (loss if logits is None or draw.random() < 0.3 else loss + logits.float().square().sum()).backward()


def pool(*size: int) -> None:
    x = torch.randn(2, 3, *size, requires_grad=True)
    cpu.pool(x).square().sum().backward()


def convolve_planes(draw: random.Random, dtype: torch.dtype) -> None:
    H, W = draw.choices((1, 2, 3, 5, 17), k=2)
    K, prefix, size = draw.choice((1, 2, 5, 9)), draw.choice((0, 1, 5)), draw.choice((1, 3, 5))
    own, prev = (torch.randn(3, K, *[prefix + H * W] * 2).to(dtype).requires_grad_() for _ in range(2))
    keys, queries = torch.randn(2, K, K, size, size, requires_grad=True)
    out = cpu.planes(own, prev, torch.tensor(0.3, requires_grad=True), keys, queries, (H, W), prefix)
    out.float().square().sum().backward()


torch.set_num_threads(2)
for compiler in sys.argv[1:]:
    os.environ["CC"] = compiler
    cpu_library.load.cache_clear()
    if isinstance(cpu_library.load(), str):
        sys.exit(cpu_library.load())
    draw = random.Random(0)
    stored = [dtype for dtype, code in cpu_library.DTYPES.items() if cpu_library.load().stored_dtypes() >> code & 1]
    for dtype in stored:
        for kernel in (0, 1, 3, 5):
            for prev, predict in (False, False), (True, False), (True, True):
                for _ in range(2):
                    attend(draw, dtype, kernel if prev else 0, prev, predict)
        for _ in range(5):
            convolve_planes(draw, dtype)
    for size in (1, 1), (5, 7), (8, 6), (2, 9):
        pool(*size)
    print("clean", flush=True)

x, out = torch.randn(1, 3, 5, 7), torch.empty(1, 3, 3, 4)
cpu_library.load().pool_forward(out.data_ptr(), x.data_ptr(), 4, 5, 7, 1)  # 4 planes where there are 3
