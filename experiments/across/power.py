"""Seeds for the verdict, from the deviations that are known before it, and what its seeds could find afterwards.

    python -m experiments.across.power                                               # from the root of a checkout

A two-sided paired t test in each comparison. Runs of one seed are taken to be uncorrelated, so a difference of two has
sqrt(2) times a run's standard deviation. The level is Holm's first, 0.05 over the number of hypotheses: the strictest.
Printed are the smallest numbers of seeds for a power of 0.8, and the core hours of the plan, from the measured training
steps in experiments/results/across/verdict-times.csv. Written is experiments/results/across/power.csv: with the spreads
that the runs have, the chance of finding the gain that was planned for, and by how much a significant result overstates
it (the mean of significant estimates over the true gain, of 200,000 draws).
"""
import numpy as np
import pandas as pd
from scipy import stats
from statsmodels.stats.power import TTestPower

from experiments.across.plan import EPOCHS, EVEN, LONGER, NARROW, PARTS, RESULTS, RIVAL, VIT, step_times
from experiments.evidence import by_variant, read_runs

PLANNED = 1.0  # points: the gain that the seeds of the small ViT were chosen for
# task: (standard deviation of a run between seeds, in points of top-1; hypotheses; gains to be seen, in points)
TASKS = {
    "small ViT, CIFAR-10": (0.38, 5, (1.0, 0.75, 0.5)),  # pooled over the four pairs of runs of the pilot
    "narrow Conv-Transformer, CIFAR-100, 4 epochs": (0.5, 4, (1.5, 1.0, 0.75)),
    "the same, CIFAR-10": (0.3, 4, (1.0, 0.75, 0.5)),
}
PILOT_PAIRS = ((59.84, 60.68), (61.60, 61.64), (63.74, 63.10), (65.76, 65.56))  # two seeds of four kinds
UPDATES = {VIT: 8 * 20_000 // 128, RIVAL: 8 * 20_000 // 128, NARROW: 4 * 45_000 // 128}
# seconds of a run of `sequences.py`, from 10 updates of each variant
OTHERS = {"recall: 16 variants, 5 seeds": 16 * 5 * 60, "characters: 8 variants, 5 seeds": 8 * 5 * 30}


def power(gain: float, deviation: float, seeds: int, hypotheses: int) -> float:
    """Return the probability that a true gain is significant."""
    return float(TTestPower().power(gain / (2 ** 0.5 * deviation), seeds, 0.05 / hypotheses))


def seeds_for(gain: float, deviation: float, hypotheses: int, wanted: float = 0.8) -> int:
    """Return the smallest number of seeds with that power."""
    return next(n for n in range(2, 1000) if power(gain, deviation, n, hypotheses) >= wanted)


def pilot_deviation() -> float:
    """Return the pooled standard deviation of the pilot's pairs of runs, in points."""
    return (sum((a - b) ** 2 / 2 for a, b in PILOT_PAIRS) / len(PILOT_PAIRS)) ** 0.5


def core_hours() -> dict[str, float]:
    """Return the hours of each part of the plan on one core."""
    step = step_times()
    longer = {variant: epochs / 8 for variant, epochs in EPOCHS.items()}
    hours = {}
    for part in PARTS.values():
        ms = sum(step[part.network, "plain" if variant == part.baseline else variant] * longer.get(variant, 1)
                 for variant in part.own)
        hours[part.title] = len(part.seeds) * UPDATES[part.network] * ms / 3.6e6
    return hours | {part: seconds / 3600 for part, seconds in OTHERS.items()}


def overstated(gain: float, spread: float, seeds: int, hypotheses: int) -> float:
    """Return the mean of the significant estimates of a true gain, over the gain. spread: of the differences."""
    drawn = np.random.default_rng(0).normal(gain, spread, (200_000, seeds))
    means = np.abs(drawn.mean(1))
    significant = means > stats.t.ppf(1 - 0.025 / hypotheses, seeds - 1) * drawn.std(1, ddof=1) / seeds ** 0.5
    return float(means[significant].mean() / gain)


def achieved() -> pd.DataFrame:
    """Return what the small ViT's seeds could find, by mechanism."""
    part = PARTS["vit-rival"]
    top1, rows = by_variant(read_runs(RESULTS / "vit-rival.csv")), []
    for name in part.tested:
        spread = (top1[name] - top1[part.baseline]).std()
        rows.append({"name": name, "spread": round(spread, 2), "planned_gain": PLANNED,
                     "power": round(power(PLANNED, spread / 2 ** 0.5, len(top1), len(part.tested)), 2),
                     "overstated": round(overstated(PLANNED, spread, len(top1), len(part.tested)), 1)})
    return pd.DataFrame(rows)


def worth_in_updates() -> tuple[list[float], float]:
    """Return top-1 of token_conv alone after 8, 10.02 and 11.92 epochs, and the share of updates that conv2d's gain is
    worth: on the line of top-1 over the logarithm of the epochs."""
    rival = by_variant(read_runs(RESULTS / "vit-rival.csv"))
    points = {8: rival["token_conv"], **{EPOCHS[name]: by_variant(read_runs(RESULTS / f"{part}.csv"))[name]
                                         for part, name in (("equal-operations", EVEN), ("equal-time", LONGER))}}
    top1 = [float(values.mean()) for values in points.values()]
    slope, _ = np.polyfit(np.log(list(points)), top1, 1)
    return top1, float(np.exp((rival["conv2d"] - rival["token_conv"]).mean() / slope) - 1)


def main() -> None:
    print(f"pilot's deviation between seeds: {pilot_deviation():.2f} points")
    print("| task | deviation | hypotheses | gain | seeds | power |\n| --- | --- | --- | --- | --- | --- |")
    for task, (deviation, hypotheses, gains) in TASKS.items():
        for gain in gains:
            seeds = seeds_for(gain, deviation, hypotheses)
            print(f"| {task} | {deviation} | {hypotheses} | {gain} | {seeds} | "
                  f"{power(gain, deviation, seeds, hypotheses):.2f} |")
    hours = core_hours()
    print("\n| part | core hours |\n| --- | --- |")
    for part, count in [*hours.items(), ("together", sum(hours.values()))]:
        print(f"| {part} | {count:.1f} |")
    achieved().to_csv(RESULTS / "power.csv", index=False)
    top1, share = worth_in_updates()
    print(achieved().to_string(index=False))
    print(f"token_conv after 8, 10.02, 11.92 epochs: {top1}; conv2d is worth {share:.1%} more updates")


if __name__ == "__main__":
    main()
