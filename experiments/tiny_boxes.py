"""Write COCO JSON for Tiny-ImageNet's boxes: one object an image of 64 x 64 pixels, 200 classes.

    python experiments/tiny_boxes.py tiny-imagenet-200 tiny-boxes
    python experiments/tiny_boxes.py tiny-imagenet-200 tiny-one --classes 20 --as-one object --per-class 250 --mean-box

TINY/train/CLASS/CLASS_boxes.txt and TINY/val/val_annotations.txt become FOLDER/train.json and val.json; the images stay
where they are, FOLDER/train and FOLDER/val are links to them. Corners in Tiny-ImageNet's files are pixels of the box,
so a box from 0 to 63 is 64 pixels wide. --mean-box evaluates a guess that looks at no image, every class's mean
training box: what a detector must beat.
"""

import argparse
import json
import sys
from collections import Counter, defaultdict
from collections.abc import Iterator, Sequence
from pathlib import Path

import numpy as np
from PIL import Image

from ea_vision.detection.coco import CocoFolder
from ea_vision.detection.evaluate import coco_metrics

Row = tuple[str, str, list[int]]  # name below the split's folder, class, [left, top, right, bottom]


def rows_of(tiny: Path, classes: Sequence[str], per_class: int) -> Iterator[tuple[str, list[Row]]]:
    """Yield the rows of each split, of the training images the first `per_class` of each class (0: all)."""
    train = []
    for label in classes:
        lines = (tiny / "train" / label / f"{label}_boxes.txt").read_text().split("\n")
        train += [
            (f"{label}/images/{name}", label, list(map(int, box)))
            for name, *box in (line.split("\t") for line in lines[: per_class or None] if line)
        ]
    yield "train", train
    lines = (tiny / "val" / "val_annotations.txt").read_text().split("\n")
    yield (
        "val",
        [
            (f"images/{name}", label, list(map(int, box)))
            for name, label, *box in (line.split("\t") for line in lines if line)
            if label in classes
        ],
    )


def convert(
    tiny: Path, out: Path, classes: Sequence[str], as_one: str = "", per_class: int = 0
) -> None:
    """Write `out`/{train,val}.json and the links beside them.

    Args:
        classes: WordNet IDs.
        as_one: the name of the one category that all of them become; "": each is its own, named by its first word.
    """
    words = dict(line.split("\t", 1) for line in (tiny / "words.txt").read_text().splitlines())
    names = {label: words[label].split(",")[0] for label in classes}
    shared = Counter(names.values())
    id_of = {label: 1 if as_one else number for number, label in enumerate(classes, start=1)}
    categories = (
        [{"id": 1, "name": as_one}]
        if as_one
        else [
            {"id": id_of[label], "name": f"{name} ({label})" if shared[name] > 1 else name}
            for label, name in names.items()
        ]
    )
    out.mkdir(parents=True, exist_ok=True)
    for split, rows in rows_of(tiny, classes, per_class):
        images, annotations = [], []
        for number, (name, label, (left, top, right, bottom)) in enumerate(rows, start=1):
            width, height = Image.open(tiny / split / name).size
            box = [left, top, right - left + 1, bottom - top + 1]
            images.append({"id": number, "file_name": name, "width": width, "height": height})
            if min(box[2:]) > 0:
                annotations.append(
                    {
                        "id": number,
                        "image_id": number,
                        "category_id": id_of[label],
                        "bbox": box,
                        "area": box[2] * box[3],
                        "iscrowd": 0,
                    }
                )
        if not (out / split).exists():
            (out / split).symlink_to((tiny / split).resolve())
        (out / f"{split}.json").write_text(
            json.dumps({"images": images, "annotations": annotations, "categories": categories})
        )
        print(f"written: {out / split}.json with {len(images)} images")


def mean_box_metrics(root: Path) -> dict[str, float]:
    """Return COCO's metrics, in percent, of a guess that looks at no image: in every one, of every class its mean
    training box, scored by how often it is there."""
    train, val = CocoFolder(root, "train"), CocoFolder(root, "val")
    boxes = defaultdict(list)
    for row in (row for of_image in train.annotations for row in of_image):
        boxes[row["category_id"]].append(row["bbox"])
    rows = [
        {
            "image_id": image["id"],
            "category_id": category,
            "bbox": np.mean(own, 0).tolist(),
            "score": len(own) / len(train),
        }
        for image in val.images
        for category, own in boxes.items()
    ]
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
        "--as-one", default="", metavar="NAME", help="all classes become one category of this name"
    )
    parser.add_argument(
        "--per-class", type=int, default=0, metavar="N", help="training images a class (0: all)"
    )
    parser.add_argument(
        "--mean-box", action="store_true", help="print what the mean training box reaches"
    )
    args = parser.parse_args(argv)
    folders = sorted(path.name for path in args.tiny.glob("train/*") if path.is_dir())
    classes = folders[: int(args.classes)] if args.classes.isdecimal() else args.classes.split(",")
    convert(args.tiny, args.out, classes, args.as_one, args.per_class)
    if args.mean_box:
        found = mean_box_metrics(args.out)
        print(
            "mean training box in every image:",
            "  ".join(f"{name} {found[name]:.1f}%" for name in ("AP", "AP50", "AP75")),
        )
    return 0


if __name__ == "__main__":
    sys.exit(main())
