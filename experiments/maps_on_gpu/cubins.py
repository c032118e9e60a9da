"""Registers and instructions of this folder's kernels, compiled for several GPUs. No GPU is needed.

    python -m experiments.maps_on_gpu.cubins experiments/maps_on_gpu/cubins.csv

NVRTC, which torch's wheels bring, compiles; the disassembler is Triton's. "an_element" is the number of instructions
that a lane executes for each of the map's numbers: each loop counts as often as its comment `trips` says.

Milliseconds are modelled for an H200 (sm_90) and 256 images, without a fitted number: "issue_ms" from the instructions,
"shared_ms" from the wavefronts of shared memory and L1, "l2_ms" from all bytes that the kernels ask for, as if L1 never
held any, "dram_ms" from the maps that pass DRAM.
"""

import argparse
import ctypes
import functools
import itertools
import re
import subprocess
import tempfile
from pathlib import Path

import pandas as pd
import torch
import triton

from experiments.maps_on_gpu.emulate import FOLDER, KERNELS, VARIANTS, K, Variant

TARGETS = (80, 90, 120)
STDINT = """typedef unsigned char uint8_t;
typedef unsigned short uint16_t;
typedef unsigned int uint32_t;
"""
# an H200 (sm_90): multiprocessors, clock in Hz, instructions a clock, bytes per second of L2 and DRAM
MODELLED = 90
MULTIPROCESSORS, CLOCK, ISSUED, L2, DRAM = 132, 1.755e9, 4, 5.5e12, 3.46e12
IMAGES = 256
# Wavefronts of an instruction by the beginning of its name. LDS alone reads one of each 16 bytes: four lanes a bank.
WAVEFRONTS = {
    r"LDSM.*\.4$": 4,
    r"LDSM": 2,
    r"(LDS|STS|LDG|STG).*128": 4,
    r"(LDS|STS|LDG|STG).*64": 2,
    r"LDS$": 4,
    r"LDS|STS|LDG|STG|SHFL|MOVM": 1,
}
WIDTHS = {
    r"[LS][DT]G.*128": 16,
    r"[LS][DT]G.*64": 8,
    r"[LS][DT]G.*U16": 2,
    r"[LS][DT]G": 4,
}  # bytes
TOOLS = Path(triton.__file__).parent / "backends" / "nvidia" / "bin"
INSTRUCTION = re.compile(r"\s*/\*[0-9a-f]{4,}\*/\s+(?:@!?U?P\w+\s+)?([A-Z][A-Z0-9_.]*)(.*)")
PLACE = re.compile(r'//## File ".*?([^/"]+)", line (\d+)')
LABEL = re.compile(r"\s*(\.L_x?_?\w+):")


def compile_cubin(kernel: str, variant: Variant, target: int) -> bytes:
    """Compile a kernel with NVRTC for a compute capability.

    Raises:
        RuntimeError: the compiler's log.
    """
    torch.cuda.is_available()  # loads the libraries that torch's wheels bring
    [library] = Path(torch.__file__).parents[1].glob("nvidia/**/libnvrtc.so.*[0-9]")
    nvrtc = ctypes.CDLL(str(library))
    headers = {path.name: path.read_text() for path in FOLDER.glob("*.h")}
    headers["stdint.h"] = STDINT

    def strings(*texts: str) -> ctypes.Array:
        return (ctypes.c_char_p * len(texts))(*(text.encode() for text in texts))

    program = ctypes.c_void_p()
    source = FOLDER / f"{kernel}.cu"
    nvrtc.nvrtcCreateProgram(
        ctypes.byref(program),
        source.read_text().encode(),
        source.name.encode(),
        len(headers),
        strings(*headers.values()),
        strings(*headers),
    )
    options = [f"--gpu-architecture=sm_{target}", "-lineinfo", *variant.options()]
    failed = nvrtc.nvrtcCompileProgram(program, len(options), strings(*options))
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


def constants(variant: Variant, kernel: str) -> dict[str, float]:
    """Return the numbers of layer.h and of a kernel's source that a comment `trips` may name."""
    numbers = {"H": variant.side, "W": variant.side, "PREV": variant.prev, "WARPS": 7}
    headers = ("layer.h", *(f"{kernel}_{part}.h" for part in ("maps", "queries", "keys")))
    for path in map(FOLDER.joinpath, (*headers, f"{kernel}.cu")):
        if not path.exists():
            continue
        text = re.sub(r"//.*", "", path.read_text())
        for number, value in re.findall(r"^#define (WARPS) (\d+)", text, re.MULTILINE):
            numbers[number] = int(value)
        for enum in re.findall(r"enum \{(.*?)\}", text, re.DOTALL):
            for entry in enum.split(","):
                number, _, formula = entry.strip().partition(" = ")
                if formula and "?" not in formula:
                    numbers[number] = eval(formula.replace("/", "//"), {}, numbers)
    return numbers


@functools.cache
def trips_of(place: tuple[str, str]) -> str:
    """Return the comment `trips` of a line, "" without one; place: file and line number."""
    name, number = place
    line = (FOLDER / name).read_text().splitlines()[int(number) - 1]
    return line.partition("// trips: ")[2]


def executed(listing: str, numbers: dict[str, float]) -> list[tuple[str, float]]:
    """Return the instructions of a listing, and how often a warp executes each.

    Raises:
        ValueError: a loop has several comments `trips`.
    """
    labels: dict[str, int] = {}
    counts: list[float] = []
    names: list[str] = []
    places: list[tuple[str, str]] = []  # of each instruction
    loops = []
    place, chain = ("", ""), False
    for line in listing.splitlines():
        if label := LABEL.match(line):
            labels[label[1]] = len(counts)
        if match := PLACE.search(
            line
        ):  # the innermost line first, then the calls that it was inlined at
            place = place if chain else match.groups()
            chain = True
        if instruction := INSTRUCTION.match(line):
            chain = False
            goal = re.search(r"(\.L_x?_?\w+)", instruction[2])
            first = labels.get(goal[1]) if goal and instruction[1].startswith("BRA") else None
            if first is not None and first < len(counts):
                loops.append((len(counts) - first, first, len(counts)))
            names.append(instruction[1])
            counts.append(float(instruction[1] != "NOP"))
            places.append(place)
    inner = set()
    for _, first, last in sorted(loops):
        candidates = set(places[first : last + 1]) - {("", "")} - inner
        lines = {place for place in candidates if trips_of(place)}
        if trips_of(places[last]) and places[last] in lines:
            lines = {places[last]}
        if not lines:
            continue  # back from code that the compiler moved to the end
        if len(lines) > 1:
            raise ValueError(f"at most one comment trips required in a loop, got {sorted(lines)}")
        inner |= lines
        for number in range(first, last + 1):
            counts[number] *= eval(trips_of(*lines), {}, numbers)
    return list(zip(names, counts, strict=True))


def value_of(name: str, values: dict[str, int]) -> int:
    """Return the value of the first pattern that the name of an instruction begins with, 0 if there is none."""
    return next((value for pattern, value in values.items() if re.match(pattern, name)), 0)


def dram_bytes(kernel: str, variant: Variant, numbers: dict[str, float]) -> float:
    """Return the bytes of maps for each of their numbers; the rows above and below a block's are read again."""
    rows = numbers["ROWS"] / numbers["R"] if variant.prev else 1
    if kernel == "forward":
        return 2 + 2 * rows * variant.prev  # logits; previous logits
    # both logits and previous ones; d_maps, of a gated layer also g and what alpha multiplies
    return 2 * rows * (2 + variant.prev) + 2 + 4 * variant.gated


def measure(kernel: str, variant: Variant, target: int) -> dict:
    """Return a kernel's row."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "kernel.cubin"
        path.write_bytes(compile_cubin(kernel, variant, target))
        usage = subprocess.check_output([TOOLS / "cuobjdump", "-res-usage", path], text=True)
        listing = subprocess.check_output(
            [TOOLS / "nvdisasm", "-gi", path], text=True, stderr=subprocess.DEVNULL
        )
    numbers = constants(variant, kernel)
    warps = numbers["WARPS"] * numbers["PARTS"]
    elements = K * variant.side**4
    instructions = executed(listing, numbers)
    total = sum(count for _, count in instructions)
    names = [name for name, count in instructions if count]
    row = {
        "kernel": kernel,
        "layer": str(variant),
        "target": f"sm_{target}",
        "registers": int(re.search(r"REG:(\d+)", usage)[1]),
        "spilled_bytes": int(re.search(r"STACK:(\d+)", usage)[1]),
        "instructions": len(names),
        "tensor_core_instructions": sum(name.startswith("HMMA") for name in names),
        "an_element": round(total * 32 * warps / elements, 1),
    }
    if target != MODELLED:
        return row
    waves = sum(count * value_of(name, WAVEFRONTS) for name, count in instructions)
    asked = 32 * sum(count * value_of(name, WIDTHS) for name, count in instructions)
    seconds = {
        "issue": warps * total / (MULTIPROCESSORS * CLOCK * ISSUED),
        "shared": warps * waves / (MULTIPROCESSORS * CLOCK),
        "l2": warps * asked / L2,
        "dram": elements * dram_bytes(kernel, variant, numbers) / DRAM,
    }
    return row | {f"{name}_ms": round(1e3 * IMAGES * x, 3) for name, x in seconds.items()}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, allow_abbrev=False)
    parser.add_argument("csv", type=Path)
    args = parser.parse_args()
    rows = [measure(*case) for case in itertools.product(KERNELS, VARIANTS, TARGETS)]
    table = pd.DataFrame(rows).assign(torch=torch.__version__, triton=triton.__version__)
    table.to_csv(args.csv, index=False)
    print(table.to_string(index=False))


if __name__ == "__main__":
    main()
