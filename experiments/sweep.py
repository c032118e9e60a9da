"""Train variants of a network with several seeds, each run in its own folder.

    python -m experiments.sweep --test --seeds 0,1,2,3,4 --output sweeps/ea \\
        --variant 'none=--model conv_transformer_cifar' --variant 'EA=--model ea_conv_transformer_cifar' \\
        -- --dataset cifar10 --data-dir DIR
    python -m experiments.sweep --set alpha=0.1,0.5,0.9 --output sweeps/alpha \\
        -- --model ea_conv_transformer_cifar --dataset cifar10 --data-dir DIR --holdout 5000

Runs are trained by train-cifar, so the same sweep started again continues where it stopped. A sweep compares variants
on held-out images (--holdout) and does not touch the test images. With --test, for settings that are already fixed,
each run is tested once. Top-1 is that of the last epoch's weights. The sweep writes sweep.csv;
`python -m experiments.evidence` reads the folder, tests whether variants differ, and draws them.
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

from ea_vision.base.errors import RunError, UsageError, exit_code
from ea_vision.data.image_files import ImageFiles
from ea_vision.data.small_images import places_of
from ea_vision.engine import train_cifar
from experiments.evidence import read_run, write_runs


def parse_variants(words: Sequence[str]) -> dict[str, list[str]]:
    """Read NAME=ARGUMENTS words; raise UsageError if a name is missing, repeated or not usable as a folder name."""
    variants: dict[str, list[str]] = {}
    for word in words:
        name, _, arguments = word.partition("=")
        is_name = name.strip() and name.isprintable() and not set(name) & set("/,|")
        if not is_name or not arguments or name in variants:
            raise UsageError(
                "--variant takes NAME=ARGUMENTS, each name once and without comma, slash and |, got "
                f"{word!r}"
            )
        variants[name] = shlex.split(arguments)
    return variants


def with_settings(variants: dict[str, list[str]], words: Sequence[str]) -> dict[str, list[str]]:
    """Return each variant with each combination of KEY=V1,V2,... model keywords; raise UsageError for other words."""
    grid = []
    for word in words:
        key, _, values = word.partition("=")
        if not key or "" in values.split(","):
            raise UsageError(f"--set takes KEY=V1,V2,..., got {word!r}")
        grid.append([f"{key}={value}" for value in values.split(",")])
    combined = {}
    for (name, arguments), setting in itertools.product(
        (variants or {"": []}).items(), itertools.product(*grid)
    ):
        keywords = ["--model-kwargs", *setting] if setting else []
        combined[" ".join(filter(None, [name, *setting]))] = [*arguments, *keywords]
    return combined


def check(name: str, arguments: Sequence[str]) -> None:
    """Raise a UsageError that names the variant if its arguments, network or data are invalid."""
    try:
        train_cifar.main([*arguments, "--check-options"])
    except UsageError as error:
        raise UsageError(f"variant {name}: {error}") from error


def check_images(folder: Path, classes: int) -> None:
    """Raise UsageError unless a data folder has training and test images of this many classes."""
    for place in places_of(str(folder)):
        num_classes = len(ImageFiles(place).classes)
        if num_classes != classes:
            raise UsageError(f"{place} must have {classes} classes, got {num_classes}")


def train(command: Sequence[str], folder: Path, seed: int) -> dict[str, Any]:
    """Train one run in its own process, which saves if this one is stopped; return the result of `read_run`.

    Raises:
        RunError: the trainer failed.
    """
    process = subprocess.Popen(
        [sys.executable, *command, "--output", str(folder), "--seed", str(seed)]
    )
    try:
        code = process.wait()
    finally:
        if process.poll() is None:
            process.terminate()
            process.wait()
    if code:
        raise RunError(
            f"{folder.name} ended with exit code {code}; mend it and run the same sweep again to continue"
        )
    return read_run(folder)


def parse_seeds(text: str) -> list[int]:
    return sorted({int(seed) for seed in text.split(",")})


def stop(number: int, _frame) -> None:
    """Handle a signal: end the sweep, so that the current run saves."""
    raise RunError("stopped by a signal; the same command continues", 128 + number)


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--variant",
        action="append",
        default=[],
        metavar="NAME=ARGUMENTS",
        dest="variants",
        help="a named variant and the trainer's arguments that make it, as one word",
    )
    parser.add_argument(
        "--set",
        action="append",
        default=[],
        metavar="KEY=V1,V2,...",
        dest="keywords",
        help="a model keyword and its values; several --set run all combinations",
    )
    parser.add_argument(
        "--test", action="store_true", help="test each run, once: for settings that are fixed"
    )
    parser.add_argument(
        "--seeds",
        type=parse_seeds,
        default=[0],
        help="seeds; every variant runs with each of them (default: 0)",
    )
    parser.add_argument(
        "--output", required=True, type=Path, help="folder of the runs and sweep.csv"
    )
    parser.add_argument(
        "arguments", nargs="*", metavar="-- ARGUMENT", help="arguments of the trainer, after --"
    )
    args = parser.parse_args(argv)
    if not (args.variants or args.keywords):
        raise UsageError("--variant or --set is required, got neither")
    variants = with_settings(parse_variants(args.variants), args.keywords)
    tested = "--test" if args.test else "--no-test"
    common = [*args.arguments, tested]
    for name, arguments in variants.items():  # before hours of the first one's runs
        check(name, [*common, *arguments])
    signal.signal(signal.SIGTERM, stop)
    args.output.mkdir(parents=True, exist_ok=True)
    rows: list[dict[str, Any]] = []
    for (name, arguments), seed in itertools.product(variants.items(), args.seeds):
        run = train(
            ["-m", "ea_vision", "train-cifar", *common, *arguments],
            args.output / f"variant={name},seed={seed}",
            seed,
        )
        rows.append({"variant": name, **run, "options": shlex.join(arguments)})
        write_runs(pd.DataFrame(rows), args.output / "sweep.csv")  # after every run
    best = max(rows, key=lambda row: row["top1"])
    print(f"best: {best['variant']}, seed {best['seed']}: top1 {best['top1']:.2f}%")
    print(f"written: {args.output / 'sweep.csv'}")
    return 0


if __name__ == "__main__":
    sys.exit(exit_code(main))
