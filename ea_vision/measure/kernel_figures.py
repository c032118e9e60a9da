"""Registers, shared memory and instructions of the Triton kernels by kind of GPU, on a machine without one.

The kernels that a layer launches, forward and backward, are compiled by Triton for compute capabilities 8.0 to 12.0
and read back from the machine code:

* registers a thread, and bytes a thread that spill to memory;
* shared memory of a block, and how many blocks a multiprocessor holds at once by registers, warps and shared memory;
* instructions, tensor-core products among them, and barriers of the loop over tiles, by warp. The compiler may unroll
  the loop, and of small maps all of it: figures are then of several tiles. On 10.0 large products may go to tensor
  memory (tcgen05).

Nothing is run and nothing is timed. Triton's own ptxas, cuobjdump and nvdisasm do the work, so no CUDA is needed.
"""

from __future__ import annotations

import argparse
import re
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from contextlib import nullcontext
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode

from ea_vision.base.errors import RunError, UsageError
from ea_vision.base.files import atomic_write, check_output, csv_text
from ea_vision.ops import triton_attention
from ea_vision.ops.problem import checked


class Chip(NamedTuple):
    """Resources of a multiprocessor: KiB of shared memory, of which a block may take all but 1; warps; registers."""

    shared_kib: int
    warps: int
    registers: int = 65536


CHIPS = {  # NVIDIA, CUDA C++ Programming Guide, technical specifications per compute capability
    "8.0": Chip(164, 64), "8.6": Chip(100, 48), "8.9": Chip(100, 48), "9.0": Chip(228, 64), "10.0": Chip(228, 64),
    "12.0": Chip(100, 48),
}
DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32}


class Layer(NamedTuple):
    """A layer of a network, as the operator sees it."""

    heads: int
    size: tuple[int, int]
    dim_qk: int
    dim_v: int
    predict: bool = False
    relative: bool = True
    chained: bool = True
    gates: bool = False
    dropout_p: float = 0.0
    kernel_size: int = 3
    prefix: int = 0


LAYERS = {
    "ea50": Layer(8, (14, 14), 20, 3),
    "ea50-7": Layer(8, (7, 7), 20, 6),
    "pa50": Layer(8, (14, 14), 20, 3, predict=True),
    "first": Layer(8, (14, 14), 20, 3, chained=False),
    "pa-cifar": Layer(4, (8, 8), 64, 64, predict=True, dropout_p=0.2),
    "ea-vit-tiny": Layer(3, (1, 197), 64, 64, relative=False, gates=True),
    "ea-vit-small": Layer(6, (1, 197), 64, 64, relative=False, gates=True, prefix=1),
    "ea-vit-base": Layer(12, (1, 577), 64, 64, relative=False, gates=True, prefix=1),
    "ea-5x5": Layer(8, (14, 14), 20, 3, kernel_size=5),
}


class Figures(NamedTuple):
    """Figures of one compiled kernel."""

    layer: str
    kernel: str
    capability: str
    dtype: str
    threads: int
    registers: int
    spilled: int
    shared: int
    blocks: int
    instructions: int
    products: int
    barriers: int
    tensor_memory: bool

    @property
    def warps_per_multiprocessor(self) -> int:
        return self.blocks * self.threads // 32


def launches_of(layer: Layer, dtype: torch.dtype, capability: str = "", device: torch.device | None = None,
                batch: int = 1) -> list[triton_attention.Launch]:
    """What the layer launches in a training step on a GPU of that capability: without data, or, where a device is
    given, ready to run there on random numbers."""
    K, (H, W), D, E = layer.heads, layer.size, layer.dim_qk, layer.dim_v
    N, size = H * W, layer.kernel_size
    with FakeTensorMode() if device is None else nullcontext():
        def made(*shape: int, of: torch.dtype = torch.float32) -> torch.Tensor:
            return torch.randn(shape, device=device).to(of)

        q, k, v = made(batch, N, K * (2 * D + E), of=dtype).split([K * D, K * D, K * E], dim=2)
        heads = [x.view(batch, N, K, -1).transpose(1, 2) for x in (q, k, v)]
        tables = [made(2 * side - 1, D) if layer.relative else None for side in (H, W)]
        prev = made(batch, N, N, K, of=dtype).permute(0, 3, 1, 2) if layer.chained else None
        convolution = [made(K, K, size, size), made(K)] if layer.chained else [None, None]
        gates = made(2, K) if layer.gates and layer.chained else (0.5, 1.0)
        tensors = dict(zip(
            ("q", "k", "v", "height_rel", "width_rel", "prev_logits", "weight", "bias", "alpha", "beta"),
            (*heads, *tables, prev, *convolution, *gates), strict=True))
        problem = checked(**tensors, feat_size=(H, W), predict=layer.predict, num_prefix_tokens=layer.prefix,
                          dropout_p=layer.dropout_p)
        return triton_attention.launches_of(
            problem, tuple(map(int, capability.split("."))) if capability else None)


def compile_launch(launch: triton_attention.Launch, capability: str) -> Any:
    """The kernel, compiled for that capability as a launch on such a GPU would compile it."""
    import triton
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    types = {torch.int64: "*i64", torch.float32: "*fp32", torch.bfloat16: "*bf16", torch.float16: "*fp16",
             torch.uint8: "*u8", torch.int16: "*i16"}
    constants, known = dict(launch.constants), {}
    signature = dict.fromkeys(constants, "constexpr")
    for i, (name, x) in enumerate(zip(launch.kernel.arg_names, launch.args, strict=False)):
        if isinstance(x, Tensor) or (isinstance(x, int) and x % 16 == 0):
            known[i,] = [["tt.divisibility", 16]]
        if isinstance(x, Tensor):
            signature[name] = types[x.dtype]
        elif isinstance(x, int) and x == 1:
            signature[name], constants[name] = "constexpr", 1
        else:
            signature[name] = "fp32" if isinstance(x, float) else "i32"
    source = ASTSource(launch.kernel, {name: signature[name] for name in launch.kernel.arg_names}, constants, known)
    target = GPUTarget("cuda", int(capability.replace(".", "")), 32)
    return triton.compile(source, target=target, options=launch.options)


def _tool(name: str, *args: str) -> str:
    import triton

    path = Path(triton.__file__).parent / "backends" / "nvidia" / "bin" / name
    return subprocess.run([path, *args], capture_output=True, text=True, check=True).stdout


def label_of(launch: triton_attention.Launch) -> str:
    """The kernel's name; where `evolve` does not do all of its work in one launch, the part that it does."""
    name, constants = launch.kernel.__name__, launch.constants
    if name != "evolve" or constants["ATTEND"] and (constants["OWN"] or constants["CONV"]):
        return name
    return f"{name} ({'attends' if constants['ATTEND'] else 'convolves' if constants['CONV'] else 'mixes'})"


def loop_of(machine_code: str) -> list[str]:
    """The instructions of the longest loop in cuobjdump's listing; all where the loop over tiles is unrolled."""
    lines = re.findall(r"/\*([0-9a-f]{4,})\*/\s+(\S.*?)\s*;", machine_code)
    code = [(int(at, 16), what) for at, what in lines]
    best: tuple[int, int] = (0, -1)
    for at, what in code:
        jump = re.search(r"\bBRA(?:\.\w+)*\b.*?\b0x([0-9a-f]+)", what)
        if jump and "BRA" in what:
            to = int(jump.group(1), 16)
            if to < at and at - to > best[1] - best[0]:
                best = (to, at)
    loop = [what for at, what in code if best[0] <= at <= best[1]]
    return loop if any("MMA" in what for what in loop) else [what for _, what in code]


def blocks_per_multiprocessor(chip: Chip, warps: int, registers: int, shared: int) -> int:
    """Return how many blocks fit at once; a warp takes registers by 256, a block 1 KiB more shared memory."""
    by_registers = chip.registers // (warps * -(-registers * 32 // 256) * 256)
    return min(chip.warps // warps, by_registers, chip.shared_kib * 1024 // (shared + 1024))


def figures_of(name: str, launch: triton_attention.Launch, capability: str, dtype: str) -> Figures:
    """Compile one launch and read its figures."""
    built = compile_launch(launch, capability)
    with tempfile.NamedTemporaryFile(suffix=".cubin") as cubin:
        cubin.write(built.asm["cubin"])
        cubin.flush()
        usage, code = _tool("cuobjdump", "-res-usage", cubin.name), _tool("cuobjdump", "-sass", cubin.name)
    registers, stack = (int(n) for n in re.search(r"REG:(\d+) STACK:(\d+)", usage).groups())
    shared = built.metadata.shared
    loop = loop_of(code)
    return Figures(
        name, label_of(launch), capability, dtype, 32 * launch.tile.warps, registers, stack, shared,
        blocks_per_multiprocessor(CHIPS[capability], launch.tile.warps, registers, shared), len(loop),
        sum("MMA" in what for what in loop), sum(bool(re.search(r"\bBAR\.(SYNC|RED)", what)) for what in loop),
        "tcgen05" in built.asm["ptx"])


def all_figures(layers: Sequence[str], capabilities: Sequence[str], dtypes: Sequence[str]) -> list[Figures]:
    """The figures of every kernel that these layers launch; a kernel that two launches share is there once."""
    found: dict[tuple, Figures] = {}
    for layer in layers:
        for dtype in dtypes:
            if dtype == "fp32" and LAYERS[layer].heads > 8:
                continue  # runs on the reference
            for capability in capabilities:
                for launch in launches_of(LAYERS[layer], DTYPES[dtype], capability):
                    constants = tuple(sorted((name, str(x)) for name, x in launch.constants.items()))
                    key = (launch.kernel.__name__, constants, capability, dtype, layer)
                    if key not in found:
                        found[key] = figures_of(layer, launch, capability, dtype)
    return list(found.values())


COLUMNS = ("layer", "kernel", "GPU", "dtype", "threads", "registers", "spilled", "shared KiB", "blocks", "warps",
           "instructions", "products", "barriers", "tcgen05")


def rows_of(figures: Sequence[Figures]) -> list[tuple[str, ...]]:
    """Text, by COLUMNS."""
    def row(f: Figures) -> tuple:
        return (f.layer, f.kernel, f.capability, f.dtype, f.threads, f.registers, f.spilled, round(f.shared / 1024, 1),
                f.blocks, f.warps_per_multiprocessor, f.instructions, f.products, f.barriers,
                "yes" if f.tensor_memory else "no")

    return [tuple(map(str, row(f))) for f in figures]


def parser() -> argparse.ArgumentParser:
    """The options."""
    p = argparse.ArgumentParser(
        formatter_class=argparse.RawDescriptionHelpFormatter, description=__doc__)
    p.add_argument("--layers", nargs="+", default=["ea50"], choices=[*LAYERS, "all"], metavar="LAYER",
                   help=f"of which networks: {', '.join(LAYERS)}, or all (default: ea50)")
    p.add_argument("--capabilities", nargs="+", default=list(CHIPS), choices=list(CHIPS), metavar="X.Y",
                   help=f"compute capabilities (default: {' '.join(CHIPS)})")
    p.add_argument("--dtypes", nargs="+", default=list(DTYPES), choices=list(DTYPES), metavar="TYPE",
                   help=f"precisions (default: {' '.join(DTYPES)})")
    p.add_argument("--csv", type=Path, metavar="FILE", help="also write the table there")
    return p


def main(argv: list[str] | None = None) -> int:
    """Print the table.

    Raises:
        RunError: no Triton with NVIDIA's tools.
        UsageError: Triton's interpreter was asked for, which compiles nothing.
    """
    args = parser().parse_args(argv)
    if not triton_attention.INSTALLED:
        raise RunError("gpu-check --kernels needs triton, which pip installs with torch on Linux")
    if triton_attention.INTERPRETING:
        raise UsageError("gpu-check --kernels needs Triton's compiler, but TRITON_INTERPRET=1 asks for its interpreter")
    if args.csv:
        check_output(args.csv)
    layers = list(LAYERS) if "all" in args.layers else list(dict.fromkeys(args.layers))
    rows = rows_of(all_figures(layers, args.capabilities, args.dtypes))
    widths = [max(map(len, column)) for column in zip(COLUMNS, *rows, strict=True)]
    print("\n".join("  ".join(text.ljust(n) for text, n in zip(row, widths, strict=True)).rstrip()
                    for row in (COLUMNS, *rows)))
    if args.csv:
        atomic_write(args.csv, csv_text([dict(zip(COLUMNS, row, strict=True)) for row in rows]).encode())
    return 0


if __name__ == "__main__":
    sys.exit(main())
