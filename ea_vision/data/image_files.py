"""Image files in class folders and tars, and their classes.

The class is the first folder of a name, so class/images/x.jpg belongs to `class`; a folder that holds all the others
does not count (train.tar with train/class/x.jpg). Links in folders are followed. In a tar of tars (ImageNet's own
ILSVRC2012_img_train.tar) and in a folder of tars each tar is a class. ILSVRC's flat validation images get their classes
from the files that come with them (`ilsvrc`), those of WebDataset's shards from the .cls beside them. Hidden files are
skipped (`image_names`). timm's readers, which could do most of this, read a tar from end to end to list it and take
`images` as the class of class/images/x.jpg.
"""

import contextlib
import hashlib
import io
import logging
import os
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import NamedTuple

import numpy as np
from PIL import Image

from ea_vision.base.errors import UsageError, as_usage_error
from ea_vision.data import ilsvrc
from ea_vision.data.decoding import BrokenImage, decode_image
from ea_vision.data.folders import walk_images
from ea_vision.data.image_names import (
    IMAGE_SUFFIXES,
    displayable,
    hidden_part,
    in_order,
    is_image_name,
    log_hidden,
    may_be_folder,
)
from ea_vision.data.tars import Span, list_tar

log = logging.getLogger(__name__)
LABEL_SUFFIX = ".cls"  # of WebDataset's shards (https://github.com/webdataset/webdataset)
# of files that img2dataset and others put beside an image, and that are not labels
OTHER_SUFFIXES = (".json", ".txt")
LONGEST = 200  # bytes of a label


class Entry(NamedTuple):
    """An image of a source."""

    name: str  # relative to the source, with /
    tar: Path | None  # that holds it; None: a file of its own
    span: Span  # where its bytes lie
    label: str  # from its shard; "": the folder is its class


class ImageFiles:
    """The images of a folder or .tar of class/name.jpg, in the natural order of their names, as in timm.

    Attributes:
        name: the source. names: relative to it. classes: their names. targets: int64 (N,), numbers of `classes`.

    Raises:
        UsageError: no such source, no images, images outside a class folder, a class folder without images, or a
            damaged or compressed tar.
    """

    def __init__(self, source: Path):
        self.source = source
        self.name = str(source)
        with as_usage_error(f"{source} cannot be read", OSError):
            entries = _entries_of(source)
            entries.sort(key=lambda entry: in_order(entry.name))
            self.names = [entry.name for entry in entries]
            self._tars = [entry.tar for entry in entries]
            # start and bytes of each image: an array, which forked processes share
            self._spans = np.array([entry.span for entry in entries], np.int64)
            labels = self._labels(entries)
        self.classes = sorted(set(labels), key=in_order)
        number = {name: target for target, name in enumerate(self.classes)}
        self.targets = np.array([number[label] for label in labels], np.int64)
        with contextlib.suppress(BrokenImage):  # reported when it is trained on
            self.read(0)  # logs if it seems to have 12 bits, which worker processes do not log

    def __len__(self) -> int:
        return len(self.names)

    def _labels(self, entries: list[Entry]) -> list[str]:
        """Return the class of each image."""
        labels = [entry.label for entry in entries]
        if all(labels):
            return labels
        if any(labels):
            without = next(entry for entry in entries if not entry.label)
            raise UsageError(
                f"{self.source} has WebDataset's shards (.cls beside the images) and other images, "
                f"such as {ascii(without.name)}: only one kind is allowed"
            )
        if ilsvrc.is_flat(self.names):
            return ilsvrc.labels_of(self.source, self.names)
        return self._class_folders()

    def _class_folders(self) -> list[str]:
        """Return the class of each image: the first folder that not all of them share."""
        folders = [name.split("/")[:-1] for name in self.names]
        first = min(folders)
        last = max(folders)
        shared = len(os.path.commonprefix([first, last]))
        beside_others = len(first) == shared < len(last)
        if beside_others or not first:
            stray = self.names[folders.index(first)]
            raise UsageError(f"images of {self.source} must lie in class folders, got {stray}")
        # If all lie in one folder, that is their class.
        depth = shared if shared < len(first) else shared - 1
        labels = [displayable(parts[depth]) for parts in folders]
        if self.source.is_dir():
            self._refuse_empty(self.source.joinpath(*first[:depth]), set(labels))
        return labels

    def _refuse_empty(self, root: Path, classes: set[str]) -> None:
        """Raise UsageError for class folders without images, and for links to folders that do not exist."""
        empty = []
        for entry in os.scandir(root):
            nowhere = entry.is_symlink() and not os.path.exists(entry.path)
            is_class = entry.is_dir() or (nowhere and may_be_folder(entry.name))
            name = displayable(entry.name)
            if is_class and name not in classes and not hidden_part(name):
                empty.append(name)
        if empty:
            raise UsageError(
                f"{len(empty)} class folder(s) of {self.source} have no images: "
                f"{', '.join(sorted(empty)[:5])}"
            )

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
            with open(self._tars[index] or self.describe(index), "rb") as file:
                file.seek(start)
                data = file.read(size)
        except OSError as error:
            raise BrokenImage(str(error)) from error
        image = decode_image(io.BytesIO(data), name=self.describe(index))
        return image, int(self.targets[index])

    def fingerprint(self) -> str:
        """Return SHA-256 over the classes, names and sizes of the images: the same wherever they are stored."""
        return fingerprint([*self.classes, "", *self.names], self._spans[:, 1], self.targets)


def fingerprint(lines: Iterable[str], *arrays) -> str:
    """Return SHA-256 over lines of text and the values of arrays or tensors on the CPU."""
    # names of files may not be UTF-8
    digest = hashlib.sha256("\n".join(lines).encode("utf-8", "surrogateescape"))
    for array in arrays:
        digest.update(np.ascontiguousarray(array))
    return digest.hexdigest()


def _entries_of(source: Path) -> list[Entry]:
    """Return the images of a folder, a tar, or a folder of tars, in any order; log how many hidden ones there are.

    Raises:
        UsageError: there are none.
    """
    hidden: set[str] = set()
    if source.is_dir():
        entries = [
            Entry(name, None, Span(0, size), "") for name, size in walk_images(source, hidden)
        ]
        tars = sorted(tar for tar in source.glob("*.tar") if not hidden_part(tar.name))
        if entries and tars:
            log.warning(
                f"{source}: {len(tars)} tars beside the folders of images are skipped, such as {tars[0].name!a}"
            )
            tars = []
        for tar in tars:
            entries += _entries_of_tar(tar, f"{tar.stem}/", hidden)
    else:
        entries = _entries_of_tar(source, "", hidden)
    log_hidden(source, hidden)
    if not entries:
        raise UsageError(
            f"{source} has no images: class/name with a suffix of {', '.join(IMAGE_SUFFIXES)} is required"
        )
    return entries


def _entries_of_tar(path: Path, prefix: str, hidden: set[str]) -> list[Entry]:
    """Return the images of a tar, each with the label of the .cls beside it. Skipped names are added to `hidden`.

    Raises:
        UsageError: see `_shard_labels`; a damaged tar.
    """
    files = list_tar(path)
    visible = {}
    for name, span in files.items():
        if not hidden_part(name):
            visible[name] = span
        elif is_image_name(name):
            hidden.add(prefix + hidden_part(name))
    labels = _shard_labels(path, visible)
    entries = []
    for name, span in visible.items():
        if is_image_name(name):
            label = labels.get(name, "")
            entries.append(Entry(prefix + name, path, span, label))
    return entries


def _shard_labels(path: Path, files: Mapping[str, Span]) -> dict[str, str]:
    """Return the labels of a tar's images by name; {} if it is not a shard of WebDataset's, in which 000012.jpg and
    000012.cls are one sample; the .cls is a number or a name.

    Args:
        files: those of the tar, by name.

    Raises:
        UsageError: a shard without labels, an image without a label, or a label that is not text.
    """
    images = [name for name in files if is_image_name(name)]
    labels = {_key(name): span for name, span in files.items() if name.endswith(LABEL_SUFFIX)}
    if not labels:
        _refuse_unlabelled(path, files, images)
        return {}
    labels_by_name = {}
    with open(path, "rb") as file:
        for name in images:
            if _key(name) not in labels:
                raise UsageError(
                    f"{path} is a shard of WebDataset's: {LABEL_SUFFIX} is required beside each image, and "
                    f"{ascii(name)} has none"
                )
            start, size = labels[_key(name)]
            file.seek(start)
            labels_by_name[name] = _label(path, name, file.read(min(size, LONGEST + 1)))
    return labels_by_name


def _key(name: str) -> str:
    """Return the name of a sample: up to the first dot of the file's name."""
    folder, slash, file = name.rpartition("/")
    return folder + slash + file.partition(".")[0]


def _label(path: Path, name: str, content: bytes) -> str:
    text = content.decode("utf-8", errors="replace").strip()
    if not text or len(content) > LONGEST or not text.isprintable() or "\ufffd" in text:
        raise UsageError(
            f"{path}: the {LABEL_SUFFIX} beside {ascii(name)} must be a number or a name, got {content!r:.60}"
        )
    return displayable(text)


def _refuse_unlabelled(path: Path, files: Iterable[str], images: list[str]) -> None:
    """Raise UsageError if the images of a tar have captions or the like beside them, but no label and no folder."""
    flat = {_key(name) for name in images if "/" not in name}
    for name in files:
        if name.endswith(OTHER_SUFFIXES) and _key(name) in flat:
            raise UsageError(
                f"{path} is a shard of WebDataset's without labels: {LABEL_SUFFIX} is required beside "
                f"each image, and {ascii(name)} is no label"
            )
