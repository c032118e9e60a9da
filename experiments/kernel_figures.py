"""Compile the Triton kernels of some layers for each kind of GPU, without a GPU, and tabulate the compiler's figures.

    python -m experiments.kernel_figures experiments/results/kernel-figures.csv          # an hour on one core
    python -m experiments.kernel_figures FILE.csv --layers ea50_28x28 --targets 8.0 9.0 --dtypes bf16

results/kernel-figures-large-maps.csv has the layers of large maps.

Per kernel: threads, registers and spilled bytes per thread, shared memory per block.
"""

import argparse
import re
import subprocess
import tempfile
from collections import Counter
from contextlib import contextmanager, nullcontext
from pathlib import Path
from unittest import mock

import pandas as pd
import torch
import triton
from torch import Tensor
from torch._subclasses import FakeTensorMode
from triton.backends.compiler import GPUTarget
from triton.runtime.jit import MockTensor

from ea_vision.ops import triton_attention
from experiments import gpu_calls

TARGETS = ("8.0", "8.6", "8.9", "9.0", "10.0", "12.0")
DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32}
# heads, (H, W), widths of queries and of values, position tables
LAYERS = {
    "ea50": (8, (14, 14), 20, 3, True),
    "ea50_28x28": (8, (28, 28), 20, 3, True),
    "ea50_40x40": (8, (40, 40), 20, 3, True),
    "wide_40x40": (8, (40, 40), 64, 64, True),
    "cifar_16x16": (4, (16, 16), 16, 8, True),
    "cifar_8x8": (4, (8, 8), 64, 32, True),
    "vit_tiny": (3, (1, 197), 64, 64, False),
    "vit_small": (6, (1, 197), 64, 64, False),
    "vit_small_1025": (6, (1, 1025), 64, 64, False),
    "vit_small_4096": (6, (1, 4096), 64, 64, False),
    "vit_base": (12, (1, 197), 64, 64, False),
}


class Driver:
    """A Triton driver for a GPU that the machine does not have."""

    def __init__(self, capability: int):
        self.capability = capability

    def get_current_target(self) -> GPUTarget:
        return GPUTarget("cuda", self.capability, 32)

    def get_current_device(self) -> int:
        return self.capability  # Triton caches kernels by device

    def get_current_stream(self, device: int) -> int:
        return 0


@contextmanager
def pretended_gpu(capability: tuple[int, int]):
    """Let the kernels' Python code believe that there is a GPU, and collect the launches."""
    launches = []

    def launch(kernel, tile, **arguments):
        launches.append((kernel, tile, arguments))

    with (
        mock.patch.object(triton_attention, "_launch", launch),
        mock.patch.object(triton_attention, "_capability", lambda device: capability),
        mock.patch("torch.cuda.device_of", lambda tensor: nullcontext()),
        FakeTensorMode(),
        torch.device("cuda"),
    ):
        yield launches


def launches_of(layer: str, dtype: torch.dtype, capability: tuple[int, int]) -> list[tuple]:
    """Return kernel, tile and arguments of each launch of a layer's forward and backward pass."""
    K, (H, W), D, E, relative = LAYERS[layer]
    N = H * W
    with pretended_gpu(capability) as launches:
        q, k = (torch.empty(1, N, K, D, dtype=dtype).transpose(1, 2) for _ in range(2))
        v = torch.empty(1, N, K, E, dtype=dtype).transpose(1, 2)
        maps = torch.empty(1, N, N, K, dtype=dtype).permute(0, 3, 1, 2)
        tables = (torch.empty(2 * H - 1, D), torch.empty(2 * W - 1, D)) if relative else (None,) * 2
        inputs = [q, k, v, *tables, maps, torch.empty(K, K, 3, 3), torch.empty(K), None, None]
        options = ([0.5, 1.0, D**-0.5, 0.0], [H, W, 0, 0])
        outputs = triton_attention._run_forward(*inputs, *options, True)
        triton_attention._run_backward(v, maps, inputs, *outputs, *options)
    return launches


def compilations_at_first_use(network: str) -> Counter:
    """Return how often each kernel is compiled in a network's first training step."""
    forward = triton_attention._forward
    backward = triton_attention._backward
    launched = set()

    def launch(kernel, tile, **arguments):
        present = tuple(name for name, x in arguments.items() if x is not None)
        launched.add((kernel.__name__, tile, arguments["S"], present))

    def run_forward(*args, **options):
        triton_attention._run_forward(*args, **options)
        return forward(*args, **options)

    def run_backward(*args):
        triton_attention._run_backward(*args)
        return backward(*args)

    with (
        mock.patch.object(triton_attention, "_launch", launch),
        mock.patch.object(triton_attention, "_forward", run_forward),
        mock.patch.object(triton_attention, "_backward", run_backward),
        mock.patch("torch.cuda.device_of", lambda tensor: nullcontext()),
    ):
        gpu_calls.count(network)
    return Counter(name for name, *_ in launched)


def mocked(x):
    """Replace tensors, also in named tuples, by Triton's MockTensor."""
    if isinstance(x, Tensor):
        return MockTensor(x.dtype, tuple(x.shape))
    if isinstance(x, tuple) and hasattr(x, "_fields"):
        return type(x)(*(mocked(part) for part in x))
    return x


def compiled(kernel, tile, arguments: dict, capability: int) -> dict:
    """Compile a launch; return the row of its figures."""
    triton.runtime.driver.set_active(Driver(capability))
    arguments = arguments | {"I": tile.queries, "J": tile.keys}
    arguments = {name: mocked(x) for name, x in arguments.items() if name in kernel.arg_names}
    limit = {"maxnreg": tile.registers} if tile.registers else {}
    binary = kernel.warmup(
        **arguments, num_warps=tile.warps, num_stages=tile.stages, grid=(1,), **limit
    )
    return {
        "queries": tile.queries,
        "keys": tile.keys,
        "stages": tile.stages,
        "threads": 32 * tile.warps,
        **usage(binary.asm["cubin"]),
        "shared KiB": round(binary.metadata.shared / 1024, 1),
    }


def usage(cubin: bytes) -> dict[str, int]:
    """Return the registers and spilled bytes of a compiled kernel."""
    tool = Path(triton.__file__).parent / "backends" / "nvidia" / "bin" / "cuobjdump"
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(cubin)
        file.flush()
        text = subprocess.run(
            [tool, "--dump-resource-usage", file.name], capture_output=True, text=True, check=True
        ).stdout
    registers, stack = re.search(r"REG:(\d+) STACK:(\d+)", text).groups()
    return {"registers": int(registers), "spilled": int(stack)}


def rows_of(layer: str, dtype: str, target: str) -> list[dict]:
    """Return a row for each kernel of a layer."""
    major, minor = (int(number) for number in target.split("."))
    rows = []
    for kernel, tile, arguments in launches_of(layer, DTYPES[dtype], (major, minor)):
        name = kernel.__name__
        if name == "evolve" and arguments["out"] is None:
            name = "evolve (mixes)"
        row = {"layer": layer, "kernel": name, "GPU": target, "dtype": dtype}
        rows.append(row | compiled(kernel, tile, arguments, 10 * major + minor))
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("csv", type=Path)
    parser.add_argument("--layers", nargs="+", default=list(LAYERS), choices=LAYERS)
    parser.add_argument("--targets", nargs="+", default=TARGETS, choices=TARGETS)
    parser.add_argument("--dtypes", nargs="+", default=list(DTYPES), choices=DTYPES)
    args = parser.parse_args()
    rows = []
    for layer in args.layers:
        for dtype in args.dtypes:
            for target in args.targets:
                rows += rows_of(layer, dtype, target)
                pd.DataFrame(rows).to_csv(args.csv, index=False)
    print(args.csv.read_text(), end="")


if __name__ == "__main__":
    main()
