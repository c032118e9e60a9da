"""What the stored runs of five seeds could have found, and how much of PA's figure is none's.

    python experiments/sensitivity.py experiments/results/evidence/sensitivity.csv

By data set: the difference EA - none that five seeds find at 80% power (paired t test, 0.05), the mean correlation of
the variants over seeds, and the differences of PA. With alpha 0.01 PA is nearly a repetition of none, so PA - none is
what two sets of five runs of one network differ by, and EA may be compared with both together.
"""
import argparse
import sys
from pathlib import Path
from statistics import mean, stdev

from ea_vision.base.errors import exit_code
from ea_vision.base.files import atomic_write, create, csv_text
from ea_vision.studies.evidence import by_variant, mean_correlation, paired_difference, read_runs, smallest_shown

STORED = Path(__file__).resolve().parent / "results" / "evidence"


def row(data: str) -> dict:
    """Return the figures of a data set's stored runs, in points of top-1 on the test images."""
    _, runs = read_runs([STORED / f"{data}-runs.csv"])
    top1 = {name: list(by_seed.values()) for name, by_seed in by_variant(runs).items()}
    gains = [ea - none for ea, none in zip(top1["EA"], top1["none"], strict=True)]
    pa = paired_difference(top1["PA"], top1["none"])
    both = [(none + pa) / 2 for none, pa in zip(top1["none"], top1["PA"], strict=True)]
    ea = paired_difference(top1["EA"], both)
    return {"data": data, "found_at_80_percent": round(smallest_shown(stdev(gains), len(gains)), 2),
            "mean_correlation": round(mean_correlation(by_variant(runs)), 1), "pa_minus_none": round(pa[0], 2),
            "pa_low": round(pa[1], 2), "pa_high": round(pa[2], 2), "ea_minus_none": round(mean(gains), 2),
            "ea_minus_none_and_pa": round(ea[0], 2), "ea_low": round(ea[1], 2), "ea_high": round(ea[2], 2)}


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("file", type=Path, help="CSV to write")
    file = parser.parse_args(argv).file
    create(file.parent)
    text = csv_text([row("cifar10"), row("cifar100")])
    atomic_write(file, text.encode())
    print(text, end="")
    return 0


if __name__ == "__main__":
    sys.exit(exit_code(main))
