"""Compute which gains the seeds of the small ViT could find: experiments/results/across/power.csv.

    python -m experiments.across.power                                               # from the root of a checkout

From the spreads of the runs it computes the probability that a paired t test, at Holm's first level, finds the planned
gain, and the factor by which a significant result overstates it (mean significant estimate / true gain, in 200,000
draws). This file at commit 7bb541b planned the seeds before the runs.
"""

import numpy as np
import pandas as pd
from scipy import stats
from statsmodels.stats.power import TTestPower

from experiments.across.plan import EPOCHS, EVEN, LONGER, PARTS, RESULTS
from experiments.evidence import by_variant, read_runs

PLANNED = 1.0  # points: the gain that the seeds of the small ViT were chosen for


def power(gain: float, deviation: float, seeds: int, hypotheses: int) -> float:
    """Return the probability that a true gain is significant."""
    return float(TTestPower().power(gain / (2**0.5 * deviation), seeds, 0.05 / hypotheses))


def overstated(gain: float, spread: float, seeds: int, hypotheses: int) -> float:
    """Return the mean of the significant estimates of a true gain, divided by the gain.

    spread: standard deviation of the differences.
    """
    drawn = np.random.default_rng(0).normal(gain, spread, (200_000, seeds))
    means = np.abs(drawn.mean(1))
    errors = drawn.std(1, ddof=1) / seeds**0.5
    threshold = stats.t.ppf(1 - 0.025 / hypotheses, seeds - 1)
    significant = means[means > threshold * errors]
    return float(significant.mean() / gain)


def achieved() -> pd.DataFrame:
    """Return the power of the small ViT's seeds, by mechanism."""
    part = PARTS["vit-rival"]
    top1 = by_variant(read_runs(RESULTS / "vit-rival.csv"))
    seeds = len(top1)
    hypotheses = len(part.tested)
    rows = []
    for name in part.tested:
        spread = (top1[name] - top1[part.baseline]).std()
        power_of_seeds = power(PLANNED, spread / 2**0.5, seeds, hypotheses)
        too_large = overstated(PLANNED, spread, seeds, hypotheses)
        rows.append(
            {
                "name": name,
                "spread": round(spread, 2),
                "planned_gain": PLANNED,
                "power": round(power_of_seeds, 2),
                "overstated": round(too_large, 1),
            }
        )
    return pd.DataFrame(rows)


def worth_in_updates() -> tuple[list[float], float]:
    """Return top-1 of token_conv alone after 8, 10.02 and 11.92 epochs, and the share of additional updates that gains
    as much as conv2d, by a linear fit of top-1 to the logarithm of the epochs."""
    rival = by_variant(read_runs(RESULTS / "vit-rival.csv"))
    even = by_variant(read_runs(RESULTS / "equal-operations.csv"))[EVEN]
    longer = by_variant(read_runs(RESULTS / "equal-time.csv"))[LONGER]
    epochs = [8, EPOCHS[EVEN], EPOCHS[LONGER]]
    top1 = [float(values.mean()) for values in (rival["token_conv"], even, longer)]
    slope, _ = np.polyfit(np.log(epochs), top1, 1)
    gain = (rival["conv2d"] - rival["token_conv"]).mean()
    return top1, float(np.exp(gain / slope) - 1)


if __name__ == "__main__":
    achieved().to_csv(RESULTS / "power.csv", index=False)
    print(achieved().to_string(index=False))
    top1, share = worth_in_updates()
    print(
        f"token_conv after 8, 10.02, 11.92 epochs: {top1}; conv2d is worth {share:.1%} more updates"
    )
