"""Train once per setting of model keywords, options or named variants, and draw accuracy over the settings.

    python -m experiments.sweep --set alpha=0.1,0.5,0.9 --output sweeps/alpha \\
        -- --dataset cifar10 --data-dir DIR --holdout 5000
    python -m experiments.sweep --test --seeds 0,1,2,3,4 --output sweeps/ea \\
        --variant 'none=--model conv_transformer_cifar' --variant 'EA=--model ea_conv_transformer_cifar' \\
        -- --dataset cifar10 --data-dir DIR

Each run has its own folder and is trained by the trainer's own command, so the same sweep started again continues
where it was. A sweep compares on images held out (--holdout) and leaves the test images alone; with --test, for
settings that are fixed, each run is tested, once. Top-1 is that of the last epoch's weights. Written: sweep.csv and
sweep.png. `python -m experiments.evidence` tests whether variants differ.
"""
import argparse
import itertools
import shlex
import signal
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pandas as pd
from matplotlib.figure import Figure

from ea_vision.base.errors import RunError, UsageError, exit_code
from experiments.evidence import read_run


def parse_settings(words: Sequence[str]) -> dict[str, list[str]]:
    """Read KEY=V1,V2,... words; raise UsageError for a word without values or a key given twice."""
    settings: dict[str, list[str]] = {}
    for word in words:
        key, _, values = word.partition("=")
        if not key or "" in values.split(",") or key in settings:
            raise UsageError(f"--set and --option take KEY=V1,V2,..., each key once, got {word!r}")
        settings[key] = values.split(",")
    return settings


def parse_variants(words: Sequence[str]) -> dict[str, list[str]]:
    """Read NAME=ARGUMENTS words; raise UsageError for a name that is missing, twice, or no folder's."""
    variants: dict[str, list[str]] = {}
    for word in words:
        name, _, arguments = word.partition("=")
        if not name.strip() or not arguments or set(name) & set("/,|") or not name.isprintable() or name in variants:
            raise UsageError("--variant takes NAME=ARGUMENTS, each name once and without comma, slash and |, got "
                             f"{word!r}")
        variants[name] = shlex.split(arguments)
    return variants


def train(command: Sequence[str], folder: Path, seed: int) -> dict[str, Any]:
    """Train one run in its own process, which saves when this one is stopped; return it as `read_run` does.

    Raises:
        RunError: the trainer failed.
    """
    process = subprocess.Popen([sys.executable, *command, "--output", str(folder), "--seed", str(seed)])
    try:
        code = process.wait()
    finally:
        if process.poll() is None:
            process.terminate()
            process.wait()
    if code:
        raise RunError(f"{folder.name} ended with exit code {code}; mend it and run the same sweep again to continue")
    return read_run(folder)


def stop(number: int, _frame) -> None:
    """Handle a signal: end the sweep, and so let the run in progress save."""
    raise RunError("stopped by a signal; the same command continues", 128 + number)


def plot_sweep(rows: pd.DataFrame, keys: Sequence[str], split: str) -> Figure:
    """Draw top-1 over the values of the first key, a line a setting of the others: means, deviations, and each run."""
    figure = Figure(figsize=(6.75, 4.5), layout="constrained")
    axes = figure.add_subplot()
    axis = rows[keys[0]]
    if pd.to_numeric(axis, errors="coerce").notna().all():
        axis = pd.to_numeric(axis)
    others = rows[list(keys[1:])].agg(lambda row: ", ".join(f"{key}={value}" for key, value in row.items()), axis=1)
    for name, of_line in rows.groupby(others if len(keys) > 1 else [""] * len(rows), sort=False):
        found = of_line["top1"].groupby(axis[of_line.index], sort=False)
        means = found.mean()
        line = axes.errorbar(means.index, means, found.std(), marker="o", capsize=3, label=name or None)
        axes.plot(axis[of_line.index], of_line["top1"], ".", color=line[0].get_color(), alpha=0.4)
    axes.set(xlabel=keys[0], ylabel=f"top-1 on {split} images (%), mean ± deviation of {rows['seed'].nunique()} seeds")
    if len(keys) > 1:
        axes.legend()
    return figure


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--set", action="append", default=[], metavar="KEY=V1,V2,...", dest="keywords",
                        help="a model keyword and its values; given again, all combinations are run")
    parser.add_argument("--option", action="append", default=[], metavar="KEY=V1,V2,...", dest="options",
                        help="the same for an option of the trainer, such as lr=0.01,0.02")
    parser.add_argument("--variant", action="append", default=[], metavar="NAME=ARGUMENTS", dest="variants",
                        help="a named variant and the trainer's arguments that make it, as one word")
    parser.add_argument("--test", action="store_true", help="test each run, once: for settings that are fixed")
    parser.add_argument("--seeds", default="0", help="seeds, each of which runs every setting (default: 0)")
    parser.add_argument("--output", required=True, type=Path, help="folder of the runs, sweep.csv and sweep.png")
    parser.add_argument("--script", help="trainer (default: ea-vision train-cifar)")
    parser.add_argument("arguments", nargs="*", metavar="-- ARGUMENT", help="arguments of the trainer, after --")
    args = parser.parse_args(argv)
    settings, options = parse_settings(args.keywords + args.options), parse_settings(args.options)
    variants = parse_variants(args.variants)
    settings = ({"variant": list(variants)} if variants else {}) | settings
    if not settings:
        raise UsageError("--set, --option or --variant is required, got none of them")
    if not all(seed.isdecimal() for seed in args.seeds.split(",")):
        raise UsageError(f"--seeds takes whole numbers between commas, got {args.seeds!r}")
    seeds = sorted({int(seed) for seed in args.seeds.split(",")})
    signal.signal(signal.SIGTERM, stop)
    args.output.mkdir(parents=True, exist_ok=True)
    rows: list[dict[str, Any]] = []
    for values in itertools.product(*settings.values()):
        setting = dict(zip(settings, values, strict=True))
        command = [*([args.script] if args.script else ["-m", "ea_vision", "train-cifar"]), *args.arguments,
                   "--test" if args.test else "--no-test", *variants.get(setting.get("variant", ""), []),
                   *(f"--{key.replace('_', '-')}={setting[key]}" for key in options)]
        if keywords := [f"{key}={setting[key]}" for key in settings if key not in options and key != "variant"]:
            command += ["--model-kwargs", *keywords]
        for seed in seeds:
            folder = args.output / ",".join(f"{key}={value}" for key, value in {**setting, "seed": seed}.items())
            run = train(command, folder, seed)
            kept = ("seed", "top1", "seconds", "updates", "data", "split")
            rows.append({**setting, **{key: run[key] for key in kept}})
            table = pd.DataFrame(rows)  # written after every run: the curve grows as the sweep goes
            table.to_csv(args.output / "sweep.csv", index=False)
            plot_sweep(table, list(settings), run["split"]).savefig(args.output / "sweep.png", dpi=200)
    best = max(rows, key=lambda row: row["top1"])
    print(f"best: {' '.join(f'{key}={best[key]}' for key in settings)} seed={best['seed']} top1 {best['top1']:.2f}%")
    print(f"written: {args.output / 'sweep.csv'} {args.output / 'sweep.png'}")
    return 0


if __name__ == "__main__":
    sys.exit(exit_code(main))
