#!/usr/bin/env python3
"""Collect the accuracies of the shipped CIFAR-10 weights in the columns of timm's results files.

    python experiments/shipped_weights.py

writes experiments/results/results-cifar10.csv, best first: of every CIFAR-10 weights file that can be loaded by name,
what its card says. `ea-vision export` measured the cards' figures on the test images, with the weights as stored.
"""
import argparse
import re
import sys
from pathlib import Path

import timm

import ea_vision  # noqa: F401  (registers the models)
from ea_vision.base.errors import UsageError, exit_code
from ea_vision.engine.report import timm_row, write_timm_results
from ea_vision.models import list_networks

ACCURACY = re.compile(r"(\d+\.\d+)% top-1, (\d+\.\d+)% top-5 on the test images")


def collect(folder: Path) -> list[dict]:
    """A row for each weights file that has a name.

    Raises:
        UsageError: a card that is missing or says no accuracy.
    """
    rows = []
    for name in (name for name in timm.list_pretrained() if name.split(".")[0] in list_networks()):
        cfg, card = timm.get_pretrained_cfg(name), folder / f"{name}.md"
        if cfg.num_classes != 10:
            continue
        found = ACCURACY.search(card.read_text()) if card.exists() else None
        if found is None:
            raise UsageError(f"the card {card} must say the accuracy of {name}, and does not or is missing")
        top1, top5 = map(float, found.groups())
        rows.append(timm_row(name, timm.create_model(name), top1, top5, cfg.input_size[-1], cfg.crop_pct,
                             cfg.interpolation))
    return rows


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.parse_args(argv)
    here = Path(__file__).resolve().parent
    print(write_timm_results(here / "results" / "results-cifar10.csv", collect(here.parent / "weights")), end="")
    return 0


if __name__ == "__main__":
    sys.exit(exit_code(main))
