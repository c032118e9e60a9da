"""The fused kernels of experiments/maps_on_gpu in the emulator, against float64; their table."""

import shutil

import pytest

from experiments.maps_on_gpu import emulate
from experiments.maps_on_gpu.launch import SHARED_BYTES
from tests.experiments.pages import rows_of, table

needs_compiler = pytest.mark.skipif(shutil.which("g++") is None, reason="needs g++")
README = "experiments/maps_on_gpu/README.md"


def that_checks_its_memory(run, source):
    """Return a kernel whose every launch has the shared memory that a GPU gives it."""

    def launch(arguments, images):
        assert run(arguments, images) == SHARED_BYTES[source]

    return launch


@needs_compiler
@pytest.mark.parametrize("source", ["forward.cu", "backward_core.cu"])
def test_a_kernel_is_as_exact_as_the_reference_in_bfloat16(source, tmp_path):
    """The forward pass beside the reference in bfloat16; the backward core beside rounding alone."""
    run = that_checks_its_memory(emulate.build(source, tmp_path), source)
    if source == "forward.cu":
        errors = emulate.forward_errors(emulate.Forward(run))
    else:
        errors = emulate.backward_errors(run)
    for name, (error, bound) in errors.items():
        assert error <= 1.1 * bound, name  # false for NaN


def test_the_table_is_that_of_the_file():
    for row in table("../maps_on_gpu/cubins.csv").itertuples():
        counts = (row.registers, row.spilled_bytes, row.instructions)
        counts += (row.tensor_core_instructions, row.longest_loop)
        cells = " \\| ".join(map(str, counts))
        assert rows_of(README, rf"\| {row.kernel} \| {row.target} \| {cells} \|")
