"""Time inference of deployed networks in several runtimes, interleaved, with ratios to timm's plain network.

    python -m experiments.runtimes resnet50 aa_resnet50 ea_aa_resnet50 --repeats 5

Every network goes through `ea_vision.deploy`, timm's plain ones too. "eager" is PyTorch, "compiled" torch.compile with
frozen weights, both channels-last; "onnx" is ONNX Runtime on a CPU. Learnable gates are set to the papers' values. Peak
memory is measured in a process that runs the ONNX file alone, and excludes onnxruntime itself.
"""

import argparse
import subprocess
import sys
import tempfile
from functools import partial
from pathlib import Path

import onnxruntime
import torch

import ea_vision
from ea_vision.benchmark import baseline_of, interleaved, live_network
from ea_vision.layers import learnable_gates
from experiments.evidence import markdown

PEAK = """
import re, sys, numpy, onnxruntime, psutil
path, batch, side = sys.argv[1], int(sys.argv[2]), int(sys.argv[3])
images, before = numpy.zeros((batch, 3, side, side), "f"), psutil.Process().memory_info().rss
session = onnxruntime.InferenceSession(path, providers=["CPUExecutionProvider"])
session.run(None, {session.get_inputs()[0].name: images})
print(int(re.search(r"VmHWM:\\s*(\\d+) kB", open("/proc/self/status").read())[1]) - before // 1024)
"""


def peak_mib(
    path: Path,
    batch: int,
    side: int,
) -> float:
    """Return the peak memory of an ONNX file on images (batch, 3, side, side), weights included."""
    argv = [sys.executable, "-c", PEAK, str(path), str(batch), str(side)]
    return int(subprocess.run(argv, stdout=subprocess.PIPE, text=True, check=True).stdout) / 1024


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("models", nargs="+", metavar="MODEL")
    parser.add_argument(
        "--runtimes",
        nargs="+",
        choices=("eager", "compiled", "onnx"),
        default=("eager", "compiled", "onnx"),
    )
    parser.add_argument("--batch-size", type=int, default=8)
    parser.add_argument("--img-size", type=int, default=224)
    parser.add_argument("--repeats", type=int, default=7)
    args = parser.parse_args(argv)
    images = torch.randn(args.batch_size, 3, args.img_size, args.img_size)
    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = torch.get_num_threads()
    calls = {}
    peaks = {}
    with (
        tempfile.TemporaryDirectory() as folder,
        torch._inductor.config.patch(freezing=True),
        torch.no_grad(),
    ):
        for name in args.models:
            model = live_network(name, images).eval()
            for gate_name, gate in learnable_gates(model).items():
                gate.fill_(1.0 if gate_name.endswith("beta") else 0.5)  # 0 turns evolution off
            deployed = ea_vision.deploy(model)
            if "onnx" in args.runtimes:
                path = Path(folder) / f"{name}.onnx"
                batch = torch.export.Dim("batch", min=1, max=1024)
                torch.onnx.export(
                    deployed,
                    (images,),
                    path,
                    input_names=["images"],
                    dynamic_shapes=({0: batch},),
                    dynamo=True,
                )
                session = onnxruntime.InferenceSession(
                    path, options, providers=["CPUExecutionProvider"]
                )
                calls[name, "onnx"] = partial(session.run, None, {"images": images.numpy()})
                sizes = [peak_mib(path, batch, args.img_size) for batch in (1, 8)]
                peaks[name, "onnx"] = [f"{size:.0f}" for size in sizes]
            deployed = deployed.to(memory_format=torch.channels_last)
            last = images.to(memory_format=torch.channels_last)
            if "eager" in args.runtimes:
                calls[name, "eager"] = partial(deployed, last)
            if "compiled" in args.runtimes:
                calls[name, "compiled"] = partial(torch.compile(deployed, dynamic=False), last)
        seconds = interleaved(calls, args.repeats)
    rows = []
    for (name, runtime), time in seconds.items():
        base = seconds.get((baseline_of(name), runtime))
        speed = f"{args.batch_size / time:.1f}"
        ratio = f"{base / time:.2f}" if base else ""
        rows.append([name, runtime, speed, ratio, *peaks.get((name, runtime), ["", ""])])
    heads = ["network", "runtime", "images/s", "ratio", "peak MiB, batch 1", "batch 8"]
    print(*markdown(heads, rows), sep="\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
