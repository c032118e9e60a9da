"""Measure what it costs that worker processes are spawned (macOS, Windows) instead of forked (Linux).

    python -m experiments.spawned_workers spawned.csv --data-dir DIR

An epoch reads the images once as a training does, and once as an evaluation does. Fork and spawn take turns; the CSV
has the seconds of every epoch and round. The first epoch starts the workers, the others use them again.
"""

import argparse
import time
from contextlib import closing
from pathlib import Path

import pandas as pd
import timm.data
import torch

from ea_vision.base.provenance import hardware
from ea_vision.data import imagenet
from ea_vision.data.bad_images import BadImages
from ea_vision.data.image_files import ImageFiles
from ea_vision.data.scaling import Scaling
from ea_vision.data.splits import find_split

METHODS = ("fork", "spawn")


def epochs_in_seconds(source, start_method: str, options: argparse.Namespace) -> list[float]:
    """Return the seconds of each epoch whose workers begin by a start method of multiprocessing."""
    imagenet.start_method = lambda: start_method
    common = {
        "batch_size": options.batch_size,
        "device": torch.device("cpu"),
        "mean": timm.data.IMAGENET_DEFAULT_MEAN,
        "std": timm.data.IMAGENET_DEFAULT_STD,
        "seed": 0,
        "img_size": options.img_size,
        "workers": options.workers,
        "bad_images": BadImages(0),
    }
    scaling = Scaling.cropped(options.img_size, options.img_size * 8 // 7)
    train = imagenet.ImageTrainLoader(source, transform=imagenet.train_transform, **common)
    evaluation = imagenet.ImageEvalLoader(source, transform=lambda _: scaling.pixels, **common)
    seconds = []
    with closing(train), closing(evaluation):
        for epoch in range(options.epochs):
            start = time.perf_counter()
            for _ in train.batches(epoch):
                pass
            for _ in evaluation.batches():
                pass
            seconds.append(time.perf_counter() - start)
    return seconds


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("csv", type=Path)
    parser.add_argument("--data-dir", required=True, help="folder with train, or of class folders")
    parser.add_argument("--workers", type=int, default=2, help="of each of the two loaders")
    parser.add_argument("--batch-size", type=int, default=32)
    parser.add_argument("--img-size", type=int, default=224)
    parser.add_argument("--epochs", type=int, default=3)
    parser.add_argument("--rounds", type=int, default=3)
    options = parser.parse_args()
    source = ImageFiles(find_split(Path(options.data_dir), "train", or_root=True))
    rows = []
    for round_number in range(options.rounds):
        for method in METHODS:
            for epoch, seconds in enumerate(epochs_in_seconds(source, method, options)):
                rows.append(
                    {"method": method, "round": round_number, "epoch": epoch, "seconds": seconds}
                )
    seconds = pd.DataFrame(rows).round(2)
    seconds.to_csv(options.csv, index=False)
    print(seconds.groupby(["epoch", "method"]).seconds.median().unstack())
    machine = hardware(torch.device("cpu"), 2 * options.workers)
    print(f"{len(source)} images, {machine}, torch {torch.__version__}")


if __name__ == "__main__":
    main()
