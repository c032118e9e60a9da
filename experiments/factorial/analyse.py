"""The analysis that README.md of this folder fixed before the runs: skip connection and convolution, seeds 5 to 9.

    python experiments/factorial/analyse.py RUNS/cifar10 RUNS/cifar100

Each argument is a sweep's folder, or the file that an earlier call kept; a data set whose 20 runs are not complete is
left out by naming the other one alone, and Holm's correction then still counts four hypotheses. Where the sweep has
`none equal time`, too, EA minus that is tested, over two hypotheses. Written beside this file: cifar10-runs.csv and
cifar100-runs.csv (the runs), effects.csv (fresh seeds, and all ten where the earlier runs are at hand, which is partly
after the fact) and, by data set, a picture.
"""
import argparse
import sys
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path

from ea_vision.base.errors import UsageError, exit_code
from ea_vision.base.figures import figure_bytes
from ea_vision.base.files import atomic_write, csv_text
from ea_vision.studies.evidence import (
    Effect,
    Run,
    by_variant,
    corrected,
    effects_table,
    factorial,
    paired_difference,
    parse_factors,
    plot_evidence,
    read_runs,
    runs_text,
)

HERE = Path(__file__).resolve().parent
EARLIER = HERE.parent / "results" / "evidence"
CELLS = ("none", "EA without skip", "EA without convolution", "EA")
FACTORS = parse_factors(["skip=none,EA without skip|EA without convolution,EA",
                         "convolution=none,EA without convolution|EA without skip,EA"])
SEEDS, HYPOTHESES, TIME_HYPOTHESES = range(5, 10), 4, 2
LONGER = "none equal time"


def checked(runs: Sequence[Run], split: str, variants: Sequence[str], source: Path) -> list[Run]:
    """Return the variants' runs; raises UsageError unless each has the five seeds and was tested."""
    if split != "test" or any(sorted(run.seed for run in runs if run.variant == name) != list(SEEDS)
                              for name in variants):
        raise UsageError(f"{source} must have tested runs of {', '.join(variants)}: seeds 5 to 9, no others")
    return [run for name in variants for run in runs if run.variant == name]


def equal_time(top1: Mapping[str, Mapping[int, float]]) -> Effect:
    """Return EA minus none with as many updates as take EA's time."""
    figures = paired_difference(*([top1[name][seed] for seed in SEEDS] for name in ("EA", LONGER)), 0.01)
    return Effect(f"EA - {LONGER}", len(SEEDS), *figures, None)


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("sources", type=Path, nargs="+", help="folders or files, named cifar10... and cifar100...")
    parser.add_argument("-o", "--output", type=Path, default=HERE, help="where the files are written")
    args = parser.parse_args(argv)
    sets = {"cifar100" if source.name.startswith("cifar100") else "cifar10": source for source in args.sources}
    if len(sets) < len(args.sources):
        raise UsageError(f"one folder or file of each data set is required, got {' '.join(map(str, args.sources))}")
    fresh, times, together = [], [], []  # (data set, effect)
    for name, source in sets.items():
        split, runs = read_runs([source])
        longer = any(run.variant == LONGER for run in runs)
        runs = checked(runs, split, (*CELLS, LONGER) if longer else CELLS, source)
        top1 = by_variant(runs)
        cells = {cell: top1[cell] for cell in CELLS}
        effects = factorial(cells, FACTORS, 0.01)
        fresh += [(name, effect) for effect in effects]
        times += [(name, equal_time(top1))] if longer else []
        _, earlier = read_runs([EARLIER / f"{name}-runs.csv"], CELLS)
        both = {cell: {**of_cell, **by_variant(earlier)[cell]} for cell, of_cell in cells.items()}
        together += [{"data": name, **asdict(effect), "seeds": "0 to 9, partly after the fact", "p": None,
                      "p_holm": None} for effect in factorial(both, FACTORS, 0.01)]
        atomic_write(args.output / f"{name}-runs.csv", runs_text(runs, split).encode())
        atomic_write(args.output / f"{name}.png", figure_bytes(plot_evidence(cells, effects, split)))
    told = []
    for named, hypotheses in ((fresh, HYPOTHESES), (times, TIME_HYPOTHESES)):
        told += zip([name for name, _ in named], corrected([effect for _, effect in named], hypotheses), strict=True)
    for name in sets:
        print(name, "", *effects_table([effect for of_set, effect in told if of_set == name]), "", sep="\n")
    rows = [{"data": name, **asdict(effect), "seeds": "5 to 9"} for name in sets for of_set, effect in told
            if of_set == name] + together
    atomic_write(args.output / "effects.csv", csv_text(rows).encode())
    return 0


if __name__ == "__main__":
    sys.exit(exit_code(main))
