"""Threads of this process that make batches: of FFCV files, and of JPEG files that torchvision decodes.

A GPU gets bytes, and flips, augments (`rand_augment`) and normalises them itself. On a CPU, where nothing else is
augmented, the threads do it, image by image while the pixels are in their caches, into memory that is used again: new
memory for each batch would cost more than the scaling.
"""

from __future__ import annotations

import io
import math
import warnings
import weakref
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Executor, Future, ThreadPoolExecutor

import numpy as np
import torch
from PIL import Image
from torchvision.io import ImageReadMode, decode_jpeg
from torchvision.transforms import InterpolationMode
from torchvision.transforms.v2 import functional as F

from ea_vision.base.errors import UsageError
from ea_vision.data.augment import normalize
from ea_vision.data.bad_images import BadImages
from ea_vision.data.batches import Batch, Share, epoch_generator, epoch_order, sent
from ea_vision.data.image_files import MAX_PIXELS, BrokenImage
from ea_vision.data.imagenet import ImageSource
from ea_vision.data.rand_augment import Draws, RandAugment

AHEAD = 3  # batches in work
TRIES = 10  # of a crop that fits
JPEG_START, JPEG_END = b"\xff\xd8", b"\xff\xd9"
SMALL_BYTES = 200_000  # at a bit for each block of 64, no JPEG of so many bytes has more than MAX_PIXELS


class Recycled:
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


class _AtOnce(Executor):
    """Does what is submitted in the thread that submits it."""

    def submit(self, work, /, *args):
        done: Future = Future()
        done.set_result(work(*args))
        return done


class ThreadLoader:
    """Args: source: has `describe`; labels: int64 (N,); mean and std of images in 0..1, per channel; batch_size: images
    per process; workers: threads that decode, 0: none; bad_images: gets the damaged ones; augment: what else is done to
    batches on the device, before they are normalised.
    """

    channels_first = False  # bytes are (B, S, S, 3), or else (B, 3, S, S)

    def __init__(self, source, labels: np.ndarray, *, img_size: int, mean: Sequence[float], std: Sequence[float],
                 device: torch.device, batch_size: int, workers: int, bad_images: BadImages, rank: int = 0,
                 world_size: int = 1, augment: RandAugment | None = None):
        self.source, self.labels, self.bad_images = source, labels, bad_images
        self.img_size, self.device, self.augment = img_size, device, augment
        self.in_bytes = augment is not None or device.type != "cpu"
        self.mean = torch.tensor(mean, dtype=torch.float32, device=device)
        self.std = torch.tensor(std, dtype=torch.float32, device=device)
        self.workers, self.share = workers, Share(len(labels), batch_size, rank, world_size)

    def fill(self, index: int, box: np.ndarray, out: np.ndarray) -> None:
        """Put the bytes that an image shows in `box` into `out`.

        Raises:
            BrokenImage: it cannot be read.
        """
        raise NotImplementedError

    def finish(self, index: int, box: np.ndarray, mirrored: bool, out: np.ndarray) -> None:
        """Put what an image shows in `box`, flipped and normalised, into float32 out (3, S, S); raises as `fill`."""
        raise NotImplementedError

    def mend(self, indices: np.ndarray, rows: np.ndarray, images: torch.Tensor, bad: list[int]) -> tuple:
        """Indices, rows and images of a batch without the images at the places `bad`."""
        raise NotImplementedError

    def decoded(self, batches: list[tuple[np.ndarray, np.ndarray]], boxes: np.ndarray, flips: np.ndarray, side: int,
                draws: Iterator[Draws] | None = None) -> Iterator[Batch]:
        """Yield what each batch shows.

        Args:
            batches: indices of the images, and for each its row of boxes and flips (N,). side: in pixels.
            boxes: (N, ...), what `fill` takes.
            draws: of `augment`, for each batch.
        """
        in_bytes, recycled = self.in_bytes, Recycled()

        def work(indices: np.ndarray, rows: np.ndarray, out: np.ndarray, places: np.ndarray) -> list[tuple[int, str]]:
            """Fill out[places]; return the places of damaged images, and what is wrong with them."""
            bad = []
            for place in places.tolist():
                row = int(rows[place])
                try:
                    if in_bytes:
                        self.fill(int(indices[place]), boxes[row], out[place])
                    else:
                        self.finish(int(indices[place]), boxes[row], bool(flips[row]), out[place])
                except BrokenImage as error:
                    bad.append((place, str(error)))
            return bad

        def start(indices: np.ndarray, rows: np.ndarray) -> tuple:
            count = len(indices)
            form = (count, 3, side, side) if self.channels_first else (count, side, side, 3)
            images = recycled.empty(count, side) if not in_bytes else torch.empty(
                form, dtype=torch.uint8, pin_memory=self.device.type == "cuda")
            out = images.numpy()
            parts = [part for part in np.array_split(np.arange(count), max(self.workers, 1)) if len(part)]
            return indices, rows, images, [pool.submit(work, indices, rows, out, part) for part in parts]

        waiting = deque(batches)
        running: deque = deque()
        ahead = AHEAD if self.workers else 1
        with ThreadPoolExecutor(self.workers) if self.workers else _AtOnce() as pool:
            try:
                while waiting or running:
                    while waiting and len(running) < ahead:
                        running.append(start(*waiting.popleft()))
                    yield self._batch(*running.popleft(), flips, None if draws is None else next(draws))
            finally:
                pool.shutdown(wait=True, cancel_futures=True)

    def _batch(self, indices: np.ndarray, rows: np.ndarray, images: torch.Tensor, jobs: list[Future],
               flips: np.ndarray, draws: Draws | None) -> Batch:
        """images: what the jobs fill; bytes or, where all is done, float32 (B, 3, S, S)."""
        bad = [found for job in jobs for found in job.result()]
        if bad:
            for place, error in bad:
                self.bad_images.add(self.source.describe(int(indices[place])), error)
            indices, rows, images = self.mend(indices.copy(), rows.copy(), images, [place for place, _ in bad])
        if self.in_bytes:
            images = images.to(self.device, non_blocking=True)
            images = images if self.channels_first else images.permute(0, 3, 1, 2)
            mirrored = sent(torch.from_numpy(flips[rows]), self.device)
            images = torch.where(mirrored[:, None, None, None], images.flip(3), images)
            if draws is not None:
                images = self.augment.apply(images, draws)
            images = normalize(images, self.mean, self.std)
        targets = sent(torch.from_numpy(self.labels[indices]), self.device)
        return Batch(images, targets, torch.from_numpy(indices))


class ThreadTrainLoader(ThreadLoader):
    """Shuffled and augmented batches. An unreadable image is replaced by another one of its batch.

    Args:
        scale: least and largest share of an image's area in its crop; hflip: probability of a left-right flip.
        size_of: side in pixels by epoch; None: img_size throughout.
        repeats: how often an epoch has each of its images (see `Share.repeated`).
    """

    def __init__(self, source, labels: np.ndarray, *, seed: int, scale: Sequence[float], hflip: float,
                 size_of: Callable[[int], int] | None = None, repeats: int = 1, **common):
        super().__init__(source, labels, **common)
        self.seed, self.scale, self.hflip, self.size_of, self.repeats = seed, scale, hflip, size_of, repeats

    def __len__(self) -> int:
        return self.share.train_batches

    def mend(self, indices: np.ndarray, rows: np.ndarray, images: torch.Tensor, bad: list[int]) -> tuple:
        for place, other in self.bad_images.replacements(len(indices), bad):
            indices[place], rows[place], images[place] = indices[other], rows[other], images[other]
        return indices, rows, images

    def shown(self, epoch: int, first: int, indices: np.ndarray, rows: np.ndarray, boxes: np.ndarray,
              flips: np.ndarray) -> Iterator[Batch]:
        """Yield the batches of an epoch from number `first` on: of each place its image, and its row of boxes and
        flips."""
        draws = None
        if self.augment is not None:
            draws = self.augment.draws(len(self.labels), self.seed, epoch, self.share, first)
        yield from self.decoded([(indices[places], rows[places]) for places in self.share.train_places(first)], boxes,
                                flips, self.img_size if self.size_of is None else self.size_of(epoch), draws)


def crop_box(height: int, width: int, draws: Sequence[float], scale: Sequence[float],
             ratio: Sequence[float] = (3 / 4, 4 / 3)) -> tuple[int, int, int, int]:
    """A crop of random area and aspect ratio (Szegedy et al. 2015): top, left, height, width.

    Args:
        draws: 2 TRIES + 2 numbers in [0, 1): area and ratio of each try, then the place.
        scale: least and largest share of the image's area; ratio: of width over height.
    """
    low, high = (math.log(value) for value in ratio)
    for attempt in range(TRIES):
        area = height * width * (scale[0] + (scale[1] - scale[0]) * draws[2 * attempt])
        aspect = math.exp(low + (high - low) * draws[2 * attempt + 1])
        w, h = round(math.sqrt(area * aspect)), round(math.sqrt(area / aspect))
        if 0 < w <= width and 0 < h <= height:
            return int(draws[-2] * (height - h + 1)), int(draws[-1] * (width - w + 1)), h, w
    nearest = min(max(width / height, ratio[0]), ratio[1])
    h, w = min(height, round(width / nearest)), min(width, round(height * nearest))
    return (height - h) // 2, (width - w) // 2, h, w


class FileTrainLoader(ThreadTrainLoader):
    """Shuffled, cropped and flipped batches of JPEG files, decoded by torchvision without the interpreter's lock; what
    is no ordinary JPEG Pillow reads.

    Args:
        interpolation: bilinear or bicubic. The others: those of `ThreadTrainLoader`.

    Raises:
        UsageError: images that timm reads.
    """

    channels_first = True

    def __init__(self, source: ImageSource, *, interpolation: str = "bilinear", **common):
        if source.files is None:
            raise UsageError(f"threads decode files of a folder or tar, got {source.name}")
        super().__init__(source, source.files.targets, **common)
        self._scale = (1 / (255 * self.std)).view(-1, 1, 1).cpu().numpy()
        self._shift = (self.mean / self.std).view(-1, 1, 1).cpu().numpy()
        self.mode = InterpolationMode(interpolation)

    def read(self, index: int) -> torch.Tensor:
        """uint8 (3, H, W).

        Raises:
            BrokenImage: it cannot be read or decoded.
        """
        try:
            with self.source.files.open(index) as file:
                data = file.read()
        except OSError as error:
            raise BrokenImage(f"{type(error).__name__}: {error}") from error
        if self._is_plain_jpeg(data):
            try:
                return decode_jpeg(torch.frombuffer(bytearray(data), dtype=torch.uint8), mode=ImageReadMode.RGB,
                                   apply_exif_orientation=self.source.exif_rotation)
            except RuntimeError:
                pass  # Pillow says what is wrong with it, or reads it
        image, _ = self.source.read(index)
        return torch.from_numpy(np.array(image)).permute(2, 0, 1)

    @staticmethod
    def _is_plain_jpeg(data: bytes) -> bool:
        """Return whether the bytes look like a whole JPEG of an allowed size."""
        if data[:2] != JPEG_START or JPEG_END not in data[-64:]:
            return False
        if len(data) <= SMALL_BYTES:
            return True
        try:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore", Image.DecompressionBombWarning)
                with Image.open(io.BytesIO(data), formats=("JPEG",)) as image:
                    return image.width * image.height <= MAX_PIXELS
        except (OSError, SyntaxError, ValueError, Image.DecompressionBombError):
            return False

    def cut(self, index: int, box: np.ndarray, side: int) -> np.ndarray:
        """uint8 (3, S, S): what an image shows in the crop that `box` draws."""
        image = self.read(index)
        top, left, height, width = crop_box(image.shape[1], image.shape[2], box.tolist(), self.scale)
        return F.resized_crop(image, top, left, height, width, [side, side], self.mode, antialias=True).numpy()

    def fill(self, index: int, box: np.ndarray, out: np.ndarray) -> None:
        out[:] = self.cut(index, box, out.shape[-1])

    def finish(self, index: int, box: np.ndarray, mirrored: bool, out: np.ndarray) -> None:
        pixels = self.cut(index, box, out.shape[-1])
        np.copyto(out, pixels[:, :, ::-1] if mirrored else pixels)  # then as `normalize` does
        out *= self._scale
        out -= self._shift

    def batches(self, epoch: int, first: int = 0) -> Iterator[Batch]:
        """Yield the batches of an epoch from number `first` on; what is drawn hangs on an image's place in it."""
        count = len(self.labels)
        order = epoch_order(count, epoch_generator(self.seed, epoch))
        indices, rows = self.share.repeated(order, self.repeats)[0].numpy(), np.arange(count)
        rng = np.random.default_rng((self.seed, epoch))
        boxes, flips = rng.random((count, 2 * TRIES + 2), np.float32), rng.random(count) < self.hflip
        yield from self.shown(epoch, first, indices, rows, boxes, flips)
