"""Images from .beton files, the format of FFCV (https://ffcv.io), behind the interface of the other loaders.

FFCV reads the tables, draws the crops, decodes and scales; threads of this process call its C library. Its own Loader
reached 0.2 to 0.7 of the images per second on a CPU, does not notice a damaged JPEG and draws other crops in every run.
Here order, crops and flips are functions of seed, epoch and the image's position in the epoch.
"""

from __future__ import annotations

import functools
import hashlib
import importlib
import json
import os
import sys
import weakref
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from itertools import islice
from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch

from ea_vision.base.errors import UsageError
from ea_vision.data.augment import normalize
from ea_vision.data.bad_images import BadImages
from ea_vision.data.batches import Batch, Share, epoch_generator, epoch_order, sent
from ea_vision.data.image_files import MAX_PIXELS

HELP = """FFCV is not installed. Debian, Ubuntu: apt-get install libturbojpeg0-dev libopencv-dev pkg-config \
&& pip install 'ea_vision[ffcv]'; conda: conda install -c conda-forge opencv libjpeg-turbo pkg-config compilers \
&& pip install 'ea_vision[ffcv]'; or leave .beton files out and give --data-dir"""
RAW = 1  # FFCV's mode of an image that is stored as pixels; 0: as JPEG
PAGES_TOGETHER = 16  # os_cache off: images are shuffled within this many pages (of 8 MiB, as written here)
AHEAD = 3  # batches in work
TRIES, RATIO = 10, (3 / 4, 4 / 3)  # of a training crop: how often it is drawn, its width to its height


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
        self.data = np.memmap(path, np.uint8, mode="c").view(np.ndarray)  # "c": numba has one type for all its arrays
        starts, sizes, heights, widths, is_jpeg = self.table.T
        pixels = heights * widths
        wrong = ((starts < 0) | (sizes <= 0) | (starts + sizes > len(self.data)) | (pixels == 0) | (pixels > MAX_PIXELS)
                 | ((is_jpeg == 0) & (sizes != 3 * pixels)))
        if wrong.any():
            raise UsageError(f"{path} is damaged: {wrong.sum()} of its {len(wrong)} images lie outside the file or "
                             f"cannot have their size, the first is number {wrong.argmax()}")
        try:
            about = json.loads(sidecar(path).read_text()) if sidecar(path).exists() else {}
            self.classes, self.exif_rotation = about.get("classes"), about.get("exif_rotation")
            self.evaluated = Evaluated(*about["evaluated"]) if about.get("evaluated") else None
        except (OSError, ValueError, TypeError, AttributeError) as error:
            raise UsageError(f"{sidecar(path)} cannot be read: {error}; write {path} anew") from error
        most = len(self.classes or ()) or num_classes or 1_000_000  # more are a damaged label
        if self.labels.min() < 0 or self.labels.max() >= most:
            raise UsageError(f"labels of {path} must lie in 0..{most - 1}, got {self.labels.min()}.."
                             f"{self.labels.max()}")
        self.classes = self.classes or [str(number) for number in range(num_classes or int(self.labels.max()) + 1)]
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
    except (AssertionError, ValueError, TypeError, KeyError, IndexError, OverflowError, MemoryError) as error:
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


def random_boxes(sides: np.ndarray, draws: np.ndarray, scale: Sequence[float]) -> np.ndarray:
    """Return crops of random area and aspect ratio (Szegedy et al. 2015), drawn as torchvision does.

    Args:
        sides: (B, 2), height and width in pixels; draws: (B, 2 TRIES + 2), of [0, 1): areas and ratios of the tries, of
            which the first that fits counts, and the place; scale: least and largest share of the image's area.

    Returns:
        int64 (B, 4): top, left, height, width. Where no try fits: the middle, of the nearest ratio.
    """
    height, width = sides.T[:, :, None]
    low, high = np.log(RATIO)
    area = height * width * (scale[0] + (scale[1] - scale[0]) * draws[:, :TRIES])
    aspect = np.exp(low + (high - low) * draws[:, TRIES:2 * TRIES])
    nearest = np.clip(width / height, *RATIO)  # the last resort, which fits
    heights = np.rint(np.hstack([np.sqrt(area / aspect), np.minimum(height, width / nearest)])).astype(np.int64)
    widths = np.rint(np.hstack([np.sqrt(area * aspect), np.minimum(width, height * nearest)])).astype(np.int64)
    chosen = ((0 < heights) & (heights <= height) & (0 < widths) & (widths <= width)).argmax(1)
    size = np.stack([heights, widths])[:, np.arange(len(sides)), chosen].T
    place = np.where(chosen[:, None] < TRIES, draws[:, 2 * TRIES:], 0.5)
    return np.hstack([(place * (sides - size + 1)).astype(np.int64), size])


def centre_boxes(sides: np.ndarray, img_size: int, resize: int) -> np.ndarray:
    """Return what torchvision's Resize(resize) and CenterCrop(img_size) show of images of these sides (B, 2), height
    and width in pixels: int64 (B, 4), top, left, height, width."""
    resized = resize * sides // sides.min(1, keepdims=True)
    size = np.rint(img_size * sides / resized)
    start = np.rint(np.rint((resized - img_size) / 2) * sides / resized)  # both roundings are torchvision's
    return np.hstack([np.minimum(start, sides - size), size]).astype(np.int64)


@functools.cache
def _compiled() -> Callable[..., None]:
    """Compile `fill`, which holds no interpreter lock, around FFCV's decoder and its scaling by areas."""
    njit, lib = require_ffcv("numba").njit, require_ffcv("ffcv.libffcv")
    imdecode, resize_crop = njit(lib.imdecode), njit(lib.resize_crop)

    @njit(nogil=True)
    def fill(data, table, boxes, flips, levels, decoded, out, bad):
        """Show the boxes (B, 4) of the images that `table` (B, 5) places in `data`, those of `flips` mirrored: out
        (B, 3, S, S) are the values of their bytes in `levels` (3, 256); bad (B,) is where a JPEG is damaged. decoded:
        memory for the largest image."""
        side = out.shape[2]
        scaled = np.empty((side, side, 3), np.uint8)
        for n in range(len(table)):
            start, size, height, width, is_jpeg = table[n]
            pixels = data[start:start + size]
            if is_jpeg:
                pixels = decoded[:height * width * 3]
                bad[n] = imdecode(data[start:start + size], pixels, height, width, height, width, 0, 0, 1, 1, False,
                                  False) != 0
            top, left, crop_height, crop_width = boxes[n]
            resize_crop(pixels.reshape(height, width, 3), top, top + crop_height, left, left + crop_width, scaled)
            shown = scaled[:, ::-1] if flips[n] else scaled[:, ::1]
            for y in range(side):
                for x in range(side):
                    for c in range(3):
                        out[n, c, y, x] = levels[c, shown[y, x, c]]

    return fill


class _Memory:
    """float32 arrays on the CPU whose memory is used again once no tensor shares it: that of new ones costs as much as
    their pixels."""

    def __init__(self):
        self._arrays: list[tuple[np.ndarray, weakref.ref]] = []

    def empty(self, *shape: int) -> torch.Tensor:
        """Return an uninitialised tensor."""
        free = next((number for number, (array, used) in enumerate(self._arrays)
                     if used() is None and array.shape == shape), None)
        array = np.empty(shape, np.float32) if free is None else self._arrays.pop(free)[0]
        view = array[:]  # lives as long as the storage that all views of the tensor share
        self._arrays.append((array, weakref.ref(view)))
        return torch.from_numpy(view)


class _BetonLoader:
    """Args: mean and std of images in 0..1, per channel; batch_size: images per process; workers: threads that decode,
    at least one; bad_images: gets the damaged ones.
    """

    def __init__(self, source: Beton, *, img_size: int, mean: Sequence[float], std: Sequence[float],
                 device: torch.device, batch_size: int, workers: int, bad_images: BadImages, rank: int = 0,
                 world_size: int = 1):
        self.source, self.bad_images, self.device, self.workers = source, bad_images, device, max(workers, 1)
        self.img_size, self.share = img_size, Share(len(source), batch_size, rank, world_size)
        self.mean, self.std = (torch.tensor(values, dtype=torch.float32, device=device) for values in (mean, std))
        # A GPU gets bytes and normalises them itself.
        levels = torch.arange(256, dtype=torch.uint8).expand(3, 1, 256)
        self._levels = (normalize(levels, self.mean, self.std) if device.type == "cpu" else levels)[:, 0].numpy()

    def _show(self, batches: Iterable[tuple[np.ndarray, ...]], side: int, training: bool) -> Iterator[Batch]:
        """Yield batches of (indices (B,), boxes (B, 4), flips (B,)), scaled to `side` pixels."""
        source, fill, memory = self.source, _compiled(), _Memory()
        largest = 3 * int((source.table[:, 2] * source.table[:, 3]).max())

        def start(indices: np.ndarray, boxes: np.ndarray, flips: np.ndarray) -> tuple:
            shape = len(indices), 3, side, side
            images = memory.empty(*shape) if self.device.type == "cpu" else torch.empty(
                shape, dtype=torch.uint8, pin_memory=self.device.type == "cuda")
            out, bad, step = images.numpy(), np.zeros(len(indices), bool), -(-len(indices) // self.workers) or 1
            jobs = [pool.submit(fill, source.data, source.table[indices[part]], boxes[part], flips[part], self._levels,
                                np.empty(largest, np.uint8), out[part], bad[part])
                    for part in (slice(first, first + step) for first in range(0, len(indices), step))]
            return images, indices, bad, jobs

        waiting = iter(batches)
        with ThreadPoolExecutor(self.workers) as pool:
            running = deque(start(*batch) for batch in islice(waiting, AHEAD))
            try:
                while running:
                    images, indices, bad, jobs = running.popleft()
                    running.extend(start(*batch) for batch in islice(waiting, 1))
                    for job in jobs:
                        job.result()
                    yield self._batch(images, indices, bad.nonzero()[0].tolist(), training)
            finally:
                pool.shutdown(cancel_futures=True)

    def _batch(self, images: torch.Tensor, indices: np.ndarray, bad: list[int], training: bool) -> Batch:
        if bad:
            for place in bad:
                self.bad_images.add(self.source.describe(int(indices[place])), "it is a damaged JPEG")
            places = self.bad_images.places(len(indices), bad, training)
            images, indices = images[places], indices[places]
        if self.device.type != "cpu":
            images = normalize(images.to(self.device, non_blocking=True), self.mean, self.std)
        targets = torch.from_numpy(self.source.labels[indices])
        return Batch(images, sent(targets, self.device), torch.from_numpy(indices))


class BetonTrainLoader(_BetonLoader):
    """Shuffled, cropped and flipped batches; a damaged image is replaced by another one of its batch.

    Args:
        os_cache: random order over the whole file; without it `quasi_random_order`.
        scale: least and largest share of an image's area in its crop; hflip: probability of a left-right flip.
        size_of: side in pixels by epoch; None: img_size throughout.
        repeats: how often an epoch has each of its images (see `Share.repeated`).
    """

    def __init__(self, source: Beton, *, os_cache: bool, seed: int, scale: Sequence[float], hflip: float,
                 size_of: Callable[[int], int] | None = None, repeats: int = 1, **common):
        super().__init__(source, **common)
        self.os_cache, self.seed, self.scale, self.hflip = os_cache, seed, scale, hflip
        self.size_of, self.repeats = size_of, repeats

    def __len__(self) -> int:
        return self.share.train_batches

    def batches(self, epoch: int, first: int = 0) -> Iterator[Batch]:
        """Yield the batches of an epoch from number `first` on."""
        if self.os_cache:
            order = epoch_order(len(self.source), epoch_generator(self.seed, epoch))
        else:
            order = quasi_random_order(self.source.pages, self.seed, epoch)
        order = self.share.repeated(order, self.repeats)[0].numpy()
        rng = np.random.default_rng((self.seed, epoch))
        draws, flips = rng.random((len(order), 2 * TRIES + 2), np.float32), rng.random(len(order)) < self.hflip
        sides = self.source.table[order, 2:4]
        yield from self._show(((order[places], random_boxes(sides[places], draws[places], self.scale), flips[places])
                               for places in self.share.train_places(first)),
                              self.img_size if self.size_of is None else self.size_of(epoch), training=True)


class BetonEvalLoader(_BetonLoader):
    """Every image once over all processes; damaged ones are left out.

    Args:
        resize: what the short side is scaled to, in pixels, before the middle img_size x img_size is cut out. Of images
            that were stored so nothing is scaled or cut any more.
    """

    def __init__(self, source: Beton, *, resize: int, **common):
        super().__init__(source, **common)
        self.resize = self.img_size if source.evaluated else resize

    def __len__(self) -> int:
        return self.share.eval_batches

    def batches(self) -> Iterator[Batch]:
        """Yield the batches; the last ones may be short or empty."""
        boxes = centre_boxes(self.source.table[:, 2:4], self.img_size, self.resize)
        batches = (np.array(images, np.int64) for images in self.share.eval_images())
        yield from self._show(((indices, boxes[indices], np.zeros(len(indices), bool)) for indices in batches),
                              self.img_size, training=False)
