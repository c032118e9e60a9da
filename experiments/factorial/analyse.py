"""The analysis that README.md of this folder fixed before the runs: skip connection and convolution, seeds 5 to 9.

    python experiments/factorial/analyse.py RUNS/cifar10 RUNS/cifar100

Each argument is a sweep's folder, or the file that an earlier call kept; a data set whose 20 runs are not complete is
left out by naming the other one alone, and Holm's correction then still counts four hypotheses. Written beside this
file: cifar10-runs.csv and cifar100-runs.csv (the runs), effects.csv (fresh seeds, and all ten where the earlier runs
are at hand, which is partly after the fact) and, by data set, a picture.
"""
import argparse
import sys
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path

from ea_vision.base.errors import UsageError, exit_code
from ea_vision.base.figures import figure_bytes
from ea_vision.base.files import atomic_write, csv_text
from ea_vision.studies.evidence import (
    Effect,
    by_variant,
    effects_table,
    factorial,
    holm,
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
SEEDS, HYPOTHESES = range(5, 10), 4


def corrected(effects: Sequence[Sequence[Effect]]) -> list[float]:
    """Return Holm's p of the main effects of all data sets, over four hypotheses however many are at hand."""
    p_values = [effect.p for of_set in effects for effect in of_set if effect.p is not None]
    return holm([*p_values, *[1.0] * (HYPOTHESES - len(p_values))])[:len(p_values)]


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("sources", type=Path, nargs="+", help="folders or files, named cifar10... and cifar100...")
    parser.add_argument("-o", "--output", type=Path, default=HERE, help="where the files are written")
    args = parser.parse_args(argv)
    sets = {"cifar100" if source.name.startswith("cifar100") else "cifar10": source for source in args.sources}
    if len(sets) < len(args.sources):
        raise UsageError(f"one folder or file of each data set is required, got {' '.join(map(str, args.sources))}")
    fresh, rows = {}, []
    for name, source in sets.items():
        split, runs = read_runs([source], CELLS)
        top1 = by_variant(runs)
        if split != "test" or any(sorted(of_cell) != list(SEEDS) for of_cell in top1.values()):
            raise UsageError(f"{source} must have the four cells' tested runs of seeds 5 to 9, no others")
        fresh[name] = factorial(top1, FACTORS, 0.01)
        _, earlier = read_runs([EARLIER / f"{name}-runs.csv"], CELLS)
        both = {cell: {**of_cell, **by_variant(earlier)[cell]} for cell, of_cell in top1.items()}
        rows += [{"data": name, **asdict(effect), "seeds": "5 to 9"} for effect in fresh[name]]
        rows += [{"data": name, **asdict(effect), "seeds": "0 to 9, partly after the fact", "p": None, "p_holm": None}
                 for effect in factorial(both, FACTORS, 0.01)]
        atomic_write(args.output / f"{name}-runs.csv", runs_text(runs, split).encode())
        atomic_write(args.output / f"{name}.png", figure_bytes(plot_evidence(top1, fresh[name], split)))
    p_values = iter(corrected(list(fresh.values())))
    for row in rows:
        if row["p"] is not None:
            row["p_holm"] = next(p_values)
    for name in fresh:
        told = [Effect(**{key: row[key] for key in ("name", "difference", "low", "high", "p", "p_holm")}, seeds=5)
                for row in rows if row["data"] == name and row["seeds"] == "5 to 9"]
        print(name, "", *effects_table(told), "", sep="\n")
    atomic_write(args.output / "effects.csv", csv_text(rows).encode())
    return 0


if __name__ == "__main__":
    sys.exit(exit_code(main))
