"""Image files in class folders and tars: which there are, whose class they are of, and what decodes them.

The class is the first folder of a name, so class/images/x.jpg is of `class`; a folder that holds all the others is
passed over (train.tar with train/class/x.jpg). Links are followed. A tar of tars has a class in each (ImageNet's own
ILSVRC2012_img_train.tar), and so has a folder of tars. ILSVRC's flat validation images have the classes of the files
that come with them (`ilsvrc`). timm's readers, which would do most of this, read a tar from end to end to list it and
take `images` for the class of class/images/x.jpg.
"""

import hashlib
import io
import os
import tarfile
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import BinaryIO

import numpy as np
from PIL import Image
from timm.utils.misc import natural_key

from ea_vision.base.errors import UsageError
from ea_vision.data import ilsvrc

IMAGE_FORMATS = (
    "JPEG",
    "PNG",
    "WEBP",
    "BMP",
    "GIF",
    "PPM",
    "TIFF",
)  # Pillow's names; nothing else is decoded anywhere
IMAGE_SUFFIXES = (
    ".jpg",
    ".jpeg",
    ".png",
    ".webp",
    ".bmp",
    ".gif",
    ".ppm",
    ".pgm",
    ".pbm",
    ".tif",
    ".tiff",
)
MAX_PIXELS = 100_000_000  # of an image


class BrokenImage(ValueError):
    """An image that cannot be decoded, or is too large; the message says why."""


def decode_image(file: str | Path | BinaryIO, over_white: bool = False) -> Image.Image:
    """Decode a file to 8-bit RGB; its size is looked at before its pixels are decoded, and it is not turned as its EXIF
    data says, as in timm and torchvision, whose published accuracies are without it.

    Args:
        over_white: put transparent pixels on white. Off by default, as in timm and torchvision, which drop alpha.

    Raises:
        BrokenImage: it has more than MAX_PIXELS, cannot be decoded, or is of none of IMAGE_FORMATS.
    """
    limit = f"must have at most {MAX_PIXELS / 1e6:g} megapixels"
    try:
        with Image.open(file, formats=IMAGE_FORMATS) as image:
            if image.width * image.height > MAX_PIXELS:
                raise BrokenImage(f"{limit}, got {image.width}x{image.height}")
            return to_rgb(image, over_white)
    except BrokenImage:
        raise
    except Image.DecompressionBombError as error:
        raise BrokenImage(f"{limit}: {error}") from error
    except Exception as error:  # Pillow's readers raise whatever damaged bytes lead them to
        raise BrokenImage(f"{type(error).__name__}: {error}") from error


def to_rgb(image: Image.Image, over_white: bool = False) -> Image.Image:
    """Decode and convert to 8-bit RGB. 16-bit grey keeps its upper 8 bits (Pillow alone would cut it off at 255).

    Raises:
        BrokenImage: 32-bit integers or floating-point numbers, of which no file says what white is.
    """
    if over_white and (
        image.mode in ("RGBA", "LA", "PA", "RGBa", "La") or "transparency" in image.info
    ):
        image = image.convert("RGBA")
        return Image.alpha_composite(Image.new("RGBA", image.size, "white"), image).convert("RGB")
    if image.mode == "F" or image.mode == "I" and image.format == "TIFF":
        raise BrokenImage(
            f"must have 8 or 16 bits a channel, got pixels of Pillow's mode {image.mode}"
        )
    if image.mode == "I" or image.mode.startswith("I;16"):
        image = Image.fromarray(
            (np.asarray(image).astype(np.int64) >> 8).clip(0, 255).astype(np.uint8)
        )
    return image.convert("RGB")


class ImageFiles:
    """The images of a folder or .tar of class/name.jpg, in the natural order of their names, as timm has it.

    Attributes:
        name: the source. names: relative to it. classes: their names. targets: int64 (N,), numbers of `classes`.

    Raises:
        UsageError: no such source, no images, images outside a class folder, a class folder without images, a damaged
            or compressed tar, or other than `num_classes` classes (0: any).
    """

    def __init__(self, source: Path, num_classes: int = 0):
        self.source, self.name = source, str(source)
        try:
            found = list(_walk(source) if source.is_dir() else _scan_tar(source))
            if not found and source.is_dir():
                found = [
                    entry
                    for tar in source.glob("*.tar")
                    for entry in _scan_tar(tar, prefix=f"{tar.stem}/")
                ]
        except OSError as error:
            raise UsageError(
                f"{error.filename or source} cannot be read: {error.strerror or error}"
            ) from error
        if not found:
            raise UsageError(
                f"{source} has no images: class/name with a suffix of {', '.join(IMAGE_SUFFIXES)} is "
                "required"
            )
        found.sort(key=lambda entry: _in_order(entry[0]))
        self.names, self._tars, spans = map(
            list, zip(*found, strict=True)
        )  # no tar: a file of its own
        self._spans = np.array(spans, np.int64)  # (start, bytes); an array, which forks share
        labels = (
            ilsvrc.labels_of(source, self.names) if ilsvrc.is_flat(self.names) else self._labels()
        )
        self.classes = sorted(set(labels), key=_in_order)
        number = {name: target for target, name in enumerate(self.classes)}
        self.targets = np.array([number[label] for label in labels], np.int64)
        check_classes(self.name, self.classes, num_classes)

    def __len__(self) -> int:
        return len(self.names)

    def _labels(self) -> list[str]:
        """Return the class of each image: the first folder that not all of them share."""
        stray = next((name for name in self.names if "/" not in name), None)
        if stray is not None:
            raise UsageError(f"images of {self.source} must lie in class folders, got {stray}")
        parts = [name.split("/") for name in self.names]
        depth = min(len(Path(os.path.commonpath(self.names)).parts), min(map(len, parts)) - 2)
        labels = [of_name[depth] for of_name in parts]
        if self.source.is_dir():
            folders = filter(
                os.DirEntry.is_dir, os.scandir(self.source.joinpath(*parts[0][:depth]))
            )
            empty = sorted(
                {folder.name for folder in folders if folder.name[0] != "."} - set(labels)
            )
            if empty:
                raise UsageError(
                    f"{len(empty)} class folder(s) of {self.source} have no images: "
                    f"{', '.join(empty[:5])}"
                )
        return labels

    def describe(self, index: int) -> str:
        """Return the path of an image."""
        return f"{self.source}/{self.names[index]}"

    def read(self, index: int) -> tuple[Image.Image, int]:
        """Decode an image to RGB; return it and its target.

        Raises:
            BrokenImage: it cannot be read or decoded.
        """
        start, size = self._spans[index].tolist()
        try:
            with open(self._tars[index] or self.describe(index), "rb") as opened:
                data = os.pread(opened.fileno(), size, start)
        except OSError as error:
            raise BrokenImage(str(error)) from error
        return decode_image(io.BytesIO(data)), int(self.targets[index])

    def fingerprint(self) -> str:
        """Return SHA-256 over the classes, names and sizes of the images: the same wherever they lie."""
        return fingerprint([*self.classes, "", *self.names], self._spans[:, 1], self.targets)


def fingerprint(lines: Iterable[str], *arrays) -> str:
    """Return SHA-256 over lines of text and the values of arrays or tensors on the CPU."""
    digest = hashlib.sha256("\n".join(lines).encode())
    for array in arrays:
        digest.update(np.ascontiguousarray(array))
    return digest.hexdigest()


def check_classes(name: str, classes: list[str], required: int) -> None:
    """Raise UsageError unless there are `required` classes (0: any number)."""
    if required and required != len(classes):
        raise UsageError(f"{name} must have {required} classes (--num-classes), got {len(classes)}")


def _in_order(name: str) -> tuple:
    """Return what natural order sorts by; names that it takes for equal (a1, a01) have an order, too."""
    return natural_key(name), name


def is_image_name(name: str) -> bool:
    """Return whether a file's name ends as an image's does."""
    return name.lower().endswith(IMAGE_SUFFIXES)


def _walk(root: Path) -> Iterator[tuple[str, None, tuple[int, int]]]:
    """Yield (name, None, (0, bytes)) of every image below a folder; a link to nowhere has none."""
    for folder, _, files in os.walk(root, followlinks=True):
        for file in filter(is_image_name, files):
            path = f"{folder}/{file}"
            try:
                size = os.path.getsize(path)
            except OSError:  # found out, and said, when the image is read
                size = 0
            yield os.path.relpath(path, root), None, (0, size)


def _scan_tar(
    path: Path, prefix: str = "", start: int = 0
) -> Iterator[tuple[str, Path, tuple[int, int]]]:
    """Yield (name, tar, (place in it, bytes)) of every image of a tar and of the tars in it, which lie beyond 0."""
    with open(path, "rb") as file:
        file.seek(start)
        try:
            with tarfile.open(fileobj=file, mode="r:") as tar:
                while (member := tar.next()) is not None:
                    tar.members.clear()  # it would keep them all
                    name = prefix + os.path.normpath(member.name).lstrip("/")
                    if member.isreg() and name.lower().endswith(".tar") and not start:
                        yield from _scan_tar(path, name[:-4] + "/", member.offset_data)
                    elif member.isreg() and is_image_name(name):
                        yield name, path, (member.offset_data, member.size)
        except tarfile.TarError as error:
            raise UsageError(
                f"{path} is not a readable tar (nor may it be compressed): {error}"
            ) from error
        file.seek(tar.offset)
        if file.read(tarfile.BLOCKSIZE) != bytes(
            tarfile.BLOCKSIZE
        ):  # tarfile takes a damaged header for the end
            raise UsageError(
                f"{path} is not a readable tar: it is damaged or cut off at byte {tar.offset}"
            )
