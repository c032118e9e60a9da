"""The analysis that README.md of this folder fixed before the runs.

    python -m experiments.collapse.analyse

Prints one table per data set and writes experiments/results/collapse-effects.csv.
"""

import sys

import pandas as pd

from ea_vision.base.errors import UsageError, exit_code
from experiments.collapse.run import NETWORKS, RESULTS
from experiments.evidence import effects_table, holm, paired

HYPOTHESES = (("none + norm", "none"), ("cnn", "none + norm"), ("EA + norm", "none + norm"))
DESCRIBED = (("cnn", "none"),)


def effects_of(runs: pd.DataFrame) -> pd.DataFrame:
    """Return one row per data set and pair, without seeds for which a network is missing."""
    tables = []
    for data, of_data in runs.groupby("data"):
        top1 = of_data.pivot(index="seed", columns="network", values="top1")
        complete = top1.reindex(columns=list(NETWORKS)).dropna()
        if len(complete) < 2:
            continue
        rows = []
        for better, worse in (*HYPOTHESES, *DESCRIBED):
            effect = paired(complete[better] - complete[worse], 0.01)
            rows.append({"data": data, "name": f"{better} - {worse}", **effect})
        table = pd.DataFrame(rows)
        tested = table.index < len(HYPOTHESES)
        table["p"] = table["p"].where(tested)
        table["p_holm"] = pd.Series(holm(table["p"][tested]))
        tables.append(table)
    return pd.concat(tables, ignore_index=True) if tables else pd.DataFrame()


def main() -> int:
    effects = effects_of(pd.read_csv(RESULTS))
    if effects.empty:
        raise UsageError(f"two seeds of all four networks are required in {RESULTS}")
    effects.to_csv(RESULTS.with_name("collapse-effects.csv"), index=False)
    for data, table in effects.groupby("data"):
        seeds = f"{data}, {table['seeds'].iloc[0]} complete seeds"
        print(seeds, "", *effects_table(table.reset_index(drop=True)), "", sep="\n")
    return 0


if __name__ == "__main__":
    sys.exit(exit_code(main))
