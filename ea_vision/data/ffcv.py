"""Images from .beton files, the format of FFCV (https://ffcv.io), behind the interface of the other loaders.

FFCV reads the tables, draws the crops, decodes and scales; threads of this process call its C library. Its own Loader
reached 0.2 to 0.7 of the images per second on a CPU, does not notice a damaged JPEG and draws other crops in every run.
Here order, crops and flips are functions of seed, epoch and image.
"""

import functools
import importlib
import json
import os
import weakref
from collections import defaultdict, deque
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch

from ea_vision.base.errors import UsageError
from ea_vision.data.augment import normalize
from ea_vision.data.image_files import check_classes, fingerprint
from ea_vision.data.imagenet import AHEAD, ImageTrainLoader

HELP = """Debian, Ubuntu: apt-get install libturbojpeg0-dev libopencv-dev pkg-config && pip install 'ea_vision[ffcv]'; \
conda: conda install -c conda-forge opencv libjpeg-turbo pkg-config compilers && pip install 'ea_vision[ffcv]'; or \
leave .beton files out and give --data-dir"""
PAGES_TOGETHER = (
    16  # os_cache off: images are shuffled within this many pages (of 8 MiB, as FFCV writes them)
)
RAW = 1  # FFCV's mode of an image that is stored as pixels; 0: as JPEG
RATIO = np.array([3 / 4, 4 / 3])  # least and greatest width of a training crop to its height


class Evaluated(NamedTuple):
    """How images are scaled and cut before evaluation: the trainer's options of these names."""

    eval_img_size: int
    eval_resize: int
    interpolation: str


def require_ffcv(module: str):
    """Import a module of FFCV. Raises UsageError, with the lines that install it, where that fails."""
    try:
        config = importlib.import_module("numba").config
        if config.THREADING_LAYER == "default":
            # FFCV starts numba's threads when it is imported. Where numba takes TBB for them and there is one core, a
            # process that has forked since waits for ever at its end. Nothing here computes in those threads.
            config.THREADING_LAYER = "workqueue"
        return importlib.import_module(module)
    except ImportError as error:
        raise UsageError(f"FFCV cannot be imported ({error}). {HELP}") from error


def sidecar(path: Path) -> Path:
    """Return the file beside a .beton that names its classes and says how it was written."""
    return path.with_name(path.name + ".json")


class Beton:
    """The images and classes of a .beton file: fields `image` (RGB) and `label` (int), in this order.

    classes: from the file that write-ffcv leaves beside it; numbers where there is none. table: int64 (N, 5), of each
    image its place in the file, bytes, height, width and whether it is JPEG. evaluated: how images were scaled and cut
    to be stored, None: not.

    Args:
        num_classes: that it must have; 0: any.
        evaluated: how its images must have been scaled and cut; None, to train on: not.

    Raises:
        UsageError: FFCV is not installed, or the file is missing, cut off, of other classes, or written otherwise.
    """

    def __init__(self, path: Path, num_classes: int = 0, evaluated: Evaluated | None = None):
        self.name, reader_module = str(path), require_ffcv("ffcv.reader")
        try:
            reader = reader_module.Reader(self.name)
            kinds = [type(field).__name__ for field in reader.handlers.values()]
        except Exception as error:  # whatever other bytes lead it to
            raise UsageError(f"{path} is not a whole .beton file: {error}") from error
        count, stored = reader.num_samples, np.sort(reader.alloc_table, order="sample_id")["size"]
        if (
            kinds != ["RGBImageField", "IntField"] or len(stored) != count
        ):  # sizes are the file's end
            raise UsageError(
                f"{path} is not a whole .beton file of {count} RGB images and integer labels: got "
                f"{', '.join(kinds)}, {len(stored)} sizes"
            )
        images, self.labels = (reader.metadata[name] for name in reader.metadata.dtype.names)
        self.table = np.stack(
            [images["data_ptr"], stored, images["height"], images["width"], images["mode"] != RAW],
            axis=1,
            dtype=np.int64,
            casting="unsafe",
        )
        self.pages = self.table[:, 0] // int(reader.page_size)
        self.data = np.memmap(path, np.uint8, mode="r").view(
            np.ndarray
        )  # Linux refuses "c" beyond the memory's size
        about = (
            json.loads(sidecar(path).read_text(encoding="utf-8")) if sidecar(path).exists() else {}
        )
        self.evaluated = Evaluated(*about["evaluated"]) if about.get("evaluated") else None
        least, most = self.labels.min(), self.labels.max()
        self.classes = about.get("classes") or list(map(str, range(num_classes or most + 1)))
        check_classes(self.name, self.classes, num_classes)
        if least < 0 or most >= len(self.classes):
            raise UsageError(
                f"labels of {path} must lie in 0..{len(self.classes) - 1}, got {least}..{most}"
            )
        if self.evaluated != evaluated:
            wanted, got = (
                f"those of validation for {how}" if how else "whole images, to train on"
                for how in (evaluated, self.evaluated)
            )
            raise UsageError(
                f"{path} must have {wanted}, got {got}: write it anew by ea-vision write-ffcv"
            )

    def __len__(self) -> int:
        return len(self.labels)

    def describe(self, index: int) -> str:
        """Return a name for an image."""
        return f"{self.name} {index}"

    def read(self, index: int) -> tuple[torch.Tensor, int]:
        """Return an image that is stored as pixels, uint8 (H, W, 3), and its target."""
        start, size, height, width, _ = self.table[index]
        return torch.tensor(self.data[start : start + size].reshape(height, width, 3)), int(
            self.labels[index]
        )

    def fits_in_memory(self) -> bool:
        """Return whether the file takes at most half of this machine's memory."""
        return len(self.data) <= os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") // 2

    def fingerprint(self) -> str:
        """Return SHA-256 over classes, labels and the size of every image in pixels and bytes."""
        return fingerprint(self.classes, self.labels, self.table[:, 1:])


def quasi_random_order(pages: np.ndarray, seed: int, epoch: int) -> torch.Tensor:
    """Return an order that reads the file in large pieces: images by their pages (N,), PAGES_TOGETHER shuffled pages at
    a time."""
    rng = np.random.default_rng((seed, epoch, 1))
    _, page = np.unique(pages, return_inverse=True)
    group = rng.permutation(page.max() + 1)[page] // PAGES_TOGETHER
    return torch.from_numpy(np.lexsort((rng.random(len(pages)), group)))


@functools.cache
def _compiled() -> Callable[..., None]:
    """Compile `show`, which holds no interpreter lock, around FFCV's decoder, its scaling by areas and its crops."""
    njit, lib = require_ffcv("numba").njit, require_ffcv("ffcv.libffcv")
    imdecode, resize_crop = njit(lib.imdecode), njit(lib.resize_crop)
    choose_crop = njit(require_ffcv("ffcv.fields.rgb_image").get_random_crop)

    @njit(nogil=True)
    def show(data, table, seeds, scale, ratio, hflip, levels, decoded, out, bad):
        """Show crops of the images that `table` (B, 5) places in `data`: out (B, 3, S, S) are the values of their bytes
        in `levels` (3, 256); bad (B,) is where a JPEG is damaged. decoded: memory for the largest image."""
        side = out.shape[2]
        scaled = np.empty((side, side, 3), np.uint8)
        for n in range(len(table)):
            start, size, height, width, is_jpeg = table[n]
            pixels = data[start : start + size]
            if is_jpeg:
                pixels = decoded[: height * width * 3]
                bad[n] = (
                    imdecode(
                        data[start : start + size],
                        pixels,
                        height,
                        width,
                        height,
                        width,
                        0,
                        0,
                        1,
                        1,
                        False,
                        False,
                    )
                    != 0
                )
            np.random.seed(seeds[n])  # of this thread's generator in compiled code
            top, left, crop_height, crop_width = choose_crop(height, width, scale, ratio)
            resize_crop(
                pixels.reshape(height, width, 3),
                top,
                top + crop_height,
                left,
                left + crop_width,
                scaled,
            )
            shown = scaled[:, ::-1] if np.random.random() < hflip else scaled[:, ::1]
            for y in range(side):
                for x in range(side):
                    for c in range(3):
                        out[n, c, y, x] = levels[c, shown[y, x, c]]

    return show


def _reused(free: list[np.ndarray], shape: tuple[int, ...]) -> torch.Tensor:
    """Return an uninitialised float32 tensor on the CPU in memory of `free`, to which it returns once no tensor shares
    it: new memory costs as much as the pixels."""
    try:
        array = free.pop()
    except IndexError:
        array = np.empty(shape, np.float32)
    view = array[:]  # lives as long as the storage that all views of the tensor share
    weakref.finalize(view, free.append, array).atexit = False
    return torch.from_numpy(view)


class BetonTrainLoader(ImageTrainLoader):
    """Shuffled, cropped and flipped batches, decoded by threads, at least one; a damaged image is replaced by another
    one of its batch.

    Args:
        os_cache: random order over the whole file; without it `quasi_random_order`.
        scale: least and largest share of an image's area in its crop; hflip: probability of a left-right flip.
    """

    def __init__(
        self,
        source: Beton,
        *,
        os_cache: bool = True,
        scale: Sequence[float],
        hflip: float,
        **common,
    ):
        super().__init__(source, transform=None, **common)
        self.os_cache, self.scale, self.hflip = os_cache, np.array(scale, float), hflip
        self._free: dict[tuple[int, ...], list[np.ndarray]] = defaultdict(list)

    def _order(self, epoch: int) -> torch.Tensor:
        return (
            super()._order(epoch)
            if self.os_cache
            else quasi_random_order(self.source.pages, self.seed, epoch)
        )

    def _decoded(
        self, batches: list[np.ndarray], img_size: int
    ) -> Iterator[tuple[torch.Tensor, list, dict[int, str]]]:
        """Yield the images of each batch, which one thread decodes. On a CPU they are normalised; a GPU gets bytes and
        normalises them itself."""
        show, on_cpu = _compiled(), self.device.type == "cpu"
        levels = torch.arange(256, dtype=torch.uint8).expand(3, 1, 256)
        levels = (normalize(levels, self.mean, self.std) if on_cpu else levels)[:, 0].numpy()
        shape = self.batch_size, 3, img_size, img_size

        def decode(keys: np.ndarray) -> tuple[torch.Tensor, list[int], dict[int, str]]:
            (seeds, ids), bad = keys.T, np.zeros(len(keys), bool)
            table = self.source.table[ids]
            out = (
                _reused(self._free[shape], shape)
                if on_cpu
                else torch.empty(shape, dtype=torch.uint8, pin_memory=True)
            )
            show(
                self.source.data,
                table,
                (seeds % 2**32).astype(np.uint32),
                self.scale,
                RATIO,
                self.hflip,
                levels,
                np.empty(3 * (table[:, 2] * table[:, 3]).max(), np.uint8),
                out.numpy(),
                bad,
            )
            return (
                out,
                self.source.labels[ids].tolist(),
                dict.fromkeys(bad.nonzero()[0].tolist(), "it is a damaged JPEG"),
            )

        running: deque = deque()
        with ThreadPoolExecutor(max(self.workers, 1)) as pool:
            for keys in batches:
                running.append(pool.submit(decode, keys))
                if len(running) > self.workers + AHEAD:
                    yield running.popleft().result()
            while running:
                yield running.popleft().result()

    def _pixels(self, images: torch.Tensor) -> torch.Tensor:
        if self.device.type == "cpu":
            return images
        return normalize(images.to(self.device, non_blocking=True), self.mean, self.std)
