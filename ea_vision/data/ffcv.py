"""Training images from .beton files (FFCV's format, https://ffcv.io), with the interface of the other loaders.

FFCV reads the tables, draws the crops, decodes and scales; threads of this process call its C library. Its own Loader
reached 0.2 to 0.7 times as many images per second on a CPU, does not notice damaged JPEGs, and draws other crops in
every run. Here order, crops and flips are functions of seed, epoch and image.
"""

import functools
import weakref
from collections import defaultdict, deque
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from ea_vision.base.processes import usable_cpus
from ea_vision.data.augment import normalize
from ea_vision.data.beton import require_ffcv
from ea_vision.data.imagenet import AHEAD, MOST_BY_DEFAULT, Decoded, ImageTrainLoader

RATIO = np.array([3 / 4, 4 / 3])  # smallest and largest ratio of width to height of a training crop


@functools.cache
def _compiled() -> Callable[..., None]:
    """Compile `show`, which runs without the interpreter lock, from FFCV's decoder, area scaling and crops."""
    njit = require_ffcv("numba").njit
    lib = require_ffcv("ffcv.libffcv")
    imdecode = njit(lib.imdecode)
    resize_crop = njit(lib.resize_crop)
    choose_crop = njit(require_ffcv("ffcv.fields.rgb_image").get_random_crop)

    @njit
    def decode(jpeg, pixels, height, width):
        return imdecode(jpeg, pixels, height, width, height, width, 0, 0, 1, 1, False, False)

    @njit(nogil=True)
    def show(data, table, seeds, scale, ratio, hflip, levels, decoded, out, bad):
        """Write crops of the images in `data` that `table` (B, 5) describes to `out` (B, 3, S, S), each byte as its
        value in `levels` (3, 256). bad (B,): where damaged JPEGs are noted. decoded: memory for the largest image."""
        side = out.shape[2]
        scaled = np.empty((side, side, 3), np.uint8)
        for n in range(len(table)):
            start, size, height, width, is_jpeg = table[n]
            pixels = data[start : start + size]
            if is_jpeg:
                pixels = decoded[: height * width * 3]
                bad[n] = decode(data[start : start + size], pixels, height, width) != 0
            np.random.seed(seeds[n])  # seeds this thread's generator in compiled code
            top, left, crop_height, crop_width = choose_crop(height, width, scale, ratio)
            image = pixels.reshape(height, width, 3)
            resize_crop(image, top, top + crop_height, left, left + crop_width, scaled)
            shown = scaled[:, ::-1] if np.random.random() < hflip else scaled[:, ::1]
            for y in range(side):
                for x in range(side):
                    for c in range(3):
                        out[n, c, y, x] = levels[c, shown[y, x, c]]

    return show


def _reused(free: list[np.ndarray], shape: tuple[int, ...]) -> Tensor:
    """Return an uninitialised float32 tensor on the CPU, in memory from `free`. Once no tensor shares the memory it
    goes back to `free`: new memory costs as much time as the pixels."""
    try:
        array = free.pop()
    except IndexError:
        array = np.empty(shape, np.float32)
    view = array[:]  # lives as long as the storage that all views of the tensor share
    weakref.finalize(view, free.append, array).atexit = False
    return torch.from_numpy(view)


@dataclass(kw_only=True, eq=False, repr=False)
class BetonTrainLoader(ImageTrainLoader):
    """Shuffled, cropped and flipped batches, decoded by threads, at least one; a damaged image is replaced by another
    one of its batch.

    Attributes:
        scale: least and largest share of an image's area in its crop.
        hflip: probability of a left-right flip.
    """

    transform: None = None
    scale: Sequence[float]
    hflip: float

    def __post_init__(self):
        super().__post_init__()
        self.scale = np.array(self.scale, float)
        self.on_cpu = self.device.type == "cpu"
        self._free: dict[tuple[int, ...], list[np.ndarray]] = defaultdict(list)

    def _default_workers(self) -> int:
        return min(MOST_BY_DEFAULT, usable_cpus())  # threads

    def _decoded(self, batches: list[np.ndarray], img_size: int) -> Iterator[Decoded]:
        """Yield the images of each batch, which one thread decodes."""
        _compiled()  # here, so that the threads do not wait for each other
        running: deque = deque()
        with ThreadPoolExecutor(max(self.workers, 1)) as pool:
            for keys in batches:
                running.append(pool.submit(self._decode, keys, img_size))
                if len(running) > self.workers + AHEAD:
                    yield running.popleft().result()
            while running:
                yield running.popleft().result()

    def _decode(self, keys: np.ndarray, img_size: int) -> Decoded:
        """Return the crops of rows of (seed, index). On a CPU they are normalised; a GPU normalises bytes itself."""
        seeds, ids = keys.T
        table = self.source.table[ids]
        bad = np.zeros(len(table), bool)
        shape = (self.batch_size, 3, img_size, img_size)
        if self.on_cpu:
            out = _reused(self._free[shape], shape)
        else:
            out = torch.empty(shape, dtype=torch.uint8, pin_memory=True)
        _compiled()(
            self.source.data,
            table,
            (seeds % 2**32).astype(np.uint32),
            self.scale,
            RATIO,
            self.hflip,
            self._levels,
            np.empty(3 * (table[:, 2] * table[:, 3]).max(), np.uint8),
            out.numpy(),
            bad,
        )
        problems = dict.fromkeys(bad.nonzero()[0].tolist(), "it is a damaged JPEG")
        return out, self.source.labels[ids].tolist(), problems

    @functools.cached_property
    def _levels(self) -> np.ndarray:
        """The value of each byte of each channel: (3, 256)."""
        levels = torch.arange(256, dtype=torch.uint8).expand(3, 1, 256)
        if self.on_cpu:
            levels = normalize(levels, self.mean, self.std)
        return levels[:, 0].numpy()

    def _pixels(self, images: Tensor) -> Tensor:
        if self.on_cpu:
            return images
        return normalize(images.to(self.device, non_blocking=True), self.mean, self.std)
