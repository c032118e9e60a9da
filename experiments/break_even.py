"""How much longer may a training take before its gain at equal updates is lost at equal time? From the rows of runs.

More updates raise the top-1 of the network beside it. Two lengths of its training give the slope, in points per unit of
the logarithm of the updates. A gain of G points is worth exp(G / slope) times the updates: break_even. A training that
takes longer than that loses at equal time, by the estimate at_equal_time where no run of equal time exists.
"""

from dataclasses import dataclass

import numpy as np
import pandas as pd

from experiments.evidence import paired
from experiments.sensitivity import HERE, NARROW_100, top1_of

RUN_B = "results/collapse.csv"
RUN_B_TIMES = "results/collapse-times.csv"
ADDED = "results/added-attention-runs.csv"
ADDED_TIMES = "results/added-attention-times.csv"


@dataclass(frozen=True)
class Comparison:
    """A network and the one beside it, and the runs that say what longer training is worth.

    Attributes:
        runs: file of the runs, and its data set where it has several.
        better: the network that gains at equal updates.
        beside: the network that it is compared with.
        slope_runs: file of the runs of two lengths; that of `runs` gives an interval, seed by seed.
        short: variant of the shorter training.
        long: variant of the longer training.
        times: updates of the longer training, as a multiple.
    """

    runs: tuple[str, str | None]
    better: str
    beside: str
    slope_runs: str
    short: str
    long: str
    times: float


COMPARISONS = (
    Comparison(
        (RUN_B, "cifar100"), "none + norm", "cnn", NARROW_100, "none", "none 5 epochs", 5 / 4
    ),
    Comparison(
        (RUN_B, "cifar100"), "none + norm", "none", NARROW_100, "none", "none 5 epochs", 5 / 4
    ),
    Comparison((ADDED, None), "aa", "plain", ADDED, "plain", "plain-18", 3),
    Comparison((ADDED, None), "ea", "plain", ADDED, "plain", "plain-18", 3),
)


def time_ratio(comparison: Comparison) -> float:
    """Return how many times as long an update of the better network takes, timed in turns: a median of repetitions."""
    file, _ = comparison.runs
    if file == ADDED:
        times = pd.read_csv(HERE / ADDED_TIMES).set_index("model")["train_ms"]
        return times[comparison.better] / times[comparison.beside]
    times = pd.read_csv(HERE / RUN_B_TIMES)
    return (times[comparison.better] / times[comparison.beside]).median()


def table() -> pd.DataFrame:
    """Return one row per comparison; intervals only where the seeds of both lengths are the same runs."""
    rows = []
    for comparison in COMPARISONS:
        file, data = comparison.runs
        top1 = top1_of(HERE / file, data)
        gains = top1[comparison.better] - top1[comparison.beside]
        lengths = top1_of(HERE / comparison.slope_runs)
        worth = lengths[comparison.long] - lengths[comparison.short]
        slope = worth.mean() / np.log(comparison.times)
        row = {
            "comparison": f"{comparison.better} - {comparison.beside}",
            "gain": gains.mean(),
            "longer_training": f"{comparison.times:g} times the updates",
            "longer_gains": worth.mean(),
            "break_even": np.exp(gains.mean() / slope),
        }
        if comparison.slope_runs == file:
            logarithms = paired(gains / worth * np.log(comparison.times))
            for name in ("low", "high"):
                row[name] = np.exp(logarithms[name])
            row["break_even"] = np.exp(logarithms["difference"])
        row["time_ratio"] = time_ratio(comparison)
        row["at_equal_time"] = gains.mean() - slope * np.log(row["time_ratio"])
        rows.append(row)
    return pd.DataFrame(rows).round(2)


if __name__ == "__main__":
    print(table().to_string(index=False))
