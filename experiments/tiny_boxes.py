"""Write COCO JSON for Tiny-ImageNet's boxes: one object per image of 64 x 64 pixels, 200 classes.

    python experiments/tiny_boxes.py tiny-imagenet-200 tiny-boxes
    python experiments/tiny_boxes.py tiny-imagenet-200 tiny-one --classes 20 --as-one object --per-class 250 --mean-box

TINY/train/CLASS/CLASS_boxes.txt and TINY/val/val_annotations.txt become FOLDER/train.json and val.json; the images stay
where they are, and FOLDER/train and FOLDER/val are links to them. Corners in Tiny-ImageNet's files are pixels inside
the box, so a box from 0 to 63 is 64 pixels wide. --mean-box evaluates the mean training box of every class, predicted
without looking at the image: a detector must beat it. Its metrics go to FOLDER/mean_box.csv.
"""

import argparse
import json
import sys
from collections import Counter, defaultdict
from collections.abc import Iterator, Sequence
from itertools import product
from pathlib import Path

import numpy as np
import pandas as pd
from PIL import Image

from ea_vision.detection.coco import CocoFolder
from ea_vision.detection.evaluate import coco_metrics

Row = tuple[str, str, list[int]]  # name below the split's folder, class, [left, top, right, bottom]


def rows_of(tiny: Path, classes: Sequence[str], per_class: int) -> Iterator[tuple[str, list[Row]]]:
    """Yield the rows of each split: the first `per_class` training images of each class (0: all), then validation."""
    train = []
    for label in classes:
        rows = _tab_separated(tiny / "train" / label / f"{label}_boxes.txt")
        for name, *box in rows[: per_class or None]:
            train.append((f"{label}/images/{name}", label, [int(side) for side in box]))
    yield "train", train
    val = []
    for name, label, *box in _tab_separated(tiny / "val" / "val_annotations.txt"):
        if label in classes:
            val.append((f"images/{name}", label, [int(side) for side in box]))
    yield "val", val


def _tab_separated(path: Path) -> list[list[str]]:
    return [line.split("\t") for line in path.read_text(encoding="utf-8").split("\n") if line]


def categories_of(tiny: Path, classes: Sequence[str]) -> list[dict]:
    """Return one category per class, named by its first word, and by its WordNet ID if several share this word."""
    text = (tiny / "words.txt").read_text(encoding="utf-8")
    words = dict(line.split("\t", 1) for line in text.splitlines())
    names = [words[label].split(",")[0] for label in classes]
    uses = Counter(names)
    categories = []
    for number, (label, name) in enumerate(zip(classes, names, strict=True), start=1):
        shown = f"{name} ({label})" if uses[name] > 1 else name
        categories.append({"id": number, "name": shown})
    return categories


def convert(
    tiny: Path, out: Path, classes: Sequence[str], as_one: str = "", per_class: int = 0
) -> None:
    """Write `out`/{train,val}.json and the links beside them.

    Args:
        classes: WordNet IDs.
        as_one: the name of a single category for all classes; "": one category per class, named by its first word.
    """
    if as_one:
        categories = [{"id": 1, "name": as_one}]
        id_of = dict.fromkeys(classes, 1)
    else:
        categories = categories_of(tiny, classes)
        id_of = {label: number for number, label in enumerate(classes, start=1)}
    out.mkdir(parents=True, exist_ok=True)
    for split, rows in rows_of(tiny, classes, per_class):
        images = []
        annotations = []
        for number, (name, label, (left, top, right, bottom)) in enumerate(rows, start=1):
            width, height = Image.open(tiny / split / name).size
            images.append({"id": number, "file_name": name, "width": width, "height": height})
            box_width = right - left + 1
            box_height = bottom - top + 1
            if min(box_width, box_height) > 0:
                annotations.append(
                    {
                        "id": number,
                        "image_id": number,
                        "category_id": id_of[label],
                        "bbox": [left, top, box_width, box_height],
                        "area": box_width * box_height,
                        "iscrowd": 0,
                    }
                )
        if not (out / split).exists():
            (out / split).symlink_to((tiny / split).resolve())
        content = {"images": images, "annotations": annotations, "categories": categories}
        (out / f"{split}.json").write_text(json.dumps(content))
        print(f"written: {out / split}.json with {len(images)} images")


def mean_box_metrics(root: Path) -> dict[str, float]:
    """Return COCO's metrics, in percent, of a baseline that does not look at the image: it predicts every class's mean
    training box, with the class's frequency as its score."""
    train = CocoFolder(root, "train")
    val = CocoFolder(root, "val")
    boxes = defaultdict(list)
    for annotations in train.annotations:
        for row in annotations:
            boxes[row["category_id"]].append(row["bbox"])
    guesses = []
    for category, of_class in boxes.items():
        box = np.mean(of_class, 0).tolist()
        score = len(of_class) / len(train)
        guesses.append({"category_id": category, "bbox": box, "score": score})
    rows = [{"image_id": image["id"], **guess} for image, guess in product(val.images, guesses)]
    return coco_metrics(val.ground_truth(), rows)[0]


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("tiny", metavar="TINY", type=Path, help="Tiny-ImageNet's folder")
    parser.add_argument(
        "out", metavar="FOLDER", type=Path, help="folder to write to; may be TINY itself"
    )
    parser.add_argument(
        "--classes", default="200", metavar="N|ID,ID,..", help="the first N classes, or these"
    )
    parser.add_argument(
        "--as-one",
        default="",
        metavar="NAME",
        help="merge all classes into one category of this name",
    )
    parser.add_argument(
        "--per-class", type=int, default=0, metavar="N", help="training images per class (0: all)"
    )
    parser.add_argument(
        "--mean-box", action="store_true", help="write the metrics of the mean training box"
    )
    args = parser.parse_args(argv)
    folders = sorted(path.name for path in args.tiny.glob("train/*") if path.is_dir())
    classes = folders[: int(args.classes)] if args.classes.isdecimal() else args.classes.split(",")
    convert(args.tiny, args.out, classes, args.as_one, args.per_class)
    if args.mean_box:
        metrics = mean_box_metrics(args.out)
        pd.DataFrame([metrics]).round(3).to_csv(args.out / "mean_box.csv", index=False)
        print(f"written: {args.out / 'mean_box.csv'}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
