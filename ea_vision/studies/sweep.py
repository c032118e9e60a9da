"""Train once per setting of model keywords, options or named variants, and draw accuracy over the settings.

Each run has its own folder below --output and is trained by the trainer's own command, so a sweep that was interrupted
continues where it was. A sweep searches: it compares on images held out (--holdout 5000, which it requires) and leaves
the test images alone. Only with --test, for settings that are no longer to be chosen among, are they used, once a run.
"""

from __future__ import annotations

import argparse
import itertools
import math
import shlex
import signal
import statistics
import subprocess
import sys
from pathlib import Path

from matplotlib.figure import Figure

from ea_vision.base.errors import RunError, UsageError
from ea_vision.base.figures import PAGE, check_width, color_cycle, figure_bytes, inches
from ea_vision.base.files import atomic_write, create, csv_text
from ea_vision.base.print import legend_below, new_figure, points, print_style, small_ticks, wrapped
from ea_vision.engine.run_folder import FinishedRun, read_finished

EXAMPLES = """\
examples:
  ea-vision sweep --set alpha=0.1,0.3,0.5,0.7 --output sweeps/alpha -- --dataset folder \\
      --data-dir DIR --epochs 3 --holdout 5000
  ea-vision sweep --option lr=0.01,0.02 --set beta=0,1 --seeds 0,1,2 --output sweeps/lr -- \\
      --model ea_conv_transformer_cifar --opt muon --holdout 300
  ea-vision sweep --variant 'none=--model conv_transformer_cifar' \\
      --variant 'EA=--model ea_conv_transformer_cifar' --seeds 0,1,2,3,4 --output sweeps/ea -- --holdout 300
"""
VARIANT = "variant"  # the key of --variant
LONGEST_NAME = 200  # bytes of a variant's name: a folder's may have 255


def parse_settings(words: list[str]) -> dict[str, list[str]]:
    """Read KEY=V1,V2,... words.

    Raises:
        UsageError: a word without values, or a key given twice.
    """
    settings: dict[str, list[str]] = {}
    for word in words:
        key, _, values = word.partition("=")
        if not key or not values or "" in values.split(","):
            raise UsageError(f"--set and --option take KEY=V1,V2,..., got {word!r}")
        if key in settings:
            raise UsageError(f"--set or --option {key} is given twice")
        settings[key] = values.split(",")
    return settings


def parse_variants(words: list[str]) -> dict[str, list[str]]:
    """Read NAME=ARGUMENTS words: the trainer's arguments by variant.

    Raises:
        UsageError: a word without a name or arguments, a name that no folder can have or that is given twice.
    """
    variants: dict[str, list[str]] = {}
    for word in words:
        name, _, text = word.partition("=")
        try:
            arguments = shlex.split(text)
        except ValueError as error:
            raise UsageError(f"--variant {name}: {error} in {text!r}") from error
        if not name.strip() or not arguments:
            raise UsageError(f"--variant takes NAME=ARGUMENTS, got {word!r:.80}")
        check_variant_name(name)
        if name in variants:
            raise UsageError(f"--variant {name} is given twice")
        variants[name] = arguments
    return variants


def check_variant_name(name: str) -> None:
    """Raise UsageError for a name that no run folder, option or table can have."""
    if not name.strip() or set(name) & set("/,=|") or not name.isprintable():
        raise UsageError(f"a variant's name must be printable and without comma, slash, = and |, got {name!r:.80}")
    if len(name.encode()) > LONGEST_NAME:
        raise UsageError(f"a variant's name takes at most {LONGEST_NAME} bytes, got {len(name.encode())}: {name:.40}")


def parse_seed(text: str) -> int:
    """Read a seed; "0" and "00" are the same.

    Raises:
        UsageError: not a whole number from 0 on.
    """
    if not (text.isascii() and text.isdigit() and len(text) < 19):
        raise UsageError(f"a seed must be a whole number, 0 or more, got {text!r:.40}")
    return int(text)


def parse_seeds(text: str) -> list[str]:
    """Read seeds between commas.

    Raises:
        UsageError: not a whole number, or the same seed twice, which would be one run twice.
    """
    seeds = [parse_seed(seed.strip()) for seed in text.split(",")]
    if len(set(seeds)) < len(seeds):
        raise UsageError(f"--seeds takes each seed once, got {text}")
    return list(map(str, seeds))


def run_name(setting: dict[str, str], seed: str) -> str:
    """The folder of a run, `key=value,...,seed=0`."""
    return ",".join(f"{key}={value}" for key, value in [*setting.items(), ("seed", seed)])


def read_run_name(name: str) -> dict[str, str]:
    """What `run_name` wrote, the seed too; empty for a folder of another name."""
    pairs = [part.partition("=") for part in name.split(",")]
    found = {key: value for key, _, value in pairs}
    return found if "seed" in found else {}


def run_setting(trainer: list[str], folder: Path, keywords: dict[str, str], options: dict[str, str], seed: str,
                arguments: list[str]) -> FinishedRun:
    """Train one setting of model keywords and options in its own process; return the run.

    Raises:
        RunError: the trainer failed.
    """
    command = [sys.executable, *trainer, *arguments, "--output", str(folder), "--seed", seed,
               *(f"--{key.replace('_', '-')}={value}" for key, value in options.items())]
    if keywords:
        command += ["--model-kwargs", *(f"{key}={value}" for key, value in keywords.items())]
    process = subprocess.Popen(command)
    try:
        code = process.wait()
    finally:  # an interrupted sweep lets the trainer save
        if process.poll() is None:
            process.terminate()
            process.wait()
    finished = read_finished(folder) if code == 0 else None
    if finished is None:
        raise RunError(f"{folder.name} ended with exit code {code}; mend it and run the same sweep again to continue")
    return finished


def stop(number: int, _frame) -> None:
    """A signal's handler: end what has several runs, so that the run in progress saves."""
    raise RunError("stopped by a signal; the same command continues", 128 + number)


def row_of(setting: dict[str, str], seed: str, run: FinishedRun) -> dict:
    """Return a row of sweep.csv. Its length and data are there, as a sweep may be repeated with others."""
    row = {**setting, "seed": seed, "top1": run.best_top1,
           "top1_by_epoch": " ".join(f"{top1:.2f}" for top1 in run.metrics["top1"]),
           "seconds": f"{run.seconds:.0f}", "epochs": run.epochs, "updates": run.updates, "data": run.data[:12]}
    return {**row, **({"test_top1": run.best["top1"]} if run.split == "test" and run.config.get("test", True) else {})}


def plot_sweep(rows: list[dict], keys: list[str], ylabel: str, *, width: float | None = None) -> Figure:
    """Top-1 over the values of the first key, one line per setting of the others: means over seeds, bars of a standard
    deviation where there are several, a dot for each run; n, the number of runs, is named. `width` is in inches."""
    with print_style():
        return _draw(rows, keys, ylabel, check_width(width) or PAGE)


def _draw(rows: list[dict], keys: list[str], ylabel: str, width: float) -> Figure:
    small, first, others = points(), keys[0], keys[1:]
    lines: dict[str, dict[str, list[float]]] = {}
    for row in rows:
        label = ", ".join(f"{key}={row[key]}" for key in others)
        lines.setdefault(label, {}).setdefault(row[first], []).append(row["top1"])
    values = list(dict.fromkeys(row[first] for row in rows))
    numeric = all(_is_number(value) for value in values)
    names = [wrapped(value, max((72 * width - 50) / len(values) - 4, 4 * small), small) for value in values]
    deep = 0 if numeric else max(name.count("\n") for name in names)
    figure = new_figure(width, min(0.75 * width, 3.6) + 1.25 * small * deep / 72, layout="constrained")
    axes = figure.add_subplot()
    small_ticks(axes)
    counts = {len(runs) for by_value in lines.values() for runs in by_value.values()}
    for color, (label, by_value) in zip(itertools.cycle(color_cycle()), lines.items(), strict=False):
        places = [float(v) if numeric else values.index(v) for v in by_value]
        means = [statistics.mean(v) for v in by_value.values()]
        spreads = [statistics.stdev(v) if len(v) > 1 else math.nan for v in by_value.values()]
        axes.errorbar(places, means, spreads, color=color, marker="o", capsize=3, label=label or None)
        for place, mean, runs in zip(places, means, by_value.values(), strict=True):
            if len(runs) > 1:
                axes.plot([place] * len(runs), runs, ".", color=color, alpha=0.4, markeredgewidth=0)
            if len(counts) > 1:
                axes.annotate(f"n={len(runs)}", (place, mean), (4, 4), textcoords="offset points", fontsize=small)
    n = f"n = {counts.pop()}" if len(counts) == 1 else "n runs each"
    axes.set_title("n = 1 run each" if n == "n = 1" else f"mean and standard deviation, {n}")
    if not numeric:
        axes.set_xticks(range(len(values)), names)
    axes.set(xlabel=first, ylabel=wrapped(ylabel, 90.0, small))
    axes.grid(alpha=0.3)
    axes.margins(x=0.12)
    if others:
        legend_below(figure, *axes.get_legend_handles_labels())
    return figure


def _is_number(text: str) -> bool:
    try:
        float(text)
    except ValueError:
        return False
    return True


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, epilog=EXAMPLES,
                                     formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--set", action="append", default=[], metavar="KEY=V1,V2,...", dest="keywords",
                        help="a model keyword and its values; given again, all combinations are run")
    parser.add_argument("--option", action="append", default=[], metavar="KEY=V1,V2,...", dest="options",
                        help="the same for an option of the trainer, such as lr=0.01,0.02")
    parser.add_argument("--variant", action="append", default=[], metavar="NAME=ARGUMENTS", dest="variants",
                        help="a named variant and the trainer's arguments that make it, as one word")
    parser.add_argument("--test", action="store_true", help="test each run's weights on the test images, once: for "
                        "settings that are fixed, not for choosing")
    parser.add_argument("--seeds", default="0", help="seeds, each of which runs every setting (default: 0)")
    parser.add_argument("--output", required=True, type=Path, help="folder of the runs, sweep.csv and sweep.png")
    parser.add_argument("--width", type=inches, metavar="3.3|6.75|N", help="of sweep.png in inches (default: 6.75)")
    parser.add_argument("--script", type=Path, help="trainer (default: ea-vision train-cifar)")
    parser.add_argument("arguments", nargs="*", metavar="-- ARGUMENT", help="arguments of the trainer, after --")
    args = parser.parse_args(argv)
    settings, options = parse_settings(args.keywords + args.options), parse_settings(args.options)
    variants = parse_variants(args.variants)
    if VARIANT in settings:
        raise UsageError(f"--set and --option {VARIANT}: variants are given by --variant")
    if variants:
        settings = {VARIANT: list(variants), **settings}
    if not settings:
        raise UsageError("--set, --option or --variant is required, got none of them")
    arguments = [*args.arguments, "--test" if args.test else "--no-test"]
    seeds = parse_seeds(args.seeds)
    trainer = [str(args.script)] if args.script else ["-m", "ea_vision", "train-cifar"]
    if args.script and not args.script.is_file():
        raise UsageError(f"no trainer {args.script}: give its path by --script")

    settings_run = [dict(zip(settings, values, strict=True)) for values in itertools.product(*settings.values())]
    for setting in settings_run:
        if len(run_name(setting, max(seeds, key=len)).encode()) > 255:
            raise UsageError(f"a run's folder is named by its settings, in at most 255 bytes: {setting!s:.80}")

    signal.signal(signal.SIGTERM, stop)
    create(args.output)
    rows: list[dict] = []
    for setting in settings_run:
        for seed in seeds:
            name = run_name(setting, seed)
            keywords = {key: value for key, value in setting.items() if key not in options and key != VARIANT}
            chosen = {key: value for key, value in setting.items() if key in options}
            of_variant = variants[setting[VARIANT]] if variants else []
            run = run_setting(trainer, args.output / name, keywords, chosen, seed, [*arguments, *of_variant])
            if args.test and run.split != "test":
                raise RunError(f"{name} was not tested, which --test asks for")
            rows.append(row_of(setting, seed, run))
            # Written after every run, so that the curve grows as the sweep goes.
            atomic_write(args.output / "sweep.csv", csv_text(rows).encode())
            ylabel = f"top-1 on {run.eval_split.replace('_', '-')} images (%)"
            figure = plot_sweep(rows, list(settings), ylabel, width=args.width)
            atomic_write(args.output / "sweep.png", figure_bytes(figure))
    best = max(rows, key=lambda row: row["top1"])
    print(f"best: {' '.join(f'{k}={best[k]}' for k in settings)} seed={best['seed']} top1 {best['top1']:.2f}%")
    print(f"written: {args.output / 'sweep.csv'} {args.output / 'sweep.png'}")
    return 0

