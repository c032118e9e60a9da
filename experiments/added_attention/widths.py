"""What attention beside the convolutions costs by stages and heads: training steps in turns, in plain steps.

    OMP_NUM_THREADS=1 python -m experiments.added_attention.widths

Processor time of one thread, batches of 4 images of 224 pixels, float32, medians of five interleaved rounds. Writes
experiments/results/added-attention-widths.csv; `make pages` puts its table into docs/fine-tune.md.
"""

import argparse
import sys
import time
from pathlib import Path

import pandas as pd
import timm
import torch

import ea_vision
from ea_vision.base.errors import exit_code
from ea_vision.base.files import atomic_write, csv_text
from ea_vision.base.provenance import hardware
from ea_vision.models.modes import lay_out
from experiments.benchmark import Steps, interleaved

RESULT = Path(__file__).resolve().parents[1] / "results" / "added-attention-widths.csv"
NETWORKS = ("resnet18", "resnet34", "resnet50")
KINDS = {"AA": None, "EA": "ea"}
PLACES = {  # stages, heads
    "stages 2 to 4, 8 heads": ((2, 3, 4), 8),
    "4 heads": ((2, 3, 4), 4),
    "2 heads": ((2, 3, 4), 2),
    "stages 3, 4, 8 heads": ((3, 4), 8),
    "stage 4, 8 heads": ((4,), 8),
}


def measure(network: str, side: int, batch: int, rounds: int) -> list[dict]:
    """Return a row per place and kind with the ratio of its step to the plain network's."""
    images = torch.randn(batch, 3, side, side).contiguous(memory_format=torch.channels_last)

    def step_of(model: torch.nn.Module):
        return Steps(lay_out(model, torch.channels_last), images).train

    calls = {"plain": step_of(timm.create_model(network))}
    for place, (stages, heads) in PLACES.items():
        for kind, evolution in KINDS.items():
            options = {"img_size": side, "attn_stages": stages, "num_heads": heads}
            model = ea_vision.evolve(timm.create_model(network), evolution, **options)
            calls[place, kind] = step_of(model)
    seconds = interleaved(calls, rounds, clock=time.process_time)
    plain = seconds.pop("plain")
    rows = []
    for (place, kind), value in seconds.items():
        row = {"network": network, "place": place, "kind": kind}
        rows.append(row | {"plain_ms": round(1e3 * plain, 1), "ratio": round(value / plain, 3)})
    return rows


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--img-size", type=int, default=224)
    parser.add_argument("--batch-size", type=int, default=4)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--networks", nargs="+", choices=NETWORKS, default=NETWORKS)
    parser.add_argument("--csv", type=Path, default=RESULT, help="(default: %(default)s)")
    args = parser.parse_args(argv)
    torch.set_num_threads(1)
    torch.manual_seed(0)
    about = {"hardware": hardware(torch.device("cpu"), 1), "torch": torch.__version__}
    rows = []
    for network in args.networks:
        for row in measure(network, args.img_size, args.batch_size, args.rounds):
            rows.append(row | about)
    atomic_write(args.csv, csv_text(rows).encode())
    table = pd.DataFrame(rows).pivot(index=["network", "kind"], columns="place", values="ratio")
    print(table.to_string())
    return 0


if __name__ == "__main__":
    sys.exit(exit_code(main))
