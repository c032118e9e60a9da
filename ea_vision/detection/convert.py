"""Write COCO JSON for Tiny-ImageNet's boxes: one object an image of 64 x 64 pixels, 200 classes.

TINY/train/CLASS/CLASS_boxes.txt and TINY/val/val_annotations.txt become FOLDER/train.json and val.json; the images stay
where they are, FOLDER/train and FOLDER/val are links to them. Corners in Tiny-ImageNet's files are pixels of the box,
so a box from 0 to 63 is 64 pixels wide.
"""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path

from PIL import Image

from ea_vision.base.errors import UsageError, exit_code, near_matches
from ea_vision.base.files import create, write_json
from ea_vision.detection.coco import CocoFolder
from ea_vision.detection.evaluate import coco_metrics

EXAMPLES = """\
examples:
  ea-vision make-boxes --tiny-imagenet tiny-imagenet-200 tiny-boxes
  ea-vision make-boxes --tiny-imagenet tiny-imagenet-200 tiny-20 --classes 20 --as-one object --mean-box
"""
Row = tuple[str, str, list[int]]  # name below the split's folder, class, [left, top, right, bottom]


def convert_tiny(tiny: Path, out: Path, classes: Sequence[str] | int | None = None, as_one: str = "",
                 per_class: int = 0) -> dict[str, int]:
    """Write `out`/{train,val}.json and the links beside them.

    Args:
        classes: WordNet IDs, or the first so many of them; None: all.
        as_one: the name of the one category that all of them become; "": each is its own, named by its first word.
        per_class: training images a class, the first ones; 0: all.

    Returns:
        The number of images by split.

    Raises:
        UsageError: not Tiny-ImageNet's files, or classes that it has not.
    """
    folders = sorted(path.name for path in tiny.glob("train/*") if path.is_dir())
    if not folders or not (tiny / "val" / "val_annotations.txt").is_file():
        raise UsageError(f"{tiny} must be Tiny-ImageNet's folder: train/CLASS/CLASS_boxes.txt and "
                         "val/val_annotations.txt required")
    chosen = folders if classes is None else folders[:classes] if isinstance(classes, int) else list(classes)
    for name in chosen:
        if name not in folders:
            raise UsageError(f"{tiny} has no class {name!r}; {near_matches(name, folders, 'classes')}")
    if as_one:
        categories = [{"id": 1, "name": as_one}]
        id_of = dict.fromkeys(chosen, 1)
    else:
        id_of = {name: number for number, name in enumerate(chosen, start=1)}
        words = _words(tiny / "words.txt", chosen)
        categories = [{"id": number, "name": words.get(name, name), "wordnet": name} for name, number in id_of.items()]
    create(out)
    counts = {}
    for split, rows in (("train", _train_rows(tiny / "train", chosen, per_class)), ("val", _val_rows(tiny / "val"))):
        images, annotations = [], []
        for name, label, (left, top, right, bottom) in rows:
            if label not in id_of:
                continue
            number, box = len(images) + 1, [left, top, right - left + 1, bottom - top + 1]
            width, height = _size(tiny / split / name)
            images.append({"id": number, "file_name": name, "width": width, "height": height})
            annotations.append({"id": number, "image_id": number, "category_id": id_of[label], "bbox": box,
                                "area": max(box[2], 0) * max(box[3], 0), "iscrowd": 0})
        _link(out / split, tiny / split)
        write_json(out / f"{split}.json", {"info": {"description": "Tiny-ImageNet's boxes"}, "images": images,
                                           "annotations": annotations, "categories": categories})
        counts[split] = len(images)
    return counts


def mean_box_metrics(root: Path) -> dict[str, float]:
    """COCO's metrics, in percent, of a guess that looks at no image: in every one, of every class its mean training
    box, scored by how often it is there. What a detector must beat.

    Raises:
        UsageError: pycocotools is not installed.
    """
    train, val = CocoFolder(root, "train"), CocoFolder(root, "val")
    boxes: dict[int, list[list[float]]] = {}
    for row in (row for of_image in train.annotations for row in of_image):
        boxes.setdefault(row["category_id"], []).append(row["bbox"])
    rows = [{"image_id": image["id"], "category_id": category, "bbox": [sum(side) / len(own) for side in zip(
        *own, strict=True)], "score": len(own) / len(train)} for image in val.images for category, own in boxes.items()]
    return coco_metrics(val.ground_truth(), rows)[0]


def _train_rows(folder: Path, classes: Sequence[str], per_class: int) -> Iterator[Row]:
    for label in classes:
        for number, (name, *box) in enumerate(_lines(folder / label / f"{label}_boxes.txt", 5)):
            if not per_class or number < per_class:
                yield f"{label}/images/{name}", label, box


def _val_rows(folder: Path) -> Iterator[Row]:
    for name, label, *box in _lines(folder / "val_annotations.txt", 6):
        yield f"images/{name}", label, box


def _lines(path: Path, fields: int) -> Iterator[list]:
    """The fields of each line, the last four as whole numbers."""
    try:
        lines = path.read_text("utf-8").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise UsageError(f"{path} cannot be read: {error}") from error
    for number, line in enumerate(lines, start=1):
        found = line.split("\t")
        if len(found) != fields or not all(word.isdecimal() for word in found[-4:]):
            raise UsageError(f"{path}, line {number}: {fields} fields between tabs required, the last four whole "
                             f"numbers, got {line[:60]!r}")
        yield [*found[:-4], *map(int, found[-4:])]


def _words(path: Path, names: Sequence[str]) -> dict[str, str]:
    """The first word for each WordNet ID, with the ID where two classes share it."""
    if not path.is_file():
        return {}
    try:
        lines = [line.partition("\t") for line in path.read_text("utf-8").splitlines()]
    except (OSError, UnicodeDecodeError) as error:
        raise UsageError(f"{path} cannot be read as UTF-8: {error}") from error
    first = {name: text.split(",")[0].strip() for name, _, text in lines if name in set(names)}
    shared = [word for word in first.values() if list(first.values()).count(word) > 1]
    return {name: f"{word} ({name})" if word in shared else word for name, word in first.items()}


def _size(path: Path) -> tuple[int, int]:
    """(width, height) from the file's head."""
    try:
        with Image.open(path) as image:
            return image.size
    except (OSError, ValueError) as error:
        raise UsageError(f"image {path} cannot be read: {error}") from error


def _link(link: Path, folder: Path) -> None:
    if link.exists() and link.samefile(folder):
        return
    try:
        os.symlink(folder.resolve(), link, target_is_directory=True)
    except OSError as error:
        raise UsageError(f"{link} cannot be made a link to {folder}: {error.strerror}") from error


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, epilog=EXAMPLES,
                                     formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("tiny", metavar="TINY", type=Path, help="Tiny-ImageNet's folder")
    parser.add_argument("out", metavar="FOLDER", type=Path, help="folder to write to; may be TINY itself")
    parser.add_argument("--classes", default="", metavar="N|ID,ID,..", help="the first N classes, or these (default: "
                        "all)")
    parser.add_argument("--as-one", default="", metavar="NAME", help="all classes become one category of this name")
    parser.add_argument("--per-class", type=int, default=0, metavar="N", help="training images a class (default: all)")
    parser.add_argument("--mean-box", action="store_true", help="also print what the mean training box, found in "
                        "every image, reaches on the validation images")
    args = parser.parse_args(argv)
    classes = int(args.classes) if args.classes.isdecimal() else args.classes.split(",") if args.classes else None
    if classes == 0 or args.per_class < 0:
        raise UsageError("--classes must be at least 1 and --per-class at least 0, got "
                         f"{args.classes or 'all'} and {args.per_class}")
    counts = convert_tiny(args.tiny, args.out, classes, args.as_one, args.per_class)
    print(f"written: {args.out}/train.json with {counts['train']} images, {args.out}/val.json with {counts['val']}")
    if args.mean_box:
        figures = mean_box_metrics(args.out)
        print("mean training box in every image:", "  ".join(f"{name} {figures[name]:.1f}%" for name in (
            "AP", "AP50", "AP75")))
    return 0


if __name__ == "__main__":
    sys.exit(exit_code(main))
