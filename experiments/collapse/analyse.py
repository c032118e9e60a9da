"""The analyses that README.md and controls.md of this folder fixed before their runs.

    python -m experiments.collapse.analyse

Prints one table per data set and writes experiments/results/collapse-effects.csv; prints the table of the controls and
writes collapse-controls-effects.csv, once all thirty of their runs have a row.
"""

import sys
from collections.abc import Sequence

import pandas as pd

from ea_vision.base.errors import UsageError, exit_code
from experiments.collapse.run import CONTROLS, RESULTS, SEEDS
from experiments.evidence import effects_table, holm, paired

Pairs = Sequence[tuple[str, str]]
HYPOTHESES = (("none + norm", "none"), ("cnn", "none + norm"), ("EA + norm", "none + norm"))
DESCRIBED = (("cnn", "none"),)
CONTROLLED = (
    ("none + norm", "cnn, equal time"),
    ("none + norm", "none, equal time"),
    ("none + norm", "uniform"),
)
CONTROLS_DESCRIBED = (("uniform", "none"), ("cnn, equal time", "cnn"))
HALVES = {"seeds 5 to 9": range(5, 10), "seeds 10 to 14": range(10, 15)}


def effects_of(
    runs: pd.DataFrame, hypotheses: Pairs = HYPOTHESES, described: Pairs = DESCRIBED
) -> pd.DataFrame:
    """Return one row per data set and pair, without seeds for which a network is missing."""
    needed = {network for pair in (*hypotheses, *described) for network in pair}
    tables = []
    for data, of_data in runs.groupby("data"):
        top1 = of_data.pivot(index="seed", columns="network", values="top1")
        complete = top1.reindex(columns=sorted(needed)).dropna()
        if len(complete) < 2:
            continue
        rows = []
        for better, worse in (*hypotheses, *described):
            effect = paired(complete[better] - complete[worse], 0.01)
            rows.append({"data": data, "name": f"{better} - {worse}", **effect})
        table = pd.DataFrame(rows)
        tested = table.index < len(hypotheses)
        table["p"] = table["p"].where(tested)
        table["p_holm"] = pd.Series(holm(table["p"][tested]))
        tables.append(table)
    return pd.concat(tables, ignore_index=True) if tables else pd.DataFrame()


def effects_of_controls(runs: pd.DataFrame, controls: pd.DataFrame) -> pd.DataFrame | None:
    """Return the effects of controls.md and the means of both halves of the seeds; None before all runs have a row."""
    complete = controls.pivot(index="seed", columns="network", values="top1")
    complete = complete.reindex(index=list(SEEDS), columns=list(CONTROLS))
    if complete.isna().to_numpy().any():
        return None
    together = pd.concat([runs[runs["data"] == "cifar100"], controls])
    effects = effects_of(together, CONTROLLED, CONTROLS_DESCRIBED)
    for half, seeds in HALVES.items():
        part = effects_of(together[together["seed"].isin(seeds)], CONTROLLED, CONTROLS_DESCRIBED)
        effects[half] = part["difference"]
    return effects


def main() -> int:
    runs = pd.read_csv(RESULTS)
    effects = effects_of(runs)
    if effects.empty:
        raise UsageError(f"two seeds of all four networks are required in {RESULTS}")
    effects.to_csv(RESULTS.with_name("collapse-effects.csv"), index=False)
    for data, table in effects.groupby("data"):
        seeds = f"{data}, {table['seeds'].iloc[0]} complete seeds"
        print(seeds, "", *effects_table(table.reset_index(drop=True)), "", sep="\n")
    path = RESULTS.with_name("collapse-controls.csv")
    controls = pd.read_csv(path) if path.exists() else None
    compared = None if controls is None else effects_of_controls(runs, controls)
    if compared is None:
        done, planned = 0 if controls is None else len(controls), len(CONTROLS) * len(SEEDS)
        print(f"controls: {done} of {planned} runs; their effects are computed when all are done")
        return 0
    compared.to_csv(RESULTS.with_name("collapse-controls-effects.csv"), index=False)
    print("controls, cifar100", "", *effects_table(compared), "", sep="\n")
    print(compared[["name", *HALVES]].to_string(index=False))
    return 0


if __name__ == "__main__":
    sys.exit(exit_code(main))
