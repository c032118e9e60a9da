"""Make a small detection data set: objects pasted on photos, with exact boxes, as folders of images and COCO JSON.

Objects are the images of class folders (such as CIFAR-10's), scaled; photos are cut to a square. Objects of the
validation images come from the test images of --objects, and their photos are photos of no training image. Without
--objects, discs, squares and triangles are drawn; without --photos, the ground is drawn: nothing need be downloaded.

`make-boxes --tiny-imagenet TINY FOLDER` writes COCO JSON for Tiny-ImageNet's boxes (`--tiny-imagenet --help`).
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
from PIL import Image, ImageDraw
from tqdm import tqdm

from ea_vision.base.errors import UsageError, exit_code, near_matches
from ea_vision.base.files import create, write_json
from ea_vision.data.image_files import IMAGE_SUFFIXES, MAX_PIXELS, BrokenImage, decode_image
from ea_vision.data.small_images import load_dataset

EXAMPLES = """\
examples:
  ea-vision make-boxes boxes                                               # drawn shapes on drawn grounds
  ea-vision make-boxes boxes --objects CIFAR10 --classes airplane,cat,truck --photos PHOTOS
"""
SHAPES = ("disc", "square", "triangle")
TRIES = 40  # places tried for an object before it is left out


@dataclass(frozen=True)
class Boxes:
    """The data set that `make_boxes` makes.

    classes: of the objects; with drawn objects some of SHAPES.
    img_size: side of the images in pixels.
    smallest, largest: side of an object in pixels.
    most: objects an image, at least one.
    train, val: images.
    val_photos: share of the photos that is kept for the validation images.
    """

    classes: tuple[str, ...]
    img_size: int = 128
    smallest: int = 24
    largest: int = 64
    most: int = 5
    train: int = 2000
    val: int = 500
    val_photos: float = 0.2
    seed: int = 0

    def __post_init__(self) -> None:
        if not 2 <= self.smallest <= self.largest <= self.img_size:
            raise UsageError("sides of objects must lie between 2 and the image's, the smaller first, got "
                             f"{self.smallest} to {self.largest} in {self.img_size} pixels")
        if not self.classes or len(set(self.classes)) < len(self.classes):
            raise UsageError(f"classes must be at least one, each once, got {','.join(self.classes) or 'none'}")
        if not 0 <= self.seed < 2**63 or not 0 < self.val_photos < 1:
            raise UsageError("a seed of at least 0 and a share of validation photos between 0 and 1 required, got "
                             f"{self.seed} and {self.val_photos:g}")
        if self.img_size**2 > MAX_PIXELS:
            raise UsageError(f"images must have at most {MAX_PIXELS / 1e6:g} megapixels, got {self.img_size} a side")
        if min(self.most, self.train, self.val) < 1:
            raise UsageError(f"at least one object an image and one image a split required, got {self.most}, "
                             f"{self.train} and {self.val}")


class DrawnObjects:
    """Discs, squares and triangles of a bright colour and a random one."""

    def __init__(self, classes: Sequence[str]):
        _check_classes(classes, SHAPES, "drawn objects")

    def draw(self, name: str, side: int, rng: np.random.Generator) -> tuple[Image.Image, Image.Image]:
        """(RGB, mask) of side x side pixels, the shape touching all four borders."""
        color = rng.integers(0, 256, 3)
        color[rng.integers(3)] = 255
        image = Image.new("RGB", (side, side), tuple(color.tolist()))
        mask = Image.new("L", (side, side), 0 if name != "square" else 255)
        if name == "disc":
            ImageDraw.Draw(mask).ellipse((0, 0, side - 1, side - 1), fill=255)
        elif name == "triangle":
            ImageDraw.Draw(mask).polygon([((side - 1) / 2, 0), (0, side - 1), (side - 1, side - 1)], fill=255)
        return image, mask


class PastedObjects:
    """Whole images of class folders, now and then flipped."""

    def __init__(self, images: np.ndarray, targets: np.ndarray, known: Sequence[str], classes: Sequence[str],
                 source: str):
        _check_classes(classes, known, source)
        self.images = images  # (N, H, W, 3)
        self.of = {name: np.flatnonzero(targets == known.index(name)) for name in classes}

    def draw(self, name: str, side: int, rng: np.random.Generator) -> tuple[Image.Image, None]:
        image = Image.fromarray(self.images[rng.choice(self.of[name])])
        if rng.random() < 0.5:
            image = image.transpose(Image.Transpose.FLIP_LEFT_RIGHT)
        return image.resize((side, side), Image.Resampling.BICUBIC), None


class Photos:
    """Squares cut from photos at a random place, their shorter side 1 to 1.5 times the square's."""

    def __init__(self, paths: Sequence[Path], img_size: int):
        self.img_size, self.photos = img_size, []
        for path in tqdm(paths, desc="photos", unit="photo", disable=None):
            try:
                photo = decode_image(path)
            except BrokenImage as error:
                raise UsageError(f"photo {path} is broken: {error}") from error
            scale = 1.5 * img_size / min(photo.size)
            size = [max(int(1.5 * img_size), round(side * scale)) for side in photo.size]
            self.photos.append(photo.resize(size, Image.Resampling.BICUBIC))

    def draw(self, rng: np.random.Generator) -> Image.Image:
        photo = self.photos[rng.integers(len(self.photos))]
        side = rng.integers(self.img_size, min(photo.size) + 1)
        left, top = rng.integers(photo.width - side + 1), rng.integers(photo.height - side + 1)
        box = tuple(int(edge) for edge in (left, top, left + side, top + side))
        return photo.resize((self.img_size, self.img_size), Image.Resampling.BICUBIC, box)


class DrawnGrounds:
    """Blurred blotches of colour, darker than the shapes, with some noise."""

    def __init__(self, img_size: int):
        self.img_size = img_size

    def draw(self, rng: np.random.Generator) -> Image.Image:
        cells = int(rng.integers(2, 9))
        blotches = Image.fromarray(rng.integers(0, 160, (cells, cells, 3), dtype=np.uint8))
        ground = np.asarray(blotches.resize((self.img_size, self.img_size), Image.Resampling.BICUBIC), np.int64)
        noise = rng.integers(-12, 13, (self.img_size, self.img_size, 1))
        return Image.fromarray((ground + noise).clip(0, 255).astype(np.uint8))


def make_boxes(out: Path, wanted: Boxes, objects: str = "", photos: str = "") -> dict[str, int]:
    """Write `out`/{train,val}/*.png and `out`/{train,val}.json; the JSON comes last.

    An image has one to `most` objects at places where none covers another; one that finds no place is left out.

    Args:
        objects: a data folder with train and test (or val), folders or tars of class/name.png; "": drawn shapes.
        photos: a folder of photos; "": drawn grounds.

    Returns:
        The number of boxes by split.

    Raises:
        UsageError: classes that there are not, too few photos, or an `out` in which there is something.
    """
    if out.exists() and (not out.is_dir() or any(out.iterdir())):
        raise UsageError(f"{out} must be a new or an empty folder")
    sources = _objects(objects, wanted)
    grounds = _grounds(photos, wanted)
    counts = {}
    for number, split in enumerate(("train", "val")):
        create(out / split)
        rng = np.random.default_rng([wanted.seed, number])
        images, annotations = [], []
        for index in tqdm(range(getattr(wanted, split)), desc=split, unit="image", disable=None):
            name = f"{index:06d}.png"
            image, found = compose(sources[number], grounds[number], wanted, rng)
            image.save(out / split / name)
            images.append({"id": index + 1, "file_name": name, "width": wanted.img_size, "height": wanted.img_size})
            annotations += [{"id": len(annotations) + place, "image_id": index + 1, "category_id": label + 1,
                             "bbox": box, "area": box[2] * box[3], "iscrowd": 0}
                            for place, (label, box) in enumerate(found, start=1)]
        about = {**asdict(wanted), "objects": Path(objects).name, "photos": Path(photos).name}
        write_json(out / f"{split}.json", {
            "info": {"description": "objects pasted on photos, made by ea-vision make-boxes", "made_with": about},
            "images": images, "annotations": annotations,
            "categories": [{"id": label + 1, "name": name} for label, name in enumerate(wanted.classes)]})
        counts[split] = len(annotations)
    return counts


def compose(objects: DrawnObjects | PastedObjects, grounds: Photos | DrawnGrounds, wanted: Boxes,
            rng: np.random.Generator) -> tuple[Image.Image, list[tuple[int, list[int]]]]:
    """An image, and of each object in it (label, [x, y, width, height])."""
    image, found = grounds.draw(rng), []
    for _ in range(rng.integers(1, wanted.most + 1)):
        label, side = int(rng.integers(len(wanted.classes))), int(rng.integers(wanted.smallest, wanted.largest + 1))
        for _ in range(TRIES):
            x, y = (int(place) for place in rng.integers(0, wanted.img_size - side + 1, 2))
            if all(x + side <= left or left + width <= x or y + side <= top or top + height <= y
                   for _, (left, top, width, height) in found):
                pixels, mask = objects.draw(wanted.classes[label], side, rng)
                image.paste(pixels, (x, y), mask)
                found.append((label, [x, y, side, side]))
                break
    return image, found


def _check_classes(classes: Sequence[str], known: Sequence[str], source: str) -> None:
    for name in classes:
        if name not in known:
            raise UsageError(f"{source}: no class {name!r}; {near_matches(name, known, 'classes')}")


def _objects(folder: str, wanted: Boxes) -> list[Any]:
    """Return the sources of the objects of training and validation images."""
    if not folder:
        return [DrawnObjects(wanted.classes)] * 2
    data = load_dataset("folder", folder)
    return [PastedObjects(split.images.permute(0, 2, 3, 1).numpy(), split.targets.numpy(), data.classes,
                          wanted.classes, folder) for split in (data.train, data.test)]


def _grounds(folder: str, wanted: Boxes) -> list[Any]:
    """Return the sources of the grounds of training and validation images: two distinct sets of photos."""
    if not folder:
        return [DrawnGrounds(wanted.img_size)] * 2
    train, val = split_photos(Path(folder), wanted.val_photos, wanted.seed)
    return [Photos(train, wanted.img_size), Photos(val, wanted.img_size)]


def split_photos(folder: Path, val_share: float, seed: int) -> tuple[list[Path], list[Path]]:
    """The photos of a folder, at any depth, for training and for validation: shuffled by `seed`, none in both.

    Raises:
        UsageError: no such folder, or too few photos for two sets.
    """
    paths = sorted(path for path in folder.rglob("*") if path.suffix.lower() in IMAGE_SUFFIXES)
    count = round(val_share * len(paths))
    if not 0 < count < len(paths):
        raise UsageError(f"at least two photos and a share between 0 and 1 of them for validation required, got "
                         f"{len(paths)} in {folder} and {val_share:g}")
    order = np.random.default_rng(seed).permutation(len(paths))
    return [paths[index] for index in sorted(order[count:])], [paths[index] for index in sorted(order[:count])]


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, epilog=EXAMPLES,
                                     formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("out", metavar="FOLDER", type=Path, help="new folder to write to")
    parser.add_argument("--objects", default="", metavar="DIR", help="data folder whose train and test (or val) hold "
                        "class/name.png, folders or tars (default: drawn shapes)")
    parser.add_argument("--classes", default="", metavar="A,B,..", help="classes of the objects (default, for drawn "
                        f"ones: {','.join(SHAPES)})")
    parser.add_argument("--photos", default="", metavar="DIR", help="folder of photos (default: drawn grounds)")
    parser.add_argument("--img-size", type=int, default=Boxes.img_size, help="side in pixels (default: %(default)s)")
    parser.add_argument("--sizes", nargs=2, type=int, default=(Boxes.smallest, Boxes.largest), metavar=("MIN", "MAX"),
                        help="side of an object in pixels (default: 24 64)")
    parser.add_argument("--most", type=int, default=Boxes.most, help="objects an image (default: 1 to %(default)s)")
    parser.add_argument("--train", type=int, default=Boxes.train, help="training images (default: %(default)s)")
    parser.add_argument("--val", type=int, default=Boxes.val, help="validation images (default: %(default)s)")
    parser.add_argument("--val-photos", type=float, default=Boxes.val_photos, metavar="0..1",
                        help="share of the photos kept for validation images (default: %(default)s)")
    parser.add_argument("--seed", type=int, default=Boxes.seed, help="default: %(default)s")
    args = parser.parse_args(argv)
    if args.objects and not args.classes:
        raise UsageError("--objects needs --classes, some of its class folders")
    wanted = Boxes(tuple(args.classes.split(",")) if args.classes else SHAPES, args.img_size, *args.sizes, args.most,
                   args.train, args.val, args.val_photos, args.seed)
    counts = make_boxes(args.out, wanted, args.objects, args.photos)
    print(f"written: {args.out}, training images {wanted.train} with {counts['train']} boxes, validation images "
          f"{wanted.val} with {counts['val']}; classes {', '.join(wanted.classes)}")
    return 0


if __name__ == "__main__":
    sys.exit(exit_code(main))
