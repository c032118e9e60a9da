"""The analysis that README.md of this folder fixed before the runs: what a mechanism adds, by part of the verdict.

    python -m experiments.across.analyse sweeps/across                               # from the root of a checkout

The folder holds the sweeps of README.md; a part may also be the file of runs that an earlier call kept (vit-rival.csv).
A part whose runs are not complete is left out, with the reason. Written into experiments/results/across: a file of runs
for each part, verdict.csv (a row a comparison, with the gain that its seeds find at 80% power) and verdict.png
(differences with 95% intervals). Printed are, last, the tables of docs/across-layers.md, that of the two tasks without
images from recall.csv and characters.csv of the folder.
"""
import argparse
import csv
import sys
from collections.abc import Mapping
from dataclasses import asdict, replace
from pathlib import Path
from statistics import mean, stdev

from matplotlib.figure import Figure

from ea_vision.base.errors import UsageError, exit_code
from ea_vision.base.figures import PAGE, figure_bytes
from ea_vision.base.files import atomic_write, create, csv_text
from ea_vision.base.print import new_figure, points, print_style, small_ticks
from ea_vision.studies.evidence import (
    Effect,
    by_variant,
    corrected,
    draw_differences,
    effects_table,
    paired_difference,
    read_runs,
    runs_text,
    smallest_shown,
)
from experiments.across.plan import EPOCHS, PARTS, RESULTS, Part, step_times
from experiments.across.sequences import MECHANISMS

Top1 = Mapping[str, Mapping[int, float]]  # percent by variant and seed
ROWS = {"equal-time": "{}, equal time", "equal-operations": "{}, equal operations", "vit-dear": "{}, two seeds"}


def read_part(part: Part, folder: Path) -> tuple[Top1, str]:
    """Return top-1 of a part's runs, and the text of the part's file.

    Raises:
        UsageError: runs that are missing, damaged, not complete or not tested.
    """
    names = [part.name, part.beside] if part.beside else [part.name]
    sources = [path for name in names for path in (folder / name, folder / f"{name}.csv") if path.exists()]
    if len(sources) < len(names):
        raise UsageError(f"runs of {' and '.join(names)} are required in {folder}")
    split, runs = read_runs(sources, part.variants)
    if split != "test":
        raise UsageError(f"runs that were tested are required, got top-1 on {split} images")
    runs = [run for run in runs if run.seed in part.seeds]
    lacking = {(v, seed) for v in part.variants for seed in part.seeds} - {(run.variant, run.seed) for run in runs}
    if lacking:
        raise UsageError(f"{len(lacking)} runs are missing, the first is {min(lacking)[0]}, seed {min(lacking)[1]}")
    return by_variant(runs), runs_text([run for run in runs if run.variant in part.own], split)


def effects_of(part: Part, top1: Top1) -> list[Effect]:
    """Return each variant minus the baseline; p of those that are tested, corrected."""
    effects = []
    for name in (*part.tested, *part.described):
        *interval, p = paired_difference(*([top1[side][seed] for seed in part.seeds] for side in (name, part.baseline)))
        effects.append(Effect(name, len(part.seeds), *interval, p if name in part.tested else None, None))
    return corrected(effects, len(part.tested))


def smallest_found(part: Part, top1: Top1, name: str) -> float:
    """Return the gain, in points, that the seeds find at 80% power; of a hypothesis at Holm's first level."""
    differences = [top1[name][seed] - top1[part.baseline][seed] for seed in part.seeds]
    level = 0.05 / len(part.tested) if name in part.tested else 0.05
    return round(smallest_shown(stdev(differences), len(differences), level=level), 2)


def time_ratio(part: Part, variant: str, times: Mapping[tuple[str, str], float]) -> float:
    """Return processor time of a run over that of the baseline's, from their training steps."""
    longer = EPOCHS.get(part.baseline, 8) / 8
    return round(times[part.network, variant] / times[part.network, "plain"] / longer, 2)


def draw(found: Mapping[Part, list[Effect]], ratios: Mapping[tuple[str, str], float]) -> Figure:
    """Draw differences with 95% intervals, a panel a part; what is tested is blue."""
    with print_style():
        rows = sum(len(effects) for effects in found.values())
        figure = new_figure(PAGE, 0.5 * len(found) + 0.2 * rows, layout="constrained")
        panels = figure.subplots(len(found), 1, sharex=True, squeeze=False,
                                 height_ratios=[len(effects) + 1 for effects in found.values()])
        for panel, (part, effects) in zip(panels[:, 0], found.items(), strict=True):
            small_ticks(panel)
            draw_differences(panel, effects, [f"{e.name} ({ratios[part.name, e.name]:.2f})" for e in effects])
            panel.set_title(f"{part.title}: minus {part.baseline}, {len(part.seeds)} seeds", fontsize=points("medium"),
                            loc="left")
        panels[-1, 0].set_xlabel("difference, points of top-1, 95% interval (in brackets: time of a run)")
    return figure


def verdict_table(found: Mapping[Part, list[Effect]], ratios: Mapping[tuple[str, str], float]) -> list[str]:
    """Return the lines of mechanisms by networks: difference (95% interval), bold if it is significant; time."""
    heads = {part.network: f"{part.title}, {len(part.seeds)} seeds" for part in reversed(found)}
    cells: dict[str, dict[str, str]] = {}
    for part, effects in found.items():
        for effect in effects:
            mark = "**" if effect.p_holm is not None and effect.p_holm < 0.05 else ""
            cells.setdefault(ROWS.get(part.name, "{}").format(effect.name), {})[part.network] = (
                f"{mark}{effect.difference:+.2f}{mark} ({effect.low:.2f} to {effect.high:.2f}) | "
                f"{ratios[part.name, effect.name]:.2f}").replace("-", "\N{MINUS SIGN}")
    networks = list(dict.fromkeys(part.network for part in found))
    return [f"| | {' | '.join(f'{heads[network]} | time' for network in networks)} |",
            "| --- |" + " --- | --- |" * len(networks),
            *(f"| {name} | {' | '.join(row.get(network, ' | ') for network in networks)} |"
              for name, row in cells.items())]


def sequences_table(folder: Path) -> list[str]:
    """Return the lines of the table of recall (%) and characters (bits): mean (lowest to highest) of five seeds.

    Raises:
        UsageError: a run that README.md plans is missing.
    """
    results: dict[tuple[str, str], list[float]] = {}
    for task in MECHANISMS:
        if not (folder / f"{task}.csv").exists():
            raise UsageError(f"{task}.csv is required in {folder}")
        for row in csv.DictReader((folder / f"{task}.csv").read_text(encoding="utf-8").splitlines()):
            results.setdefault((task, row["variant"]), []).append(float(row["result"]))
    lines = ["| | recall, % | with `token_conv` | next character, bits | with `token_conv` |", "| --- |" + " --- |" * 4]
    for kind in ("none", *MECHANISMS["recall"]):
        cells = []
        for task, digits in (("recall", 1), ("characters", 3)):
            for name in (kind, "token_conv" if kind == "none" else f"{kind}+token_conv"):
                values = results.get((task, name), [])
                if len(values) != 5 and kind in ("none", *MECHANISMS[task]):
                    raise UsageError(f"five runs of {name} are required in {task}.csv, got {len(values)}")
                least, average, most = (f"{of(values):.{digits}f}" if values else "" for of in (min, mean, max))
                cells.append(average if least == most else f"{average} ({least} to {most})")
        lines.append(f"| {kind} | {' | '.join(cells)} |")
    return lines


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("sweeps", type=Path, help="folder of the sweeps, or of the files of runs")
    parser.add_argument("-o", "--output", type=Path, default=RESULTS, help="where the files are written")
    args = parser.parse_args(argv)
    create(args.output)
    found: dict[Part, list[Effect]] = {}
    rows, times = [], step_times()
    conv2d_gains = False  # at equal updates: question 2 is asked only then
    for part in PARTS.values():
        try:
            top1, text = read_part(part, args.sweeps)
        except UsageError as error:
            print(f"left out: {part.name}: {error}")
            continue
        if part.name == "equal-time" and not conv2d_gains:
            part = replace(part, tested=(), described=part.tested)
        found[part] = effects_of(part, top1)
        rows += [{"part": part.name, "against": part.baseline, **asdict(effect),
                  "found_at_80_percent": smallest_found(part, top1, effect.name),
                  "time_ratio": time_ratio(part, effect.name, times)} for effect in found[part]]
        if part.name == "vit-rival":
            [conv2d] = [effect for effect in found[part] if effect.name == "conv2d"]
            conv2d_gains = conv2d.difference > 0 and conv2d.p_holm is not None and conv2d.p_holm < 0.05
        atomic_write(args.output / f"{part.name}.csv", text.encode())
        print(part.title, f"minus {part.baseline}", "", *effects_table(found[part]), "", sep="\n")
    if not found:
        raise UsageError(f"no part of the verdict is complete in {args.sweeps}")
    atomic_write(args.output / "verdict.csv", csv_text(rows).encode())
    ratios = {(row["part"], row["name"]): row["time_ratio"] for row in rows}
    atomic_write(args.output / "verdict.png", figure_bytes(draw(found, ratios)))
    print(*verdict_table(found, ratios), "", sep="\n")
    try:
        print(*sequences_table(args.sweeps), sep="\n")
    except UsageError as error:
        print(f"left out: {error}")
    return 0


if __name__ == "__main__":
    sys.exit(exit_code(main))
