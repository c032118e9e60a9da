"""Measure r, the processor time of an update of EA over that of none, for the equal time of README.md beside this file.

    OMP_NUM_THREADS=1 python -m experiments.factorial.time_ratio experiments/results/evidence/time-ratio.csv

An update is forward, backward and the recipe's Muon step of the narrow networks, 128 images of 32 pixels, bfloat16,
channels last, one thread; rounds are interleaved. The last line's ratio is that of the medians.
"""
import argparse
import time
from pathlib import Path

import pandas as pd
import timm
import torch

import ea_vision
from ea_vision.base.provenance import hardware
from ea_vision.benchmark import Steps, interleaved
from ea_vision.engine.config import load_recipe
from ea_vision.engine.optimizer import build_optimizer
from ea_vision.engine.train_cifar import CifarConfig

NETWORKS = {"none": "conv_transformer_cifar", "EA": "ea_conv_transformer_cifar"}
WIDTHS, IMAGES = [16, 32, 64, 64], 128


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("csv", type=Path)
    parser.add_argument("--repeats", type=int, default=25, help="rounds in a row of the table (default: %(default)s)")
    parser.add_argument("--rows", type=int, default=5, help="(default: %(default)s)")
    args = parser.parse_args()
    torch.set_num_threads(1)
    images, calls = torch.randn(IMAGES, 3, 32, 32).contiguous(memory_format=torch.channels_last), {}
    for name, model_name in NETWORKS.items():
        model = timm.create_model(model_name, widths=WIDTHS, num_classes=10).to(memory_format=torch.channels_last)
        steps = Steps(model, images, "bfloat16")
        steps.optimizer = build_optimizer(CifarConfig(model=model_name, **load_recipe("fast")), model, IMAGES)
        calls[name] = steps.train
    under = {"repeats": args.repeats, "hardware": hardware(torch.device("cpu"), 1), "torch": str(torch.__version__),
             "timm": timm.__version__, "ea_vision": ea_vision.__version__}
    rows = []
    for _ in range(args.rows):
        seconds = interleaved(calls, args.repeats, clock=time.process_time)
        rows.append({**{f"{name}_ms": round(1e3 * value, 1) for name, value in seconds.items()},
                     "ratio": round(seconds["EA"] / seconds["none"], 4), **under})
        print(*list(rows[-1].values()), flush=True)
        pd.DataFrame(rows).to_csv(args.csv, index=False)


if __name__ == "__main__":
    main()
