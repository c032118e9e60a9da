"""For each argument, a compiler command: compile the C kernel with it and run it. At the end, read beyond a tensor.

Runs in a process that has the address sanitizer loaded.
"""

import math
import os
import sys

import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from ea_vision.ops import cpu, cpu_library
from tests.ops.oracle import among, check, random_case, random_form


@settings(max_examples=100, derandomize=True, deadline=None, database=None)
@given(st.data())
def attend(data):
    """Run forward and backward on a random shape."""
    case = random_case(data, 5, (1, 3, 4, 9, 17), (0, 1, 3, 5), 9)
    dtype = among(data, *cpu_library.DTYPES)
    check("cpu", **{**case, **random_form(data, case, 1, (3, 5))}, tolerance=math.inf, dtype=dtype)


def pool(*size):
    x = torch.randn(2, 3, *size, requires_grad=True)
    loss = cpu.pool(x).square().sum()
    loss.backward()


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

x = torch.randn(1, 3, 5, 7)
out = torch.empty(1, 3, 3, 4)
# 4 planes where there are 3
cpu_library.load().pool_forward(out.data_ptr(), x.data_ptr(), 4, 5, 7, 1)
