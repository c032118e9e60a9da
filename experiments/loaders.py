"""Measure images per second of every loader on the same images, and the share of time that a step waits for images.

    python -m experiments.loaders loaders.csv --data-dir DIR --workers 8 --rounds 5

Training batches (random crop, flip, normalised) come from timm's loader (set up as in its train script, but without
colour jitter), from ea_vision's loader of image files, and from FFCV files of the same images: all as JPEG, half as
JPEG, and all as pixels. Each loader runs in a separate process with the same number of workers. A few images are
repeated to make a long epoch, whose start is not timed. In every round the loaders run one after another; the CSV
has medians.

The step stands for an accelerator that takes `--rate` images per second: it sleeps, so that the loader has the cores.
With image files it also waits for their normalisation, which a GPU would do.
"""

import argparse
import multiprocessing
import os
import tempfile
import time
from collections.abc import Iterator
from multiprocessing.connection import Connection
from pathlib import Path
from typing import NamedTuple

import numpy as np
import pandas as pd
import timm
import timm.data
import torch

from ea_vision.base.provenance import hardware
from ea_vision.data.bad_images import BadImages
from ea_vision.data.beton import Beton
from ea_vision.data.ffcv import BetonTrainLoader
from ea_vision.data.image_files import ImageFiles
from ea_vision.data.imagenet import ImageTrainLoader, train_transform
from ea_vision.data.splits import find_split
from ea_vision.data.write_ffcv import write_beton

JPEG_SHARES = (1.0, 0.5, 0.0)  # of FFCV files
EPOCH = 200_000  # images at least
MEAN = timm.data.IMAGENET_DEFAULT_MEAN
STD = timm.data.IMAGENET_DEFAULT_STD


class Target(NamedTuple):
    """A loader to measure: its name in the table, its kind, what it reads, and the size of that."""

    name: str
    kind: str
    path: str
    mib: float


class Repeated:
    """A timm reader or an image source, repeated to `length` items."""

    def __init__(self, items, length: int = EPOCH):
        self.items = items
        self.length = length

    def __len__(self) -> int:
        return self.length

    def __getitem__(self, index: int):
        return self.items[index % len(self.items)]

    def read(self, index: int):
        return self.items.read(index % len(self.items))


def batches(kind: str, path: str, given: argparse.Namespace):
    """Yield training batches of one loader."""
    common = {
        "batch_size": given.batch_size,
        "device": torch.device(given.device),
        "mean": MEAN,
        "std": STD,
    }
    if kind == "timm":
        dataset = timm.data.create_dataset(
            "", str(find_split(Path(path), "train", or_root=True)), search_split=False
        )
        dataset.reader = Repeated(dataset.reader)
        yield from timm.data.create_loader(
            dataset,
            (3, given.img_size, given.img_size),
            is_training=True,
            color_jitter=None,
            hflip=0.5,
            interpolation="bilinear",
            num_workers=given.workers,
            **common,
        )
        return
    common |= {
        "img_size": given.img_size,
        "workers": given.workers,
        "seed": 0,
        "bad_images": BadImages(0),
    }
    if kind == "files":
        source = ImageFiles(find_split(Path(path), "train", or_root=True))
        loader = ImageTrainLoader(Repeated(source), transform=train_transform, **common)
        yield from loader.batches(0)
        return
    source = Beton(Path(path))
    source.labels = np.resize(source.labels, EPOCH)
    source.table = np.resize(source.table, (EPOCH, 5))
    yield from BetonTrainLoader(source, scale=(0.08, 1), hflip=0.5, **common).batches(0)


def measure(loader, given: argparse.Namespace) -> dict[str, float]:
    """Draw batches as fast as possible for `seconds`, then for the same time with a step between them."""
    for _ in range(3 + 2 * given.workers):  # skip batches that were prefetched
        next(loader)
    images = 0
    start = time.perf_counter()
    while time.perf_counter() - start < given.seconds:
        images += len(next(loader)[0])
    rate = images / (time.perf_counter() - start)
    waited = 0.0
    start = time.perf_counter()
    while time.perf_counter() - start < given.seconds:
        request_time = time.perf_counter()
        next(loader)
        waited += time.perf_counter() - request_time
        time.sleep(given.batch_size / given.rate)
    return {"rate": rate, "waits_percent": 100 * waited / (time.perf_counter() - start)}


def serve(connection: Connection, kind: str, path: str, given: argparse.Namespace) -> None:
    """Measure one loader in this separate process whenever a message arrives; None ends it."""
    torch.set_num_threads(1)
    loader = batches(kind, path, given)
    next(loader)
    connection.send(None)
    while connection.recv():
        connection.send(measure(loader, given))
    os._exit(0)  # without waiting for timm's workers


def targets_of(folder: Path, given: argparse.Namespace) -> Iterator[Target]:
    """Write the FFCV files into a folder, and yield what is measured."""
    images = find_split(Path(given.data_dir), "train", or_root=True)
    source = ImageFiles(images)
    size = sum(file.stat().st_size for file in images.rglob("*") if file.is_file()) / 2**20
    yield Target("timm's, files", "timm", given.data_dir, size)
    yield Target("ours, files", "files", given.data_dir, size)
    for share in JPEG_SHARES:
        out = folder / f"{share}.beton"
        write_beton(source, out, jpeg_share=share, max_size=given.max_size, workers=given.workers)
        name = f"FFCV, `--jpeg-share {share:g}`"
        yield Target(name, "ffcv", str(out), out.stat().st_size / 2**20)


def measure_in_turns(targets: list[Target], given: argparse.Namespace) -> pd.DataFrame:
    """Return one row per loader: medians over rounds in which the loaders run one after another."""
    served: dict[str, Connection] = {}
    context = multiprocessing.get_context("spawn")
    for target in targets:
        served[target.name], theirs = context.Pipe()
        arguments = (theirs, target.kind, target.path, given)
        context.Process(target=serve, args=arguments).start()
        theirs.close()  # else recv would wait for ever once the process has ended
        served[target.name].recv()
    turns = []
    for _ in range(given.rounds):
        for name, connection in served.items():
            connection.send(True)
            turns.append({"loader": name, **connection.recv()})
    for connection in served.values():
        connection.send(None)
    measured = (
        pd.DataFrame(turns)
        .groupby("loader", sort=False)
        .agg(
            images_per_s=("rate", "median"),
            least=("rate", "min"),
            most=("rate", "max"),
            waits_percent=("waits_percent", "median"),
        )
    )
    measured.insert(0, "mib", [target.mib for target in targets])
    return measured.round().astype(int).reset_index()


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("csv", type=Path)
    parser.add_argument("--data-dir", required=True, help="folder with train, or of class folders")
    parser.add_argument(
        "--workers", type=int, default=os.cpu_count(), help="processes or threads that decode"
    )
    parser.add_argument("--batch-size", type=int, default=64)
    parser.add_argument("--img-size", type=int, default=224)
    parser.add_argument(
        "--max-size", type=int, default=500, help="longest side in the FFCV files, in pixels"
    )
    parser.add_argument(
        "--rate", type=float, default=1000.0, help="images per second that the step takes"
    )
    parser.add_argument(
        "--seconds", type=float, default=1.5, help="duration of each of the two measurements"
    )
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--device", default="cpu")
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        rows = measure_in_turns(list(targets_of(Path(folder), args)), args)
    under = {
        "rate": args.rate,
        "workers": args.workers,
        "batch_size": args.batch_size,
        "img_size": args.img_size,
        "rounds": args.rounds,
        "torch": torch.__version__,
        "timm": timm.__version__,
        "hardware": hardware(torch.device(args.device), 1),
    }
    rows.assign(**under).to_csv(args.csv, index=False)
    print(rows.to_string(index=False))


if __name__ == "__main__":
    main()
