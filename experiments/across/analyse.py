"""The analysis that README.md of this folder fixed before the runs: what a mechanism adds, by part of the verdict.

    python experiments/across/analyse.py sweeps/across

The folder holds the sweeps of README.md; a part may also be the file of runs that an earlier call kept (vit-rival.csv).
A part whose runs are not complete is left out, with the reason. Written into experiments/results/across: a file of runs
for each part, verdict.csv (a row a comparison) and verdict.png (differences with 95% intervals).
"""
import argparse
import csv
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from matplotlib.figure import Figure

from ea_vision.base.errors import UsageError, exit_code
from ea_vision.base.figures import PAGE, figure_bytes
from ea_vision.base.files import atomic_write, create, csv_text
from ea_vision.base.print import new_figure, points, print_style, small_ticks
from ea_vision.studies.evidence import by_variant, holm, paired_difference, read_runs, runs_text

RESULTS = Path(__file__).resolve().parents[1] / "results" / "across"
Top1 = Mapping[str, Mapping[int, float]]  # percent by variant and seed


@dataclass(frozen=True)
class Part:
    """A sweep of the verdict: its variants over its seeds, each compared with the baseline.

    tested: the variants that are hypotheses, corrected together (Holm); the others are described.
    network: of verdict-times.csv, for the cost of a training step.
    """

    name: str
    title: str
    baseline: str
    tested: tuple[str, ...]
    described: tuple[str, ...]
    seeds: range
    network: str

    @property
    def variants(self) -> tuple[str, ...]:
        return (self.baseline, *self.tested, *self.described)


VIT, RIVAL, NARROW = "small ViT", "small ViT, token_conv", "narrow Conv-Transformer"
PARTS = (
    Part("vit-rival", "small ViT with token_conv, CIFAR-10", "token_conv",
         ("residual", "ea", "talking_heads", "reattention", "conv2d"), (), range(100, 108), RIVAL),
    Part("equal-time", "the same, token_conv alone as long as conv2d takes", "token_conv longer", ("conv2d",), (),
         range(100, 108), RIVAL),
    Part("vit-dear", "the same, the dear ones", "token_conv", (), ("refiner", "mta"), range(100, 102), RIVAL),
    Part("vit-alone", "small ViT, CIFAR-10", "plain", (), ("residual", "conv2d", "uniform"), range(100, 105), VIT),
    Part("cifar100", "narrow Conv-Transformer, CIFAR-100", "none", ("residual", "ea", "talking_heads", "conv2d"),
         ("uniform",), range(100, 106), NARROW),
)


def read_part(part: Part, folder: Path) -> tuple[Top1, str]:
    """Return top-1 of a part's runs, and the text of the part's file.

    Runs of equal time and of what is too dear for the test are compared with runs of vit-rival.

    Raises:
        UsageError: runs that are missing, damaged, not complete or not tested.
    """
    names = [part.name] if part.name in ("vit-rival", "vit-alone", "cifar100") else [part.name, "vit-rival"]
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
    shared = PARTS[0].variants if len(names) > 1 else ()  # their runs stand in vit-rival's file
    return by_variant(runs), runs_text([run for run in runs if run.variant not in shared], split)


def costs(path: Path) -> dict[tuple[str, str], float]:
    """Return processor time of a training step in ms, by network and kind."""
    rows = csv.DictReader(path.read_text(encoding="utf-8").splitlines())
    return {(row["network"], row["kind"]): float(row["train_ms"]) for row in rows}


def rows_of(part: Part, top1: Top1, times: Mapping[tuple[str, str], float]) -> list[dict]:
    """Return a row for each comparison of a part; p of those that are tested, corrected."""
    figures = {name: paired_difference(*([top1[side][seed] for seed in part.seeds] for side in (name, part.baseline)))
               for name in (*part.tested, *part.described)}
    corrected = dict(zip(part.tested, holm([figures[name][3] for name in part.tested]), strict=True))
    rows = []
    for name, (difference, low, high, p) in figures.items():
        means = [sum(top1[side].values()) / len(part.seeds) for side in (name, part.baseline)]
        ratio = times[part.network, name] / times[part.network, "plain"]
        rows.append({"part": part.name, "variant": name, "against": part.baseline, "seeds": len(part.seeds),
                     "top1": means[0], "top1_against": means[1], "difference": difference, "low": low, "high": high,
                     "p": p if name in part.tested else None, "p_holm": corrected.get(name),
                     "time_ratio": round(ratio, 2) if part.name != "equal-time" else 1.0})
    return rows


def conv2d_gains(rows: Sequence[Mapping]) -> bool:
    """Return whether question 1 finds a gain of conv2d, without which its gain at equal time is not tested."""
    return any(row["part"] == "vit-rival" and row["variant"] == "conv2d" and row["difference"] > 0
               and row["p_holm"] is not None and row["p_holm"] < 0.05 for row in rows)


def draw(rows: Sequence[Mapping], parts: Sequence[Part]) -> Figure:
    """Draw differences with 95% intervals, a panel a part; what is tested is blue."""
    with print_style():
        counts = [sum(row["part"] == part.name for row in rows) for part in parts]
        figure = new_figure(PAGE, 0.5 * len(parts) + 0.2 * sum(counts), layout="constrained")
        panels = figure.subplots(len(parts), 1, sharex=True, squeeze=False, height_ratios=[c + 1 for c in counts])
        for panel, part in zip(panels[:, 0], parts, strict=True):
            own = [row for row in rows if row["part"] == part.name]
            for place, row in enumerate(reversed(own)):
                colour = "tab:blue" if row["p_holm"] is not None else "0.45"
                if row["low"] is not None:
                    panel.plot([row["low"], row["high"]], [place, place], color=colour)
                panel.plot(row["difference"], place, marker="o", markersize=4, color=colour)
            small_ticks(panel)
            panel.axvline(0, color="0.2", linewidth=0.8)
            panel.set_yticks(range(len(own)), [f"{row['variant']} ({row['time_ratio']:.2f})" for row in reversed(own)])
            panel.set_ylim(-0.7, len(own) - 0.3)
            panel.set_title(f"{part.title}: minus {part.baseline}, {len(part.seeds)} seeds", fontsize=points("medium"),
                            loc="left")
            panel.grid(axis="x", alpha=0.3)
        panels[-1, 0].set_xlabel("difference, points of top-1, 95% interval (in brackets: time of a training step)")
    return figure


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("sweeps", type=Path, help="folder of the sweeps, or of the files of runs")
    parser.add_argument("-o", "--output", type=Path, default=RESULTS, help="where the files are written")
    args = parser.parse_args(argv)
    times = costs(RESULTS / "verdict-times.csv")
    create(args.output)
    rows, complete = [], []
    for part in PARTS:
        try:
            top1, text = read_part(part, args.sweeps)
        except UsageError as error:
            print(f"left out: {part.name}: {error}")
            continue
        if part.name == "equal-time" and not conv2d_gains(rows):
            part = replace(part, tested=(), described=part.tested)
        complete.append(part)
        rows += rows_of(part, top1, times)
        atomic_write(args.output / f"{part.name}.csv", text.encode())
    if not rows:
        raise UsageError(f"no part of the verdict is complete in {args.sweeps}")
    atomic_write(args.output / "verdict.csv", csv_text(rows).encode())
    atomic_write(args.output / "verdict.png", figure_bytes(draw(rows, complete)))
    for row in rows:
        print(*(f"{value:.2f}" if isinstance(value, float) else value for value in row.values()))
    return 0


if __name__ == "__main__":
    sys.exit(exit_code(main))
