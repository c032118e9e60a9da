"""Collect the accuracies of the shipped CIFAR-10 weights, with the columns of timm's results files.

    python experiments/shipped_weights.py

writes experiments/results/results-cifar10.csv, best first: the card's figures for every CIFAR-10 weights file that can
be loaded by name. `experiments.weights_card` measured them on the test images, with the stored weights.
"""

import argparse
import re
import sys
from pathlib import Path

import timm

import ea_vision  # noqa: F401  (registers the models)
from ea_vision.base.errors import exit_code
from ea_vision.base.files import atomic_write, csv_text
from ea_vision.models import list_networks

ACCURACY = re.compile(r"(\d+\.\d+)% top-1, (\d+\.\d+)% top-5 on the test images")


def collect(folder: Path) -> list[dict]:
    """Return one row per weights file with ten classes that can be loaded by name, the best first."""
    rows = []
    for name in timm.list_pretrained():
        cfg = timm.get_pretrained_cfg(name)
        if name.split(".")[0] not in list_networks() or not cfg.file or cfg.num_classes != 10:
            continue
        card = (folder / f"{name}.md").read_text(encoding="utf-8")
        top1, top5 = map(float, ACCURACY.search(card).groups())
        params = sum(parameter.numel() for parameter in timm.create_model(name).parameters())
        row = {
            "model": name,
            "img_size": cfg.input_size[-1],
            "top1": f"{top1:.3f}",
            "top1_err": f"{100 - top1:.3f}",
            "top5": f"{top5:.3f}",
            "top5_err": f"{100 - top5:.3f}",
            "param_count": f"{params / 1e6:.2f}",
            "crop_pct": cfg.crop_pct,
            "interpolation": cfg.interpolation,
        }
        rows.append(row)
    return sorted(rows, key=lambda row: -float(row["top1"]))


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.parse_args(argv)
    here = Path(__file__).resolve().parent
    text = csv_text(collect(here.parent / "weights"))
    atomic_write(here / "results" / "results-cifar10.csv", text.encode())
    print(text, end="")
    return 0


if __name__ == "__main__":
    sys.exit(exit_code(main))
