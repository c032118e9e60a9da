"""Images per second and peak memory of each loader on given images, in one run, as a table.

Training batches (random crop, flip, normalised) are drawn for some seconds from timm's loader, as its train script
makes it, from the image loaders of this project (processes, and threads) and, where FFCV is installed, from FFCV files
written for it: as pixels, half JPEG, and JPEG. Each loader has a process of its own, with the same number of workers.
Few images are repeated to make an epoch as long as ImageNet's; its start is not timed. The loaders take turns in every
round, and the medians of the rounds are shown. Processor time for each image hardly depends on what else a machine
does; images per second do.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import os
import platform
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import numpy as np
import timm.data
import torch

from ea_vision.base.errors import RunError, UsageError
from ea_vision.base.process_tree import PeakMemory, tree_seconds
from ea_vision.data.bad_images import BadImages
from ea_vision.data.ffcv import BetonTrainLoader, open_beton
from ea_vision.data.imagenet import ImageSource, ImageTrainLoader, train_transform
from ea_vision.data.splits import find_split
from ea_vision.data.threads import FileTrainLoader
from ea_vision.data.write_ffcv import write_beton

EXAMPLES = """\
examples:
  ea-vision benchmark --loaders --data-dir /data/imagenet --workers 8
  ea-vision benchmark --loaders --data-dir DIR --beton train.beton         # a file that is there already
  ea-vision benchmark --loaders --data-dir DIR --img-size 64 --seconds 5
"""
WRITTEN = {"ffcv, pixels": 0.0, "ffcv, half JPEG": 0.5, "ffcv, JPEG": 1.0}  # share of JPEG
EPOCH = 200_000  # images at least


class Repeated:
    """`length` items: those of a timm reader, of an image source or of its files, over and over."""

    def __init__(self, items: Any, length: int):
        self.items, self.length = items, length

    def __len__(self) -> int:
        return self.length

    def __getitem__(self, index: int):
        return self.items[index % len(self.items)]

    def read(self, index: int):
        return self.items.read(index % len(self.items))

    def open(self, index: int):
        return self.items.open(index % len(self.items))

    def describe(self, index: int) -> str:
        return self.items.describe(index % len(self.items))


class RepeatedFiles(Repeated):
    """The images of a source, over and over, for threads that decode its files."""

    def __init__(self, items: ImageSource, length: int):
        super().__init__(items, length)
        self.files, self.exif_rotation = Repeated(items.files, length), items.exif_rotation
        self.files.targets = np.resize(items.files.targets, length)


class TimmLoader:
    """timm's loader of training images, as its train script makes it, without the colour jitter."""

    def __init__(self, split: Path, length: int, *, img_size: int, device: torch.device, seed: int, **common):
        del seed  # timm's is global
        dataset = timm.data.create_dataset("", str(split), search_split=False)
        dataset.reader = Repeated(dataset.reader, length)
        self.loader = timm.data.create_loader(
            dataset, (3, img_size, img_size), is_training=True, scale=(0.08, 1), hflip=0.5, color_jitter=None,
            interpolation="bilinear", num_workers=common.pop("workers"), device=device, **common)

    def batches(self, epoch: int):
        yield from self.loader


def measure(loader, seconds: float) -> dict[str, float]:
    """Draw training batches for some seconds, after the first of an epoch, or to its end."""
    images = 0
    with PeakMemory() as memory:
        batches = loader.batches(0)
        next(batches)
        start, cpu = time.perf_counter(), tree_seconds(os.getpid())
        now = start
        for batch in batches:
            now = time.perf_counter()
            images += len(batch[0])
            if now - start >= seconds:
                break
        cpu = tree_seconds(os.getpid()) - cpu
    return {"images_per_s": images / (now - start), "cpu_ms": 1000 * cpu / images, "memory_mib": memory.peak / 2**20}


def _measure_one(kind: str, path: str, given: argparse.Namespace) -> dict[str, float]:
    common = {"img_size": given.img_size, "mean": (0.485, 0.456, 0.406), "std": (0.229, 0.224, 0.225), "seed": 0,
              "device": torch.device(given.device), "batch_size": given.batch_size, "workers": given.workers}
    if kind == "beton":
        source = open_beton(Path(path))
        for table in ("images", "labels", "sizes", "pages", "heights", "widths", "unverified"):
            setattr(source, table, np.resize(getattr(source, table), max(EPOCH, len(source))))  # repeats them
        return measure(BetonTrainLoader(source, scale=(0.08, 1), hflip=0.5, os_cache=True, bad_images=BadImages(0),
                                        **common), given.seconds)
    source = ImageSource("", find_split(Path(path), "train", or_root=True), "train")
    if kind == "timm":
        return measure(TimmLoader(Path(source.name), max(EPOCH, len(source)), **common), given.seconds)
    if kind == "threads":
        files = RepeatedFiles(source, max(EPOCH, len(source)))
        return measure(FileTrainLoader(files, scale=(0.08, 1), hflip=0.5, bad_images=BadImages(0), **common),
                       given.seconds)
    loader = ImageTrainLoader(Repeated(source, max(EPOCH, len(source))), transform=train_transform(given.img_size),
                              bad_images=BadImages(0), **common)
    return measure(loader, given.seconds)


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, epilog=EXAMPLES,
                                     formatter_class=argparse.RawDescriptionHelpFormatter, allow_abbrev=False)
    parser.add_argument("--data-dir", required=True, help="folder with train (else of class folders itself)")
    parser.add_argument("--beton", nargs="+", default=[], metavar="FILE", help="FFCV files to measure (default: write "
                        "some of the same images)")
    parser.add_argument("--workers", type=int, default=os.cpu_count(), help="processes or threads that decode, "
                        "0: none besides the one that trains (default: one per core)")
    parser.add_argument("--batch-size", type=int, default=64, help="images (default: %(default)s)")
    parser.add_argument("--img-size", type=int, default=224, help="side in pixels (default: %(default)s)")
    parser.add_argument("--max-size", type=int, default=500, help="longest side in the files written here, in pixels "
                        "(default: %(default)s)")
    parser.add_argument("--seconds", type=float, default=10, help="time per loader (default: %(default)s)")
    parser.add_argument("--rounds", type=int, default=1, help="rounds in which the loaders take turns (default: "
                        "%(default)s)")
    parser.add_argument("--device", default="cpu", help="where batches are wanted (default: %(default)s)")
    parser.add_argument("--only", nargs=2, metavar=("KIND", "PATH"), help=argparse.SUPPRESS)
    given = parser.parse_args(argv)
    if given.only:
        print(json.dumps(_measure_one(*given.only, given)))
        return 0
    if given.workers < 0:
        raise UsageError(f"--workers must not be negative, got {given.workers}")
    for name in ("batch_size", "img_size", "seconds", "rounds"):
        if getattr(given, name) <= 0:
            raise UsageError(f"--{name.replace('_', '-')} must be positive, got {getattr(given, name)}")
    source = ImageSource("", find_split(Path(given.data_dir), "train", or_root=True), "train")
    targets = [("timm", "timm", given.data_dir), ("image files", "images", given.data_dir),
               ("image files, threads", "threads", given.data_dir)]
    with tempfile.TemporaryDirectory() as folder:
        if given.beton:
            targets += [(Path(path).name, "beton", path) for path in given.beton]
        elif importlib.util.find_spec("ffcv") is None:
            print("FFCV is not installed: the loaders of image files alone are measured")
        else:
            for number, (name, share) in enumerate(WRITTEN.items()):
                path = Path(folder) / f"{number}.beton"
                write_beton(source, path, jpeg_share=share, max_size=given.max_size, workers=given.workers)
                targets.append((name, "beton", str(path)))
        rounds = [[_in_own_process(kind, path, argv) for _, kind, path in targets] for _ in range(given.rounds)]
        rows = [(name, Path(path), {key: statistics.median(found[key] for found in of_target) for key in of_target[0]})
                for (name, _, path), of_target in zip(targets, zip(*rounds, strict=True), strict=True)]
        sizes = [path.stat().st_size / 2**20 if path.is_file() else None for _, path, _ in rows]
    print(f"{len(source)} images, {given.img_size} pixels, batch {given.batch_size}, {given.workers} worker(s), "
          f"{given.rounds} x {given.seconds:g} s each, {os.cpu_count()} cores, {platform.machine()}, "
          f"torch {torch.__version__}")
    print(f"{'loader':<22}{'images/s':>10}{'ratio':>8}{'CPU ms':>9}{'ratio':>8}{'peak memory':>14}{'file':>12}")
    for (name, _, result), size in zip(rows, sizes, strict=True):
        timms = rows[0][2]
        print(f"{name:<22}{result['images_per_s']:>10.0f}{result['images_per_s'] / timms['images_per_s']:>8.2f}"
              f"{result['cpu_ms']:>9.2f}{timms['cpu_ms'] / result['cpu_ms']:>8.2f}{result['memory_mib']:>10.0f} MiB"
              + (f"{size:>8.0f} MiB" if size is not None else ""))
    return 0


def _in_own_process(kind: str, path: str, argv: list[str] | None) -> dict[str, float]:
    command = [sys.executable, "-m", "ea_vision", "benchmark", "--loaders", *(sys.argv[1:] if argv is None else argv)]
    done = subprocess.run([*command, "--only", kind, path], stdout=subprocess.PIPE, text=True)
    if done.returncode:
        raise RunError(f"the measurement of {path} ended with code {done.returncode}")
    return json.loads(done.stdout.splitlines()[-1])
