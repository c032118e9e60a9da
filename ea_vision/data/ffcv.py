"""Images from .beton files, the format of FFCV (https://ffcv.io), behind the interface of the other loaders.

FFCV reads the file's tables and its C library decodes and scales, in threads of this process. Order and crops are drawn
here: FFCV's own loader seeds the order only, has no quasi-random order for several processes, and leaves its threads
behind. So a run continues inside an epoch with the same images, as with every other loader.
"""

from __future__ import annotations

import ctypes
import functools
import hashlib
import importlib
import json
import os
import sys
import threading
import weakref
import zlib
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch

from ea_vision.base.errors import UsageError
from ea_vision.data.augment import normalize
from ea_vision.data.bad_images import without
from ea_vision.data.batches import Batch, epoch_generator, epoch_order
from ea_vision.data.image_files import MAX_PIXELS, BrokenImage
from ea_vision.data.threads import ThreadLoader, ThreadTrainLoader

HELP = """FFCV is not installed. Debian, Ubuntu: apt-get install libturbojpeg0-dev libopencv-dev pkg-config \
&& pip install 'ea_vision[ffcv]'; conda: conda install -c conda-forge opencv libjpeg-turbo pkg-config compilers \
&& pip install 'ea_vision[ffcv]'; or leave .beton files out and give --data-dir"""
RAW = 1  # FFCV's mode of an image that is stored as pixels; 0: as JPEG
MOST_CLASSES = 1_000_000  # of a file without names; a larger label is a damaged one
PAGES_TOGETHER = 16  # os_cache off: images are shuffled within this many pages (of 8 MiB, as written here)


class Evaluated(NamedTuple):
    """How images are scaled and cut before evaluation: the trainer's options of these names."""

    eval_img_size: int
    eval_resize: int
    interpolation: str

    def __str__(self) -> str:
        return ", ".join(f"{name} {value}" for name, value in self._asdict().items())


def require_ffcv(module: str):
    """Import a module of FFCV.

    Raises:
        UsageError: it is not installed, with the lines that install it, or does not work, with what it says.
    """
    try:
        config = importlib.import_module("numba").config
        if config.THREADING_LAYER == "default":
            # FFCV starts numba's threads when it is imported. Where numba takes TBB for them and there is one core, a
            # process that has forked since waits for ever at its end. Nothing here computes in those threads.
            config.THREADING_LAYER = "workqueue"
        return importlib.import_module(module)
    except ModuleNotFoundError as error:
        if sys.modules.get("ffcv") is None:
            raise UsageError(HELP) from error
        raise UsageError(f"FFCV cannot be imported: {error}") from error
    except ImportError as error:  # a library it was built with has gone
        raise UsageError(f"FFCV cannot be imported: {error}") from error


def sidecar(path: Path) -> Path:
    """The file beside a .beton that says what it holds: its classes, its checksums, how it was written."""
    return path.with_name(path.name + ".json")


def seal(about: dict[str, Any]) -> dict[str, Any]:
    """`about` with a checksum of itself, as it lies beside a .beton file."""
    return {**about, "sha256": _digest_of(about)}


def _digest_of(about: dict[str, Any]) -> str:
    return hashlib.sha256(json.dumps(about, sort_keys=True).encode()).hexdigest()


def read_sidecar(path: Path) -> dict[str, Any]:
    """Return the description beside a .beton file; {} where there is none (FFCV's own writer leaves none).

    Raises:
        UsageError: it cannot be read, is damaged, or names no classes.
    """
    about = sidecar(path)
    if not about.exists():
        return {}
    try:
        found = json.loads(about.read_text())
    except (OSError, ValueError, RecursionError) as error:
        raise UsageError(f"{about} cannot be read: {error}; write {path} anew") from error
    if not isinstance(found, dict):
        raise UsageError(f"{about} must hold a table, got {type(found).__name__}")
    stated = found.pop("sha256", None)
    if (stated is not None or "checksums" in found) and stated != _digest_of(found):
        raise UsageError(f"{about} is damaged: its checksum does not match; write {path} anew")
    classes = found.get("classes")
    if not (isinstance(classes, list) and classes and all(isinstance(name, str) for name in classes)):
        raise UsageError(f"{about} does not name the classes of {path}")
    return found


class Beton:
    """The images and classes of a .beton file: fields `image` (RGB) and `label` (int), in this order.

    classes: from the file beside it that the writer leaves; numbers where there is none. checksums: uint32 (N,), CRC-32
    of each image's bytes, or None where that file has none. exif_rotation: whether the writer turned images as their
    EXIF data says; None: not known. evaluated: how images were scaled and cut when they were stored; None: not at all.

    Args:
        num_classes: that it must have; 0: any.
        verify: compare each image with its checksum when it is first decoded.
    """

    def __init__(self, path: Path, num_classes: int = 0, verify: bool = False):
        self.path, self.name = path, str(path)
        reader = _checked_reader(path)
        self.images, self.labels = (reader.metadata[name] for name in reader.metadata.dtype.names)
        self.heights, self.widths = (self.images[side].astype(np.int64) for side in ("height", "width"))
        self.data = np.memmap(path, np.uint8, mode="r").view(np.ndarray)
        self.sizes = self._checked_sizes(reader)
        self.pages = (self.images["data_ptr"] // np.uint64(reader.page_size)).astype(np.int64)
        self.lib = require_ffcv("ffcv.libffcv")
        self._local = threading.local()
        self._read_about(num_classes)
        if verify and self.checksums is None:
            raise UsageError(f"{sidecar(path)} has no checksums to verify {path} with: write it anew")
        self.unverified = np.full(len(self), verify)

    def _checked_sizes(self, reader) -> np.ndarray:
        """uint64 (N,): bytes of every image, which must lie in the file where the tables say."""
        by_place = np.sort(reader.alloc_table, order="ptr")
        starts = self.images["data_ptr"]
        places = np.minimum(np.searchsorted(by_place["ptr"], starts), len(by_place) - 1)
        sizes = by_place["size"][places]
        tables = np.uint64(len(self.data) - reader.alloc_table.nbytes)  # where the table of places begins
        pixels = self.heights.astype(np.uint64) * self.widths.astype(np.uint64) * np.uint64(3)
        raw = self.images["mode"] == RAW
        wrong = ((by_place["ptr"][places] != starts) | (sizes == 0) | (sizes > tables)
                 | (starts > tables - np.minimum(sizes, tables)) | (pixels == 0) | (pixels > 3 * np.uint64(MAX_PIXELS))
                 | (self.images["mode"] > RAW) | (raw & (sizes != pixels)))
        if wrong.any():
            raise UsageError(f"{self.path} is damaged: {int(wrong.sum())} of {len(wrong)} entries of its tables cannot "
                             f"be, the first is number {int(wrong.argmax())}")
        return sizes

    def _read_about(self, num_classes: int) -> None:
        path, about = self.path, read_sidecar(self.path)
        named = len(about.get("classes", [])) or num_classes
        if self.labels.min() < 0 or self.labels.max() >= (named or MOST_CLASSES):
            raise UsageError(f"labels of {path} must lie in 0..{(named or MOST_CLASSES) - 1}, "
                             f"got {self.labels.min()}..{self.labels.max()}")
        self.classes = about.get("classes") or [str(n) for n in range(num_classes or int(self.labels.max()) + 1)]
        self.exif_rotation = about.get("exif_rotation", False) if about else None
        self.evaluated = None
        if "evaluated" in about:
            try:
                self.evaluated = Evaluated(**about["evaluated"])
                side = int(self.evaluated.eval_img_size)
            except (TypeError, ValueError) as error:
                raise UsageError(f"{sidecar(path)} must say how images are evaluated, got {about['evaluated']!r}"
                                 ) from error
            if (self.heights != side).any() or (self.widths != side).any():
                raise UsageError(f"{path} must have images of {side}x{side} pixels, as {sidecar(path)} says")
        self.checksums = None
        if "checksums" in about:
            if about.get("tables") != self.tables_digest():
                raise UsageError(f"{path} is damaged, or not the file that {sidecar(path)} describes: the checksum of "
                                 "its tables does not match; write it anew")
            try:
                self.checksums = np.frombuffer(bytes.fromhex(about["checksums"]), ">u4")
            except (TypeError, ValueError) as error:
                raise UsageError(f"the checksums in {sidecar(path)} are none: {error}") from error
            if len(self.checksums) != len(self):
                raise UsageError(f"{sidecar(path)} must have {len(self)} checksums, got {len(self.checksums)}")
        if num_classes and len(self.classes) != num_classes:
            raise UsageError(f"{path} must have {num_classes} classes (--num-classes), got {len(self.classes)}")

    def __len__(self) -> int:
        return len(self.labels)

    def mean_bytes(self) -> float:
        """Return the mean size of a stored image."""
        return float(self.sizes.mean())

    def describe(self, index: int) -> str:
        return f"{self.path} {index}"

    def fits_in_memory(self) -> bool:
        """Return whether the file takes at most half of this machine's memory."""
        return self.path.stat().st_size <= os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") // 2

    def check_exif_rotation(self, wanted: bool) -> None:
        """Raise UsageError where the file was written with other EXIF rotation than is wanted."""
        if self.exif_rotation is not None and self.exif_rotation != wanted:
            had, asked = ("with", "without") if self.exif_rotation else ("without", "with")
            raise UsageError(f"{self.path} was written {had} --exif-rotation, the trainer was started {asked} it: both "
                             "must be alike")

    def check_evaluated(self, wanted: Evaluated | None) -> None:
        """Raise UsageError where images were stored for another evaluation, or (wanted: None) are to be trained on."""
        if self.evaluated is not None and self.evaluated != wanted:
            asked = f"got {wanted}" if wanted else "and cannot be trained on"
            raise UsageError(f"{self.path} was written for {self.evaluated}, {asked}: write it anew, or without "
                             "--eval-img-size")

    def tables_digest(self) -> str:
        """SHA-256 over the file's tables: label, place, form and size of every image."""
        digest = hashlib.sha256()
        for table in (self.labels, self.images, self.sizes, self.pages):
            digest.update(table.tobytes())
        return digest.hexdigest()

    def fingerprint(self) -> str:
        """SHA-256 over classes, labels, the size of every image in pixels and bytes, and the checksums there are."""
        found = self.earlier_fingerprint()
        if self.checksums is None:
            return found
        return hashlib.sha256(found.encode() + self.checksums.tobytes()).hexdigest()

    def earlier_fingerprint(self) -> str:
        """Return the fingerprint of releases without checksums, so that their runs can go on."""
        digest = hashlib.sha256("\n".join(self.classes).encode())
        for table in (self.labels, self.heights, self.widths, self.sizes):
            digest.update(np.ascontiguousarray(table))
        return digest.hexdigest()

    def stored(self, index: int) -> np.ndarray:
        """The bytes of an image, as they lie in the file."""
        start = int(self.images["data_ptr"][index])
        return self.data[start:start + int(self.sizes[index])]

    def decode(self, index: int) -> np.ndarray:
        """Pixels (H, W, 3), valid until this thread decodes another one.

        Raises:
            BrokenImage: the image is damaged.
        """
        data, height, width = self.stored(index), int(self.heights[index]), int(self.widths[index])
        if self.unverified[index]:
            if zlib.crc32(data) != self.checksums[index]:
                raise BrokenImage("its checksum does not match")
            self.unverified[index] = False
        if self.images["mode"][index] == RAW:
            return data.reshape(height, width, 3)
        if not hasattr(self._local, "buffer"):
            self._local.buffer = np.empty(int((self.heights * self.widths).max()) * 3, np.uint8)
            self._local.jpeg = _JpegHeader(self.lib.lib)
        pixels = self._local.buffer[:height * width * 3].reshape(height, width, 3)
        stated = self._local.jpeg.size(data)
        if stated != (height, width):
            raise BrokenImage(f"it is no JPEG of {height}x{width} pixels")
        if self.lib.imdecode(data, pixels, height, width, height, width) != 0:
            raise BrokenImage("it is a damaged JPEG")
        return pixels

    def scaled(self, index: int, box: Sequence[int], out: np.ndarray) -> None:
        """Scale a part of an image to `out` (S, S, 3), averaging areas. box: top, left, height, width.

        Raises:
            BrokenImage: the image is damaged.
        """
        top, left, height, width = np.asarray(box).tolist()
        self.lib.resize_crop(self.decode(index), top, top + height, left, left + width, out)


class _JpegHeader:
    """Reads the size that a JPEG states, with the libjpeg-turbo that FFCV decodes with; for one thread."""

    def __init__(self, lib: ctypes.CDLL):
        self._lib = lib
        lib.tjInitDecompress.restype = ctypes.c_void_p
        lib.tjDecompressHeader3.argtypes = [ctypes.c_void_p, ctypes.c_void_p, ctypes.c_ulong,
                                            *[ctypes.POINTER(ctypes.c_int)] * 4]
        lib.tjDestroy.argtypes = [ctypes.c_void_p]
        self._renew()

    def _renew(self) -> None:
        self._handle = self._lib.tjInitDecompress()
        self._end = weakref.finalize(self, self._lib.tjDestroy, self._handle)

    def size(self, data: np.ndarray) -> tuple[int, int] | None:
        """(height, width), or None for what has no readable header."""
        width, height, sampling, colours = (ctypes.c_int() for _ in range(4))
        failed = self._lib.tjDecompressHeader3(self._handle, data.ctypes.data, data.size, width, height, sampling,
                                               colours)
        if failed:  # the handle is left inside that header, and would fail once more
            self._end()
            self._renew()
            return None
        return height.value, width.value


def _checked_reader(path: Path):
    """FFCV's reader of a file that is whole.

    Raises:
        UsageError: no such file, not FFCV's, other fields, or cut off.
    """
    if not path.is_file():
        raise UsageError(f"no such .beton file: {path}")
    reader_module, types = require_ffcv("ffcv.reader"), require_ffcv("ffcv.types")
    size = path.stat().st_size
    broken = f"{path} is not a whole .beton file"
    if size < types.HeaderType.itemsize:
        raise UsageError(f"{broken}: it has {size} bytes")
    header = np.fromfile(path, types.HeaderType, count=1)[0]
    if header["version"] != types.CURRENT_VERSION:
        raise UsageError(f"{broken}: FFCV's format {types.CURRENT_VERSION} is required, got {header['version']}")
    if header["num_fields"] != 2:
        raise UsageError(f"{broken}: an RGB image and an integer label are required, got {header['num_fields']} fields")
    if header["num_samples"] == 0 or header["alloc_table_ptr"] == 0:
        raise UsageError(f"{broken}: its writing was interrupted")
    wanted = int(header["alloc_table_ptr"]) + int(header["num_samples"]) * types.ALLOC_TABLE_TYPE.itemsize
    if size != wanted:
        raise UsageError(f"{broken}: it must have {wanted} bytes, got {size}")
    kinds = np.fromfile(path, types.FieldDescType, count=2, offset=types.HeaderType.itemsize)["type_id"]
    known = [types.TYPE_ID_HANDLER.get(int(kind)) for kind in kinds]
    names = [kind.__name__ if kind else "an unknown field" for kind in known]
    if names != ["RGBImageField", "IntField"]:
        raise UsageError(f"{path} must have an RGB image and an integer label, got {', '.join(names)}")
    try:
        reader = reader_module.Reader(str(path))
        if len(reader.handlers) != 2 or reader.page_size == 0:
            raise ValueError(f"fields {', '.join(reader.handlers)} in pages of {reader.page_size} bytes")
    except (ValueError, TypeError, KeyError, IndexError, OverflowError) as error:
        raise UsageError(f"{broken}: {error}") from error
    return reader


def open_beton(path: Path, num_classes: int = 0, verify: bool = False) -> Beton:
    """Open a .beton file.

    Args:
        num_classes: that it must have; 0: any.
        verify: compare each image with its checksum when it is first decoded.

    Raises:
        UsageError: FFCV is not installed, or the file is missing, cut off, damaged, of other classes or, with `verify`,
            without checksums.
    """
    return Beton(path, num_classes, verify)


def random_boxes(heights: np.ndarray, widths: np.ndarray, rng: np.random.Generator, scale: Sequence[float],
                 ratio: Sequence[float] = (3 / 4, 4 / 3)) -> np.ndarray:
    """Crops of random area and aspect ratio (Szegedy et al. 2015) for images of the given sizes in pixels.

    Args:
        scale: least and largest share of the image's area; ratio: of width over height.

    Returns:
        int64 (N, 4): top, left, height, width. After ten tries that do not fit: the middle, of the nearest ratio.
    """
    log_ratio = np.log(ratio)
    found = np.clip(widths / heights, *ratio)
    crop_h = np.minimum(heights, np.rint(widths / found)).astype(np.int64)
    crop_w = np.minimum(widths, np.rint(heights * found)).astype(np.int64)
    where = rng.random((2, len(heights)))
    centred = np.ones(len(heights), bool)
    left_over = np.arange(len(heights))
    for _ in range(10):
        area = heights[left_over] * widths[left_over] * rng.uniform(*scale, len(left_over))
        aspect = np.exp(rng.uniform(*log_ratio, len(left_over)))
        w, h = np.rint(np.sqrt(area * aspect)).astype(np.int64), np.rint(np.sqrt(area / aspect)).astype(np.int64)
        fits = (0 < w) & (w <= widths[left_over]) & (0 < h) & (h <= heights[left_over])
        chosen = left_over[fits]
        crop_h[chosen], crop_w[chosen], centred[chosen] = h[fits], w[fits], False
        left_over = left_over[~fits]
    where[:, centred] = 0.5
    top = np.minimum((where[0] * (heights - crop_h + 1)).astype(np.int64), heights - crop_h)
    left = np.minimum((where[1] * (widths - crop_w + 1)).astype(np.int64), widths - crop_w)
    return np.stack([top, left, crop_h, crop_w], axis=1)


def centre_boxes(heights: np.ndarray, widths: np.ndarray, img_size: int, resize: int) -> np.ndarray:
    """int64 (N, 4), top, left, height, width: what torchvision's Resize(resize) and CenterCrop(img_size) would show."""
    short = np.minimum(heights, widths)
    boxes = []
    for sides in (heights, widths):
        resized = resize * sides // short
        start = np.rint((resized - img_size) / 2) * sides / resized  # both roundings are torchvision's
        length = np.rint(img_size * sides / resized)
        boxes.append((np.minimum(np.rint(start), sides - length).astype(np.int64), length.astype(np.int64)))
    (top, height), (left, width) = boxes
    return np.stack([top, left, height, width], axis=1)


def quasi_random_order(pages: np.ndarray, seed: int, epoch: int, together: int = PAGES_TOGETHER) -> torch.Tensor:
    """An order that reads the file in large pieces: pages (N,) of the images, shuffled, `together` at a time."""
    rng = np.random.default_rng((seed, epoch, 1))
    _, page = np.unique(pages, return_inverse=True)
    group = rng.permutation(page.max() + 1)[page] // together
    return torch.from_numpy(np.lexsort((rng.random(len(pages)), group)))


def _look_up(pixels: np.ndarray, mirrored: bool, table: np.ndarray, out: np.ndarray) -> None:
    """out[c, y, x] = table[c, pixels[y, x, c]], left and right exchanged where `mirrored`."""
    height, width, _ = pixels.shape
    for y in range(height):
        for x in range(width):
            to = width - 1 - x if mirrored else x
            out[0, y, to] = table[0, pixels[y, x, 0]]
            out[1, y, to] = table[1, pixels[y, x, 1]]
            out[2, y, to] = table[2, pixels[y, x, 2]]


@functools.cache
def _compiled_look_up():
    return require_ffcv("numba").njit(nogil=True)(_look_up)


class _BetonLoader(ThreadLoader):
    """Decodes by FFCV. Args: those of `ThreadLoader`."""

    def __init__(self, source: Beton, **common):
        super().__init__(source, source.labels, **common)
        if not self.in_bytes:
            levels = torch.arange(256, dtype=torch.uint8).expand(3, 1, 256)
            self._table = normalize(levels, self.mean, self.std)[:, 0].numpy()  # (3, 256)
            self._look_up = _compiled_look_up()

    def fill(self, index: int, box: np.ndarray, out: np.ndarray) -> None:
        self.source.scaled(index, box, out)

    def finish(self, index: int, box: np.ndarray, mirrored: bool, out: np.ndarray) -> None:
        pixels = np.empty((out.shape[-1], out.shape[-1], 3), np.uint8)
        self.source.scaled(index, box, pixels)
        self._look_up(pixels, mirrored, self._table, out)


class BetonTrainLoader(_BetonLoader, ThreadTrainLoader):
    """Shuffled, cropped and flipped batches.

    Args:
        os_cache: random order over the whole file; without it `quasi_random_order`. The others: those of
            `ThreadTrainLoader`.
    """

    def __init__(self, source: Beton, *, os_cache: bool, **common):
        super().__init__(source, **common)
        self.os_cache = os_cache

    def batches(self, epoch: int, first: int = 0) -> Iterator[Batch]:
        """Yield the batches of an epoch from number `first` on."""
        source = self.source
        if self.os_cache:
            order = epoch_order(len(source), epoch_generator(self.seed, epoch))
        else:
            order = quasi_random_order(source.pages, self.seed, epoch)
        indices = self.share.repeated(order, self.repeats)[0].numpy()
        shown = slice(None) if self.repeats == 1 else indices  # a row an image, or a row a place
        rng = np.random.default_rng((self.seed, epoch))
        boxes = random_boxes(source.heights[shown], source.widths[shown], rng, self.scale)
        flips = rng.random(len(source)) < self.hflip
        rows = indices if self.repeats == 1 else np.arange(len(indices))
        yield from self.shown(epoch, first, indices, rows, boxes, flips)


class BetonEvalLoader(_BetonLoader):
    """Every image once over all processes; damaged ones are left out.

    Args:
        resize: what the short side is scaled to, in pixels, before the middle img_size x img_size is cut out. Of images
            that were stored so nothing is scaled or cut any more.
    """

    def __init__(self, source: Beton, *, resize: int, **common):
        super().__init__(source, **common)
        self.boxes = centre_boxes(source.heights, source.widths, self.img_size,
                                  resize if source.evaluated is None else self.img_size)

    def __len__(self) -> int:
        return self.share.eval_batches

    def mend(self, indices: np.ndarray, rows: np.ndarray, images: torch.Tensor, bad: list[int]) -> tuple:
        good = without(len(indices), bad)
        return indices[good], rows[good], images[good]

    def batches(self) -> Iterator[Batch]:
        batches = [np.array(images, np.int64) for images in self.share.eval_images()]
        yield from self.decoded([(indices, indices) for indices in batches], self.boxes,
                                np.zeros(len(self.source), bool), self.img_size)
