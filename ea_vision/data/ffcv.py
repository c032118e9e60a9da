"""Images from .beton files, the format of FFCV (https://ffcv.io), behind the interface of the other loaders.

FFCV reads the file's tables and its C library decodes and scales, in threads of this process. Order and crops are drawn
here: FFCV's own loader seeds the order only, has no quasi-random order for several processes, and leaves its threads
behind. So a run continues inside an epoch with the same images, as with every other loader.

A GPU gets bytes, and flips and normalises them itself. On a CPU the threads do it, image by image while the pixels are
in their caches, into memory that is used again: new memory for each batch would cost more than the scaling.
"""

from __future__ import annotations

import functools
import hashlib
import importlib
import json
import os
import sys
import threading
import weakref
from collections import deque
from collections.abc import Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path

import numpy as np
import torch

from ea_vision.base.errors import UsageError
from ea_vision.data.augment import normalize
from ea_vision.data.batches import Batch, Share, epoch_generator, epoch_order

HELP = """FFCV is not installed. Debian, Ubuntu: apt-get install libturbojpeg0-dev libopencv-dev pkg-config \
&& pip install 'ea_vision[ffcv]'; conda: conda install -c conda-forge opencv libjpeg-turbo pkg-config compilers \
&& pip install 'ea_vision[ffcv]'; or leave .beton files out and give --data-dir"""
AHEAD = 3  # batches in work
PAGES_TOGETHER = 16  # os_cache off: images are shuffled within this many pages (of 8 MiB, as written here)


def require_ffcv(module: str):
    """Import a module of FFCV.

    Raises:
        UsageError: it is not installed, with the lines that install it, or does not work, with what it says.
    """
    try:
        return importlib.import_module(module)
    except ModuleNotFoundError as error:
        if sys.modules.get("ffcv") is None:
            raise UsageError(HELP) from error
        raise UsageError(f"FFCV cannot be imported: {error}") from error
    except ImportError as error:  # a library it was built with has gone
        raise UsageError(f"FFCV cannot be imported: {error}") from error


def sidecar(path: Path) -> Path:
    """The file beside a .beton that names its classes."""
    return path.with_name(path.name + ".json")


class Beton:
    """The images and classes of a .beton file: fields `image` (RGB) and `label` (int), in this order.

    classes: from the file beside it that the writer leaves; numbers where there is none.
    """

    def __init__(self, path: Path, num_classes: int = 0):
        self.path, self.name = path, str(path)
        reader = _checked_reader(path)
        self.images, self.labels = (reader.metadata[name] for name in reader.metadata.dtype.names)
        by_place = np.sort(reader.alloc_table, order="ptr")
        self.sizes = by_place["size"][np.searchsorted(by_place["ptr"], self.images["data_ptr"])]
        self.pages = (self.images["data_ptr"] // np.uint64(reader.page_size)).astype(np.int64)
        self.heights, self.widths = (self.images[side].astype(np.int64) for side in ("height", "width"))
        self.data = np.memmap(path, np.uint8, mode="r").view(np.ndarray)
        self.lib = require_ffcv("ffcv.libffcv")
        self._local = threading.local()
        about = sidecar(path)
        if about.exists():
            try:
                self.classes = list(json.loads(about.read_text())["classes"])
            except (ValueError, KeyError, TypeError) as error:
                raise UsageError(f"{about} does not name the classes of {path}: {error!r}") from error
        else:
            self.classes = [str(number) for number in range(num_classes or int(self.labels.max()) + 1)]
        if num_classes and len(self.classes) != num_classes:
            raise UsageError(f"{path} must have {num_classes} classes (--num-classes), got {len(self.classes)}")
        if self.labels.min() < 0 or self.labels.max() >= len(self.classes):
            raise UsageError(f"labels of {path} must lie in 0..{len(self.classes) - 1}, "
                             f"got {self.labels.min()}..{self.labels.max()}")

    def __len__(self) -> int:
        return len(self.labels)

    def describe(self, index: int) -> str:
        return f"{self.path} {index}"

    def fits_in_memory(self) -> bool:
        """Whether the file takes at most half of this machine's memory."""
        return self.path.stat().st_size <= os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") // 2

    def fingerprint(self) -> str:
        """SHA-256 over the classes and the file's tables: labels, and the size of every image, in pixels and bytes."""
        digest = hashlib.sha256("\n".join(self.classes).encode())
        for table in (self.labels, self.heights, self.widths, self.sizes):
            digest.update(np.ascontiguousarray(table))
        return digest.hexdigest()

    def decode(self, index: int) -> np.ndarray:
        """Pixels (H, W, 3), valid until this thread decodes another one."""
        image = self.images[index]
        height, width, start = int(image["height"]), int(image["width"]), int(image["data_ptr"])
        data = self.data[start:start + int(self.sizes[index])]
        if image["mode"] == 1:  # raw
            return data.reshape(height, width, 3)
        buffer = getattr(self._local, "buffer", None)
        if buffer is None:
            buffer = self._local.buffer = np.empty(int((self.heights * self.widths).max()) * 3, np.uint8)
        pixels = buffer[:height * width * 3].reshape(height, width, 3)
        self.lib.imdecode(data, pixels, height, width, height, width)
        return pixels

    def scaled(self, index: int, box: Sequence[int], out: np.ndarray) -> None:
        """Scale a part of an image to `out` (S, S, 3), averaging areas. box: top, left, height, width."""
        top, left, height, width = np.asarray(box).tolist()
        self.lib.resize_crop(self.decode(index), top, top + height, left, left + width, out)


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
    if header["version"] != types.CURRENT_VERSION or header["num_fields"] > 100:
        raise UsageError(f"{broken}: FFCV's format {types.CURRENT_VERSION} is required, got {header['version']}")
    if header["num_samples"] == 0 or header["alloc_table_ptr"] == 0:
        raise UsageError(f"{broken}: its writing was interrupted")
    wanted = int(header["alloc_table_ptr"]) + int(header["num_samples"]) * types.ALLOC_TABLE_TYPE.itemsize
    if size != wanted:
        raise UsageError(f"{broken}: it must have {wanted} bytes, got {size}")
    reader = reader_module.Reader(str(path))
    kinds = [type(handler).__name__ for handler in reader.handlers.values()]
    if kinds != ["RGBImageField", "IntField"]:
        raise UsageError(f"{path} must have an RGB image and an integer label, got {', '.join(kinds)}")
    return reader


def open_beton(path: Path, num_classes: int = 0) -> Beton:
    """Open a .beton file.

    Args:
        num_classes: that it must have; 0: any.

    Raises:
        UsageError: FFCV is not installed, or the file is missing, cut off, or of other classes.
    """
    return Beton(path, num_classes)


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


class _Recycled:
    """float32 tensors (B, 3, S, S) on the CPU, whose memory is used again once no tensor shares it any more."""

    def __init__(self):
        self._arrays: list[tuple[np.ndarray, weakref.ref]] = []

    def empty(self, count: int, side: int) -> torch.Tensor:
        shape = (count, 3, side, side)
        free = (number for number, (array, used) in enumerate(self._arrays) if used() is None and array.shape == shape)
        number = next(free, None)
        array = np.empty(shape, np.float32) if number is None else self._arrays.pop(number)[0]
        view = array[:]  # lives as long as the storage that all views of the tensor share
        self._arrays.append((array, weakref.ref(view)))
        return torch.from_numpy(view)


class _BetonLoader:
    """Args: img_size: side in pixels; mean and std of images in 0..1, per channel; batch_size: images per process;
    workers: threads that decode.
    """

    def __init__(self, source: Beton, *, img_size: int, mean: Sequence[float], std: Sequence[float],
                 device: torch.device, batch_size: int, workers: int, rank: int = 0, world_size: int = 1):
        self.source, self.img_size, self.device = source, img_size, device
        self.mean = torch.tensor(mean, dtype=torch.float32, device=device)
        self.std = torch.tensor(std, dtype=torch.float32, device=device)
        self.workers, self.share = workers, Share(len(source), batch_size, rank, world_size)
        if device.type == "cpu":
            levels = torch.arange(256, dtype=torch.uint8).expand(3, 1, 256)
            self._table = normalize(levels, self.mean, self.std)[:, 0].numpy()  # (3, 256)

    def _decode(self, batches: list[np.ndarray], boxes: np.ndarray, flips: np.ndarray) -> Iterator[Batch]:
        """Yield what each batch of indices shows; boxes (N, 4) and flips (N,) are by index."""
        side, on_cpu = self.img_size, self.device.type == "cpu"
        recycled, look_up = _Recycled(), _compiled_look_up() if on_cpu else None

        def work(indices: np.ndarray, out: np.ndarray) -> None:
            pixels = np.empty((side, side, 3), np.uint8)
            for place, index in enumerate(indices.tolist()):
                self.source.scaled(index, boxes[index], pixels if on_cpu else out[place])
                if on_cpu:
                    look_up(pixels, bool(flips[index]), self._table, out[place])

        def start(indices: np.ndarray) -> tuple:
            count = len(indices)
            images = recycled.empty(count, side) if on_cpu else torch.empty(count, side, side, 3, dtype=torch.uint8,
                                                                            pin_memory=True)
            out = images.numpy()
            parts = [part for part in np.array_split(np.arange(count), self.workers) if len(part)]
            return indices, images, [pool.submit(work, indices[part], out[part[0]:part[-1] + 1]) for part in parts]

        waiting = deque(batches)
        running: deque = deque()
        with ThreadPoolExecutor(self.workers) as pool:
            try:
                while waiting or running:
                    while waiting and len(running) < AHEAD:
                        running.append(start(waiting.popleft()))
                    yield self._batch(*running.popleft(), flips)
            finally:
                pool.shutdown(wait=True, cancel_futures=True)

    def _batch(self, indices: np.ndarray, images: torch.Tensor, jobs: list[Future], flips: np.ndarray) -> Batch:
        """images: what the jobs fill; on a CPU (B, 3, S, S), normalised, for a GPU bytes (B, S, S, 3)."""
        for job in jobs:
            job.result()
        if self.device.type != "cpu":
            images = images.to(self.device, non_blocking=True).permute(0, 3, 1, 2)
            mirrored = torch.from_numpy(flips[indices]).to(self.device, non_blocking=True)
            images = torch.where(mirrored[:, None, None, None], images.flip(3), images)
            images = normalize(images, self.mean, self.std)
        targets = torch.from_numpy(self.source.labels[indices]).to(self.device, non_blocking=True)
        return Batch(images, targets, torch.from_numpy(indices))


class BetonTrainLoader(_BetonLoader):
    """Shuffled, cropped and flipped batches.

    Args:
        scale: least and largest share of an image's area in its crop; hflip: probability of a left-right flip.
        os_cache: random order over the whole file; without it `quasi_random_order`.
    """

    def __init__(self, source: Beton, *, seed: int, scale: Sequence[float], hflip: float, os_cache: bool, **common):
        super().__init__(source, **common)
        self.seed, self.scale, self.hflip, self.os_cache = seed, scale, hflip, os_cache

    def __len__(self) -> int:
        return self.share.train_batches

    def batches(self, epoch: int, first: int = 0) -> Iterator[Batch]:
        """Yield the batches of an epoch from number `first` on."""
        source = self.source
        if self.os_cache:
            order = epoch_order(len(source), epoch_generator(self.seed, epoch)).numpy()
        else:
            order = quasi_random_order(source.pages, self.seed, epoch).numpy()
        rng = np.random.default_rng((self.seed, epoch))
        boxes = random_boxes(source.heights, source.widths, rng, self.scale)
        flips = rng.random(len(source)) < self.hflip
        yield from self._decode([order[places] for places in self.share.train_places(first)], boxes, flips)


class BetonEvalLoader(_BetonLoader):
    """Every image once over all processes.

    Args:
        resize: what the short side is scaled to, in pixels, before the middle img_size x img_size is cut out.
    """

    def __init__(self, source: Beton, *, resize: int, **common):
        super().__init__(source, **common)
        self.boxes = centre_boxes(source.heights, source.widths, self.img_size, resize)

    def __len__(self) -> int:
        return self.share.eval_batches

    def batches(self) -> Iterator[Batch]:
        batches = [np.array(images, np.int64) for images in self.share.eval_images()]
        yield from self._decode(batches, self.boxes, np.zeros(len(self.source), bool))
