"""What triton.autotune is given to try; test_triton.py runs it with the kernels, in Triton's interpreter."""
import importlib.util
import json

import pytest

from ea_vision.ops import triton_tiles as ours
from ea_vision.ops.triton_attention import Shape
from ea_vision.ops.triton_tiles import Tile


@pytest.mark.skipif(importlib.util.find_spec("triton") is None, reason="needs triton")
def test_triton_is_given_the_stepped_side_alone_and_a_key_that_its_cache_can_write():
    from ea_vision.ops import triton_kernels

    kernel = triton_kernels.keys_backward
    shape = Shape(14, 14, 196, 8, 3, 8, 32, 16, 32, 32, 64, 4, 0, True, False, False, "torch.bfloat16", True)
    stored = shape._replace(GIVEN=("maps", "stored"))
    one = ours.tuned(kernel, Tile(16, 32), stored)
    assert {tuple(config.kwargs) for config in one.configs} == {("I",)}
    assert set(one.keys) == {"S", "J"}
    json.dumps(stored)
    assert one.restore_value == ["maps"]  # multiplied in place
    assert one.configs[0].num_warps == 8 and one.configs[0].maxnreg is None
    assert one is ours.tuned(kernel, Tile(16, 32), stored)
    other = ours.tuned(kernel, Tile(16, 32, registers=128), shape)
    assert other.restore_value == [] and other.configs[0].maxnreg == 128
