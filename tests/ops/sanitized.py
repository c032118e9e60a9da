"""Runs the C kernel as each argument, a compiler, compiles it; then reads beyond a tensor.

For a process that has the address sanitizer loaded.
"""

import math
import os
import sys

import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from ea_vision.ops import cpu, cpu_library
from tests.ops.oracle import check, random_case


@settings(max_examples=100, derandomize=True, deadline=None, database=None)
@given(st.data())
def attend(data) -> None:
    """Forward and backward of a random shape."""
    among = {
        "dtype": cpu_library.DTYPES,
        "prefix": (0, 0, 1),
        "dropout_p": (0.0, 0.3),
        "window": (None, None, 1, (3, 5)),
        "uses": (("out",), ("out", "logits")),
    }
    check(
        "cpu",
        **random_case(data, 5, (1, 3, 4, 9, 17), (0, 1, 3, 5), 9),
        tolerance=math.inf,
        **{name: data.draw(st.sampled_from([*values])) for name, values in among.items()},
    )


def pool(*size: int) -> None:
    x = torch.randn(2, 3, *size, requires_grad=True)
    cpu.pool(x).square().sum().backward()


torch.set_num_threads(2)
for compiler in sys.argv[1:]:
    os.environ["CC"] = compiler
    cpu_library.load.cache_clear()
    if isinstance(cpu_library.load(), str):
        sys.exit(cpu_library.load())
    attend()
    for size in (1, 1), (5, 7), (8, 6), (2, 9):
        pool(*size)
    print("clean", flush=True)

x, out = torch.randn(1, 3, 5, 7), torch.empty(1, 3, 3, 4)
cpu_library.load().pool_forward(out.data_ptr(), x.data_ptr(), 4, 5, 7, 1)  # 4 planes of 3
