"""Images of folders, tars and of Hugging Face's data sets, decoded as they are needed.

Worker processes read, decode and augment (0 workers: this process); pixels are normalised on the device. The
augmentation of an image is a function of seed, epoch and index. It depends neither on the number of workers nor on the
place in the epoch at which a run resumes.
"""

import random
import signal
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from typing import Any

import numpy as np
import timm.data
import torch
from timm.layers import to_2tuple
from torch import Tensor
from torch.utils.data import DataLoader, Dataset
from torchvision import transforms

from ea_vision.base.devices import pins_memory, random_state_kept
from ea_vision.base.errors import RunError
from ea_vision.base.processes import end_with_parent, start_method, usable_cpus, workers_watched
from ea_vision.data.augment import normalize
from ea_vision.data.bad_images import BadImages
from ea_vision.data.batches import Batch, Loader, epoch_generator, sent
from ea_vision.data.decoding import BrokenImage
from ea_vision.data.scaling import Size, pixels_of

MOST_BY_DEFAULT = 8  # workers
IMAGES_PER_SPAWN = 1000  # spawning a worker costs about as much as decoding so many: 10 s of a CPU
AHEAD = 2  # batches that each worker prepares
GLOO_SECONDS = 0.3  # in which gloo's threads must end a collective
# If a worker sends no batch for so long, the process ends with an error, and torchrun restarts it.
STUCK_SECONDS = 900
TRIVIAL = "ta_wide"  # torchvision's name of a policy that timm lacks
Decoded = tuple[Tensor, list[Any], dict[int, str]]  # images, targets, errors by place in the batch


def train_transform(
    img_size: int,
    *,
    scale: Sequence[float] = (0.08, 1.0),
    hflip: float = 0.5,
    auto_augment: str = "",
    interpolation: str = "bilinear",
):
    """Return timm's transform: crop of random area and aspect ratio (Szegedy et al. 2015), flip, and further ones.

    Args:
        img_size: side of the result in pixels.
        scale: least and largest share of the image's area in the crop.
        auto_augment: timm's policy, or ta_wide, torchvision's TrivialAugmentWide.
    """
    trivial = auto_augment == TRIVIAL
    policy = None if trivial else auto_augment or None
    parts = timm.data.create_transform(
        img_size,
        is_training=True,
        scale=tuple(scale),
        hflip=hflip,
        normalize=False,
        separate=True,
        color_jitter=None,
        auto_augment=policy,
        interpolation=interpolation,
        use_prefetcher=True,
    )
    steps = list(parts[:2])  # the third converts to tensors
    if trivial:
        mode = transforms.InterpolationMode(interpolation)
        steps.append(transforms.TrivialAugmentWide(interpolation=mode))
    steps.append(pixels_of)
    return transforms.Compose(steps)


@dataclass(eq=False, repr=False)
class Decoder(Dataset):
    """Turns rows of (seed, index) into a batch, in the worker processes, for which it can be pickled.

    Attributes:
        transform: makes an image's uint8 pixels of `shape`.
    """

    source: Any
    transform: Callable
    shape: tuple[int, ...]

    def read(self, index: int) -> tuple[Tensor, Any]:
        """Return the pixels of an image, and its target. Raises BrokenImage."""
        image, target = self.source.read(index)
        return self.transform(image), target

    def __getitems__(self, keys: np.ndarray) -> Decoded:
        """Return uint8 (B, *shape), targets, and the errors of broken images by place; their pixels are 0."""
        images = torch.zeros(len(keys), *self.shape, dtype=torch.uint8)
        targets: list[Any] = [0] * len(keys)
        bad = {}
        with random_state_kept(torch.device("cpu")):
            for place, (seed, index) in enumerate(keys.tolist()):
                random.seed(seed)
                np.random.seed(seed % 2**32)
                torch.default_generator.manual_seed(seed)
                try:
                    images[place], targets[place] = self.read(index)
                except BrokenImage as error:
                    bad[place] = str(error)
        return images, targets, bad


def _as_decoded(batch):
    return batch


def _begin_worker(_number: int) -> None:
    """Leave signals to the trainer, which finishes its update first. The workers of a killed trainer end at once (on
    Linux), because they also hold the lock of its run folder, and torchrun starts the next trainer before torch would
    notice."""
    end_with_parent("SIGKILL")
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, signal.SIG_IGN)


@dataclass(kw_only=True, eq=False, repr=False)
class DecodingLoader(Loader):
    """Base of all loaders that decode images as they are needed. For other images, or other ways to decode them, a
    subclass overrides `_decoder`, `_decoded`, `_pixels` or `_batch`.

    Attributes:
        transform: takes a size in pixels, returns the function that makes an image's pixels (H, W, 3) of that size.
        workers: number of processes that decode for this one, 0: none; an argument of -1 means as many as CPUs and
            images call for. They start with the first batch and end with `close`.
        bad_images: collects the unreadable ones.
    """

    transform: Callable[[int], Callable] | None
    img_size: int | Size
    workers: int
    bad_images: BadImages

    def __post_init__(self):
        super().__post_init__()
        if self.workers < 0:
            self.workers = self._default_workers()
        self._loader: DataLoader | None = None  # torch's, for images of one size
        self._loader_size = self.img_size
        self._batches: list[np.ndarray] = []  # its sampler, which torch reads for each iteration

    def _default_workers(self) -> int:
        most = min(MOST_BY_DEFAULT, usable_cpus())
        return most if start_method() == "fork" else min(most, self.count // IMAGES_PER_SPAWN)

    def _decoder(self, img_size: int | Size) -> Decoder:
        return Decoder(self.source, self.transform(img_size), (*to_2tuple(img_size), 3))

    def _decoded(self, batches: list[np.ndarray], img_size: int) -> Iterator[Decoded]:
        """Yield the decoder's result for each batch of rows (seed, index), in order."""
        if self._loader is None or self._loader_size != img_size:
            self.close()
            if self.workers and self.world_size > 1 and self.device.type == "cpu":
                # After a collective gloo's threads enter the interpreter to drop its tensors. A worker that is forked
                # at that moment waits for ever for the interpreter's list of threads.
                time.sleep(GLOO_SECONDS)
            self._loader = self._torch_loader(img_size)
            self._loader_size = img_size
        self._batches[:] = batches
        with workers_watched() if self.workers else nullcontext():
            yield from self._loader

    def _torch_loader(self, img_size: int) -> DataLoader:
        """Return torch's loader, which starts its workers once: each iteration has other batches."""
        worker_options = {}
        if self.workers:
            worker_options = {
                "prefetch_factor": AHEAD,
                "multiprocessing_context": start_method(),
                "timeout": STUCK_SECONDS,
                "persistent_workers": True,
            }
        return DataLoader(
            self._decoder(img_size),
            batch_sampler=self._batches,
            num_workers=self.workers,
            collate_fn=_as_decoded,
            pin_memory=pins_memory(self.device),
            worker_init_fn=_begin_worker,
            # A generator of its own, since the trainer's random state is part of its checkpoints.
            generator=torch.Generator(),
            **worker_options,
        )

    def close(self) -> None:
        """End the worker processes."""
        iterator = getattr(self._loader, "_iterator", None)
        if iterator is not None:
            # an error may refer to it and so keep it; then torch would report a killed worker again at exit
            iterator._shutdown_workers()
        self._loader = None

    def _show(self, batches: list[np.ndarray], img_size: int) -> Iterator[Batch]:
        """Yield the batches of these rows of (seed, index), in order."""
        decoded = self._decoded(batches, img_size)
        for keys, (images, targets, bad) in zip(batches, decoded, strict=True):
            ids = torch.from_numpy(keys[:, 1].copy())
            if bad:
                places = self._places(ids, bad)
                images = images[places]
                ids = ids[places]
                targets = [targets[place] for place in places]
            yield self._batch(images, targets, ids)

    def _places(self, ids: Tensor, bad: dict[int, str]) -> list[int]:
        """Return the places of the images of a batch to show: in training good images replace the bad ones, in
        evaluation the bad ones are left out. Bad ones are added to `bad_images`.

        Raises:
            RunError: there is no good image to train on.
        """
        broken = {self.source.describe(int(ids[place])): bad[place] for place in bad}
        self.bad_images.new |= broken
        good = [place for place in range(len(ids)) if place not in bad]
        if not self.training:
            return good
        if not good:
            path, error = min(broken.items())
            raise RunError(
                f"none of the {len(ids)} images of a batch can be read, such as {path} ({error})"
            )
        places = list(range(len(ids)))
        for place in bad:
            places[place] = good[place % len(good)]
        return places

    def _batch(self, images: Tensor, targets: list[int], ids: Tensor) -> Batch:
        labels = torch.tensor(targets, dtype=torch.int64)
        return Batch(self._pixels(images), sent(labels, self.device), ids)

    def _pixels(self, images: Tensor) -> Tensor:
        """Return a decoder's images as the network takes them, on the device."""
        images = images.to(self.device, non_blocking=True).permute(0, 3, 1, 2)
        return normalize(images, self.mean, self.std)


@dataclass(kw_only=True, eq=False, repr=False)
class ImageTrainLoader(DecodingLoader):
    """Shuffled, augmented batches; an unreadable image is replaced by another one of its batch.

    Attributes:
        size_of: side in pixels by epoch; None: img_size throughout.
        repeats: how often an epoch has each of its images (see `Loader.repeated`).
    """

    training = True
    size_of: Callable[[int], int] | None = None
    repeats: int = 1

    def batches(self, epoch: int, first: int = 0) -> Iterator[Batch]:
        """Yield the batches of an epoch from number `first` on."""
        generator = epoch_generator(self.seed, epoch)
        order = torch.randperm(self.count, generator=generator)
        order, copies = self.repeated(order, self.repeats).numpy()
        rng = np.random.default_rng((self.seed, epoch))
        seeds = rng.integers(2**63, size=(self.repeats, self.count))
        keys = np.stack([seeds[copies, order], order], 1)
        batches = [keys[places] for places in self.train_places(first)]
        img_size = self.size_of(epoch) if self.size_of else self.img_size
        yield from self._show(batches, img_size)


def _in_evaluation(images: Sequence[int]) -> np.ndarray:
    """Return the rows (seed, index) of images that are not augmented."""
    return np.array([[0] * len(images), images], np.int64).T


class ImageEvalLoader(DecodingLoader):
    """Every image once over all processes; unreadable ones are left out."""

    training = False

    def batches(self) -> Iterator[Batch]:
        """Yield the batches; the last ones may be short or empty."""
        yield from self._show(list(map(_in_evaluation, self.eval_images())), self.img_size)

    def images_of(self, places: Sequence[int]) -> Tensor:
        """Return images by their numbers, without unreadable ones: float32 (B, C, H, W), normalised."""
        [batch] = self._show([_in_evaluation(places)], self.img_size)
        return batch.images
