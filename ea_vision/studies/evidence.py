"""Whether variants of a sweep differ: paired differences over seeds, with intervals and a picture.

    ea-vision sweep --test --seeds 0,1,2,3,4 --output sweeps/evidence \\
        --variant 'none=--model conv_transformer_cifar' --variant 'EA=--model ea_conv_transformer_cifar' \\
        -- --dataset cifar10 --data-dir DIR --eval-epochs 10
    ea-vision evidence sweeps/evidence --question EA,none
    ea-vision evidence sweeps/evidence --factor 'skip=none,EA without skip|EA without convolution,EA' \\
        --factor 'convolution=none,EA without convolution|EA without skip,EA'

The figures are top-1 of the last epoch's weights, read from the runs' files, on the test images where the runs were
tested. Differences are taken seed by seed; intervals (95%) and p values, two-sided, are those of Student's paired t
test, and say nothing about other data, widths or recipes.

`--question A,B` is asked before the runs: is A better than B? Its p value stands as it is; those of all other pairs are
corrected for their number (Holm, 1979). `--factor NAME=WITHOUT,...|WITH,...` names the variants without a factor and
those with it. K factors need all 2^K variants. A main effect is the mean over the others' settings, an interaction the
effect of one factor with the other minus that without it. Holm's correction is over the main effects; interactions are
not tested.

Runs of a variant must have equal options, and all runs the same data (data_fingerprint of config.yaml). In what the
variants differ stands in a column. Written into the folder: evidence-runs.csv (a row a run); of a question evidence.csv
(a row a pair), evidence.md and evidence.png; of factors evidence-factors.csv, .md and .png. evidence-runs.csv can be
given instead of the folder; several folders and files are read as one sweep. Files from before release 0.4 have neither
data nor options: their runs are compared, and the tables say that these are not recorded.
"""
from __future__ import annotations

import argparse
import csv
import json
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from itertools import combinations
from pathlib import Path
from statistics import correlation, mean, stdev

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from scipy import optimize, stats

from ea_vision.base.errors import UsageError, near_matches
from ea_vision.base.figures import PAGE, check_width, figure_bytes, inches
from ea_vision.base.files import atomic_write, create, csv_text
from ea_vision.base.print import new_figure, points, print_style, small_ticks, wrapped
from ea_vision.engine.run_folder import FinishedRun, difference, read_finished
from ea_vision.studies.sweep import VARIANT, check_variant_name, parse_seed, read_run_name

TOP1 = "_top1"  # ends the name of the column of top-1, after what the runs were evaluated on
SPLITS = ("test", "held_out", "train")


@dataclass(frozen=True)
class Run:
    """A finished run of a sweep over variants."""

    variant: str
    seed: int
    top1: float  # in percent, of the last epoch's weights
    train_loss: float  # of the last epoch
    seconds: int  # of all epochs
    images: int | None = None  # that top1 is of; None: not recorded, as in files from before release 0.4
    updates: int | None = None
    data: str = ""  # fingerprint of the data set
    options: str = ""  # the model and the options in which the folder's variants differ


@dataclass(frozen=True)
class Pair:
    """The difference of two variants, in points of top-1: the first minus the second, seed by seed.

    Interval (95%) and p are None where the seeds' differences are all the same, so that there is nothing to judge by.
    """

    first: str
    second: str
    seeds: int
    difference: float
    low: float | None
    high: float | None
    p: float | None  # two-sided
    p_holm: float | None  # corrected for the number of pairs; None: the question, which is not

    @property
    def label(self) -> str:
        return f"{self.first} - {self.second}"


@dataclass(frozen=True)
class Effect:
    """The effect of a factor, or an interaction of two, in points of top-1; None as for `Pair`.

    p_holm: corrected for the number of main effects; None, as p: an interaction, which is not tested.
    """

    name: str
    seeds: int
    difference: float
    low: float | None
    high: float | None
    p: float | None
    p_holm: float | None

    @property
    def label(self) -> str:
        return self.name


def runs_of_folder(folder: Path, wanted: Callable[[str], bool]) -> list[tuple[str, Run]]:
    """Return the runs of a sweep's folder, each with what it was evaluated on.

    wanted: asked for every variant in the folder, whether its runs are read.

    Raises:
        UsageError: no run of a variant, one that is wanted and not complete or damaged, settings beside the variant, or
            options that differ between the runs of a variant.
    """
    runs: dict[str, list[FinishedRun]] = {}
    for path in sorted(folder.iterdir()):
        settings = read_run_name(path.name)
        if not path.is_dir() or VARIANT not in settings:
            continue
        if len(settings) > 2:
            raise UsageError(f"runs that differ in their variant and seed alone are required, got {path.name}")
        check_variant_name(settings[VARIANT])
        of_variant = runs.setdefault(settings[VARIANT], [])
        if not wanted(settings[VARIANT]):
            continue
        run = read_finished(path)
        if run is None:
            raise UsageError(f"{path} is not complete: the sweep's own command continues it")
        if parse_seed(settings["seed"]) != run.seed:
            raise UsageError(f"{path} must be the run of its name's seed, but its config.yaml says seed {run.seed}")
        of_variant.append(run)
    if not runs:
        raise UsageError(f"runs of `ea-vision sweep --variant ...` are required in {folder}, and there are none")
    return [(run.split, replace(about, options=text)) for variant, of_variant in runs.items()
            for run, about, text in zip(of_variant, (run_of(variant, run) for run in of_variant),
                                        _options(of_variant, [run for found in runs.values() for run in found]),
                                        strict=True)]


def run_of(variant: str, run: FinishedRun) -> Run:
    """Return a finished run as a run of the variant, without its options."""
    return Run(variant, run.seed, run.last["top1"], run.metrics["train_loss"][-1], round(run.seconds), run.images,
               run.updates, run.data)


def _options(of_variant: Sequence[FinishedRun], of_all: Sequence[FinishedRun]) -> list[str]:
    """Return by run of a variant its model and the options in which the variants differ.

    Raises:
        UsageError: the runs of the variant differ.
    """
    for run in of_variant[1:]:
        for key, (one, other) in difference(of_variant[0].options, run.options).items():
            raise UsageError(f"the runs of a variant must have equal options: {key} is {one!r:.60} in "
                             f"{of_variant[0].folder} and {other!r:.60} in {run.folder}")
    keys = {key for run in of_all for key in difference(of_all[0].options, run.options)} | {"model"}
    texts = {}
    for run in of_variant:
        texts[run.folder] = " ".join(f"{key}={json.dumps(run.options[key], default=str)}".replace('"', "")
                                     for key in run.options if key in keys)
    return list(texts.values())


def runs_of_file(path: Path, wanted: Callable[[str], bool]) -> list[tuple[str, Run]]:
    """Return the same from a file that `runs_text` wrote.

    Raises:
        UsageError: the file cannot be read or is not such a file.
    """
    try:
        rows = list(csv.DictReader(path.read_text().splitlines()))
        [split] = {key.removesuffix(TOP1) for key in rows[0] if key and key.endswith(TOP1)} & set(SPLITS)
        found = [(split, _run_of_row(row, split)) for row in rows]
    except OSError as error:
        raise UsageError(f"cannot read {path}: {error.strerror}") from error
    except (KeyError, IndexError, TypeError, ValueError, csv.Error) as error:
        raise UsageError(f"{path} is not a file of runs: it must have the columns variant, seed, test{TOP1} (or "
                         f"held_out{TOP1}), train_loss and seconds, with a number in the last three: {error}"
                         ) from error
    return [(split, run) for split, run in found if wanted(run.variant)]


def _run_of_row(row: Mapping[str, str], split: str) -> Run:
    """Raise UsageError, TypeError or ValueError for what no run has."""
    if None in row or None in row.values():
        raise ValueError("a row is too long or too short")
    check_variant_name(row["variant"])
    count = {key: int(row[key]) if row.get(key) else None for key in ("images", "updates")}
    run = Run(row["variant"], parse_seed(row["seed"]), float(row[split + TOP1]), float(row["train_loss"]),
              int(row["seconds"]), **count, data=row.get("data", ""), options=row.get("options", ""))
    if not 0 <= run.top1 <= 100 or not math.isfinite(run.train_loss) or run.seconds < 0:
        raise ValueError("not in percent, or no loss or time of training")
    if any(number is not None and not 0 < number < 1e12 for number in count.values()):
        raise ValueError("images and updates must be positive")
    return run


def read_runs(sources: Sequence[Path], variants: Sequence[str] | None = None) -> tuple[str, list[Run]]:
    """Return what the runs of sweeps over variants were evaluated on, and the runs by variant and seed.

    Args:
        sources: the sweeps' folders, or files that `runs_text` wrote.
        variants: those to read, in their order; None: all, by name.

    Raises:
        UsageError: a source without runs or that cannot be read, a run that is there twice, a variant that is not
            there, or runs of other data or evaluated on different images.
    """
    known: set[str] = set()

    def wanted(name: str) -> bool:
        known.add(name)
        return variants is None or name in variants

    places: dict[tuple[str, int], Path] = {}
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
    _check_comparable(runs)
    order = list(variants or sorted(known))
    return next(iter(splits)), sorted(runs, key=lambda run: (order.index(run.variant), run.seed))


def _check_comparable(runs: Sequence[Run]) -> None:
    """Raise UsageError for runs of other data, of other numbers of images, or of a variant with other updates."""
    for what, of in (("data (data_fingerprint)", lambda run: run.data[:12]),
                     ("number of images", lambda run: run.images)):
        found: dict[str | int, list[str]] = {}
        for run in runs:
            if of(run):
                found.setdefault(of(run), []).append(run.variant)
        if len(found) > 1:
            raise UsageError(f"all runs must have the same {what}, got " + "; ".join(
                f"{value} of {', '.join(dict.fromkeys(names))}" for value, names in found.items()))
    updates: dict[str, tuple[int, int]] = {}
    for run in runs:
        if run.updates is not None:
            seed, first = updates.setdefault(run.variant, (run.seed, run.updates))
            if first != run.updates:
                raise UsageError(f"the runs of a variant must be equally long: {run.variant} has {first} updates with "
                                 f"seed {seed}, {run.updates} with seed {run.seed}")


def by_variant(runs: Sequence[Run]) -> dict[str, dict[int, float]]:
    """Return top-1 in percent by variant and seed.

    Raises:
        UsageError: a seed that one variant has and another lacks.
    """
    found: dict[str, dict[int, float]] = {}
    for run in runs:
        found.setdefault(run.variant, {})[run.seed] = run.top1
    seeds = {name: sorted(top1) for name, top1 in found.items()}
    first = next(iter(seeds))
    for name, of_variant in seeds.items():
        if of_variant != seeds[first]:
            raise UsageError(f"the variants must have the same seeds: {first} has {_listed(seeds[first])}; "
                             f"{name} has {_listed(of_variant)}; --variants takes those that have")
    return found


def _listed(values: Sequence) -> str:
    return ", ".join(map(str, values))


def runs_text(runs: Sequence[Run], split: str) -> str:
    """Return the runs as comma-separated values, which `read_runs` takes instead of the sweep's folder."""
    return csv_text([{"variant": run.variant, "seed": run.seed, split + TOP1: run.top1, "train_loss": run.train_loss,
                      "seconds": run.seconds, "images": run.images, "updates": run.updates, "data": run.data,
                      "options": run.options} for run in runs])


Test = tuple[float, float | None, float | None, float | None]


def mean_test(differences: Sequence[float], resolution: float = 0.0) -> Test:
    """Return the mean of the differences, its 95% interval (low, high) and the two-sided p of Student's t test.

    Args:
        differences: one a seed, at least two.
        resolution: what one image is worth, in points. Differences that spread by less are equal: interval and p None.
    """
    centre = mean(differences)
    if max(differences) - min(differences) <= max(resolution / 2, 1e-9):
        return centre, None, None, None
    test = stats.ttest_1samp(differences, 0.0)
    interval = test.confidence_interval(0.95)
    return centre, float(interval.low), float(interval.high), float(test.pvalue)


def paired_difference(first: Sequence[float], second: Sequence[float], resolution: float = 0.0) -> Test:
    """Return `mean_test` of first - second, figures in the same order of seeds."""
    return mean_test([a - b for a, b in zip(first, second, strict=True)], resolution)


def holm(p_values: Sequence[float | None]) -> list[float | None]:
    """Return p values corrected for their number, in the order given (Holm, A simple sequentially rejective multiple
    test procedure, 1979). None counts as a test that shows nothing."""
    order = sorted(range(len(p_values)), key=lambda index: _or_one(p_values[index]))
    corrected, largest = [0.0] * len(p_values), 0.0
    for rank, index in enumerate(order):
        largest = max(largest, min(1.0, (len(p_values) - rank) * _or_one(p_values[index])))
        corrected[index] = largest
    return [None if p is None else value for p, value in zip(p_values, corrected, strict=True)]


def _or_one(p: float | None) -> float:
    return 1.0 if p is None else p


def smallest_shown(spread: float, seeds: int, power: float = 0.8, level: float = 0.05) -> float:
    """Return the true difference, in points, that a paired t test at this level finds with this power.

    spread: standard deviation of the seeds' differences.
    """
    freedom = seeds - 1
    # Rejected where |shift + noise| > limit * error, over the errors that are estimated; scipy's nct has NaN far out.
    errors = np.sqrt(stats.chi2.ppf((np.arange(10_000) + 0.5) / 10_000, freedom) / freedom)
    limits = stats.t.ppf(1 - level / 2, freedom) * errors

    def missing(shift: float) -> float:
        return np.mean(stats.norm.cdf(shift - limits) + stats.norm.cdf(-shift - limits)) - power

    return float(optimize.brentq(missing, 0.0, 1000.0)) * spread / math.sqrt(seeds)


def mean_correlation(runs: Mapping[str, Mapping[int, float]]) -> float | None:
    """Return the mean over pairs of variants of the correlation of their seeds; None where a variant has no spread."""
    columns = [[by_seed[seed] for seed in sorted(by_seed)] for by_seed in runs.values()]
    if any(max(column) == min(column) for column in columns):
        return None
    return mean(correlation(a, b) for a, b in combinations(columns, 2))


def _seeds(runs: Mapping[str, Mapping[int, float]]) -> list[int]:
    """Raise UsageError for fewer than two seeds."""
    seeds = sorted(next(iter(runs.values())))
    if len(seeds) < 2:
        raise UsageError(f"a paired test needs at least 2 seeds, got {len(seeds)}")
    return seeds


def compare(runs: dict[str, dict[int, float]], question: tuple[str, str], resolution: float = 0.0) -> list[Pair]:
    """Return the question first, then all other pairs of variants.

    Args:
        runs: top-1 in percent by variant and seed, the same seeds for each.
        question: the two variants that the runs were made for.
        resolution: what one image is worth, in points.

    Raises:
        UsageError: a variant that was not run, twice the same, or fewer than two seeds.
    """
    for name in question:
        if name not in runs:
            raise UsageError(f"--question: no variant {name!r}; {near_matches(name, list(runs), 'variants')}")
    if question[0] == question[1]:
        raise UsageError(f"--question takes two variants, got {question[0]} twice")
    seeds = _seeds(runs)
    others = [pair for pair in combinations(runs, 2) if set(pair) != set(question)]
    figures = {pair: paired_difference(*([runs[name][seed] for seed in seeds] for name in pair), resolution)
               for pair in [question, *others]}
    corrected = dict(zip(others, holm([figures[pair][3] for pair in others]), strict=True))
    return [Pair(*pair, len(seeds), *figures[pair], corrected.get(pair)) for pair in [question, *others]]


def parse_factors(words: Sequence[str]) -> dict[str, dict[str, int]]:
    """Read NAME=WITHOUT,...|WITH,... words: by factor and variant, -1 without it and 1 with it.

    Raises:
        UsageError: a word of another form, or factors that are not crossed: 2^K variants, each in its own combination.
    """
    factors: dict[str, dict[str, int]] = {}
    for word in words:
        name, _, text = word.partition("=")
        sides = [side.split(",") for side in text.split("|")]
        cells = [cell for side in sides for cell in side]
        if not name.strip() or name in factors or len(sides) != 2 or "" in cells or len(set(cells)) != len(cells):
            raise UsageError(f"--factor takes NAME=WITHOUT,...|WITH,..., each name and variant once, got {word!r}")
        factors[name] = {cell: sign for side, sign in zip(sides, (-1, 1), strict=True) for cell in side}
    first = next(iter(factors.values()))
    settings = {tuple(signs.get(cell) for signs in factors.values()) for cell in first}
    if any(signs.keys() != first.keys() for signs in factors.values()) or not (
            len(settings) == len(first) == 2 ** len(factors)):
        raise UsageError(f"{len(factors)} factors need {2 ** len(factors)} variants, each in every --factor and in its "
                         f"own combination, got {'; '.join(words)}")
    return factors


def factorial(runs: Mapping[str, Mapping[int, float]], factors: Mapping[str, Mapping[str, int]],
              resolution: float = 0.0) -> list[Effect]:
    """Return the main effects, then the interactions of two factors, of a factorial over seeds.

    Args:
        runs: top-1 in percent by variant and seed, the same seeds for each. factors: see `parse_factors`.
        resolution: what one image is worth, in points.

    Raises:
        UsageError: a variant that was not run, or fewer than two seeds.
    """
    cells = list(next(iter(factors.values())))
    for cell in cells:
        if cell not in runs:
            raise UsageError(f"--factor: no variant {cell!r}; {near_matches(cell, list(runs), 'variants')}")
    seeds = _seeds({cell: runs[cell] for cell in cells})

    def test(weight: Callable[[str], float]) -> Test:
        return mean_test([sum(weight(cell) * runs[cell][seed] for cell in cells) for seed in seeds], resolution)

    mains = {name: test(lambda cell, signs=signs: signs[cell] * 2 / len(cells)) for name, signs in factors.items()}
    crossed = {f"{a} x {b}": test(lambda cell, a=a, b=b: factors[a][cell] * factors[b][cell] * 4 / len(cells))
               for a, b in combinations(factors, 2)}
    return corrected([*(Effect(name, len(seeds), *figures, None) for name, figures in mains.items()),
                      *(Effect(name, len(seeds), *figures[:3], None, None) for name, figures in crossed.items())],
                     len(mains))


def corrected(effects: Sequence[Effect], hypotheses: int) -> list[Effect]:
    """Return the effects with Holm's p of those that are tested, over so many hypotheses however few are at hand."""
    p_values = [effect.p for effect in effects if effect.p is not None]
    holms = iter(holm([*p_values, *[1.0] * (hypotheses - len(p_values))]))
    return [effect if effect.p is None else replace(effect, p_holm=next(holms)) for effect in effects]


def _escaped(text: str) -> str:
    return text.replace("|", r"\|")


def _p(p: float | None) -> str:
    return "" if p is None else "< 0.001" if p < 5e-4 else f"{p:.3f}"


def _interval(row: Pair | Effect) -> str:
    return "no spread" if row.low is None else f"{row.low:+.2f} to {row.high:+.2f}"


def variants_table(runs: Mapping[str, Mapping[int, float]], split: str, options: Mapping[str, str]) -> list[str]:
    """Return the lines of the table of variants: top-1 by seed, mean and standard deviation, differing options."""
    column = any(options.values())
    lines = [f"| variant | top-1 % on {split.replace('_', '-')} images, by seed | mean | standard deviation |"
             + " model and other options |" * column, "| --- | --- | --- | --- |" + " --- |" * column]
    for name, by_seed in runs.items():
        values = [by_seed[seed] for seed in sorted(by_seed)]
        lines.append(f"| {_escaped(name)} | {', '.join(f'{value:.2f}' for value in values)} | {mean(values):.2f} | "
                     f"{stdev(values):.2f} |" + f" {_escaped(options.get(name, ''))} |" * column)
    return lines


def pairs_table(pairs: Sequence[Pair]) -> list[str]:
    """Return the lines of the table of pairs."""
    return ["| pair | difference, points | 95% interval | p | p, corrected |", "| --- | --- | --- | --- | --- |",
            *(f"| {_escaped(pair.label)} | {pair.difference:+.2f} | {_interval(pair)} | {_p(pair.p)} | "
              f"{_p(pair.p_holm) or ('the question' if place == 0 else '')} |" for place, pair in enumerate(pairs))]


def effects_table(effects: Sequence[Effect]) -> list[str]:
    """Return the lines of the table of effects."""
    return ["| effect | points | 95% interval | p | p, corrected |", "| --- | --- | --- | --- | --- |",
            *(f"| {_escaped(effect.name)} | {effect.difference:+.2f} | {_interval(effect)} | {_p(effect.p)} | "
              f"{_p(effect.p_holm) or 'not tested'} |" for effect in effects)]


def remarks(runs: Sequence[Run], differences: Sequence[float] = ()) -> list[str]:
    """Return what a reader of the tables must know: the resolution, the sensitivity, and what is not recorded.

    differences: of the question, by seed.
    """
    found = []
    images = next((run.images for run in runs if run.images), None)
    if images:
        found.append(f"One image of {images:,} is {100 / images:.3g} points.")
    top1 = by_variant(runs)
    if len(differences) > 1 and stdev(differences) > 0:
        least = smallest_shown(stdev(differences), len(differences))
        found.append(f"With this spread {len(differences)} seeds find a difference of {least:.2f} points at 80% power "
                     "(paired t test, 0.05).")
    related = mean_correlation(top1)
    if related is not None and len(top1) > 1:
        found.append(f"Mean correlation of the variants over seeds: {related:.1f}; near 0, pairing gains nothing.")
    unknown = list(dict.fromkeys(run.variant for run in runs if not run.data))
    if unknown:
        found.append(f"Data and options are not recorded for runs of {', '.join(unknown)}: the file of them is older "
                     "than release 0.4.")
    return found


def plot_evidence(runs: dict[str, dict[int, float]], rows: Sequence[Pair | Effect], split: str, *,
                  width: float | None = None) -> Figure:
    """Draw every run, a line a seed, with the means (left), and differences with 95% intervals (right).

    The question and the main effects are blue. `width` is in inches; in a column the differences are below.
    """
    with print_style():
        return _draw(runs, rows, split, check_width(width) or PAGE)


def _draw(runs: dict[str, dict[int, float]], rows: Sequence[Pair | Effect], split: str, width: float) -> Figure:
    small, beside = points(), width >= 5
    labels = [wrapped(row.label.replace(" - ", " \N{MINUS SIGN} "), 72 * width * (0.22 if beside else 0.4), small)
              for row in rows]
    height = 0.5 + 0.13 * sum(1.6 + label.count("\n") for label in labels)
    if beside:
        figure = new_figure(width, max(2.8, height), layout="constrained")
        left, right = figure.subplots(1, 2)
    else:
        figure = new_figure(width, 2.6 + height, layout="constrained")
        left, right = figure.subplots(2, 1, height_ratios=(2.6, height))
    small_ticks(left)
    small_ticks(right)
    names = list(runs)
    seeds = sorted(runs[names[0]])
    for seed in seeds:
        left.plot(range(len(names)), [runs[name][seed] for name in names], color="0.7", marker="o", markersize=3,
                  linewidth=0.8)
    left.plot(range(len(names)), [mean(runs[name].values()) for name in names], linestyle="none", marker="_",
              markersize=22, markeredgewidth=2, color="tab:blue", label=f"mean of {len(seeds)} seeds")
    room = (72 * width / (2 if beside else 1) - 60) / len(names) - 4
    below = [wrapped(name, room, small) for name in names]
    upright = all(text.count("\n") < 4 and text.replace("\n", " ") == name
                  for text, name in zip(below, names, strict=True))
    left.set_xticks(range(len(names)), [_plain(text) for text in (below if upright else (
        wrapped(name, 80.0, small) for name in names))], rotation=0 if upright else 90)
    left.set_xlim(-0.5, len(names) - 0.5)
    left.set(ylabel=f"top-1 on {split.replace('_', '-')} images (%)")
    left.legend(markerscale=0.5)
    draw_differences(right, rows, labels)
    right.set(xlabel="difference, points of top-1, 95% interval")
    return figure


def draw_differences(axes: Axes, rows: Sequence[Pair | Effect], labels: Sequence[str]) -> None:
    """Draw differences with 95% intervals, the first row on top. The question and what is tested are blue."""
    places = range(len(rows) - 1, -1, -1)
    for place, row in zip(places, rows, strict=True):
        main = row.p_holm is not None if isinstance(row, Effect) else place == len(rows) - 1
        colour = "tab:blue" if main else "0.45"
        if row.low is not None:
            axes.plot([row.low, row.high], [place, place], color=colour, linewidth=2 if main else 1)
        axes.plot(row.difference, place, marker="o", color=colour)
    axes.axvline(0, color="0.2", linewidth=0.8)
    axes.set_yticks(places, [_plain(label) for label in labels])
    axes.set_ylim(-0.6, len(rows) - 0.4)
    axes.grid(axis="x", alpha=0.3)


def _plain(text: str) -> str:
    """Return a label that matplotlib does not read as mathematics."""
    return text.replace("$", r"\$")


def study(runs: Sequence[Run], split: str, table: list[str], rows: Sequence[Pair | Effect],
          differences: Sequence[float] = (), width: float | None = None) -> tuple[str, bytes]:
    """Return the text of a study, its tables and remarks, and its picture."""
    top1 = by_variant(runs)
    options = {run.variant: run.options for run in runs}
    lines = [*variants_table(top1, split, options), "", *table, "", *remarks(runs, differences)]
    return "\n".join(lines) + "\n", figure_bytes(plot_evidence(top1, rows, split, width=width))


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("runs", type=Path, nargs="+", help="sweeps' folders, or files evidence-runs.csv")
    parser.add_argument("--question", metavar="A,B", help="is variant A better than variant B?")
    parser.add_argument("--factor", action="append", default=[], metavar="NAME=WITHOUT,...|WITH,...",
                        help="analyse a factorial; given once a factor")
    parser.add_argument("--variants", metavar="A,B,...", help="compare these alone, in this order (default: all, by "
                        "name; of factors, theirs)")
    parser.add_argument("-o", "--output", type=Path, metavar="FOLDER",
                        help="where the files are written (default: the first sweep's folder, or that of its file)")
    parser.add_argument("--width", type=inches, metavar="3.3|6.75|N", help="of the pictures in inches (default: 6.75)")
    args = parser.parse_args(argv)
    question = args.question.split(",") if args.question else []
    if not question and not args.factor:
        raise UsageError("--question A,B or --factor NAME=WITHOUT,...|WITH,... is required, got neither")
    if question and len(question) != 2:
        raise UsageError(f"--question takes two variants as A,B, got {args.question!r}")
    factors = parse_factors(args.factor) if args.factor else {}
    cells = [cell for signs in list(factors.values())[:1] for cell in signs]
    variants = args.variants.split(",") if args.variants else None if question else cells
    split, runs = read_runs(args.runs, variants)
    top1 = by_variant(runs)
    resolution = next((100 / run.images for run in runs if run.images), 0.0)
    folder = args.output or (args.runs[0].parent if args.runs[0].is_file() else args.runs[0])
    files = {folder / "evidence-runs.csv": runs_text(runs, split).encode()}
    texts = []
    if question:
        pairs = compare(top1, (question[0], question[1]), resolution)
        gains = [top1[question[0]][seed] - top1[question[1]][seed] for seed in sorted(top1[question[0]])]
        text, picture = study(runs, split, pairs_table(pairs), pairs, gains, args.width)
        files |= {folder / "evidence.csv": csv_text([asdict(pair) for pair in pairs]).encode(),
                  folder / "evidence.md": text.encode(), folder / "evidence.png": picture}
        texts.append(text)
    if factors:
        effects = factorial(top1, factors, resolution)
        text, picture = study([run for run in runs if run.variant in cells], split, effects_table(effects), effects,
                              width=args.width)
        files |= {folder / "evidence-factors.csv": csv_text([asdict(effect) for effect in effects]).encode(),
                  folder / "evidence-factors.md": text.encode(), folder / "evidence-factors.png": picture}
        texts.append(text)
    create(folder)
    read = {source.resolve() for source in args.runs}
    files = {path: content for path, content in files.items() if path.resolve() not in read}  # may have more variants
    for path, content in files.items():
        atomic_write(path, content)
    print("\n".join(texts), end="")
    print(f"written: {' '.join(map(str, files))}")
    return 0
