"""Compute what each study could have found: the true difference that its seeds find at 80% power, from its own spread.

A two-sided paired t test at 0.05, or at Holm's first level if a study has several hypotheses. mean_correlation: the
correlation of variants over seeds; near 0, pairing gains nothing.
"""

from pathlib import Path

import pandas as pd

from experiments.evidence import by_variant, mean_correlation, read_runs, smallest_shown

HERE = Path(__file__).resolve().parent
RESULTS = HERE / "results"
NARROW_10 = "results/evidence/cifar10-runs.csv"
NARROW_100 = "results/evidence/cifar100-runs.csv"
FRESH_10 = "factorial/cifar10-runs.csv"
FRESH_100 = "factorial/cifar100-runs.csv"
RUN_B = "results/collapse.csv"
STUDIES = {  # study: (file of runs, first, second, hypotheses, data set if the file has several)
    "narrow networks, CIFAR-10, seeds 0 to 4": (NARROW_10, "EA", "none", 1),
    "narrow networks, CIFAR-100, seeds 0 to 4": (NARROW_100, "EA", "none", 1),
    "narrow networks, CIFAR-10, seeds 5 to 9": (FRESH_10, "EA", "none", 1),
    "narrow networks, CIFAR-100, seeds 5 to 9": (FRESH_100, "EA", "none", 1),
    "equal time, CIFAR-10": (FRESH_10, "EA", "none equal time", 2),
    "equal time, CIFAR-100": (FRESH_100, "EA", "none equal time", 2),
    "with query-key norm, CIFAR-10": ("healthy_maps/norm-runs.csv", "EA", "none", 1),
    "scenes, quarter width": ("results/scenes/quarter-width-runs.csv", "EA", "plain", 2),
    "tuning a ViT": ("results/finetune-scenes-runs.csv", "gates", "plain", 3),
    "attention added to a ResNet": ("results/added-attention-runs.csv", "ea", "aa", 3),
    "SST, PA": ("results/sst.csv", "PA", "none", 2),
    "SST, EA": ("results/sst.csv", "EA", "none", 2),
    "query-key norm, CIFAR-10": (RUN_B, "none + norm", "none", 3, "cifar10"),
    "query-key norm, CIFAR-100": (RUN_B, "none + norm", "none", 3, "cifar100"),
    "convolution and the norm, CIFAR-10": (RUN_B, "cnn", "none + norm", 3, "cifar10"),
    "convolution and the norm, CIFAR-100": (RUN_B, "cnn", "none + norm", 3, "cifar100"),
}


def top1_of(path: Path, data: str | None = None) -> pd.DataFrame:
    """Return accuracy in percent, one row per complete seed and one column per network or variant.

    data: the data set, where a file has the runs of several.
    """
    rows = pd.read_csv(path)
    if data is not None:
        rows = rows[rows["data"] == data]
    if "network" not in rows:
        return by_variant(read_runs(path))
    accuracy = "test" if "test" in rows else "top1"
    return rows.pivot(index="seed", columns="network", values=accuracy).dropna()


def table() -> pd.DataFrame:
    """Return one row per study: seeds, spread of the differences, and the difference that they find, in points."""
    rows = []
    for study, (file, first, second, hypotheses, *data) in STUDIES.items():
        top1 = top1_of(HERE / file, *data)
        spread = (top1[first] - top1[second]).std()
        smallest = smallest_shown(spread, len(top1), 0.05 / hypotheses)
        rows.append(
            {
                "study": study,
                "comparison": f"{first} - {second}",
                "seeds": len(top1),
                "spread": round(spread, 2),
                "found_at_80_percent": round(smallest, 2),
                "mean_correlation": round(float(mean_correlation(top1)), 1),
            }
        )
    return pd.DataFrame(rows)


if __name__ == "__main__":
    print(table().to_string(index=False))
