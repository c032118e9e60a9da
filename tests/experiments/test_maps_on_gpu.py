"""The fused kernels of experiments/maps_on_gpu in the emulator, against float64; what their launch needs."""

import shutil
from functools import partial

import pytest

from experiments.maps_on_gpu import emulate

LEAST_SHARED_BYTES = 99 * 1024  # of a block, on the smallest of the GPUs
ROUNDING = 2**-8  # relative, of one number in bfloat16


@pytest.mark.skipif(shutil.which("g++") is None, reason="needs g++")
@pytest.mark.parametrize("variant", emulate.VARIANTS, ids=str)
def test_all_outputs_and_gradients(variant, tmp_path):
    """Beside the reference in bfloat16; all memory that is to be written is NaN before."""
    kernels = emulate.load_all(partial(emulate.build, folder=tmp_path), variant)
    layer = emulate.Layer(kernels, variant, images=2 if variant.side == 7 else 1)
    errors = emulate.errors(layer)
    expected = {"out", "logits", *(f"d_{name}" for name in layer.inputs)}
    assert set(errors) == expected - (set() if variant.gated else {"d_alpha", "d_beta"})
    for name, (error, bound) in errors.items():
        assert error <= 1.1 * max(bound, ROUNDING), name  # false for NaN
    assert not layer.tensors["done"].any()  # ready for the next step
    for kernel in kernels.values():
        assert kernel.shared_bytes <= LEAST_SHARED_BYTES
