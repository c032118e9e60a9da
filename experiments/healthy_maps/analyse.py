"""The analysis of question 1, fixed in README.md of this folder before the runs: what does query-key norm cost?

    python -m experiments.healthy_maps.analyse SWEEP [SWEEP ...]

SWEEP: folders written by the command in README.md, for CIFAR-10, CIFAR-100 or both; runs that are not complete are
named and left out. The command writes beside this file norm-runs.csv (each run with the norm, and the accuracy of the
same network and seed without it, from ../factorial) and norm-effects.csv. Holm's correction counts the protocol's four
hypotheses.
"""

import argparse
import sys
from pathlib import Path

import pandas as pd

from ea_vision.base.errors import UsageError, exit_code
from ea_vision.engine.run_folder import read_config
from experiments.evidence import effects_table, holm, paired, read_run, read_runs

HERE = Path(__file__).resolve().parent
FACTORIAL = HERE.parent / "factorial"
HYPOTHESES = 4  # two networks on two data sets


def run_of(folder: Path, without: dict[str, pd.DataFrame]) -> dict:
    """Return a run's row. without: the runs without the norm, by data set."""
    run = read_run(folder)
    last = pd.read_csv(folder / "metrics.csv").iloc[-1]
    map_columns = [name for name in last.index if name.startswith(("entropy", "largest"))]
    network = folder.name.removeprefix("variant=").partition(" norm")[0]
    data = f"cifar{len(read_config(folder)[1]['classes'])}"
    others = without[data]
    [same] = others[(others["variant"] == network) & (others["seed"] == run["seed"])]["top1"]
    return {
        "data": data,
        "network": network,
        "seed": run["seed"],
        "top1": run["top1"],
        "without_norm": same,
        "train_loss": run["train_loss"],
        "updates": run["updates"],
        "fingerprint": run["data"],
        **{name: round(last[name], 3) for name in map_columns},
    }


def effects_of(runs: pd.DataFrame) -> pd.DataFrame:
    """Return the effect of the norm (with minus without) for each data set and network with two seeds or more."""
    rows = []
    for (data, network), group in runs.groupby(["data", "network"]):
        if len(group) > 1:
            change = paired(group["top1"] - group["without_norm"], 0.01)
            rows.append({"name": f"{data}, {network}", **change})
    table = pd.DataFrame(rows)
    return table.assign(p_holm=holm(table["p"], HYPOTHESES))


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("sweeps", type=Path, nargs="+", help="folders that experiments.sweep wrote")
    args = parser.parse_args(argv)
    folders = []
    for sweep in args.sweeps:
        for folder in sorted(sweep.glob("variant=*")):
            if (folder / "results.json").is_file():
                folders.append(folder)
            else:
                print(f"left out: {folder} is not complete")
    if not folders:
        raise UsageError(
            f"complete runs are required, got none in {', '.join(map(str, args.sweeps))}"
        )
    without = {data: read_runs(FACTORIAL / f"{data}-runs.csv") for data in ("cifar10", "cifar100")}
    runs = pd.DataFrame([run_of(folder, without) for folder in folders])
    runs = runs.sort_values(["data", "network", "seed"])
    runs.to_csv(HERE / "norm-runs.csv", index=False)
    effects = effects_of(runs)
    effects.to_csv(HERE / "norm-effects.csv", index=False)
    print(*effects_table(effects), sep="\n")
    return 0


if __name__ == "__main__":
    sys.exit(exit_code(main))
