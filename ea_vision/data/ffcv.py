"""Images from .beton files, the format of FFCV (https://ffcv.io), behind the interface of the other loaders.

FFCV reads the tables, draws the crops, decodes and scales; threads of this process call its C library. Its own Loader
reached 0.2 to 0.7 of the images per second on a CPU, does not notice a damaged JPEG and draws other crops in every run.
Here order, crops and flips are functions of seed, epoch and image.
"""

from __future__ import annotations

import functools
import hashlib
import importlib
import json
import logging
import os
import sys
import threading
import weakref
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch

from ea_vision.base.errors import UsageError
from ea_vision.data.augment import normalize
from ea_vision.data.image_files import MAX_PIXELS
from ea_vision.data.imagenet import ImageEvalLoader, ImageTrainLoader, image_seed

HELP = """FFCV is not installed. Debian, Ubuntu: apt-get install libturbojpeg0-dev libopencv-dev pkg-config \
&& pip install 'ea_vision[ffcv]'; conda: conda install -c conda-forge opencv libjpeg-turbo pkg-config compilers \
&& pip install 'ea_vision[ffcv]'; or leave .beton files out and give --data-dir"""
log = logging.getLogger(__name__)
RAW = 1  # FFCV's mode of an image that is stored as pixels; 0: as JPEG
PAGES_TOGETHER = 16  # os_cache off: images are shuffled within this many pages (of 8 MiB, as written here)
RATIO = np.array([3 / 4, 4 / 3])  # least and greatest width of a training crop to its height


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
    except ImportError as error:
        missing = isinstance(error, ModuleNotFoundError) and sys.modules.get("ffcv") is None
        raise UsageError(HELP if missing else f"FFCV cannot be imported: {error}") from error


def sidecar(path: Path) -> Path:
    """Return the file beside a .beton that names its classes and says how it was written."""
    return path.with_name(path.name + ".json")


class Beton:
    """The images and classes of a .beton file: fields `image` (RGB) and `label` (int), in this order.

    classes: from the file that write-ffcv leaves beside it; numbers where there is none. table: int64 (N, 5), of each
    image its place in the file, bytes, height, width and whether it is JPEG. exif_rotation: whether images were turned
    as their EXIF data says; None: not known. evaluated: how images were scaled and cut to be stored; None: not.

    Args:
        num_classes: that it must have; 0: any.

    Raises:
        UsageError: FFCV is not installed, or the file is missing, cut off, damaged or of other classes.
    """

    def __init__(self, path: Path, num_classes: int = 0):
        self.path, self.name = path, str(path)
        reader = _open_reader(path)
        images, self.labels = (reader.metadata[name] for name in reader.metadata.dtype.names)
        self.pages = (images["data_ptr"] // np.uint64(reader.page_size)).astype(np.int64)
        by_place = np.sort(reader.alloc_table, order="ptr")
        places = np.searchsorted(by_place["ptr"], images["data_ptr"]).clip(max=len(by_place) - 1)
        self.table = np.stack([column.astype(np.int64) for column in (
            images["data_ptr"], by_place["size"][places], images["height"], images["width"], images["mode"] != RAW)], 1)
        self.data = np.memmap(path, np.uint8, mode="r").view(np.ndarray)  # Linux refuses "c" beyond the memory's size
        starts, sizes, heights, widths, is_jpeg = self.table.T
        pixels = heights * widths
        wrong = ((starts < 0) | (sizes <= 0) | (starts + sizes > len(self.data)) | (pixels == 0) | (pixels > MAX_PIXELS)
                 | ((is_jpeg == 0) & (sizes != 3 * pixels)))  # the C library would read beyond them
        if wrong.any():
            raise UsageError(f"{path} is damaged: {wrong.sum()} of its {len(wrong)} images lie outside the file or "
                             f"cannot have their size, the first is number {wrong.argmax()}")
        try:
            about = json.loads(sidecar(path).read_text()) if sidecar(path).exists() else {}
        except (OSError, ValueError) as error:
            raise UsageError(f"{sidecar(path)} cannot be read: {error}; write {path} anew") from error
        self.exif_rotation = about.get("exif_rotation")
        self.evaluated = Evaluated(*about["evaluated"]) if about.get("evaluated") else None
        most = len(about.get("classes", ())) or num_classes or 1_000_000  # more are a damaged label
        if self.labels.min() < 0 or self.labels.max() >= most:
            raise UsageError(f"labels of {path} must lie in 0..{most - 1}, got {self.labels.min()}.."
                             f"{self.labels.max()}")
        self.classes = about.get("classes") or [str(number) for number in range(num_classes or self.labels.max() + 1)]
        if num_classes and len(self.classes) != num_classes:
            raise UsageError(f"{path} must have {num_classes} classes (--num-classes), got {len(self.classes)}")

    def __len__(self) -> int:
        return len(self.labels)

    def describe(self, index: int) -> str:
        """Return a name for an image."""
        return f"{self.path} {index}"

    def fits_in_memory(self) -> bool:
        """Return whether the file takes at most half of this machine's memory."""
        return len(self.data) <= os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") // 2

    def check(self, exif_rotation: bool, evaluated: Evaluated | None) -> None:
        """Raise UsageError unless the file was written with this EXIF rotation and, where its images were stored for an
        evaluation, for this one (None: it is to be trained on)."""
        if self.exif_rotation is not None and self.exif_rotation != exif_rotation:
            had, asked = ("with", "without") if self.exif_rotation else ("without", "with")
            raise UsageError(f"{self.path} was written {had} --exif-rotation, the trainer was started {asked} it: both "
                             "must be alike")
        if self.evaluated is not None and self.evaluated != evaluated:
            asked = f"got {evaluated}" if evaluated else "and cannot be trained on"
            raise UsageError(f"{self.path} was written for {self.evaluated}, {asked}: write it anew, or without "
                             "--eval-img-size")

    def fingerprint(self) -> str:
        """Return SHA-256 over classes, labels and the size of every image in pixels and bytes."""
        digest = hashlib.sha256("\n".join(self.classes).encode())
        for array in (self.labels, self.table[:, 1:]):
            digest.update(np.ascontiguousarray(array))
        return digest.hexdigest()


def _open_reader(path: Path):
    """Return FFCV's reader of a file that is whole.

    Raises:
        UsageError: no such file, not FFCV's, other fields, or cut off.
    """
    reader_module, types = require_ffcv("ffcv.reader"), require_ffcv("ffcv.types")
    if not path.is_file():
        raise UsageError(f"no such .beton file: {path}")
    try:
        reader = reader_module.Reader(str(path))
        fields = [type(field).__name__ for field in reader.handlers.values()]
        wanted = int(reader.header["alloc_table_ptr"]) + len(reader.metadata) * types.ALLOC_TABLE_TYPE.itemsize
        if not len(reader.metadata) == len(reader.alloc_table) > 0 or wanted != path.stat().st_size:
            raise ValueError(f"its writing was interrupted or it was cut off: {wanted} bytes are required, "
                             f"got {path.stat().st_size}")
    except (AssertionError, ValueError, TypeError, LookupError, OverflowError, MemoryError) as error:
        raise UsageError(f"{path} is not a whole .beton file: {error}") from error
    if fields != ["RGBImageField", "IntField"]:
        raise UsageError(f"{path} must have an RGB image and an integer label, got {', '.join(fields)}")
    return reader


def quasi_random_order(pages: np.ndarray, seed: int, epoch: int, together: int = PAGES_TOGETHER) -> torch.Tensor:
    """Return an order that reads the file in large pieces: pages (N,) of the images, shuffled, `together` at a time."""
    rng = np.random.default_rng((seed, epoch, 1))
    _, page = np.unique(pages, return_inverse=True)
    group = rng.permutation(page.max() + 1)[page] // together
    return torch.from_numpy(np.lexsort((rng.random(len(pages)), group)))


def centre_crop(height: int, width: int, resize: int, side: int) -> tuple[int, int, int, int]:
    """Return what torchvision's Resize(resize) and CenterCrop(side) show of an image: top, left, height, width."""
    short = min(height, width)
    tall, wide = resize * height // short, resize * width // short
    crop_height, crop_width = int(np.rint(side * height / tall)), int(np.rint(side * width / wide))
    top = int(np.rint(np.rint((tall - side) / 2) * height / tall))  # both roundings are torchvision's
    left = int(np.rint(np.rint((wide - side) / 2) * width / wide))
    return min(top, height - crop_height), min(left, width - crop_width), crop_height, crop_width


@functools.cache
def _compiled(training: bool) -> Callable[..., None]:
    """Compile `show`, which holds no interpreter lock, around FFCV's decoder, its scaling by areas and what chooses a
    crop: FFCV's function in training, `centre_crop` else."""
    njit, lib = require_ffcv("numba").njit, require_ffcv("ffcv.libffcv")
    imdecode, resize_crop = njit(lib.imdecode), njit(lib.resize_crop)
    choose_crop = njit(require_ffcv("ffcv.fields.rgb_image").get_random_crop if training else centre_crop)

    @njit(nogil=True)
    def show(data, table, seeds, first, second, hflip, levels, decoded, out, bad):
        """Show crops of the images that `table` (B, 5) places in `data`: out (B, 3, S, S) are the values of their bytes
        in `levels` (3, 256); first, second: of `choose_crop`; bad (B,) is where a JPEG is damaged. decoded: memory for
        the largest image."""
        side = out.shape[2]
        scaled = np.empty((side, side, 3), np.uint8)
        for n in range(len(table)):
            start, size, height, width, is_jpeg = table[n]
            pixels = data[start:start + size]
            if is_jpeg:
                pixels = decoded[:height * width * 3]
                bad[n] = imdecode(data[start:start + size], pixels, height, width, height, width, 0, 0, 1, 1, False,
                                  False) != 0
            np.random.seed(seeds[n])  # of this thread's generator in compiled code
            top, left, crop_height, crop_width = choose_crop(height, width, first, second)
            resize_crop(pixels.reshape(height, width, 3), top, top + crop_height, left, left + crop_width, scaled)
            shown = scaled[:, ::-1] if np.random.random() < hflip else scaled[:, ::1]
            for y in range(side):
                for x in range(side):
                    for c in range(3):
                        out[n, c, y, x] = levels[c, shown[y, x, c]]

    return show


class _Memory:
    """float32 arrays on the CPU whose memory is used again once no tensor shares it: that of new ones costs as much as
    their pixels."""

    def __init__(self):
        self._arrays: list[tuple[np.ndarray, weakref.ref]] = []
        self._lock = threading.Lock()

    def empty(self, *shape: int) -> torch.Tensor:
        """Return an uninitialised tensor."""
        with self._lock:
            free = next((number for number, (array, used) in enumerate(self._arrays)
                         if used() is None and array.shape == shape), None)
            array = np.empty(shape, np.float32) if free is None else self._arrays.pop(free)[0]
            view = array[:]  # lives as long as the storage that all views of the tensor share
            self._arrays.append((array, weakref.ref(view)))
            return torch.from_numpy(view)


class _BetonLoader:
    """Beside a loader of images: its source is a `Beton`, and threads decode, at least one.

    training: whether crops are random; how: the last two arguments of what chooses them; hflip: probability of a flip.
    """

    training: bool
    how: tuple
    hflip = 0.0

    def _decoder(self, img_size: int):
        """Return the function from a list of (epoch, index, number of the copy) to a batch; see `DecodingLoader`. On a
        CPU its images are normalised; a GPU gets bytes and normalises them itself."""
        show, table, labels = _compiled(self.training), self.source.table, self.source.labels
        levels = torch.arange(256, dtype=torch.uint8).expand(3, 1, 256)
        if self.device.type == "cpu":
            levels = normalize(levels, self.mean, self.std)
        levels = levels[:, 0].numpy()
        largest, memory = 3 * int((table[:, 2] * table[:, 3]).max()), _Memory()

        def decode(keys: list[tuple[int, int, int]]):
            ids = np.array([index for _, index, _ in keys], np.int64)
            seeds = np.array([image_seed(self.seed, *key) % 2**32 for key in keys], np.uint32)
            shape = len(ids), 3, img_size, img_size
            out = memory.empty(*shape) if self.device.type == "cpu" else torch.empty(
                shape, dtype=torch.uint8, pin_memory=self.device.type == "cuda")
            bad = np.zeros(len(ids), bool)
            show(self.source.data, table[ids], seeds, *self.how, self.hflip, levels,
                 np.empty(largest, np.uint8), out.numpy(), bad)
            return (out, labels[ids].tolist(), torch.from_numpy(ids),
                    [(place, "it is a damaged JPEG") for place in bad.nonzero()[0].tolist()])

        return decode

    def _decoded(self, decoder, batches: list[list[tuple[int, int, int]]]) -> Iterator[tuple]:
        """Yield the decoder's batches, in order; each is of one thread."""
        running: deque = deque()
        with ThreadPoolExecutor(max(self.workers, 1)) as pool:
            try:
                for keys in batches:
                    running.append(pool.submit(decoder, keys))
                    if len(running) > self.workers + self.prefetch:
                        yield running.popleft().result()
                while running:
                    yield running.popleft().result()
            finally:
                pool.shutdown(cancel_futures=True)

    def _pixels(self, images: torch.Tensor) -> torch.Tensor:
        if self.device.type == "cpu":
            return images
        return normalize(images.to(self.device, non_blocking=True), self.mean, self.std)


class BetonTrainLoader(_BetonLoader, ImageTrainLoader):
    """Shuffled, cropped and flipped batches; a damaged image is replaced by another one of its batch.

    Args:
        os_cache: random order over the whole file; without it `quasi_random_order`.
        scale: least and largest share of an image's area in its crop; hflip: probability of a left-right flip.
    """

    training = True

    def __init__(self, source: Beton, *, os_cache: bool, scale: Sequence[float], hflip: float, **common):
        super().__init__(source, transform=None, **common)
        self.os_cache, self.how, self.hflip = os_cache, (np.array(scale, float), RATIO), hflip
        if not source.fits_in_memory():
            log.info("%s takes more than half of the memory (%.0f GiB): %s", source.path, len(source.data) / 2**30,
                     "with --os-cache on each image is a random read of the disk" if os_cache else
                     f"images are shuffled within {PAGES_TOGETHER} pages at a time (--os-cache on: all of them)")

    def _order(self, epoch: int) -> torch.Tensor:
        return super()._order(epoch) if self.os_cache else quasi_random_order(self.source.pages, self.seed, epoch)


class BetonEvalLoader(_BetonLoader, ImageEvalLoader):
    """Every image once over all processes; damaged ones are left out.

    Args:
        resize: what the short side is scaled to, in pixels, before the middle img_size x img_size is cut out. Of images
            that were stored so nothing is scaled or cut any more.
    """

    training = False

    def __init__(self, source: Beton, *, resize: int, **common):
        super().__init__(source, transform=None, **common)
        self.how = self.img_size if source.evaluated else resize, self.img_size
