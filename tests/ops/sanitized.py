"""Runs the C kernel as each argument, a compiler, compiles it; then reads beyond a tensor.

For a process that has the address sanitizer loaded.
"""
import os
import random
import sys

import torch

from ea_vision.ops import cpu, cpu_library
from tests.ops.oracle import outputs_and_gradients, problem


def attend(draw: random.Random, dtype: torch.dtype, kernel: int, kind: str) -> None:
    """Forward and backward of two images of a random shape."""
    size, widths = (draw.choice((1, 2, 3, 5)), draw.choice((1, 3, 4, 9, 17))), draw.choices(range(1, 10), k=3)
    tensors = problem(kind, size, *widths, kernel=kernel, relative=draw.random() < 0.5, dtype=dtype,
                      seed=draw.randrange(1 << 30), gates=draw.choice((None, "heads")),
                      channels_last=draw.random() < 0.5)
    shares = {"alpha": 0.3, "beta": draw.choice((0.6, 1.0))}
    outputs_and_gradients(
        tensors, implementation="cpu", **{name: x for name, x in shares.items() if name not in tensors}, feat_size=size,
        predict=kind == "pa", num_prefix_tokens=draw.choice((0, 0, min(2, size[0] * size[1]))),
        dropout_p=draw.choice((0.0, 0.3)), need_logits=draw.random() < 0.5, window=draw.choice((None, None, 1, (3, 5))),
        uses=draw.choice((("out",), ("out", "logits"))))


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
    for dtype in cpu_library.DTYPES:
        for kernel in (0, 1, 3, 5):
            for kind in ("aa", "ea", "pa") * 2:
                attend(draw, dtype, kernel, kind)
        for _ in range(5):
            convolve_planes(draw, dtype)
    for size in (1, 1), (5, 7), (8, 6), (2, 9):
        pool(*size)
    print("clean", flush=True)

x, out = torch.randn(1, 3, 5, 7), torch.empty(1, 3, 3, 4)
cpu_library.load().pool_forward(out.data_ptr(), x.data_ptr(), 4, 5, 7, 1)  # 4 planes where there are 3
