"""Collect what the runs reached on the test photos: a row a run, with the interval, and their metrics beside it.

    python -m experiments.scenes.collect RUNS -o experiments/results/scenes

RUNS holds the run folders, each evaluated on the test photos by `train_imagenet.py --evaluate RUN --val-split test`.
Written: results.csv and, of each run, MODEL.csv, its metrics. Where the folders are called variant=NAME,seed=S, as a
sweep's, quarter-width-runs.csv is written instead, which experiments.evidence reads.
"""
import argparse
import json
import shutil
import sys
from pathlib import Path

from ea_vision.base.errors import UsageError, exit_code
from ea_vision.base.files import atomic_write, csv_text
from ea_vision.engine import run_folder
from experiments.evidence import read_runs, write_runs
from experiments.weights_card import interval


def evaluation_of(folder: Path) -> dict:
    """Return what a run reached on the test photos.

    Raises:
        UsageError: a run that was not evaluated on them.
    """
    path = folder / "evaluation" / "evaluation.json"
    if not path.is_file():
        raise UsageError(f"{folder} must be evaluated on the test photos first (--evaluate {folder} --val-split test)")
    tested = json.loads(path.read_text())
    if Path(tested["data"]).name != "test":
        raise UsageError(f"{path} must be of the folder test, got {tested['data']}")
    return tested


def row_of(folder: Path) -> dict:
    """Return a run's row; raise UsageError as `evaluation_of`."""
    config, run = run_folder.read_config(folder)
    metrics, tested = run_folder.read_metrics(folder), evaluation_of(folder)
    return {"model": config["model"], "seed": config["seed"], "validation_top1": f"{max(metrics['top1']):.2f}",
            "images": tested["images"], "top1": f"{tested['top1']:.2f}",
            "interval": interval(tested["top1"], tested["images"]), "loss": f"{tested['loss']:.4f}",
            "minutes": f"{sum(metrics['seconds']) / 60:.0f}", "hardware": run["hardware"]}


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("runs", type=Path)
    parser.add_argument("-o", "--output", type=Path, required=True)
    args = parser.parse_args(argv)
    folders = sorted(path.parent for path in args.runs.glob("*/results.json"))
    if not folders:
        raise UsageError(f"{args.runs} has no complete run")
    args.output.mkdir(parents=True, exist_ok=True)
    if any(folder.name.startswith("variant=") for folder in folders):
        runs = read_runs(args.runs)
        tested = [evaluation_of(args.runs / f"variant={run.variant},seed={run.seed}") for run in runs.itertuples()]
        runs = runs.assign(split="test", top1=[round(found["top1"], 4) for found in tested],
                           images=[found["images"] for found in tested])
        write_runs(runs, args.output / "quarter-width-runs.csv")
        return 0
    rows = [row_of(folder) for folder in folders]
    atomic_write(args.output / "results.csv", csv_text(rows).encode())
    for folder, row in zip(folders, rows, strict=True):
        shutil.copyfile(folder / "metrics.csv", args.output / f"{row['model']}.csv")
    return 0


if __name__ == "__main__":
    sys.exit(exit_code(main))
