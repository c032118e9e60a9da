"""The analysis that README.md of this folder fixed before the runs: what a mechanism adds, by part of the verdict.

    python -m experiments.across.analyse sweeps/across                               # from the root of a checkout

The folder holds the sweeps of README.md; a part may also be the file of runs that an earlier call kept (vit-rival.csv).
A part whose runs are not complete is left out, with the reason. Written into experiments/results/across: a file of runs
for each part, verdict.csv (a row a comparison, with the gain that its seeds find at 80% power) and verdict.png
(differences with 95% intervals). Printed are, last, the tables of docs/across-layers.md and, of the two tasks without
images from recall.csv and characters.csv of the folder, of README.md.
"""

import argparse
import csv
import sys
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from statistics import mean

import pandas as pd
from matplotlib.figure import Figure

from ea_vision.base.errors import UsageError, exit_code
from experiments.across.plan import RESULTS, RUNS, SECOND, THIRD, Part, run_time, step_times
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
    """Return a part's runs, those of the part beside it too.

    Raises:
        UsageError: runs that are missing, damaged, not complete or not tested.
    """
    names = [part.name, *part.beside]
    sources = [
        path for name in names for path in (folder / name, folder / f"{name}.csv") if path.exists()
    ]
    if len(sources) < len(names):
        raise UsageError(f"runs of {' and '.join(names)} are required in {folder}")
    runs = read_runs(*sources, variants=part.variants)
    if set(runs["split"]) != {"test"}:
        raise UsageError(
            f"runs that were tested are required, got top-1 on {runs['split'].iloc[0]} images"
        )
    runs = runs[runs["seed"].isin(part.seeds)]
    lacking = {(variant, seed) for variant in part.variants for seed in part.seeds} - set(
        zip(runs["variant"], runs["seed"], strict=True)
    )
    if lacking:
        raise UsageError(
            f"{len(lacking)} runs are missing, the first is {min(lacking)[0]}, seed {min(lacking)[1]}"
        )
    return runs


def effects_of(
    part: Part, runs: pd.DataFrame, times: Mapping[tuple[str, str], float]
) -> pd.DataFrame:
    """Return each variant minus the baseline, with Holm's p of those that are tested.

    found_at_80_percent: the gain, in points, that the seeds find at 80% power; of a hypothesis at Holm's first level.
    run_ratio: mean time of the runs over that of the baseline's. time_ratio: processor time of a run over the
    baseline's, from the training steps of today's code.
    """
    top1, rows, seconds = by_variant(runs), [], runs.groupby("variant")["seconds"].mean()
    for name in (*part.tested, *part.described):
        differences = top1[name] - top1[part.baseline]
        found = smallest_shown(
            differences.std(),
            len(differences),
            0.05 / len(part.tested) if name in part.tested else 0.05,
        )
        ratio = run_time(times, part, name) / run_time(times, part, part.baseline)
        rows.append(
            {
                "part": part.name,
                "against": part.baseline,
                "name": name,
                **paired(differences),
                "p_holm": None,
                "found_at_80_percent": round(found, 2),
                "time_ratio": round(ratio, 2),
                "run_ratio": round(seconds[name] / seconds[part.baseline], 2),
            }
        )
    table = pd.DataFrame(rows)
    table["p"] = table["p"].where(table["name"].isin(part.tested))
    tested = table["p"].notna()
    table["p_holm"] = pd.Series(holm(table["p"][tested], len(part.tested)), table.index[tested])
    return table


def draw(found: Mapping[Part, pd.DataFrame]) -> Figure:
    """Draw differences with 95% intervals, a panel a part; what is tested is blue."""
    rows = sum(map(len, found.values()))
    figure = Figure(figsize=(6.75, 0.5 * len(found) + 0.2 * rows), layout="constrained")
    panels = figure.subplots(
        len(found),
        1,
        sharex=True,
        squeeze=False,
        height_ratios=[len(effects) + 1 for effects in found.values()],
    )
    for panel, (part, effects) in zip(panels[:, 0], found.items(), strict=True):
        names = [f"{row.name} ({row.time_ratio:.2f})" for row in effects.itertuples(index=False)]
        draw_differences(panel, effects, names, effects["p"].notna())
        panel.set_title(
            f"{part.title}: minus {part.baseline}, {len(part.seeds)} seeds", fontsize=8, loc="left"
        )
    panels[-1, 0].set_xlabel(
        "difference, points of top-1, 95% interval (in brackets: time of a run)"
    )
    return figure


def verdict_table(found: Mapping[Part, pd.DataFrame]) -> list[str]:
    """Return the lines of mechanisms by networks: difference (95% interval), bold if it is significant; times."""
    heads = {part.network: f"{part.title}, {len(part.seeds)} seeds" for part in reversed(found)}
    cells: dict[str, dict[str, list[str]]] = {}
    for part, effects in found.items():
        for row in effects.itertuples(index=False):
            mark = "**" if row.p_holm < 0.05 else ""
            text = f"{mark}{row.difference:+.2f}{mark} ({row.low:.2f} to {row.high:.2f})"
            cells.setdefault(ROWS.get(part.name, "{}").format(row.name), {})[part.network] = [
                text.replace("-", "\N{MINUS SIGN}"),
                f"{row.run_ratio:.2f}, {row.time_ratio:.2f}",
            ]
    networks = list(dict.fromkeys(part.network for part in found))
    return markdown(
        ["", *(head for network in networks for head in (heads[network], "time: runs, step"))],
        [
            [name, *(cell for network in networks for cell in row.get(network, ["", ""]))]
            for name, row in cells.items()
        ],
    )


def sequences_table(folder: Path) -> list[str]:
    """Return the lines of the table of recall (%) and characters (bits): mean (lowest to highest) of five seeds.

    Raises:
        UsageError: a run that README.md plans is missing.
    """
    results: dict[tuple[str, str], list[float]] = {}
    for task in MECHANISMS:
        if not (folder / f"{task}.csv").exists():
            raise UsageError(f"{task}.csv is required in {folder}")
        for row in csv.DictReader(
            (folder / f"{task}.csv").read_text(encoding="utf-8").splitlines()
        ):
            results.setdefault((task, row["variant"]), []).append(float(row["result"]))
    rows = []
    for kind in ("none", *MECHANISMS["recall"]):
        cells = []
        for task, digits in (("recall", 1), ("characters", 3)):
            for name in (kind, "token_conv" if kind == "none" else f"{kind}+token_conv"):
                values = results.get((task, name), [])
                if len(values) != 5 and kind in ("none", *MECHANISMS[task]):
                    raise UsageError(
                        f"five runs of {name} are required in {task}.csv, got {len(values)}"
                    )
                least, average, most = (
                    f"{of(values):.{digits}f}" if values else "" for of in (min, mean, max)
                )
                cells.append(average if least == most else f"{average} ({least} to {most})")
        rows.append([kind, *cells])
    return markdown(
        ["", "recall, %", "with `token_conv`", "next character, bits", "with `token_conv`"], rows
    )


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
    found: dict[Part, pd.DataFrame] = {}
    times = step_times()
    confirmed: set[tuple[str, str]] = (
        set()
    )  # (part, variant): what is asked at equal time only if it gains before
    for part in RUNS.values():
        try:
            runs = read_part(part, args.sweeps)
        except UsageError as error:
            print(f"left out: {part.name}: {error}")
            continue
        if (
            part.name in AFTER
            and not {(AFTER[part.name], name) for name in part.tested} & confirmed
        ):
            part = replace(part, tested=(), described=part.tested)
        effects = found[part] = effects_of(part, runs, times)
        gains = effects["difference"].gt(0) & effects["p_holm"].astype(float).lt(0.05)
        confirmed |= {(part.name, name) for name in effects["name"][gains]}
        write_runs(runs[runs["variant"].isin(part.own)], args.output / f"{part.name}.csv")
        print(part.title, f"minus {part.baseline}", "", *effects_table(effects), "", sep="\n")
    if not found:
        raise UsageError(f"no part of the verdict is complete in {args.sweeps}")
    pd.concat(found.values()).to_csv(args.output / "verdict.csv", index=False)
    draw(found).savefig(args.output / "verdict.png", dpi=200)
    told = {"vit-alone", "vit-dear", *SECOND, *THIRD} - {
        "second-updates"
    }  # in words, not in the table
    main_parts = {part: effects for part, effects in found.items() if part.name not in told}
    print(*verdict_table(main_parts), "", sep="\n")
    try:
        print(*sequences_table(args.sweeps), sep="\n")
    except UsageError as error:
        print(f"left out: {error}")
    return 0


if __name__ == "__main__":
    sys.exit(exit_code(main))
