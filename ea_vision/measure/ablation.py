"""The AA paper's ablations, share of attention and kind of positions: sizes beside the published ones, and short runs.

    ea-vision ablation share                          # parameters and GFLOPs beside the published ones
    ea-vision ablation position --csv positions.csv

With --output a narrow AA-Wide-ResNet (depth 10, width 2, 4 heads) is trained, too, once a setting, by `ea-vision
train-cifar` with the arguments after --; the second table is made from these runs' files. The same command continues
what was interrupted, and both ablations may share a folder. Accuracy is on images held out (--holdout, required), of
one run a setting: what differs by a point or two differs by chance.

    ea-vision ablation share --output runs/ablation -- --dataset cifar10 --data-dir DIR --img-size 16 --epochs 3 \\
        --holdout 5000

The published accuracies are those of ImageNet as they are known of the AA paper; they were not checked against a copy.
"""

from __future__ import annotations

import argparse
import signal
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import timm
import torch

from ea_vision.base.errors import UsageError
from ea_vision.base.files import atomic_write, create, csv_text
from ea_vision.engine.run_folder import read_config, read_metrics, read_results
from ea_vision.measure.counts import count
from ea_vision.measure.summary import markdown
from ea_vision.models import Published, published_tables
from ea_vision.studies.sweep import evaluation_top1, run_name, run_setting, stop

TRIAL_MODEL = "aa_wrn28_10_cifar"
TRIAL_KEYWORDS = {"depth": 10, "width": 2, "num_heads": 4, "min_head_qk": 8}


@dataclass(frozen=True)
class Ablation:
    """What is varied.

    rows: (setting, ImageNet network, its keywords, what the AA paper prints of it).
    trials: by setting, the keywords of the narrow network.
    """

    rows: tuple[tuple[str, str, Mapping[str, Any], Published], ...]
    trials: Mapping[str, Mapping[str, Any]]


def _share(share: float) -> dict[str, float]:
    return {"qk_ratio": share, "v_ratio": share}


def _rows(table: str) -> tuple[tuple[str, str, Mapping[str, Any], Published], ...]:
    return tuple((row.name.split()[-1], row.model, row.kwargs, row.published) for row in published_tables()[table].rows)


_SETTINGS = {varied: tuple(dict.fromkeys(setting for setting, *_ in _rows(varied))) for varied in ("share", "position")}
ABLATIONS = {
    "share": Ablation(
        _rows("share"),
        {share: {**_share(float(share)), "position": "relative"} for share in _SETTINGS["share"]}),
    "position": Ablation(
        _rows("position"), {position: {**_share(1.0), "position": position} for position in _SETTINGS["position"]}),
}


def size_row(varied: str, setting: str, name: str, keywords: Mapping[str, Any], published: Published) -> dict[str, Any]:
    """Parameters and GFLOPs, as TensorFlow's profiler counted in the AA paper, of an ImageNet network."""
    with torch.device("meta"):
        model = timm.create_model(name, **keywords)
    counts = count(model, model.default_cfg["input_size"])
    return {"model": name, varied: setting, "params_m": round(counts.params / 1e6, 3),
            "published_params_m": published.params_m, "gflops_profiler": round(counts.flops_profiler / 1e9, 3),
            "published_gflops": published.gflops, "published_top1": published.top1["ImageNet"]}


def trial_row(varied: str, setting: str, folder: Path) -> dict[str, Any]:
    """What the files of a complete run say of it, and the size of its network."""
    config, run = read_config(folder)
    results, metrics = read_results(folder), read_metrics(folder)
    side = config["img_size"]
    with torch.device("meta"):
        model = timm.create_model(config["model"], **run["model_kwargs"])
    counts = count(model, (model.in_chans, side, side))
    return {varied: setting, "seed": config["seed"], "model": config["model"],
            "model_kwargs": " ".join(f"{key}={value}" for key, value in run["model_kwargs"].items()),
            "img_size": side, "params_m": round(counts.params / 1e6, 4),
            "mflops_profiler": round(counts.flops_profiler / 1e6, 2), "epochs": results["epochs"],
            f"{results['eval_split']}_images": results[f"{results['eval_split']}_images"],
            f"{results['eval_split']}_top1": round(evaluation_top1(results), 2),
            "top1_by_epoch": " ".join(f"{top1:.2f}" for top1 in metrics["top1"]),
            "train_loss": round(metrics["train_loss"][-1], 4), "seconds": round(sum(metrics["seconds"]))}


def size_table(varied: str, rows: Sequence[Mapping[str, Any]]) -> str:
    """A Markdown table of `size_row`s."""
    def cells(row: Mapping[str, Any]) -> list[str]:
        published = ["" if row[key] is None else f"{row[key]:.1f}"
                     for key in ("published_params_m", "published_gflops", "published_top1")]
        return [row["model"], row[varied], f"{row['params_m']:.2f}", published[0], f"{row['gflops_profiler']:.2f}",
                *published[1:]]

    headings = ("model", varied, "params M", "(published)", "GFLOPs (profiler)", "(published)", "published top-1 %")
    return markdown([headings, *map(cells, rows)])


def trial_table(varied: str, rows: Sequence[Mapping[str, Any]]) -> str:
    """A Markdown table of `trial_row`s."""
    headings = (varied, "params M", "MFLOPs (profiler)", "top-1 %, held out", "training loss")
    lines = [(row[varied], f"{row['params_m']:.3f}", f"{row['mflops_profiler']:.1f}", f"{row['held_out_top1']:.2f}",
              f"{row['train_loss']:.3f}") for row in rows]
    first, narrow = rows[0], " ".join(f"{key}={value}" for key, value in TRIAL_KEYWORDS.items())
    epochs = f"{first['epochs']} epoch{'s' * (first['epochs'] > 1)}"
    return (f"{markdown([headings, *lines])}\n{first['model']} with {narrow}, {epochs} at {first['img_size']} pixels; "
            f"one run each, seed {first['seed']}; {first['held_out_images']} images")


def train(varied: str, output: Path, seed: int, arguments: list[str]) -> list[dict[str, Any]]:
    """Train each setting that has not been; write DIR/VARIED.csv after every run.

    Raises:
        RunError: the trainer failed.
    """
    create(output)
    rows: list[dict[str, Any]] = []
    for setting, keywords in ABLATIONS[varied].trials.items():
        words = {key: str(value) for key, value in {**TRIAL_KEYWORDS, **keywords}.items()}
        folder = output / run_name({key: words[key] for key in keywords}, str(seed))
        run_setting(["-m", "ea_vision", "train-cifar"], folder, words, {"model": TRIAL_MODEL}, str(seed),
                    [*arguments, "--no-test"])
        rows.append(trial_row(varied, setting, folder))
        atomic_write(output / f"{varied}.csv", csv_text(rows).encode())
    return rows


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(usage="%(prog)s [options] {share,position} [-- ARGUMENT ...]", description=__doc__,
                                     formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("varied", choices=tuple(ABLATIONS), help="what is varied")
    parser.add_argument("--csv", type=Path, metavar="FILE", help="also write the sizes to FILE as CSV")
    parser.add_argument("--output", type=Path, metavar="DIR", help="train the narrow network, too; folder of the runs "
                        "and of the table made from them")
    parser.add_argument("--seed", type=int, default=0, help="of the runs (default: %(default)s)")
    argv = list(sys.argv[1:] if argv is None else argv)
    end = argv.index("--") if "--" in argv else len(argv)
    args, arguments = parser.parse_args(argv[:end]), argv[end + 1:]
    if arguments and not args.output:
        raise UsageError(f"arguments of the trainer need --output, got {' '.join(arguments)} without it")
    rows = [size_row(args.varied, *row) for row in ABLATIONS[args.varied].rows]
    if args.csv:
        create(args.csv.parent)
        atomic_write(args.csv, csv_text(rows).encode())
    print(size_table(args.varied, rows), flush=True)
    if args.output:
        signal.signal(signal.SIGTERM, stop)
        print("", trial_table(args.varied, train(args.varied, args.output, args.seed, arguments)), sep="\n")
    return 0
