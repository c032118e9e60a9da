"""Fine-tune a pretrained ViT-S/14 on scenes in four ways, five seeds each; see README.md beside this file.

    python experiments/finetune_scenes/run.py SCENES RUNS --weights WEIGHTS.safetensors

SCENES is written by experiments/scenes/split.py. The same command started again skips complete runs and continues
incomplete ones.
"""

import argparse
import json
import os
import sys
from collections.abc import Iterable
from itertools import product
from pathlib import Path

import torch
import torch.nn.functional as F
from safetensors.torch import load_file, save
from torch import Tensor

import ea_vision  # noqa: F401  (registers the models)
from ea_vision.base.errors import UsageError, exit_code
from ea_vision.base.files import atomic_write, csv_text
from ea_vision.engine import train_imagenet
from experiments.learning_curves import read_metrics

SEEDS = 5
PHOTOS = 500  # of each class
EPOCHS = 4
BATCH = 50
SIDE = 112  # pixels
PATCH = 14  # pixels
VIT = {"patch_size": PATCH, "init_values": 1e-5}
WAYS = {  # way of tuning -> model, and options in addition to the common ones
    "plain": ("vit_small_patch16_224", {}, []),
    "gates": ("ea_vit_small_patch16_224", {}, ["--gate-lr", "30"]),
    "residual": ("ea_vit_small_patch16_224", {"evolution": "residual"}, ["--gate-lr", "30"]),
    "conv2d": ("ea_vit_small_patch16_224", {"evolution": "conv2d"}, ["--gate-lr", "30"]),
}


def resized(weights: dict[str, Tensor], patches: int) -> dict[str, Tensor]:
    """Return the weights with the position table (class token and a square of patches) resized to patches x patches."""
    table = weights["pos_embed"]
    side = round((table.shape[1] - 1) ** 0.5)
    if table.shape[1] != side * side + 1:
        raise UsageError(
            f"pos_embed must have a class token and a square of patches, got {tuple(table.shape)}"
        )
    grid = table[:, 1:].unflatten(1, (side, side)).permute(0, 3, 1, 2)
    grid = F.interpolate(grid, size=(patches, patches), mode="bicubic", align_corners=False)
    position_grid = grid.flatten(2).transpose(1, 2)
    return {**weights, "pos_embed": torch.cat([table[:, :1], position_grid], 1).contiguous()}


def start_of(weights: Path, classes: int) -> dict[str, Tensor]:
    """Return the initial weights of all ways: the position table resized, the classifier zero."""
    loaded = resized(load_file(weights), SIDE // PATCH)
    width = loaded["pos_embed"].shape[-1]
    head = {"head.weight": torch.zeros(classes, width), "head.bias": torch.zeros(classes)}
    return {**loaded, **head}


def pick(scenes: Path, folder: Path, photos: int) -> None:
    """Link the first photos of each class of scenes/train into folder/train, all of scenes/validation into folder/val
    and all of scenes/test into folder/test/val."""
    link_photos(scenes / "train", folder / "train", photos)
    link_photos(scenes / "validation", folder / "val")
    link_photos(scenes / "test", folder / "test" / "val")


def link_photos(source: Path, target: Path, count: int | None = None) -> None:
    """Link the first `count` photos of each class (None: all) from one folder of classes into another."""
    classes = sorted(path for path in source.glob("*") if path.is_dir())
    if not classes:
        raise UsageError(f"{source} must have one folder per class: experiments/scenes/split.py")
    for of_class in classes:
        folder = target / of_class.name
        folder.mkdir(parents=True, exist_ok=True)
        for photo in sorted(of_class.iterdir())[:count]:
            if not (folder / photo.name).exists():
                os.link(photo, folder / photo.name)


def arguments(
    way: str, seed: int, data: Path, weights: Path, output: Path, epochs: int, more: list[str]
) -> list[str]:
    """Return the trainer's options."""
    model, kwargs, options = WAYS[way]
    keywords = []
    for name, value in {**VIT, **kwargs}.items():
        keywords.append(f"{name}={value:.5f}" if isinstance(value, float) else f"{name}={value}")
    common = f"--recipe finetune_vit --model {model} --img-size {SIDE} --eval-resize {SIDE} --batch-size {BATCH}"
    where = "--device cpu --amp bfloat16 --workers 1"
    run = f"--epochs {epochs} --seed {seed}"
    paths = ["--pretrained-path", weights, "--data-dir", data, "--output", output]
    return [
        *f"{common} {where} {run}".split(),
        *map(str, paths),
        "--model-kwargs",
        *keywords,
        *options,
        *more,
    ]


def test(output: Path, data: Path) -> float:
    """Return the top-1 in percent of a run's weights on the test photos; each run is tested once."""
    folder = output / "test"
    path = folder / "evaluation.json"
    if not path.exists():
        paths = ["--evaluate", output, "--data-dir", data / "test", "--output", folder]
        train_imagenet.main([*map(str, paths), "--device", "cpu"])
    return json.loads(path.read_text(encoding="utf-8"))["top1"]


def row_of(way: str, seed: int, output: Path, top1: float) -> dict[str, str | int | float]:
    """Return the row of a run for experiments.evidence, with the range of each gate after the last epoch."""
    metrics = read_metrics(output)
    ranges = {}
    for name in ("alpha", "beta"):
        last = [values[-1] for path, values in metrics.items() if f".{name}" in path]
        ranges[name] = f"{min(last):.4f} to {max(last):.4f}" if last else ""
    return {
        "variant": way,
        "seed": seed,
        "test_top1": top1,
        "train_loss": metrics["train_loss"][-1],
        "seconds": round(sum(metrics["seconds"])),
        **ranges,
    }


def tested_runs(runs: Path, ways: Iterable[str], data: Path) -> list[dict[str, str | int | float]]:
    """Return the tested runs of a folder, seed by seed, as rows of the file that experiments.evidence reads."""
    tested = {}
    for report in runs.glob("*/test/evaluation.json"):
        output = report.parents[1]
        way, _, seed = output.name.rpartition("-")
        tested[int(seed), way] = output
    rows = []
    for seed, way in product(sorted({seed for seed, _ in tested}), ways):
        if (seed, way) in tested:
            output = tested[seed, way]
            rows.append(row_of(way, seed, output, test(output, data)))
    return rows


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("scenes", type=Path)
    parser.add_argument("runs", type=Path)
    parser.add_argument(
        "--weights",
        type=Path,
        required=True,
        help="safetensors file with weights of timm's vit_small_patch14_dinov2",
    )
    parser.add_argument(
        "--ways", default=",".join(WAYS), help="ways of tuning to run (default: %(default)s)"
    )
    parser.add_argument("--seeds", type=int, default=SEEDS, help="(default: %(default)s)")
    parser.add_argument(
        "--photos",
        type=int,
        default=PHOTOS,
        help="training photos per class (default: %(default)s)",
    )
    parser.add_argument("--epochs", type=int, default=EPOCHS, help="(default: %(default)s)")
    args, more = parser.parse_known_args(argv)
    ways = args.ways.split(",")
    if not set(ways) <= set(WAYS):
        raise UsageError(f"--ways must be some of {', '.join(WAYS)}, got {args.ways}")
    data = args.runs / "data"
    start = args.runs / "start.safetensors"
    pick(args.scenes, data, args.photos)
    first = save(start_of(args.weights, len(list((data / "train").iterdir()))))
    if not start.exists():
        atomic_write(start, first)
    elif start.read_bytes() != first:
        raise UsageError(f"the runs in {args.runs} began with other weights than {args.weights}")
    for seed in range(args.seeds):
        for way in ways:
            output = args.runs / f"{way}-{seed}"
            code = train_imagenet.main(arguments(way, seed, data, start, output, args.epochs, more))
            if code:
                return code
            test(output, data)
            rows = tested_runs(args.runs, WAYS, data)
            atomic_write(args.runs / "evidence-runs.csv", csv_text(rows).encode())
    return 0


if __name__ == "__main__":
    sys.exit(exit_code(main))
