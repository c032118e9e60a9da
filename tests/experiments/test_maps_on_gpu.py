"""The fused kernels of experiments/maps_on_gpu in the emulator, against float64; their table."""

import shutil

import pytest

from experiments.maps_on_gpu import emulate
from tests.experiments.pages import rows_of, table

needs_compiler = pytest.mark.skipif(shutil.which("g++") is None, reason="needs g++")
README = "experiments/maps_on_gpu/README.md"


@needs_compiler
def test_the_forward_pass_is_as_exact_as_the_reference_in_bfloat16(tmp_path):
    errors = emulate.forward_errors(emulate.Forward(emulate.build("forward.cu", tmp_path)))
    for name, (error, bound) in errors.items():
        assert error <= 1.1 * bound, name  # false for NaN


@needs_compiler
def test_the_backward_core_has_the_convolutions_gradients(tmp_path):
    errors = emulate.backward_errors(emulate.build("backward_core.cu", tmp_path))
    for name, (error, bound) in errors.items():
        assert error <= 1.1 * bound, name


def test_the_table_is_that_of_the_file():
    for row in table("../maps_on_gpu/cubins.csv").itertuples():
        counts = (row.registers, row.spilled_bytes, row.instructions)
        counts += (row.tensor_core_instructions, row.longest_loop)
        cells = " \\| ".join(map(str, counts))
        assert rows_of(README, rf"\| {row.kernel} \| {row.target} \| {cells} \|")
