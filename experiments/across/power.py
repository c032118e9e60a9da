"""What the seeds of the small ViT could find: experiments/results/across/power.csv.

    python -m experiments.across.power                                               # from the root of a checkout

With the spreads that the runs have: the chance that a paired t test, at Holm's first level, finds the gain that was
planned for, and by how much a significant result overstates it (the mean of significant estimates over the true gain,
of 200,000 draws). How the seeds were planned before the runs: this file at commit 7bb541b.
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
    """Return the mean of the significant estimates of a true gain, over the gain. spread: of the differences."""
    drawn = np.random.default_rng(0).normal(gain, spread, (200_000, seeds))
    means = np.abs(drawn.mean(1))
    significant = (
        means > stats.t.ppf(1 - 0.025 / hypotheses, seeds - 1) * drawn.std(1, ddof=1) / seeds**0.5
    )
    return float(means[significant].mean() / gain)


def achieved() -> pd.DataFrame:
    """Return what the small ViT's seeds could find, by mechanism."""
    part = PARTS["vit-rival"]
    top1, rows = by_variant(read_runs(RESULTS / "vit-rival.csv")), []
    for name in part.tested:
        spread = (top1[name] - top1[part.baseline]).std()
        rows.append(
            {
                "name": name,
                "spread": round(spread, 2),
                "planned_gain": PLANNED,
                "power": round(power(PLANNED, spread / 2**0.5, len(top1), len(part.tested)), 2),
                "overstated": round(overstated(PLANNED, spread, len(top1), len(part.tested)), 1),
            }
        )
    return pd.DataFrame(rows)


def worth_in_updates() -> tuple[list[float], float]:
    """Return top-1 of token_conv alone after 8, 10.02 and 11.92 epochs, and the share of updates that conv2d's gain is
    worth: on the line of top-1 over the logarithm of the epochs."""
    rival = by_variant(read_runs(RESULTS / "vit-rival.csv"))
    points = {
        8: rival["token_conv"],
        **{
            EPOCHS[name]: by_variant(read_runs(RESULTS / f"{part}.csv"))[name]
            for part, name in (("equal-operations", EVEN), ("equal-time", LONGER))
        },
    }
    top1 = [float(values.mean()) for values in points.values()]
    slope, _ = np.polyfit(np.log(list(points)), top1, 1)
    return top1, float(np.exp((rival["conv2d"] - rival["token_conv"]).mean() / slope) - 1)


if __name__ == "__main__":
    achieved().to_csv(RESULTS / "power.csv", index=False)
    print(achieved().to_string(index=False))
    top1, share = worth_in_updates()
    print(
        f"token_conv after 8, 10.02, 11.92 epochs: {top1}; conv2d is worth {share:.1%} more updates"
    )
