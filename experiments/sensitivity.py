"""What each study could have found: the true difference that its seeds find at 80% power, from its own spread.

    python -m experiments.sensitivity experiments/results/sensitivity.csv

A two-sided paired t test at 0.05, or at Holm's first level where a study has several hypotheses. mean_correlation: of
the variants over seeds; near 0, pairing gains nothing.
"""

import sys
from pathlib import Path

import pandas as pd

from experiments.evidence import by_variant, mean_correlation, read_runs, smallest_shown

HERE = Path(__file__).resolve().parent
RESULTS = HERE / "results"
STUDIES = {  # study: (files of runs, read as one; first, second; hypotheses)
    "narrow networks, CIFAR-10, seeds 0 to 4": (
        ["results/evidence/cifar10-runs.csv"],
        "EA",
        "none",
        1,
    ),
    "narrow networks, CIFAR-100, seeds 0 to 4": (
        ["results/evidence/cifar100-runs.csv"],
        "EA",
        "none",
        1,
    ),
    "narrow networks, CIFAR-10, seeds 5 to 9": (["factorial/cifar10-runs.csv"], "EA", "none", 1),
    "narrow networks, CIFAR-100, seeds 5 to 9": (["factorial/cifar100-runs.csv"], "EA", "none", 1),
    "equal time, CIFAR-10": (["factorial/cifar10-runs.csv"], "EA", "none equal time", 2),
    "equal time, CIFAR-100": (["factorial/cifar100-runs.csv"], "EA", "none equal time", 2),
    "scenes, quarter width": (["results/scenes/quarter-width-runs.csv"], "EA", "plain", 2),
    "tuning a ViT": (["results/finetune-scenes-runs.csv"], "gates", "plain", 3),
}


def table() -> pd.DataFrame:
    """Return a row for each study: seeds, spread of the differences and what they find, in points."""
    rows = []
    for study, (files, first, second, hypotheses) in STUDIES.items():
        top1 = by_variant(read_runs(*(HERE / file for file in files)))
        spread = (top1[first] - top1[second]).std()
        rows.append(
            {
                "study": study,
                "comparison": f"{first} - {second}",
                "seeds": len(top1),
                "spread": round(spread, 2),
                "found_at_80_percent": round(
                    smallest_shown(spread, len(top1), 0.05 / hypotheses), 2
                ),
                "mean_correlation": round(float(mean_correlation(top1)), 1),
            }
        )
    return pd.DataFrame(rows)


if __name__ == "__main__":
    table().to_csv(sys.argv[1], index=False)
    print(table().to_string(index=False))
