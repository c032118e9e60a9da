"""Train the runs of the verdict that have no row yet, part by part and seed by seed.

    OMP_NUM_THREADS=1 python -m experiments.across.run sweeps/across --cifar10 DIR --cifar100 DIR   # root of a checkout
    ... --only vit-rival conv2d 100                                       # one run again, for a cell of the table

DIR has train and test, folders or tars of class/name.png. A finished run is a row of PART.csv in
experiments/results/across, so another machine can do the remaining runs; an interrupted run is continued, too. To use
several cores, start one process per core, each with its own --parts. --only trains its run even if it has a row.
"""

import argparse
import os
import signal
import sys
from itertools import product
from pathlib import Path

import pandas as pd

from ea_vision.base.errors import UsageError, exit_code
from experiments import sweep
from experiments.across.plan import NETWORKS, RESULTS, RUNS, UNFUSED, Part, mechanism
from experiments.evidence import read_runs, write_runs


def rows_of(part: Part, results: Path) -> list[pd.DataFrame]:
    """Return the table of the runs that have a row, or none."""
    path = results / f"{part.name}.csv"
    return [read_runs(path)] if path.exists() else []


def has_row(part: Part, variant: str, seed: int, results: Path) -> bool:
    """Return whether the part's file has the run."""
    for rows in rows_of(part, results):
        if ((rows["variant"] == variant) & (rows["seed"] == seed)).any():
            return True
    return False


def keep(part: Part, run: pd.DataFrame, results: Path) -> None:
    """Add a run's row to the part's file."""
    rows = pd.concat([*rows_of(part, results), run])
    order = pd.Categorical(rows["variant"], part.own)
    write_runs(
        rows.assign(order=order).sort_values(["order", "seed"]), results / f"{part.name}.csv"
    )


def train(part: Part, variant: str, seed: int, runs: Path, data: dict[str, Path]) -> pd.DataFrame:
    """Train a run in its own process and return it as a table of one row."""
    kind = "plain"
    if variant != part.baseline:
        kind = mechanism(part.network, variant).get("evolution", "plain")
    os.environ["TIMM_FUSED_ATTN"] = "0" if kind in UNFUSED else "1"
    images = ["--dataset", "folder", "--data-dir", str(data[part.data])]
    network = NETWORKS[part.network]
    command = ["-m", network.module, "train-cifar", *part.options(variant), *images]
    run = sweep.train(command, runs / f"{part.name},{variant},{seed}", seed)
    options = " ".join([network.model, *part.keywords(variant)])
    return pd.DataFrame([{"variant": variant, **run, "options": options}])


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("runs", type=Path, help="folder of the run folders")
    parser.add_argument(
        "--cifar10", type=Path, metavar="DIR", help="needed by the parts of the small ViT"
    )
    parser.add_argument("--cifar100", type=Path, metavar="DIR", help="needed by the part cifar100")
    parser.add_argument(
        "--parts",
        nargs="+",
        choices=RUNS,
        default=list(RUNS),
        metavar="PART",
        help=f"parts, in this order (default: {' '.join(RUNS)})",
    )
    parser.add_argument(
        "--only", nargs=3, metavar=("PART", "VARIANT", "SEED"), help="train this run alone"
    )
    parser.add_argument("-o", "--output", type=Path, default=RESULTS, help="folder of the rows")
    args = parser.parse_args(argv)
    data = {"cifar10": args.cifar10, "cifar100": args.cifar100}
    if args.only:
        name, variant, seed = args.only
        if name not in RUNS or variant not in RUNS[name].own:
            raise UsageError(
                f"--only takes a part and one of its own variants, got {name} {variant}: "
                + "; ".join(f"{part.name}: {', '.join(part.own)}" for part in RUNS.values())
            )
        requested = [(RUNS[name], variant, int(seed))]
    else:
        requested = []
        for part in [RUNS[name] for name in args.parts]:
            requested += [(part, variant, seed) for seed, variant in product(part.seeds, part.own)]
    for part in {part.name: part for part, _, _ in requested}.values():
        if data[part.data] is None:
            raise UsageError(f"part {part.name} needs --{part.data} DIR, got none")
    for name, classes in sorted({(part.data, part.classes) for part, _, _ in requested}):
        sweep.check_images(data[name], classes)
    signal.signal(signal.SIGTERM, sweep.stop)
    args.runs.mkdir(parents=True, exist_ok=True)
    args.output.mkdir(parents=True, exist_ok=True)
    for part, variant, seed in requested:
        if not args.only and has_row(part, variant, seed, args.output):
            continue
        run = train(part, variant, seed, args.runs, data)
        print(run.to_csv(index=False), end="", flush=True)
        if not args.only:
            keep(part, run, args.output)
    return 0


if __name__ == "__main__":
    sys.exit(exit_code(main))
