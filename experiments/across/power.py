"""Seeds for the verdict, from the deviations that are known before it: a two-sided paired t test in each comparison.

    python -m experiments.across.power                                               # from the root of a checkout

Runs of one seed are taken to be uncorrelated, so a difference of two has sqrt(2) times a run's standard deviation.
The level is Holm's first, 0.05 over the number of hypotheses: the strictest. Printed are the smallest numbers of seeds
for a power of 0.8. Below them stand the core hours of the plan, from the measured training steps in
experiments/results/across/verdict-times.csv.
"""
from scipy import stats

from experiments.across.plan import EPOCHS, NARROW, PARTS, RIVAL, VIT, step_times

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
    freedom = seeds - 1
    bound = stats.t.ppf(1 - 0.025 / hypotheses, freedom)
    shift = gain / (2 ** 0.5 * deviation) * seeds ** 0.5
    return stats.nct.sf(bound, freedom, shift) + stats.nct.cdf(-bound, freedom, shift)


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


if __name__ == "__main__":
    main()
