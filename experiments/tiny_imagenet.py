"""Runs on Tiny-ImageNet (100,000 photos of 64 pixels, 200 classes): beside timm's train.py, and with attention.

    python experiments/tiny_imagenet.py timm DIR OUT --train-script pytorch-image-models/train.py
    python experiments/tiny_imagenet.py attention DIR OUT

DIR is the data set as it comes. OUT gets folders of links to a part of it, the run folders, what the runs print, and a
table, TRIAL.csv. Runs that are in the table are not repeated; one of ours that was cut off continues (its seconds are
then those of the rest).

timm: resnet18 for 5 epochs on 60 images of each of the 200 classes, tested once, after the last epoch, on all 10,000
images, by our trainer and timm's in turns.
attention: resnet34 and its AA, PA and EA forms, half as wide, for 3 epochs on 160 images of each of 20 classes (every
tenth), tested once on their 1,000 images.

Seconds are of the whole command, processor seconds too, with all its processes; images/s are of training alone, as the
trainers give them; memory is the most that the processes of a run had at once, shared pages counted once.
"""
import argparse
import contextlib
import csv
import os
import re
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import psutil

SEEDS = (0, 1)
BATCH, LR, WEIGHT_DECAY, SMOOTHING, CROP = 64, 0.05, 5e-4, 0.1, 0.35
SMALL = "channels=[32,64,128,256] stem_stride=2"  # half as wide
ATTENTION = f"{SMALL} num_heads=4 img_size=64 map_reduction=4"  # maps of 16x16, 8x8 and 4x4
NETWORKS = {
    "resnet34": ("resnet18_cifar", f"layers=[3,4,6,3] {SMALL}"),  # timm's ResNet with another stem
    "aa_resnet34": ("aa_resnet34", ATTENTION),
    "pa_aa_resnet34": ("pa_aa_resnet34", ATTENTION),
    "ea_aa_resnet34": ("ea_aa_resnet34", ATTENTION),
}
Run = tuple[str, int, Callable[[], dict[str, Any]]]  # name, seed, what makes the row


def classes_of(tiny: Path) -> list[str]:
    return sorted(path.name for path in (tiny / "train").iterdir())


def link_part(tiny: Path, part: Path, classes: list[str], images: int) -> None:
    """Make `part` a folder of links: train and val, each CLASS/x.JPEG; `images` of each class to train on."""
    named = [line.split("\t")[:2] for line in (tiny / "val" / "val_annotations.txt").read_text().splitlines()]
    wanted = [("train", name, image) for name in classes
              for image in sorted((tiny / "train" / name / "images").iterdir())[:images]]
    wanted += [("val", name, tiny / "val" / "images" / image) for image, name in named if name in set(classes)]
    for split, name, image in wanted:
        link = part / split / name / image.name
        link.parent.mkdir(parents=True, exist_ok=True)
        if not link.is_symlink():
            link.symlink_to(image.resolve())


def memory_of(pid: int) -> int:
    """Return bytes of main memory of a process and those that it started, shared pages divided among their users."""
    total = 0
    with contextlib.suppress(psutil.NoSuchProcess):
        for process in (psutil.Process(pid), *psutil.Process(pid).children(recursive=True)):
            with contextlib.suppress(psutil.NoSuchProcess, psutil.AccessDenied):
                total += process.memory_full_info().pss
    return total


def measured(command: list[str], printed: Path) -> dict[str, float]:
    """Run a command: seconds, processor seconds and MiB of memory of its processes.

    Raises:
        SystemExit: it failed; what it printed is in `printed`.
    """
    start = time.perf_counter()
    with printed.open("w") as file:
        running = subprocess.Popen(command, stdout=file, stderr=subprocess.STDOUT)
        ended, peak = 0, 0
        while not ended:
            peak = max(peak, memory_of(running.pid))
            time.sleep(0.5)
            ended, status, used = os.wait4(running.pid, os.WNOHANG)
    if status:
        raise SystemExit(f"{' '.join(command)} ended with {os.waitstatus_to_exitcode(status)}: see {printed}")
    return {"seconds": time.perf_counter() - start, "processor_seconds": used.ru_utime + used.ru_stime,
            "memory_mib": peak / 2**20}


def rows_of(path: Path) -> list[dict[str, str]]:
    with path.open() as file:
        return list(csv.DictReader(file))


def ours(out: Path, name: str, model: str, seed: int, epochs: int, *options: str, batch: int = BATCH) -> dict[str, Any]:
    """One run of our trainer; the rate goes with the batch, the warm-up takes a fifth of the updates."""
    folder = out / f"{name}-{seed}"
    recipe = (f"--recipe none --epochs {epochs} --eval-epochs {epochs} --batch-size {batch} --opt sgd --lr {LR} "
              f"--lr-base-size {BATCH} --momentum 0.9 --weight-decay {WEIGHT_DECAY} --sched cosine --warmup-epochs 20% "
              f"--smoothing {SMOOTHING} --img-size 64 --eval-resize 64 --crop-scale {CROP} --amp bfloat16 "
              f"--channels-last --workers 1 --device cpu --seed {seed} --checkpoint-steps 200")
    command = [sys.executable, "-m", "ea_vision", "train-imagenet", "--model", model, *recipe.split(),
               "--output", str(folder), *options]
    used = measured(command, out / f"{folder.name}.log")
    rows = rows_of(folder / "metrics.csv")
    images = int(rows[0]["step"]) * batch
    trained = sum(images / float(row["images_per_s"]) for row in rows)
    return {"top1": rows[-1]["top1"], "top5": rows[-1]["top5"], "train_loss": rows[-1]["train_loss"],
            "images_per_s": images * len(rows) / trained, **used}


def timms(out: Path, script: Path, data: Path, seed: int, epochs: int) -> dict[str, Any]:
    """One run of timm's train.py with the same recipe; its warm-up is the first epoch."""
    folder, classes = out / f"timm-{seed}", len(list((data / "train").iterdir()))
    recipe = (f"--epochs {epochs - 1} --val-interval {epochs} -b {BATCH} -vb 500 --opt sgd --lr {LR} --momentum 0.9 "
              f"--weight-decay {WEIGHT_DECAY} --sched cosine --sched-on-updates --warmup-epochs 1 --warmup-prefix "
              f"--warmup-lr 0 --smoothing {SMOOTHING} --img-size 64 --crop-pct 1.0 --scale {CROP} 1.0 --color-jitter 0 "
              f"--train-interpolation bilinear --interpolation bilinear --amp --amp-dtype bfloat16 --channels-last "
              f"--workers 1 --device cpu --seed {seed}")
    command = [sys.executable, str(script), "--data-dir", str(data), "--model", "resnet18", "--num-classes",
               str(classes), *recipe.split(), "--output", str(out), "--experiment", folder.name]
    printed = out / f"{folder.name}.log"
    used = measured(command, printed)
    row = rows_of(folder / "summary.csv")[-1]
    # Train: 0 [ 311/312 (100%)] ... Time: 0.2s, 300/s  (0.21s, 301/s): the mean over the epoch so far
    means = re.findall(r"Train: \d+ \[ *(\d+)/(\d+) .*?\(\d+\.\d+s, +([\d.]+)/s\)", printed.read_text())
    of_epochs = [float(rate) for step, steps, rate in means if int(step) + 1 == int(steps)]
    if len(of_epochs) != epochs:
        raise SystemExit(f"{printed} must have {epochs} epochs, got {len(of_epochs)}")
    return {"top1": row["eval_top1"], "top5": row["eval_top5"], "train_loss": row["train_loss"],
            "images_per_s": len(of_epochs) / sum(1 / rate for rate in of_epochs), **used}


def beside_timm(given: argparse.Namespace) -> Iterator[Run]:
    """The comparison's runs. The trainers take turns."""
    data = given.out / f"200x{given.images}"
    link_part(given.tiny, data, classes_of(given.tiny), given.images)
    for seed in SEEDS:
        pair = [("ours", partial(ours, given.out, "ours", "resnet18", seed, given.epochs, "--data-dir", str(data))),
                ("timm", partial(timms, given.out, given.train_script, data, seed, given.epochs))]
        for name, run in pair if seed % 2 == 0 else pair[::-1]:
            yield name, seed, run


def with_attention(given: argparse.Namespace) -> Iterator[Run]:
    """The runs of the networks."""
    data = given.out / f"20x{given.images}"
    link_part(given.tiny, data, classes_of(given.tiny)[::10], given.images)
    for seed in SEEDS:
        for name, (model, keywords) in NETWORKS.items():
            yield name, seed, partial(
                ours, given.out, name, model, seed, given.epochs, "--data-dir", str(data),
                "--model-kwargs", *keywords.split(), batch=32)


TRIALS = {"timm": (beside_timm, 60, 5), "attention": (with_attention, 160, 3)}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("trial", choices=TRIALS)
    parser.add_argument("tiny", type=Path, metavar="DIR", help="Tiny-ImageNet: train, val, wnids.txt")
    parser.add_argument("out", type=Path, metavar="OUT")
    parser.add_argument("--train-script", type=Path, help="timm's train.py, for the trial beside it")
    parser.add_argument("--images", type=int, help="of each class (default: 60 of 200 classes, 160 of 20)")
    parser.add_argument("--epochs", type=int, help="(default: 5; attention 3)")
    given = parser.parse_args()
    if given.trial == "timm" and given.train_script is None:
        parser.error("trial timm needs --train-script, timm's train.py")
    make_runs, of_class, epochs = TRIALS[given.trial]
    given.images, given.epochs = given.images or of_class, given.epochs or epochs
    if given.trial == "timm" and given.epochs != 5:
        parser.error(f"timm's warm-up is an epoch, ours a fifth of them: --epochs must be 5, got {given.epochs}")
    given.out.mkdir(parents=True, exist_ok=True)
    table = given.out / f"{given.trial}.csv"
    done = rows_of(table) if table.exists() else []
    for name, seed, run in make_runs(given):
        which = {"run": name, "seed": str(seed), "epochs": str(given.epochs), "images": str(given.images)}
        if any(which.items() <= row.items() for row in done):
            continue
        row = which | {key: f"{float(value):.5g}" for key, value in run().items()}
        done.append(row)
        with table.open("w", newline="") as file:
            writer = csv.DictWriter(file, list(row))
            writer.writeheader()
            writer.writerows(done)
        print(*row.values(), flush=True)


if __name__ == "__main__":
    main()
