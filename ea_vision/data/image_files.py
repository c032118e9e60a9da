"""Image files in class folders and tars: which there are, whose class they are of, and what decodes them.

The class is the first folder of a name, so class/images/x.jpg is of `class`; a folder that holds all the others is
passed over (train.tar with train/class/x.jpg). Links are followed, each file counts once, and a loop is an error. A tar
of tars has a class in each (ImageNet's own ILSVRC2012_img_train.tar), and so has a folder of tars. A folder with a
val_annotations.txt, lines of name and class with tabs between (Tiny-ImageNet's val), has the classes of that file, and
ILSVRC's flat validation images those of the files that come with them (`ilsvrc`).
"""

from __future__ import annotations

import errno
import hashlib
import io
import logging
import os
import re
import stat
import tarfile
import warnings
from collections import Counter
from collections.abc import Callable
from contextlib import nullcontext
from functools import partial
from graphlib import CycleError, TopologicalSorter
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np
from PIL import Image, ImageOps

from ea_vision.base.errors import UsageError
from ea_vision.data import ilsvrc

log = logging.getLogger(__name__)
IMAGE_FORMATS = ("JPEG", "PNG", "WEBP", "BMP", "GIF", "PPM", "TIFF")  # Pillow's names; nothing else is decoded anywhere
IMAGE_SUFFIXES = (".jpg", ".jpeg", ".png", ".webp", ".bmp", ".gif", ".ppm", ".pgm", ".pbm", ".tif", ".tiff")
ANNOTATIONS = "val_annotations.txt"
MAX_PIXELS = 100_000_000  # of an image, as it is and scaled
CHEAP_BYTES = 2**28  # a split of at most this size is fingerprinted by its contents, too


class BrokenImage(ValueError):
    """An image that cannot be decoded, or is too large; the message says why."""


class TooLarge(BrokenImage):
    """An image of more pixels than are allowed; the message begins with `must have at most`."""


def decode_image(file: str | Path | BinaryIO, exif_rotation: bool = False, max_pixels: int = MAX_PIXELS,
                 over_white: bool = False) -> Image.Image:
    """Decode a file to 8-bit RGB; its size is looked at before its pixels are decoded.

    Args:
        exif_rotation: turn it as its EXIF data says. Off by default, as in timm and torchvision, whose published
            accuracies are without it.
        over_white: put transparent pixels on white. Off by default, as in timm and torchvision, which drop alpha.

    Raises:
        TooLarge: it has more than `max_pixels`.
        BrokenImage: it cannot be decoded, or is of none of IMAGE_FORMATS.
    """
    limit = f"must have at most {max_pixels / 1e6:g} megapixels"
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", Image.DecompressionBombWarning)  # the limit is max_pixels
            with open_regular(file) if isinstance(file, (str, Path)) else nullcontext(file) as data:
                with Image.open(data, formats=IMAGE_FORMATS) as image:
                    if image.width * image.height > max_pixels:
                        raise TooLarge(f"{limit}, got {image.width}x{image.height}")
                    if image.format != "PNG":
                        return to_rgb(ImageOps.exif_transpose(image) if exif_rotation else image, over_white)
                    image.verify()  # its checksums, of which decoding leaves out some
                data.seek(0)
                with Image.open(data, formats=("PNG",)) as image:
                    return to_rgb(ImageOps.exif_transpose(image) if exif_rotation else image, over_white)
    except BrokenImage:
        raise
    except Image.DecompressionBombError as error:
        raise TooLarge(f"{limit}: {error}") from error
    except Exception as error:  # Pillow's readers raise whatever damaged bytes lead them to
        raise BrokenImage(f"{type(error).__name__}: {error}") from error


def open_regular(path: str | Path) -> BinaryIO:
    """Open a file to read it. A named pipe or a device, which could wait for ever, is refused.

    Raises:
        OSError: it cannot be read, or is no regular file.
    """
    file = open(os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC), "rb")  # a pipe is opened without waiting
    if stat.S_ISREG(os.fstat(file.fileno()).st_mode):
        return file
    file.close()
    raise OSError(errno.EINVAL, "not a regular file")


def to_rgb(image: Image.Image, over_white: bool = False) -> Image.Image:
    """Decode and convert to 8-bit RGB. 16-bit grey keeps its upper 8 bits (Pillow alone would cut it off at 255)."""
    if over_white and (image.mode in ("RGBA", "LA", "PA", "RGBa", "La") or "transparency" in image.info):
        image = image.convert("RGBA")
        return Image.alpha_composite(Image.new("RGBA", image.size, "white"), image).convert("RGB")
    if image.mode == "I" or image.mode.startswith("I;16"):
        image = Image.fromarray((np.asarray(image).astype(np.int64) >> 8).clip(0, 255).astype(np.uint8))
    return image.convert("RGB")


def check_scaled(size: tuple[int, int], short: int) -> None:
    """Raise TooLarge for an image (W, H) that has more than MAX_PIXELS once its short side has `short`."""
    width, height = (max(short, round(side * short / min(size))) for side in size)
    if width * height > MAX_PIXELS:
        raise TooLarge(f"must have at most {MAX_PIXELS / 1e6:g} megapixels once its short side is {short}, "
                       f"got {width}x{height} from {size[0]}x{size[1]}")


def is_image_name(name: str) -> bool:
    return name.lower().endswith(IMAGE_SUFFIXES)


class ImageFiles:
    """The images of a folder or .tar of class/name.jpg, in the order of their names.

    names: relative to the source; sizes: int64 (N,) in bytes; targets: int64 (N,), numbers of `classes`.

    Args:
        key: sorts names and classes (default: as text).

    Raises:
        UsageError: no such source, no images, images outside a class folder, names that are not UTF-8, a loop of links,
            a damaged or compressed tar.
    """

    def __init__(self, source: Path, key: Callable[[str], Any] | None = None):
        self.source = source
        self._file: tuple[int, int] | None = None  # the process that opened the tar, and its descriptor
        self.is_tar = not source.is_dir()
        try:
            found = _scan_tar(source) if self.is_tar else _walk(source)
            self._tars = [] if found or self.is_tar else sorted(source.glob("*.tar"))
            if self._tars:  # a folder with a tar for each class
                found = [(f"{tar.stem}/{name}", size, start, f"{tar.name}/{own}")
                         for tar in self._tars for name, size, start, own in _scan_tar(tar)]
        except OSError as error:
            raise UsageError(f"{error.filename or source} cannot be read: {error.strerror or error}") from error
        if not found:
            raise UsageError(f"{source} has no images: class/name with a suffix of {', '.join(IMAGE_SUFFIXES)} is "
                             f"required{'' if self.is_tar else _what_is_there(source)}")
        for name in (str(source), *(name for name, *_ in found)):
            _check_text(source, name)
        found.sort(key=lambda entry: (key(entry[3]) if key else entry[0], entry[0]))
        self.names = [name for name, *_ in found]
        self.sizes = np.array([size for _, size, *_ in found], np.int64)
        self._starts = np.array([start for _, _, start, _ in found], np.int64)
        self._own_names = [own for *_, own in found]  # those inside the tar of a tar, and with a leading ./
        annotated = None if self.is_tar else _annotated_labels(source, self.names)
        if annotated is None and ilsvrc.is_flat(self.names):
            annotated = ilsvrc.labels_of(source, self.names)
        self.is_annotated = annotated is not None
        labels = annotated or _labels(source, self.names)
        self.classes = sorted(set(labels), key=lambda label: (key(label) if key else label, label))
        number = {label: index for index, label in enumerate(self.classes)}
        self.targets = np.array([number[label] for label in labels], np.int64)

    def __len__(self) -> int:
        return len(self.names)

    def describe(self, index: int) -> str:
        return f"{self.source}/{self.names[index]}"

    def open(self, index: int) -> BinaryIO:
        """The file of an image.

        Raises:
            OSError: it cannot be read (any more).
        """
        start, size = int(self._starts[index]), int(self.sizes[index])
        if self._tars:
            with open(self.source / self._own_names[index].partition("/")[0], "rb") as tar:
                tar.seek(start)
                return io.BytesIO(tar.read(size))
        if not self.is_tar:
            return open_regular(self.source / self.names[index])
        return io.BytesIO(self._read_tar(start, size))

    def _read_tar(self, start: int, size: int) -> bytes:
        if self._file is None or self._file[0] != os.getpid():
            self._file = (os.getpid(), os.open(self.source, os.O_RDONLY))
        parts = []
        while size and (part := os.pread(self._file[1], size, start)):
            parts.append(part)
            start, size = start + len(part), size - len(part)
        return b"".join(parts)

    def empty_classes(self) -> list[str]:
        """Folders beside the classes' that have no images."""
        used = {name.split("/", 1)[0] for name in self.names}
        return [] if self.is_tar else sorted(entry.name for entry in os.scandir(self.source) if entry.is_dir()
                                             and not entry.name.startswith(".") and entry.name not in used)

    def fingerprint(self) -> str:
        """SHA-256 over the names and sizes of classes and images, and of at most CHEAP_BYTES over their contents: the
        same for the same files, wherever they lie."""
        digest = hashlib.sha256("\n".join(["2", *self.classes, "", str(len(self))]).encode())
        cheap = int(self.sizes.sum()) <= CHEAP_BYTES
        for index, name in enumerate(self.names):
            digest.update(f"\n{name} {self.sizes[index]}".encode())
            if cheap:
                digest.update(content_digest(partial(self.open, index)))
        if self.is_annotated:
            digest.update(self.targets.tobytes())
        return digest.hexdigest()

    def earlier_fingerprint(self) -> str:
        """The fingerprint of run folders written before sizes and contents were part of it: of names alone."""
        digest = hashlib.sha256("\n".join([*self.classes, "", str(len(self))]).encode())
        for name in self._own_names:
            digest.update(f"\n{name}".encode())
        return digest.hexdigest()


def content_digest(open_image: Callable[[], BinaryIO]) -> bytes:
    """Return SHA-256 of what `open_image` opens, or that it cannot be read."""
    try:
        with open_image() as file:
            return hashlib.sha256(file.read()).digest()
    except OSError as error:
        return f"unreadable {error.errno}".encode()


def _labels(source: Path, names: list[str]) -> list[str]:
    parts = [name.split("/") for name in names]
    stray = next((name for name, of_name in zip(names, parts, strict=True) if len(of_name) < 2), None)
    if stray is not None:
        raise UsageError(f"images of {source} must lie in class folders, got {stray}")
    depth = 0
    while len({of_name[depth] for of_name in parts}) == 1 and all(len(of_name) > depth + 2 for of_name in parts):
        depth += 1
    return [of_name[depth] for of_name in parts]


def _annotated_labels(source: Path, names: list[str]) -> list[str] | None:
    """The classes that a folder's val_annotations.txt gives its images, by name without folder; None without one.

    Raises:
        UsageError: it cannot be read, or leaves an image out.
    """
    path = source / ANNOTATIONS
    if not path.is_file():
        return None
    try:
        rows = [line.split("\t") for line in path.read_text().splitlines() if line.strip()]
    except (OSError, ValueError) as error:
        raise UsageError(f"{path} cannot be read: {error}") from error
    classes = {row[0]: row[1] for row in rows if len(row) > 1}
    own = [name.rsplit("/", 1)[-1] for name in names]
    without = [name for name in own if name not in classes]
    if without:
        raise UsageError(f"{path} must name the class of every image of {source}, got none for {len(without)} of "
                         f"{len(own)}, such as {without[0]}")
    return [classes[name] for name in own]


def _check_text(source: Path, name: str) -> None:
    try:
        name.encode()
    except UnicodeEncodeError as error:
        raise UsageError(f"file names in {source} must be UTF-8, got {os.fsencode(name)!r}") from error


def _what_is_there(source: Path) -> str:
    """Return what a folder holds instead of images, for the message."""
    files = [name for _, _, names in os.walk(source) for name in names]
    if not files:
        return "; it has no files"
    suffixes = Counter(Path(name).suffix.lower() or "no suffix" for name in files)
    shown = ", ".join(f"{count} of {ascii(suffix)[1:-1]}" for suffix, count in suffixes.most_common(3))
    return f"; it has {len(files)} other file(s): {shown}"


def _walk(root: Path) -> list[tuple[str, int, int, str]]:
    """(name, bytes, 0, name) of every image below a folder. Files that lie in it come before links to them."""
    top = os.path.realpath(root)
    found: dict[str, tuple[str, int, int, str]] = {}  # by real path
    visited: set[str] = set()
    links: list[tuple[str, str, str]] = []  # to folders: name, the real folder it lies in, the one it leads to
    file_links: list[str] = []
    more = 0

    def visit(folder: str, real: str) -> None:
        nonlocal more
        waiting = [(folder, real)]
        while waiting:
            folder, real = waiting.pop()
            if real in visited:
                more += 1
                continue
            visited.add(real)
            for entry in sorted(os.scandir(os.path.join(top, folder)), key=lambda entry: entry.name):
                name = f"{folder}/{entry.name}" if folder else entry.name
                if entry.is_symlink():
                    target = os.path.realpath(entry.path)
                    if not os.path.isdir(target):
                        file_links.extend([name] if is_image_name(name) else [])
                        continue
                    if _lies_in(real, target):
                        raise UsageError(f"{root / name} is a link back to {target}, which it lies in")
                    links.append((name, real, target))
                elif entry.is_dir():
                    waiting.append((name, os.path.join(real, entry.name)))
                elif is_image_name(name) and entry.is_file():
                    path = os.path.join(real, entry.name)
                    more += path in found
                    found.setdefault(path, (name, entry.stat().st_size, 0, name))

    visit("", top)
    for name, _, target in links:  # which grow
        visit(name, target)
    leads_to = {name: [other for other, place, _ in links if _lies_in(place, target)] for name, _, target in links}
    try:
        TopologicalSorter(leads_to).prepare()
    except CycleError as error:
        raise UsageError(f"links of {root} lead in a circle: {', '.join(sorted(set(error.args[1])))}") from error
    for name in sorted(file_links):
        path = os.path.realpath(os.path.join(top, name))
        more += path in found
        size = os.stat(path).st_size if os.path.isfile(path) else 0
        if os.path.isfile(path) or not os.path.exists(path):  # one that leads nowhere is an unreadable image
            found.setdefault(path, (name, size, 0, name))
    if more:
        log.warning("%s: %d link(s) to files or folders that are there already are left out", root, more)
    return list(found.values())


def _lies_in(place: str, folder: str) -> bool:
    return place == folder or place.startswith(folder.rstrip(os.sep) + os.sep)


def _scan_tar(path: Path) -> list[tuple[str, int, int, str]]:
    """(name, bytes, place in the file, name as it is written) of every image of a tar, and of the tars in it.

    Every header up to the mark of the end must be whole, and every image, too.
    """
    found: dict[str, tuple[str, int, int, str]] = {}
    with open(path, "rb") as file:
        end = file.seek(0, os.SEEK_END)
        _scan_open_tar(path, file, 0, end, "", found)
    return list(found.values())


def _scan_open_tar(path: Path, file: BinaryIO, start: int, end: int, prefix: str, found: dict) -> None:
    broken = f"{path} is not a readable tar"
    file.seek(start)
    magic = file.read(6)
    file.seek(start)
    if magic[:2] == b"\x1f\x8b" or magic[:3] == b"BZh" or magic == b"\xfd7zXZ\0":
        raise UsageError(f"{broken}: it is compressed; its images are read where they lie, so unpack it once")
    try:
        with tarfile.open(fileobj=file, mode="r:") as tar:
            while (member := tar.next()) is not None:
                tar.members.clear()  # it would keep them all
                written = member.name
                name = prefix + os.path.normpath(written).lstrip("/")
                if not member.isreg():
                    continue
                if member.offset_data + member.size > end:
                    raise UsageError(f"{broken}: it is cut off inside {ascii(name)}")
                if name.lower().endswith(".tar") and not prefix:
                    _scan_open_tar(path, file, member.offset_data, member.offset_data + member.size, name[:-4] + "/",
                                   found)
                elif is_image_name(name):
                    if member.issparse():
                        raise UsageError(f"{broken}: {ascii(name)} is stored as a sparse file")
                    found[name] = (name, member.size, member.offset_data, written)
            stop = tar.offset
    except (tarfile.TarError, EOFError, ValueError, OverflowError) as error:
        if isinstance(error, UsageError):
            raise
        raise UsageError(f"{broken}: {error}") from error
    file.seek(stop)
    if stop + tarfile.BLOCKSIZE > end:
        raise UsageError(f"{broken}: it is cut off, the mark of its end is missing")
    if file.read(tarfile.BLOCKSIZE).strip(b"\0"):
        raise UsageError(f"{broken}: it is damaged at byte {stop}")


def natural_key(text: str) -> list[int | str]:
    """timm's order of names: numbers by value, letters without their case."""
    return [int(part) if part.isdecimal() else part for part in re.split(r"(\d+)", text.lower())]
