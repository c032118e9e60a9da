"""Time inference of deployed networks in several runtimes, interleaved, with ratios to timm's plain network.

    python -m experiments.runtimes runtimes.csv resnet50 aa_resnet50 ea_aa_resnet50

Every network goes through `ea_vision.deploy`, timm's plain ones too. "eager" is PyTorch, "compiled" torch.compile with
frozen weights, both channels-last; "onnx" is ONNX Runtime on a CPU. Learnable gates are set to the papers' values. Peak
memory is measured in a process that runs the ONNX file alone, and excludes onnxruntime itself. One row per network
and runtime goes to the CSV.
"""

import argparse
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from functools import partial
from pathlib import Path

import onnxruntime
import pandas as pd
import timm
import torch

import ea_vision
from ea_vision.base.provenance import hardware
from ea_vision.layers import learnable_gates
from experiments.benchmark import baseline_of, interleaved, live_network

RUNTIMES = ("eager", "compiled", "onnx")
PEAK = """
import re, sys, numpy, onnxruntime, psutil
path, batch, side = sys.argv[1], int(sys.argv[2]), int(sys.argv[3])
images, before = numpy.zeros((batch, 3, side, side), "f"), psutil.Process().memory_info().rss
session = onnxruntime.InferenceSession(path, providers=["CPUExecutionProvider"])
session.run(None, {session.get_inputs()[0].name: images})
print(int(re.search(r"VmHWM:\\s*(\\d+) kB", open("/proc/self/status").read())[1]) - before // 1024)
"""


def peak_mib(path: Path, batch: int, side: int) -> int:
    """Return the peak memory of an ONNX file on images (batch, 3, side, side), weights included."""
    argv = [sys.executable, "-c", PEAK, str(path), str(batch), str(side)]
    kib = int(subprocess.run(argv, stdout=subprocess.PIPE, text=True, check=True).stdout)
    return round(kib / 1024)


def deployed(name: str, images: torch.Tensor) -> torch.nn.Module:
    """Return a network as `ea_vision.deploy` leaves it."""
    model = live_network(name, images).eval()
    for gate_name, gate in learnable_gates(model).items():
        gate.fill_(1.0 if gate_name.endswith("beta") else 0.5)  # 0 turns evolution off
    return ea_vision.deploy(model)


def export(
    model: torch.nn.Module, images: torch.Tensor, path: Path
) -> onnxruntime.InferenceSession:
    """Write an ONNX file for any number of images, and open it."""
    batch = torch.export.Dim("batch", min=1, max=1024)
    torch.onnx.export(
        model, (images,), path, input_names=["images"], dynamic_shapes=({0: batch},), dynamo=True
    )
    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = torch.get_num_threads()
    return onnxruntime.InferenceSession(path, options, providers=["CPUExecutionProvider"])


def measure(
    models: Sequence[str], runtimes: Sequence[str], images: torch.Tensor, repeats: int
) -> pd.DataFrame:
    """Return one row per network and runtime. `images` has (B, 3, side, side)."""
    calls = {}
    peaks = {}
    last = images.to(memory_format=torch.channels_last)
    with (
        tempfile.TemporaryDirectory() as folder,
        torch._inductor.config.patch(freezing=True),
        torch.no_grad(),
    ):
        for name in models:
            model = deployed(name, images)
            if "onnx" in runtimes:
                path = Path(folder) / f"{name}.onnx"
                session = export(model, images, path)
                calls[name, "onnx"] = partial(session.run, None, {"images": images.numpy()})
                peaks[name, "onnx"] = [peak_mib(path, batch, images.shape[-1]) for batch in (1, 8)]
            model = model.to(memory_format=torch.channels_last)
            if "eager" in runtimes:
                calls[name, "eager"] = partial(model, last)
            if "compiled" in runtimes:
                calls[name, "compiled"] = partial(torch.compile(model, dynamic=False), last)
        seconds = interleaved(calls, repeats)
    rows = []
    for (name, runtime), time in seconds.items():
        plain = seconds.get((baseline_of(name), runtime))
        peak_of_1, peak_of_8 = peaks.get((name, runtime), (None, None))
        rows.append(
            {
                "network": name,
                "runtime": runtime,
                "images_per_s": round(len(images) / time, 1),
                "ratio": round(plain / time, 2) if plain else None,
                "peak_mib_batch_1": peak_of_1,
                "peak_mib_batch_8": peak_of_8,
            }
        )
    return pd.DataFrame(rows)


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("csv", type=Path)
    parser.add_argument("models", nargs="+", metavar="MODEL")
    parser.add_argument("--runtimes", nargs="+", choices=RUNTIMES, default=RUNTIMES)
    parser.add_argument("--batch-size", type=int, default=8)
    parser.add_argument("--img-size", type=int, default=224)
    parser.add_argument("--repeats", type=int, default=7)
    args = parser.parse_args(argv)
    images = torch.randn(args.batch_size, 3, args.img_size, args.img_size)
    rows = measure(args.models, args.runtimes, images, args.repeats)
    under = {
        "batch_size": args.batch_size,
        "img_size": args.img_size,
        "repeats": args.repeats,
        "torch": torch.__version__,
        "onnxruntime": onnxruntime.__version__,
        "timm": timm.__version__,
        "hardware": hardware(torch.device("cpu"), 1),
    }
    rows.assign(**under).to_csv(args.csv, index=False)
    print(rows.to_string(index=False))
    return 0


if __name__ == "__main__":
    sys.exit(main())
