"""Split the labelled scenes into class folders: 13,000 photos for training, 1,500 for validation, 2,534 for the test.

    python experiments/scenes/split.py FOLDER OUT

FOLDER is "train-scene classification" of github.com/ndb796/Scene-Classification-Dataset (CC0): train.csv and the folder
train of photos, most of them 150 x 150 pixels. OUT gets train, validation and test, each with one folder per class. The
split depends on train.csv alone, so it is the same on every machine. Photos are linked where the disk allows it, else
copied.
"""

import argparse
import csv
import os
import random
import shutil
import sys
from pathlib import Path

CLASSES = (
    "buildings",
    "forest",
    "glacier",
    "mountain",
    "sea",
    "street",
)  # in the order of train.csv's labels
SIZES = {"train": 13_000, "validation": 1_500}  # test: the rest
SEED = 0


def read_labels(path: Path) -> dict[str, str]:
    """Return the class of every labelled photo by its file name, in the file's order.

    Raises:
        ValueError: a row without a name or with another label than 0 to 5.
    """
    labels = {}
    with path.open(newline="") as file:
        for row in csv.DictReader(file):
            name = row.get("image_name")
            label = row.get("label")
            if not name or label not in {str(index) for index in range(len(CLASSES))}:
                raise ValueError(
                    f"{path}: an image_name and a label from 0 to {len(CLASSES) - 1} are required, "
                    f"got {row}"
                )
            labels[name] = CLASSES[int(label)]
    return labels


def split(names: list[str]) -> dict[str, list[str]]:
    """Return the file names of train, validation and test: a fixed shuffle of the sorted names, cut at SIZES."""
    order = sorted(names)
    random.Random(SEED).shuffle(order)
    parts = {}
    start = 0
    for part, size in SIZES.items():
        parts[part] = order[start : start + size]
        start += size
    return {**parts, "test": order[start:]}


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("folder", type=Path)
    parser.add_argument("out", type=Path)
    args = parser.parse_args(argv)
    try:
        labels = read_labels(args.folder / "train.csv")
    except (OSError, ValueError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    for part, names in split(list(labels)).items():
        for name in names:
            target = args.out / part / labels[name] / name
            target.parent.mkdir(parents=True, exist_ok=True)
            target.unlink(missing_ok=True)
            try:
                os.link(args.folder / "train" / name, target)
            except OSError:
                shutil.copyfile(args.folder / "train" / name, target)
        print(f"{part}: {len(names)} photos")
    return 0


if __name__ == "__main__":
    sys.exit(main())
