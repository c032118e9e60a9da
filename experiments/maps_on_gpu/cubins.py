"""Registers and instructions of this folder's kernels, compiled for several GPUs. No GPU is needed.

    python -m experiments.maps_on_gpu.cubins experiments/maps_on_gpu/cubins.csv

NVRTC, which torch's wheels bring, compiles; the disassembler is Triton's. "longest_loop" is the number of instructions
in the longest loop: in the backward core, one pass over a row of 196 pixels with 8 heads by 32 lanes.
"""

import argparse
import ctypes
import re
import subprocess
import tempfile
from pathlib import Path

import pandas as pd
import torch
import triton

from experiments.maps_on_gpu.emulate import FOLDER, KERNELS

TARGETS = (80, 90, 120)
TOOLS = Path(triton.__file__).parent / "backends" / "nvidia" / "bin"
INSTRUCTION = re.compile(r"\s*/\*[0-9a-f]{4,}\*/\s+(?:@!?U?P\w+\s+)?([A-Z][A-Z0-9_.]*)(.*)")
LABEL = re.compile(r"\s*(\.L_x?_?\w+):")


def compile_cubin(source: str, target: int) -> bytes:
    """Compile a kernel with NVRTC for a compute capability; two blocks must fit on a multiprocessor.

    Raises:
        RuntimeError: the compiler's log.
    """
    torch.cuda.is_available()  # loads the libraries that torch's wheels bring
    [library] = Path(torch.__file__).parents[1].glob("nvidia/**/libnvrtc.so.*[0-9]")
    nvrtc = ctypes.CDLL(str(library))
    header = (
        (FOLDER / "warp.h")
        .read_text()
        .replace("#pragma once", "")
        .replace("#include <stdint.h>", "")
    )
    types = "typedef unsigned short uint16_t; typedef unsigned int uint32_t;\n"
    text = (FOLDER / source).read_text().replace('#include "warp.h"', types + header)
    program = ctypes.c_void_p()
    nvrtc.nvrtcCreateProgram(ctypes.byref(program), text.encode(), source.encode(), 0, None, None)
    options = [f"--gpu-architecture=sm_{target}".encode(), b"-DBLOCKS=2"]
    failed = nvrtc.nvrtcCompileProgram(program, len(options), (ctypes.c_char_p * 2)(*options))
    size = ctypes.c_size_t()
    if failed:
        nvrtc.nvrtcGetProgramLogSize(program, ctypes.byref(size))
        log = ctypes.create_string_buffer(size.value)
        nvrtc.nvrtcGetProgramLog(program, log)
        raise RuntimeError(log.value.decode())
    nvrtc.nvrtcGetCUBINSize(program, ctypes.byref(size))
    cubin = ctypes.create_string_buffer(size.value)
    nvrtc.nvrtcGetCUBIN(program, cubin)
    return cubin.raw


def longest_loop(listing: str) -> int:
    """Return the number of instructions in the longest loop: up to a branch that jumps back."""
    labels = {}
    count = longest = 0
    for line in listing.splitlines():
        label = LABEL.match(line)
        if label:
            labels[label[1]] = count
        instruction = INSTRUCTION.match(line)
        if not instruction:
            continue
        goal = re.search(r"(\.L_x?_?\w+)", instruction[2])
        if instruction[1].startswith("BRA") and goal and goal[1] in labels:
            length = count + 1 - labels[goal[1]]
            longest = max(longest, length)
        count += 1
    return longest


def measure(source: str, target: int) -> dict:
    """Return a kernel's row."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "kernel.cubin"
        path.write_bytes(compile_cubin(source, target))
        usage = subprocess.check_output([TOOLS / "cuobjdump", "-res-usage", path], text=True)
        listing = subprocess.check_output(
            [TOOLS / "nvdisasm", path], text=True, stderr=subprocess.DEVNULL
        )
    names = [line[1] for line in map(INSTRUCTION.match, listing.splitlines()) if line]
    return {
        "kernel": KERNELS[source],
        "target": f"sm_{target}",
        "registers": int(re.search(r"REG:(\d+)", usage)[1]),
        "spilled_bytes": int(re.search(r"STACK:(\d+)", usage)[1]),
        "instructions": sum(name != "NOP" for name in names),
        "tensor_core_instructions": sum(name.startswith("HMMA") for name in names),
        "longest_loop": longest_loop(listing),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, allow_abbrev=False)
    parser.add_argument("csv", type=Path)
    args = parser.parse_args()
    rows = [measure(source, target) for source in KERNELS for target in TARGETS]
    table = pd.DataFrame(rows).assign(torch=torch.__version__, triton=triton.__version__)
    table.to_csv(args.csv, index=False)
    print(table.to_string(index=False))


if __name__ == "__main__":
    main()
