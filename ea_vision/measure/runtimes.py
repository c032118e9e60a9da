"""`benchmark --runtime eager,compiled,onnx`: deployed networks in several runtimes, side by side in one run.

Every network goes through `ea_vision.deploy`, timm's plain ones too: their BatchNorms are folded as ours are. "eager"
is PyTorch, "compiled" torch.compile with frozen weights, both with images and weights channels-last; "onnx" is ONNX
Runtime on a CPU. Gates that learn are at the papers' values, alpha 0.5 and beta 1. Repeats are interleaved; a ratio is
to timm's plain network in the same runtime. Peak memory is that of a process which runs the ONNX file alone, beyond
onnxruntime itself.
"""
from __future__ import annotations

import argparse
import subprocess
import sys
import tempfile
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path

import torch

from ea_vision.base.errors import RunError, UsageError
from ea_vision.base.networks import lay_out
from ea_vision.base.processes import choose_device
from ea_vision.deployment import deploy
from ea_vision.deployment.files import About, ExportedNetwork, check_packages, export_program, write
from ea_vision.layers import learnable_gates
from ea_vision.measure.speed_report import baseline_of
from ea_vision.measure.steps import Bench

RUNTIMES = ("eager", "compiled", "onnx")


def parse_runtimes(text: str, args: argparse.Namespace) -> list[str]:
    """Return the runtimes of a list separated by commas.

    Raises:
        UsageError: another one, one that is not installed, or options of training or of a GPU.
    """
    if choose_device(args.device).type != "cpu" or args.amp != "none" or args.csv:
        raise UsageError("--runtime measures float32 on a CPU and prints a table: no --device cuda, --amp and --csv")
    names = text.split(",")
    if not set(names) <= set(RUNTIMES):
        raise UsageError(f"--runtime must be of {','.join(RUNTIMES)}, got {text!r}")
    if "onnx" in names:
        check_packages(Path("net.onnx"), "onnx", "onnxscript", "onnxruntime")
    return names


PEAK = """
import re, sys, numpy, onnxruntime, psutil
path, batch, side = sys.argv[1], int(sys.argv[2]), int(sys.argv[3])
images, before = numpy.zeros((batch, 3, side, side), "f"), psutil.Process().memory_info().rss
session = onnxruntime.InferenceSession(path, providers=["CPUExecutionProvider"])
session.run(None, {"images": images})
print(int(re.search(r"VmHWM:\\s*(\\d+) kB", open("/proc/self/status").read())[1]) - before // 1024)
"""


def peak_memory(path: Path, batch: int, side: int) -> float:
    """Peak memory, in MiB, of an ONNX file on images (batch, 3, side, side) in a process of its own, weights included.

    Raises:
        RunError: that process failed.
    """
    argv = [sys.executable, "-c", PEAK, str(path), str(batch), str(side)]
    done = subprocess.run(argv, capture_output=True, text=True)
    if done.returncode:
        raise RunError(f"the process that measures memory failed: {done.stderr.strip()[-200:]}")
    return int(done.stdout) / 1024


def compare_runtimes(bench: Bench, names: Sequence[str], runtimes: Sequence[str]) -> list[dict[str, object]]:
    """Measure networks in runtimes, interleaved; one row for each pair, with its ratio to timm's plain network.

    Raises:
        UsageError: a network that refuses the size.
    """
    calls: dict[tuple[str, str], Callable[[], object]] = {}
    memory: dict[str, list[float]] = {}
    images = bench.images.contiguous(memory_format=torch.channels_last)
    side, threads = bench.setting.img_size, torch.get_num_threads()
    with tempfile.TemporaryDirectory() as folder, torch._inductor.config.patch(freezing=True), torch.no_grad():
        for name in names:
            print(name, file=sys.stderr)
            model = bench.live_network(name).eval()
            for gate_name, gate in learnable_gates(model).items():
                gate.fill_(1.0 if gate_name.endswith("beta") else 0.5)  # at 0 nothing would evolve
            deployed = lay_out(deploy(model), torch.channels_last)
            if "eager" in runtimes:
                calls[name, "eager"] = partial(deployed, images)
            if "compiled" in runtimes:
                calls[name, "compiled"] = partial(torch.compile(deployed, dynamic=False), images)
            if "onnx" in runtimes:
                path = Path(folder) / f"{name}.onnx"
                about = About(name, (side, side), (0.5,) * 3, (0.5,) * 3, 1.0, "bilinear", 1000)
                write(export_program(model, (side, side)), path, about)
                calls[name, "onnx"] = partial(ExportedNetwork(path, threads), bench.images.contiguous())
                memory[name] = [peak_memory(path, batch, side) for batch in (1, 8)]
        seconds = bench.medians(calls)
    rows = []
    for (name, runtime), time in seconds.items():
        base = seconds.get((baseline_of(name), runtime))
        rows.append({"model": name, "runtime": runtime, "images_per_s": bench.setting.batch_size / time,
                     "ratio": None if base is None else base / time,
                     "peak_mib": memory.get(name) if runtime == "onnx" else None})
    return rows


def to_table(rows: Sequence[dict[str, object]]) -> str:
    """Markdown: images per second and ratio of each network and runtime; peak memory at batches of 1 and 8."""
    lines = ["| network | runtime | images/s | ratio | peak MiB, batch 1 | batch 8 |",
             "| --- | --- | --- | --- | --- | --- |"]
    for row in rows:
        ratio = "" if row["ratio"] is None else f"{row['ratio']:.2f}"
        peaks = [f"{peak:.0f}" for peak in row["peak_mib"]] if row["peak_mib"] else ["", ""]
        cells = [row["model"], row["runtime"], f"{row['images_per_s']:.1f}", ratio, *peaks]
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines)
