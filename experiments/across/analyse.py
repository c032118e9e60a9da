"""The analysis that README.md of this folder fixed before the runs: the gain of each mechanism in each part.

    python -m experiments.across.analyse sweeps/across                               # from the root of a checkout

The folder holds the sweeps of README.md; a part may also be the file of runs that an earlier call kept (vit-rival.csv).
A part whose runs are not complete is left out, and the command prints the reason. It writes into
experiments/results/across a file of runs for each part, verdict.csv (one row per comparison, with the gain that its
seeds find at 80% power) and verdict.png (differences with 95% intervals). Last, it prints the tables of
docs/across-layers.md and, from recall.csv and characters.csv of the folder, README.md's table of the two tasks without
images.
"""

import argparse
import sys
from collections.abc import Mapping
from dataclasses import replace
from itertools import product
from pathlib import Path

import numpy as np
import pandas as pd
from matplotlib.figure import Figure

from ea_vision.base.errors import UsageError, exit_code
from experiments.across.plan import FOURTH, RESULTS, RUNS, SECOND, THIRD, Part, run_time, step_times
from experiments.across.sequences import MECHANISMS
from experiments.evidence import (
    by_variant,
    draw_differences,
    effects_table,
    holm,
    markdown,
    paired,
    read_runs,
    smallest_shown,
    write_runs,
)

ROWS = {
    "equal-time": "{}, equal time",
    "equal-operations": "{}, equal operations",
    "vit-dear": "{}, two seeds",
}
AFTER = {
    "equal-time": "vit-rival",
    "second-xsa": "second-updates",
    "second-gated": "second-updates",
}


def read_part(part: Part, folder: Path) -> pd.DataFrame:
    """Return the runs of a part's variants, also those that belong to the parts named in `beside`.

    Raises:
        UsageError: runs are missing, damaged, not complete or not tested.
    """
    names = [part.name, *part.beside]
    sources = []
    for name in names:
        places = (folder / name, folder / f"{name}.csv")
        sources += [path for path in places if path.exists()]
    if len(sources) < len(names):
        raise UsageError(f"runs of {' and '.join(names)} are required in {folder}")
    runs = read_runs(*sources, variants=part.variants)
    if set(runs["split"]) != {"test"}:
        raise UsageError(
            f"runs that were tested are required, got top-1 on {runs['split'].iloc[0]} images"
        )
    runs = runs[runs["seed"].isin(part.seeds)]
    present = set(zip(runs["variant"], runs["seed"], strict=True))
    missing = set(product(part.variants, part.seeds)) - present
    if missing:
        variant, seed = min(missing)
        raise UsageError(f"{len(missing)} runs are missing, the first is {variant}, seed {seed}")
    return runs


def compared(differences: pd.Series, level: float) -> dict[str, float]:
    """Return the result of `paired` and the gain that the seeds find at 80% power; for one seed the difference alone.

    level: significance level of the test.
    """
    if len(differences) == 1:
        unknown = dict.fromkeys(("low", "high", "p", "found_at_80_percent"), np.nan)
        return {"seeds": 1, "difference": differences.iloc[0], **unknown}
    smallest = smallest_shown(differences.std(), len(differences), level)
    return {**paired(differences), "found_at_80_percent": round(smallest, 2)}


def effects_of(
    part: Part, runs: pd.DataFrame, times: Mapping[tuple[str, str], float]
) -> pd.DataFrame:
    """Return each variant minus the baseline, with Holm's p for the tested variants.

    found_at_80_percent: the gain, in points, that the seeds find at 80% power; for hypotheses at Holm's first level.
    run_ratio: mean seconds of a variant's runs / those of the baseline. time_ratio: the same ratio of processor time,
    computed from the training steps in the part's file of times.
    """
    top1 = by_variant(runs)
    seconds = runs.groupby("variant")["seconds"].mean()
    hypotheses = part.hypotheses or len(part.tested)
    rows = []
    for name in (*part.tested, *part.described):
        differences = top1[name] - top1[part.baseline]
        level = 0.05 / hypotheses if name in part.tested else 0.05
        ratio = run_time(times, part, name) / run_time(times, part, part.baseline)
        rows.append(
            {
                "part": part.name,
                "against": part.baseline,
                "name": name,
                **compared(differences, level),
                "time_ratio": round(ratio, 2),
                "run_ratio": round(seconds[name] / seconds[part.baseline], 2),
            }
        )
    table = pd.DataFrame(rows)
    table["p"] = table["p"].where(table["name"].isin(part.tested))
    tested = table["p"].notna()
    corrected = holm(table["p"][tested], hypotheses)
    p_values = pd.Series(corrected, table.index[tested])
    table.insert(table.columns.get_loc("p") + 1, "p_holm", p_values)
    return table


def draw(found: Mapping[Part, pd.DataFrame]) -> Figure:
    """Draw differences with 95% intervals, one panel per part; tested ones are blue."""
    heights = [len(effects) + 1 for effects in found.values()]
    rows = sum(heights) - len(found)
    figure = Figure(figsize=(6.75, 0.65 * len(found) + 0.2 * rows), layout="constrained")
    panels = figure.subplots(len(found), 1, sharex=True, squeeze=False, height_ratios=heights)
    for panel, (part, effects) in zip(panels[:, 0], found.items(), strict=True):
        names = [f"{row.name} ({row.time_ratio:.2f})" for row in effects.itertuples(index=False)]
        draw_differences(panel, effects, names, effects["p"].notna())
        seeds = "1 seed" if len(part.seeds) == 1 else f"{len(part.seeds)} seeds"
        title = f"{part.title}\nminus {part.baseline}, {seeds}"
        panel.set_title(title, fontsize=8, loc="left")
    panels[-1, 0].set_xlabel(
        "difference, points of top-1, 95% interval\n(in brackets: time of a run)"
    )
    return figure


def verdict_table(found: Mapping[Part, pd.DataFrame]) -> list[str]:
    """Return the table's lines, one row per mechanism: per network the difference (95% interval), bold if significant,
    and the time ratios."""
    titles: dict[str, str] = {}  # network -> title of its first part
    cells: dict[str, dict[str, list[str]]] = {}  # row -> network -> cells
    for part, effects in found.items():
        titles.setdefault(part.network, f"{part.title}, {len(part.seeds)} seeds")
        for row in effects.itertuples(index=False):
            mark = "**" if row.p_holm < 0.05 else ""
            text = f"{mark}{row.difference:+.2f}{mark} ({row.low:.2f} to {row.high:.2f})"
            times = f"{row.run_ratio:.2f}, {row.time_ratio:.2f}"
            name = ROWS.get(part.name, "{}").format(row.name)
            cells.setdefault(name, {})[part.network] = [text.replace("-", "\N{MINUS SIGN}"), times]
    heads = [""]
    for title in titles.values():
        heads += [title, "time: runs, step"]
    lines = []
    for name, by_network in cells.items():
        line = [name]
        for network in titles:
            line += by_network.get(network, ["", ""])
        lines.append(line)
    return markdown(heads, lines)


def sequences_table(folder: Path) -> list[str]:
    """Return the lines of the table of recall (%) and characters (bits): mean (lowest to highest) of five seeds.

    Raises:
        UsageError: a run that README.md plans is missing.
    """
    results: dict[str, pd.Series] = {}
    for task in MECHANISMS:
        path = folder / f"{task}.csv"
        if not path.exists():
            raise UsageError(f"{task}.csv is required in {folder}")
        results[task] = pd.read_csv(path).set_index("variant")["result"]
    rows = []
    for kind in ("none", *MECHANISMS["recall"]):
        with_conv = "token_conv" if kind == "none" else f"{kind}+token_conv"
        cells = []
        for task, variant in product(("recall", "characters"), (kind, with_conv)):
            values = results[task][results[task].index == variant]
            if len(values) != 5 and kind in ("none", *MECHANISMS[task]):
                raise UsageError(
                    f"five runs of {variant} are required in {task}.csv, got {len(values)}"
                )
            cells.append(_mean_and_range(values, digits=1 if task == "recall" else 3))
        rows.append([kind, *cells])
    with_token_conv = "with `token_conv`"
    heads = ["", "recall, %", with_token_conv, "next character, bits", with_token_conv]
    return markdown(heads, rows)


def _mean_and_range(values: pd.Series, digits: int) -> str:
    """Return "mean (lowest to highest)", the mean alone where all are equal, "" for no values."""
    if values.empty:
        return ""
    average = f"{values.mean():.{digits}f}"
    least = f"{values.min():.{digits}f}"
    most = f"{values.max():.{digits}f}"
    return average if least == most else f"{average} ({least} to {most})"


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("sweeps", type=Path, help="folder of the sweeps, or of the files of runs")
    parser.add_argument(
        "-o", "--output", type=Path, default=RESULTS, help="where the files are written"
    )
    args = parser.parse_args(argv)
    args.output.mkdir(parents=True, exist_ok=True)
    tables: dict[Part, pd.DataFrame] = {}
    # (part, variant) with a significant gain; the parts in AFTER are tested only after such a gain
    confirmed: set[tuple[str, str]] = set()
    for part in RUNS.values():
        try:
            runs = read_part(part, args.sweeps)
        except UsageError as error:
            print(f"left out: {part.name}: {error}")
            continue
        if part.name in AFTER:
            before = {(AFTER[part.name], name) for name in part.tested}
            if not before & confirmed:
                part = replace(part, tested=(), described=part.tested)
        write_runs(runs[runs["variant"].isin(part.own)], args.output / f"{part.name}.csv")
        if not (part.tested or part.described):  # its runs belong to another part's comparison
            continue
        effects = effects_of(part, runs, step_times(part.times))
        tables[part] = effects
        gains = effects["difference"].gt(0) & effects["p_holm"].lt(0.05)
        confirmed |= {(part.name, name) for name in effects["name"][gains]}
        print(part.title, f"minus {part.baseline}", "", *effects_table(effects), "", sep="\n")
    if not tables:
        raise UsageError(f"no part of the verdict is complete in {args.sweeps}")
    pd.concat(tables.values()).to_csv(args.output / "verdict.csv", index=False)
    draw(tables).savefig(args.output / "verdict.png", dpi=200)
    # the pages give these parts in words, not in the table
    in_words = {"vit-alone", "vit-dear", *SECOND, *THIRD, *FOURTH} - {"second-updates"}
    main_parts = {part: effects for part, effects in tables.items() if part.name not in in_words}
    print(*verdict_table(main_parts), "", sep="\n")
    try:
        print(*sequences_table(args.sweeps), sep="\n")
    except UsageError as error:
        print(f"left out: {error}")
    return 0


if __name__ == "__main__":
    sys.exit(exit_code(main))
