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
from collections.abc import Sequence
from dataclasses import asdict, replace
from pathlib import Path

from ea_vision.base.errors import UsageError, exit_code
from ea_vision.base.figures import figure_bytes
from ea_vision.base.files import atomic_write, csv_text
from ea_vision.studies.evidence import (
    Effect,
    Run,
    by_variant,
    effects_table,
    factorial,
    holm,
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


def corrected(effects: Sequence[Effect], hypotheses: int = HYPOTHESES) -> list[Effect]:
    """Return the effects with Holm's p of those that are tested, over so many hypotheses however few are at hand."""
    p_values = [effect.p for effect in effects if effect.p is not None]
    holms = iter(holm([*p_values, *[1.0] * (hypotheses - len(p_values))]))
    return [effect if effect.p is None else replace(effect, p_holm=next(holms)) for effect in effects]


def tested_runs(source: Path, variants: Sequence[str]) -> list[Run]:
    """Return the variants' runs; raises UsageError unless each has the five seeds and was tested."""
    split, runs = read_runs([source], variants)
    if split != "test" or any(sorted(top1) != list(SEEDS) for top1 in by_variant(runs).values()):
        raise UsageError(f"{source} must have tested runs of {', '.join(variants)}: seeds 5 to 9, no others")
    return runs


def equal_time(source: Path) -> tuple[list[Run], Effect] | None:
    """Return the runs of none that take EA's time, and EA minus them; None where the source has no such runs."""
    if LONGER not in {run.variant for run in read_runs([source])[1]}:
        return None
    runs = tested_runs(source, ("EA", LONGER))
    top1 = by_variant(runs)
    figures = paired_difference(*([top1[name][seed] for seed in SEEDS] for name in ("EA", LONGER)), 0.01)
    return [run for run in runs if run.variant == LONGER], Effect(f"EA - {LONGER}", 5, *figures, None)


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("sources", type=Path, nargs="+", help="folders or files, named cifar10... and cifar100...")
    parser.add_argument("-o", "--output", type=Path, default=HERE, help="where the files are written")
    args = parser.parse_args(argv)
    sets = {"cifar100" if source.name.startswith("cifar100") else "cifar10": source for source in args.sources}
    if len(sets) < len(args.sources):
        raise UsageError(f"one folder or file of each data set is required, got {' '.join(map(str, args.sources))}")
    fresh: dict[str, list[Effect]] = {}
    times: dict[str, Effect] = {}
    together = []
    for name, source in sets.items():
        runs = tested_runs(source, CELLS)
        top1 = by_variant(runs)
        fresh[name] = factorial(top1, FACTORS, 0.01)
        longer = equal_time(source)
        if longer is not None:
            runs, times[name] = runs + longer[0], longer[1]
        _, earlier = read_runs([EARLIER / f"{name}-runs.csv"], CELLS)
        both = {cell: {**of_cell, **by_variant(earlier)[cell]} for cell, of_cell in top1.items()}
        together += [{"data": name, **asdict(effect), "seeds": "0 to 9, partly after the fact", "p": None,
                      "p_holm": None} for effect in factorial(both, FACTORS, 0.01)]
        atomic_write(args.output / f"{name}-runs.csv", runs_text(runs, "test").encode())
        atomic_write(args.output / f"{name}.png", figure_bytes(plot_evidence(top1, fresh[name], "test")))
    effects = iter(corrected([effect for of_set in fresh.values() for effect in of_set]))
    pairs = iter(corrected(list(times.values()), TIME_HYPOTHESES))
    rows = []
    for name, of_set in fresh.items():
        told = [next(effects) for _ in of_set] + ([next(pairs)] if name in times else [])
        print(name, "", *effects_table(told), "", sep="\n")
        rows += [{"data": name, **asdict(effect), "seeds": "5 to 9"} for effect in told]
    rows += together
    atomic_write(args.output / "effects.csv", csv_text(rows).encode())
    return 0


if __name__ == "__main__":
    sys.exit(exit_code(main))
