"""The analysis that README.md of this folder fixed before the runs: skip connection and convolution, seeds 5 to 9.

    python -m experiments.factorial.analyse RUNS/cifar10 RUNS/cifar100

Each argument is a sweep's folder, or the file of runs that an earlier call wrote. To leave out a data set whose 20 runs
are not complete, name the other one alone; Holm's correction still counts four hypotheses. If the sweep also has the
variant `none equal time`, EA minus this variant is tested, with Holm's correction for two hypotheses. The command
writes beside this file cifar10-runs.csv and cifar100-runs.csv (the runs), effects.csv (effects over the fresh seeds,
and over all ten seeds, which is partly after the fact) and one picture per data set.
"""

import argparse
import sys
from pathlib import Path

import numpy as np
import pandas as pd

from ea_vision.base.errors import UsageError, exit_code
from experiments.evidence import (
    by_variant,
    effects_table,
    factorial,
    holm,
    paired,
    plot_evidence,
    read_runs,
    write_runs,
)

HERE = Path(__file__).resolve().parent
EARLIER = HERE.parent / "results" / "evidence"
CELLS = ["none", "EA without skip", "EA without convolution", "EA"]
FACTORS = {
    "skip": dict(zip(CELLS, (-1, -1, 1, 1), strict=True)),
    "convolution": dict(zip(CELLS, (-1, 1, -1, 1), strict=True)),
}
SEEDS = list(range(5, 10))
HYPOTHESES = 4
TIME_HYPOTHESES = 2
LONGER = "none equal time"


def read_fresh(source: Path) -> pd.DataFrame:
    """Return the runs of a data set; raise UsageError unless each variant has the five seeds and was tested."""
    runs = read_runs(source)
    variants = [*CELLS, LONGER] if LONGER in set(runs["variant"]) else CELLS
    runs = read_runs(source, variants=variants)
    complete = [sorted(seeds) == SEEDS for _, seeds in runs.groupby("variant")["seed"]]
    if set(runs["split"]) != {"test"} or not all(complete):
        raise UsageError(
            f"{source} must have tested runs of {', '.join(variants)}: seeds 5 to 9, no others"
        )
    return runs


def analysed(sources: dict[str, pd.DataFrame]) -> pd.DataFrame:
    """Return effects per data set: over the fresh seeds, with p corrected together, and over all ten seeds."""
    fresh = []
    both = []
    for data, runs in sources.items():
        top1 = by_variant(runs)
        effects = factorial(top1[CELLS], FACTORS, 0.01)
        if LONGER in top1:
            gain = paired(top1["EA"] - top1[LONGER], 0.01)
            time = pd.DataFrame([{"name": f"EA - {LONGER}", **gain, "p_holm": np.nan}])
            effects = pd.concat([effects, time], ignore_index=True)
        fresh.append(effects.assign(data=data, seeds="5 to 9"))
        earlier = by_variant(read_runs(EARLIER / f"{data}-runs.csv"))
        ten_seeds = factorial(pd.concat([earlier[CELLS], top1[CELLS]]), FACTORS, 0.01)
        seeds = "0 to 9, partly after the fact"
        both.append(ten_seeds.assign(data=data, seeds=seeds, p=np.nan, p_holm=np.nan))
    table = pd.concat([*fresh, *both], ignore_index=True)
    table.insert(0, "data", table.pop("data"))
    for names, hypotheses in ((list(FACTORS), HYPOTHESES), ([f"EA - {LONGER}"], TIME_HYPOTHESES)):
        tested = table["p"].notna() & table["name"].isin(names)
        table.loc[tested, "p_holm"] = holm(table["p"][tested], hypotheses)
    return table


def data_of(source: Path) -> str:
    """Return the data set that a source's name begins with; raise UsageError for another name."""
    for data in ("cifar100", "cifar10"):
        if source.name.startswith(data):
            return data
    raise UsageError(f"a source's name must begin with cifar10 or cifar100, got {source}")


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "sources", type=Path, nargs="+", help="folders or files, named cifar10... and cifar100..."
    )
    parser.add_argument(
        "-o", "--output", type=Path, default=HERE, help="where the files are written"
    )
    args = parser.parse_args(argv)
    sources = {data_of(path): read_fresh(path) for path in args.sources}
    if len(sources) < len(args.sources):
        raise UsageError(
            f"one folder or file of each data set is required, got {' '.join(map(str, args.sources))}"
        )
    table = analysed(sources)
    args.output.mkdir(parents=True, exist_ok=True)
    for data, runs in sources.items():
        effects = table[(table["data"] == data) & (table["seeds"] == "5 to 9")]
        print(data, "", *effects_table(effects), "", sep="\n")
        write_runs(runs, args.output / f"{data}-runs.csv")
        figure = plot_evidence(by_variant(runs)[CELLS], effects, "test")
        figure.savefig(args.output / f"{data}.png", dpi=200)
    table.to_csv(args.output / "effects.csv", index=False)
    return 0


if __name__ == "__main__":
    sys.exit(exit_code(main))
