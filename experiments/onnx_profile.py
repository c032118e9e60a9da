"""Where ONNX Runtime spends a forward pass of exported networks: milliseconds by kind of operation, side by side.

    for name in resnet50 aa_resnet50 ea_aa_resnet50; do ea-vision export $name --random -o $name.onnx; done
    python experiments/onnx_profile.py {resnet50,aa_resnet50,ea_aa_resnet50}.onnx > experiments/results/onnx-profile.csv

One thread; the files take turns, and of each operation the fastest of --repeats counts.
"""
import argparse
import json
import sys
import tempfile
from collections import defaultdict
from pathlib import Path

import numpy as np
import onnxruntime

from ea_vision.base.errors import exit_code
from ea_vision.base.files import csv_text


def operations(file: str, batch: int, repeats: int) -> dict[str, float]:
    """Return the milliseconds of one pass by kind of operation."""
    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads, options.enable_profiling = 1, True
    options.profile_file_prefix = str(Path(tempfile.mkdtemp()) / "profile")
    session = onnxruntime.InferenceSession(file, options, providers=["CPUExecutionProvider"])
    images = session.get_inputs()[0]
    batch_of_noise = np.random.default_rng(0).standard_normal((batch, *images.shape[1:])).astype("float32")
    for _ in range(repeats):
        session.run(None, {images.name: batch_of_noise})
    taken = defaultdict(list)
    for event in json.loads(Path(session.end_profiling()).read_text()):
        if event.get("cat") == "Node" and event["name"].endswith("kernel_time"):
            taken[event["args"]["op_name"], event["name"]].append(event["dur"] / 1000)
    total = defaultdict(float)
    for (kind, _), times in taken.items():
        total[kind] += min(times)
    return total


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("files", nargs="+")
    parser.add_argument("--batch-size", type=int, default=8)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--repeats", type=int, default=6)
    args = parser.parse_args(argv)
    best = [defaultdict(lambda: float("inf")) for _ in args.files]
    for _ in range(args.rounds):
        for file, known in zip(args.files, best, strict=True):
            found = operations(file, args.batch_size, args.repeats)
            known.update({kind: min(known[kind], time) for kind, time in found.items()})
    kinds = sorted(set().union(*best), key=lambda kind: -max(known.get(kind, 0) for known in best))
    names = [Path(file).stem for file in args.files]
    rows = [{"operation": kind} | {name: f"{known.get(kind, 0):.1f}" for name, known in zip(names, best, strict=True)}
            for kind in kinds]
    print(csv_text(rows), end="")
    return 0


if __name__ == "__main__":
    sys.exit(exit_code(main))
