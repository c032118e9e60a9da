"""What the stored runs of five seeds could have found, and how much of PA's figure is none's.

    python -m experiments.sensitivity experiments/results/evidence/sensitivity.csv

By data set: the difference EA - none that five seeds find at 80% power (paired t test, 0.05), the mean correlation of
the variants over seeds, and the differences of PA. With alpha 0.01 PA is nearly a repetition of none, so PA - none is
what two sets of five runs of one network differ by, and EA may be compared with both together.
"""
import sys
from pathlib import Path

import pandas as pd

from experiments.evidence import by_variant, mean_correlation, paired, read_runs, smallest_shown

STORED = Path(__file__).resolve().parent / "results" / "evidence"


def row(data: str) -> dict:
    """Return the figures of a data set's stored runs, in points of top-1 on the test images."""
    top1 = by_variant(read_runs(STORED / f"{data}-runs.csv"))
    gains = top1["EA"] - top1["none"]
    pa, ea = paired(top1["PA"] - top1["none"]), paired(top1["EA"] - (top1["none"] + top1["PA"]) / 2)
    figures = {"pa_minus_none": pa["difference"], "pa_low": pa["low"], "pa_high": pa["high"],
               "ea_minus_none": gains.mean(), "ea_minus_none_and_pa": ea["difference"], "ea_low": ea["low"],
               "ea_high": ea["high"]}
    return {"data": data, "found_at_80_percent": round(smallest_shown(gains.std(), len(gains)), 2),
            "mean_correlation": round(float(mean_correlation(top1)), 1),
            **{name: round(float(value), 2) for name, value in figures.items()}}


if __name__ == "__main__":
    pd.DataFrame([row("cifar10"), row("cifar100")]).to_csv(sys.argv[1], index=False)
