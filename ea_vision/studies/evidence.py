"""Whether one variant of a sweep is better than another: paired differences over seeds, with intervals and a picture.

    ea-vision sweep --test --seeds 0,1,2,3,4 --output sweeps/evidence \\
        --variant 'none=--model conv_transformer_cifar' --variant 'EA=--model ea_conv_transformer_cifar' \\
        -- --dataset cifar10 --data-dir DIR --eval-epochs 10
    ea-vision evidence sweeps/evidence --question EA,none

The figures are read from the runs' own results.json: top-1 of the last epoch's weights, on the test images where the
runs were tested. `--question A,B` is asked before the runs: is A better than B? Its p value stands as it is; those of
all other pairs are corrected for their number (Holm, 1979). Differences are taken seed by seed; intervals (95%) and p
values, two-sided, are those of Student's paired t test, and say nothing about other data, widths or recipes.
Written into the folder: evidence-runs.csv (a row a run), evidence.csv (a row a pair), evidence.md (both tables) and
evidence.png. evidence-runs.csv can be given instead of the folder; several folders and files are read as one sweep.
"""
from __future__ import annotations

import argparse
import csv
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from itertools import combinations
from pathlib import Path
from statistics import mean, stdev

from matplotlib.figure import Figure
from scipy import stats

from ea_vision.base.errors import UsageError, near_matches
from ea_vision.base.figures import figure_bytes
from ea_vision.base.files import atomic_write, create, csv_text
from ea_vision.engine.run_folder import read_metrics, read_results
from ea_vision.studies.sweep import VARIANT, read_run_name

TOP1 = "_top1"  # ends the name of the column of top-1, after what the runs were evaluated on


@dataclass(frozen=True)
class Run:
    """A finished run of a sweep over variants."""

    variant: str
    seed: str
    top1: float  # in percent, of the last epoch's weights
    train_loss: float  # of the last epoch
    seconds: int  # of all epochs


@dataclass(frozen=True)
class Pair:
    """The difference of two variants, in points of top-1: the first minus the second, seed by seed."""

    first: str
    second: str
    seeds: int
    difference: float
    low: float  # of the 95% interval
    high: float
    p: float  # two-sided
    p_holm: float | None  # corrected for the number of pairs; None: the question, which is not


def last_top1(results: dict) -> tuple[str, float]:
    """What a run was evaluated on ("test" where it was tested) and top-1, in percent, of its last weights."""
    split = "test" if "test_last" in results else results["eval_split"]
    return split, results[f"{split}_last"]["top1"]


def runs_of_folder(folder: Path, wanted: Callable[[str], bool]) -> list[tuple[str, Run]]:
    """The runs of a sweep's folder, each with what it was evaluated on.

    wanted: asked for every variant in the folder, whether its runs are read.

    Raises:
        UsageError: no run of a variant, one that is wanted and not complete, or settings beside the variant.
    """
    found, names = [], set()
    for path in sorted(folder.iterdir()):
        settings = read_run_name(path.name)
        if not path.is_dir() or VARIANT not in settings:
            continue
        if len(settings) > 2:
            raise UsageError(f"runs that differ in their variant and seed alone are required, got {path.name}")
        names.add(settings[VARIANT])
        if not wanted(settings[VARIANT]):
            continue
        results = read_results(path)
        if results is None:
            raise UsageError(f"{path} is not complete: the sweep's own command continues it")
        split, top1 = last_top1(results)
        metrics = read_metrics(path)
        found.append((split, Run(settings[VARIANT], settings["seed"], top1, metrics["train_loss"][-1],
                                 round(sum(metrics["seconds"])))))
    if not names:
        raise UsageError(f"runs of `ea-vision sweep --variant ...` are required in {folder}, and there are none")
    return found


def runs_of_file(path: Path, wanted: Callable[[str], bool]) -> list[tuple[str, Run]]:
    """The same from a file that `runs_text` wrote.

    Raises:
        UsageError: the file cannot be read or is not such a file.
    """
    try:
        rows = list(csv.DictReader(path.read_text().splitlines()))
        split = next(key for key in rows[0] if key and key.endswith(TOP1)).removesuffix(TOP1)
        found = [(split, Run(row["variant"], row["seed"], float(row[split + TOP1]), float(row["train_loss"]),
                             int(row["seconds"]))) for row in rows]
        if not all(0 <= run.top1 <= 100 for _, run in found):
            raise ValueError("not in percent")
    except OSError as error:
        raise UsageError(f"cannot read {path}: {error.strerror}") from error
    except (KeyError, IndexError, StopIteration, TypeError, ValueError, csv.Error) as error:
        raise UsageError(f"{path} is not a file of runs: it must have the columns variant, seed, test{TOP1} (or "
                         f"held_out{TOP1}), train_loss and seconds, with a number in the last three") from error
    return [(split, run) for split, run in found if wanted(run.variant)]


def read_runs(sources: Sequence[Path], variants: Sequence[str] | None = None) -> tuple[str, list[Run]]:
    """What the runs of sweeps over variants were evaluated on, and the runs by variant and seed.

    Args:
        sources: the sweeps' folders, or files that `runs_text` wrote.
        variants: those to read, in their order; None: all, by name.

    Raises:
        UsageError: a source without runs or that cannot be read, a run that is there twice, a variant that is not
            there, or runs evaluated on different images.
    """
    known: set[str] = set()

    def wanted(name: str) -> bool:
        known.add(name)
        return variants is None or name in variants

    places: dict[tuple[str, str], Path] = {}
    splits: dict[str, str] = {}
    runs: list[Run] = []
    for source in sources:
        if not source.exists():
            raise UsageError(f"no such file or folder: {source}")
        for split, run in (runs_of_file if source.is_file() else runs_of_folder)(source, wanted):
            here = (run.variant, run.seed)
            if here in places:
                raise UsageError(f"one run of each variant and seed is required, got two of {run.variant}, seed "
                                 f"{run.seed}: in {places[here]} and in {source}")
            places[here] = source
            splits[split] = f"{run.variant}, seed {run.seed}, in {source}"
            runs.append(run)
    for name in variants or []:
        if name not in known:
            raise UsageError(f"--variants: no variant {name!r}; {near_matches(name, known, 'variants')}")
    if len(splits) > 1:
        raise UsageError("all runs must be evaluated on the same kind of images, got "
                         + ", ".join(f"{split} ({where})" for split, where in splits.items()))
    order = list(variants or sorted(known))
    return next(iter(splits)), sorted(runs, key=lambda run: (order.index(run.variant), run.seed))


def by_variant(runs: Sequence[Run]) -> dict[str, dict[str, float]]:
    """Top-1 in percent by variant and seed.

    Raises:
        UsageError: a seed that one variant has and another lacks.
    """
    found: dict[str, dict[str, float]] = {}
    for run in runs:
        found.setdefault(run.variant, {})[run.seed] = run.top1
    seeds = {name: sorted(top1) for name, top1 in found.items()}
    first = next(iter(seeds))
    for name, of_variant in seeds.items():
        if of_variant != seeds[first]:
            raise UsageError(f"the variants must have the same seeds: {first} has {', '.join(seeds[first])}; "
                             f"{name} has {', '.join(of_variant)}; --variants takes those that have")
    return found


def runs_text(runs: Sequence[Run], split: str) -> str:
    """The runs as comma-separated values, which `read_runs` takes instead of the sweep's folder."""
    return csv_text([{"variant": run.variant, "seed": run.seed, split + TOP1: run.top1, "train_loss": run.train_loss,
                      "seconds": run.seconds} for run in runs])


def paired_difference(first: Sequence[float], second: Sequence[float]) -> tuple[float, float, float, float]:
    """Mean of first - second, its 95% interval (low, high) and the two-sided p of Student's paired t test.

    Args:
        first, second: figures in the same order of seeds, at least two.
    """
    differences = {a - b for a, b in zip(first, second, strict=True)}
    centre = mean(first) - mean(second)
    if len(differences) == 1:  # no spread, so no test: the t statistic is 0 / 0 or infinite
        return centre, centre, centre, 0.0 if differences.pop() else 1.0
    test = stats.ttest_rel(first, second)
    interval = test.confidence_interval(0.95)
    return centre, float(interval.low), float(interval.high), float(test.pvalue)


def holm(p_values: Sequence[float]) -> list[float]:
    """p values corrected for their number, in the order given (Holm, A simple sequentially rejective multiple test
    procedure, 1979)."""
    order = sorted(range(len(p_values)), key=lambda index: p_values[index])
    corrected, largest = [0.0] * len(p_values), 0.0
    for rank, index in enumerate(order):
        largest = max(largest, min(1.0, (len(p_values) - rank) * p_values[index]))
        corrected[index] = largest
    return corrected


def compare(runs: dict[str, dict[str, float]], question: tuple[str, str]) -> list[Pair]:
    """The question first, then all other pairs of variants.

    Args:
        runs: top-1 in percent by variant and seed, the same seeds for each.
        question: the two variants that the runs were made for.

    Raises:
        UsageError: a variant that was not run, twice the same, or fewer than two seeds.
    """
    for name in question:
        if name not in runs:
            raise UsageError(f"--question: no variant {name!r}; {near_matches(name, list(runs), 'variants')}")
    if question[0] == question[1]:
        raise UsageError(f"--question takes two variants, got {question[0]} twice")
    seeds = sorted(runs[question[0]])
    if len(seeds) < 2:
        raise UsageError(f"a paired test needs at least 2 seeds, got {len(seeds)}")
    others = [pair for pair in combinations(runs, 2) if set(pair) != set(question)]
    figures = {pair: paired_difference(*([runs[name][seed] for seed in seeds] for name in pair))
               for pair in [question, *others]}
    corrected = dict(zip(others, holm([figures[pair][3] for pair in others]), strict=True))
    return [Pair(*pair, len(seeds), *figures[pair], corrected.get(pair)) for pair in [question, *others]]


def to_markdown(runs: dict[str, dict[str, float]], pairs: Sequence[Pair], split: str) -> str:
    """Both tables: the variants with mean and standard deviation over seeds, and the pairs."""
    lines = [f"| variant | top-1 % on {split.replace('_', '-')} images, by seed | mean | standard deviation |",
             "| --- | --- | --- | --- |"]
    for name, by_seed in runs.items():
        values = [by_seed[seed] for seed in sorted(by_seed)]
        lines.append(f"| {name} | {', '.join(f'{value:.2f}' for value in values)} | {mean(values):.2f} | "
                     f"{stdev(values):.2f} |")
    lines += ["", "| pair | difference, points | 95% interval | p | p, corrected |", "| --- | --- | --- | --- | --- |"]
    for pair in pairs:
        p, corrected = ("" if value is None else "< 0.001" if value < 5e-4 else f"{value:.3f}"
                        for value in (pair.p, pair.p_holm))
        lines.append(f"| {pair.first} - {pair.second} | {pair.difference:+.2f} | {pair.low:+.2f} to {pair.high:+.2f} | "
                     f"{p} | {corrected or 'the question'} |")
    return "\n".join(lines) + "\n"


def plot_evidence(runs: dict[str, dict[str, float]], pairs: Sequence[Pair], split: str) -> Figure:
    """Left: every run, a line a seed, and the means; right: differences and 95% intervals, the question on top."""
    figure = Figure(figsize=(11, max(3.5, 1.2 + 0.32 * len(pairs))), layout="constrained")
    left, right = figure.subplots(1, 2)
    names = list(runs)
    seeds = sorted(runs[names[0]])
    for seed in seeds:
        left.plot(range(len(names)), [runs[name][seed] for name in names], color="0.7", marker="o", markersize=3,
                  linewidth=0.8)
    left.plot(range(len(names)), [mean(runs[name].values()) for name in names], linestyle="none", marker="_",
              markersize=22, markeredgewidth=2, color="tab:blue", label=f"mean of {len(seeds)} seeds")
    left.set_xticks(range(len(names)), names, rotation=30, ha="right")
    left.set_xlim(-0.5, len(names) - 0.5)
    left.set(ylabel=f"top-1 on {split.replace('_', '-')} images (%)")
    left.legend()
    places = range(len(pairs) - 1, -1, -1)
    for place, pair in zip(places, pairs, strict=True):
        colour = "tab:blue" if pair.p_holm is None else "0.45"
        right.plot([pair.low, pair.high], [place, place], color=colour, linewidth=2 if pair.p_holm is None else 1)
        right.plot(pair.difference, place, marker="o", color=colour)
    right.axvline(0, color="0.2", linewidth=0.8)
    right.set_yticks(places, [f"{pair.first} \N{MINUS SIGN} {pair.second}" for pair in pairs])
    right.set(xlabel="difference, points of top-1, 95% interval")
    right.grid(axis="x", alpha=0.3)
    return figure


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("runs", type=Path, nargs="+", help="sweeps' folders, or files evidence-runs.csv")
    parser.add_argument("--question", required=True, metavar="A,B", help="is variant A better than variant B?")
    parser.add_argument("--variants", metavar="A,B,...",
                        help="compare these alone, in this order (default: all, by name)")
    parser.add_argument("-o", "--output", type=Path, metavar="FOLDER",
                        help="where the files are written (default: the first sweep's folder, or that of its file)")
    args = parser.parse_args(argv)
    question = args.question.split(",")
    if len(question) != 2:
        raise UsageError(f"--question takes two variants as A,B, got {args.question!r}")
    split, runs = read_runs(args.runs, args.variants.split(",") if args.variants else None)
    top1 = by_variant(runs)
    pairs = compare(top1, (question[0], question[1]))
    folder = args.output or (args.runs[0].parent if args.runs[0].is_file() else args.runs[0])
    create(folder)
    text = to_markdown(top1, pairs, split)
    files = {folder / "evidence-runs.csv": runs_text(runs, split).encode(),
             folder / "evidence.csv": csv_text([asdict(pair) for pair in pairs]).encode(),
             folder / "evidence.md": text.encode(),
             folder / "evidence.png": figure_bytes(plot_evidence(top1, pairs, split))}
    read = {source.resolve() for source in args.runs}
    files = {path: content for path, content in files.items() if path.resolve() not in read}  # may have more variants
    for path, content in files.items():
        atomic_write(path, content)
    print(text, end="")
    print(f"written: {' '.join(map(str, files))}")
    return 0
