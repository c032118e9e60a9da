"""Measure the time of a forward pass with and without recording, and the memory of the recorded maps.

    OMP_NUM_THREADS=1 python -m experiments.recording_cost experiments/results/recording-cost.csv

One row per network: processor seconds of a forward pass, plain and with all layers recorded (medians of interleaved
rounds), and MiB of maps per image. Random weights, evaluation mode, float32.
"""

import argparse
import time
from pathlib import Path

import pandas as pd
import timm
import torch

import ea_vision
from ea_vision.base.provenance import hardware
from experiments.benchmark import interleaved

MODELS = (
    "vit_small_patch16_224",
    "swin_tiny_patch4_window7_224",
    "ea_vit_small_patch16_224",
    "ea_aa_resnet34",
)


@torch.no_grad()
def measure(name: str, images: int, repeats: int) -> dict[str, str | float]:
    """Return the table row of one network."""
    torch.manual_seed(0)
    model = timm.create_model(name).eval()
    batch = torch.rand(images, *timm.data.resolve_model_data_config(model)["input_size"])

    def recorded() -> dict:
        with ea_vision.record_attention(model) as maps:
            model(batch)
        return maps

    steps = {"plain": lambda: model(batch), "recorded": recorded}
    seconds = interleaved(steps, repeats, clock=time.process_time)
    plain = seconds["plain"]
    with_maps = seconds["recorded"]
    kept = 0
    for layer in recorded().values():
        kept += sum(part.nbytes for part in layer._parts.values())
    return {
        "network": name,
        "plain_s": round(plain, 3),
        "recorded_s": round(with_maps, 3),
        "ratio": round(with_maps / plain, 2),
        "maps_mib": round(kept / images / 2**20, 1),
    }


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("csv", type=Path)
    parser.add_argument("--images", type=int, default=8, help="per batch (default: %(default)s)")
    parser.add_argument("--repeats", type=int, default=11, help="rounds (default: %(default)s)")
    args = parser.parse_args()
    rows = [measure(name, args.images, args.repeats) for name in MODELS]
    under = {
        "images": args.images,
        "repeats": args.repeats,
        "torch": torch.__version__,
        "hardware": hardware(torch.device("cpu"), 1),
    }
    pd.DataFrame(rows).assign(**under).to_csv(args.csv, index=False)
    print(args.csv.read_text(), end="")


if __name__ == "__main__":
    main()
