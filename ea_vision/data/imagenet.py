"""Images of folders and tars, and of what else timm's `create_dataset` can index, decoded as they are needed.

Processes of their own read, decode and augment (0 workers: this process); pixels are normalised on the device. What
happens to an image is a function of seed, epoch and index, whatever the number of workers and wherever an epoch is
entered.
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
from PIL import Image
from torch.utils.data import DataLoader, Dataset
from torchvision import transforms

from ea_vision.base.devices import pins_memory
from ea_vision.base.errors import RunError
from ea_vision.base.processes import end_with_parent, start_method, workers_watched
from ea_vision.data.augment import normalize
from ea_vision.data.bad_images import BadImages
from ea_vision.data.batches import Batch, Loader, epoch_generator, sent
from ea_vision.data.image_files import BrokenImage

AHEAD = 2  # batches that each worker prepares
GLOO_SECONDS = 0.3  # that gloo's threads have to end a collective in
STUCK_SECONDS = (
    900  # without a batch from a worker: the process ends with an error, and torchrun restarts it
)
TRIVIAL = "ta_wide"  # torchvision's name of a policy that timm has not


def _pixels(image: Image.Image) -> torch.Tensor:
    """Return uint8 (H, W, 3): the channels come first on the device, where that costs less."""
    return torch.from_numpy(np.array(image))


def train_transform(
    img_size: int,
    *,
    scale: Sequence[float] = (0.08, 1.0),
    hflip: float = 0.5,
    color_jitter: float = 0.0,
    auto_augment: str = "",
    interpolation: str = "bilinear",
    **more,
):
    """Return timm's transform: crop of random area and aspect ratio (Szegedy et al. 2015), flip, and further ones.

    Args:
        img_size: side of the result in pixels. scale: least and largest share of the image's area in the crop.
        auto_augment: timm's policy, or ta_wide, torchvision's TrivialAugmentWide.
        more: other keywords of timm's `create_transform`: vflip, ratio, train_crop_mode.
    """
    trivial = auto_augment == TRIVIAL
    steps = list(
        timm.data.create_transform(
            img_size,
            is_training=True,
            scale=tuple(scale),
            hflip=hflip,
            normalize=False,
            separate=True,
            color_jitter=color_jitter or None,
            auto_augment=None if trivial else auto_augment or None,
            interpolation=interpolation,
            use_prefetcher=True,
            **more,
        )[:2]
    )
    if trivial:
        steps.append(
            transforms.TrivialAugmentWide(interpolation=transforms.InterpolationMode(interpolation))
        )
    return transforms.Compose([*steps, _pixels])


def eval_transform(img_size: int, resize: int, interpolation: str = "bilinear"):
    """Scale the short side to `resize`, cut the middle `img_size` x `img_size`."""
    mode = transforms.InterpolationMode(interpolation)
    return transforms.Compose(
        [transforms.Resize(resize, mode), transforms.CenterCrop(img_size), _pixels]
    )


class Decoder(Dataset):
    """Turns rows of (seed, index) into a batch, in the worker processes.

    read: from an index to uint8 pixels of `shape` and a target; it may raise BrokenImage.
    """

    def __init__(self, read: Callable[[int], tuple[torch.Tensor, Any]], shape: tuple[int, ...]):
        self.read, self.shape = read, shape

    def __getitems__(self, keys: np.ndarray) -> tuple[torch.Tensor, list[Any], dict[int, str]]:
        """Return uint8 (B, *shape), targets, and what is wrong with bad ones, by place; their pixels are 0."""
        images, targets, bad = (
            torch.zeros(len(keys), *self.shape, dtype=torch.uint8),
            [0] * len(keys),
            {},
        )
        python, numpy = random.getstate(), np.random.get_state()
        with torch.random.fork_rng(
            devices=[]
        ):  # the trainer's random state is part of its checkpoints
            for place, (seed, index) in enumerate(keys.tolist()):
                random.seed(seed)
                np.random.seed(seed % 2**32)
                torch.default_generator.manual_seed(seed)
                try:
                    images[place], targets[place] = self.read(index)
                except BrokenImage as error:
                    bad[place] = str(error)
        random.setstate(python)
        np.random.set_state(numpy)
        return images, targets, bad


@dataclass
class TransformedImages:
    """Reads image number `index` of a source and transforms it; worker processes get it, so it can be pickled."""

    source: Any
    transform: Callable[[Image.Image], torch.Tensor]

    def __call__(self, index: int) -> tuple[torch.Tensor, int]:
        image, target = self.source.read(index)
        return self.transform(image), target


def _as_decoded(batch):
    return batch


def _begin_worker(_number: int) -> None:
    """Leave signals to the trainer, which finishes its update first. A killed trainer's workers go at once (on Linux):
    they hold the lock of its run folder too, and torchrun starts the next trainer before torch would notice."""
    end_with_parent("SIGKILL")
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, signal.SIG_IGN)


class DecodingLoader(Loader):
    """Common to all loaders that decode images as they are needed. Other images, or other ways to decode them, are
    subclasses with another `_decoder`, `_decoded`, `_pixels` or `_batch`.

    Args: transform: from a side in pixels to what is done to images (`train_transform`, `eval_transform`); workers:
    processes that decode for this one, 0: none; bad_images: gets the unreadable ones; common: see `Loader`.
    """

    def __init__(
        self,
        source,
        *,
        transform: Callable[[int], Callable],
        img_size: int,
        workers: int,
        bad_images: BadImages,
        **common,
    ):
        super().__init__(len(source), **common)
        self.source, self.transform, self.img_size = source, transform, img_size
        self.workers, self.bad_images = workers, bad_images

    def _decoder(self, img_size: int) -> Decoder:
        read = TransformedImages(self.source, self.transform(img_size))
        return Decoder(read, (img_size, img_size, 3))

    def _decoded(
        self, batches: list[np.ndarray], img_size: int
    ) -> Iterator[tuple[torch.Tensor, list, dict[int, str]]]:
        """Yield what the decoder makes of each batch's rows of (seed, index), in order."""
        of_workers = {
            "prefetch_factor": AHEAD,
            "multiprocessing_context": start_method(),
            "timeout": STUCK_SECONDS,
        }
        if self.workers and self.world_size > 1 and self.device.type == "cpu":
            # A fork while one of gloo's threads enters the interpreter, as they do after a collective to drop its
            # tensors, leaves a worker that waits for ever for the interpreter's list of threads.
            time.sleep(GLOO_SECONDS)
        loader = DataLoader(
            self._decoder(img_size),
            batch_sampler=batches,
            num_workers=self.workers,
            collate_fn=_as_decoded,
            pin_memory=pins_memory(self.device),
            worker_init_fn=_begin_worker,
            **(of_workers if self.workers else {}),
            # Its own: the trainer's random state is part of its checkpoints.
            generator=torch.Generator(),
        )
        with workers_watched() if self.workers else nullcontext():
            yield from loader

    def _show(self, batches: list[np.ndarray], img_size: int) -> Iterator[Batch]:
        """Yield the batches of these rows of (seed, index), in order."""
        for keys, (images, targets, bad) in zip(
            batches, self._decoded(batches, img_size), strict=True
        ):
            ids = torch.from_numpy(keys[:, 1].copy())
            if bad:
                broken = {
                    self.source.describe(int(ids[place])): error for place, error in bad.items()
                }
                self.bad_images.new |= broken
                places = good = [place for place in range(len(ids)) if place not in bad]
                if self.training:
                    if not good:
                        path, error = min(broken.items())
                        raise RunError(
                            f"none of the {len(ids)} images of a batch can be read, such as {path} "
                            f"({error})"
                        )
                    places = [
                        good[place % len(good)] if place in bad else place
                        for place in range(len(ids))
                    ]
                images, ids, targets = (
                    images[places],
                    ids[places],
                    [targets[place] for place in places],
                )
            yield self._batch(images, targets, ids)

    def _batch(self, images: torch.Tensor, targets: list[int], ids: torch.Tensor) -> Batch:
        return Batch(
            self._pixels(images), sent(torch.tensor(targets, dtype=torch.int64), self.device), ids
        )

    def _pixels(self, images: torch.Tensor) -> torch.Tensor:
        """Return a decoder's images as the network takes them, on the device."""
        images = images.to(self.device, non_blocking=True).permute(0, 3, 1, 2)
        return normalize(images, self.mean, self.std)


class ImageTrainLoader(DecodingLoader):
    """Shuffled, augmented batches; an unreadable image is replaced by another one of its batch.

    Args:
        size_of: side in pixels by epoch; None: img_size throughout.
        repeats: how often an epoch has each of its images (see `Loader.repeated`).
    """

    training = True

    def __init__(
        self, source, *, size_of: Callable[[int], int] | None = None, repeats: int = 1, **common
    ):
        super().__init__(source, **common)
        self.size_of, self.repeats = size_of or (lambda epoch: self.img_size), repeats

    def _order(self, epoch: int) -> torch.Tensor:
        return torch.randperm(len(self.source), generator=epoch_generator(self.seed, epoch))

    def batches(self, epoch: int, first: int = 0) -> Iterator[Batch]:
        """Yield the batches of an epoch from number `first` on."""
        order, copies = self.repeated(self._order(epoch), self.repeats).numpy()
        seeds = np.random.default_rng((self.seed, epoch)).integers(
            2**63, size=(self.repeats, len(self.source))
        )
        keys = np.stack([seeds[copies, order], order], 1)
        yield from self._show(
            [keys[places] for places in self.train_places(first)], self.size_of(epoch)
        )


class ImageEvalLoader(DecodingLoader):
    """Every image once over all processes; unreadable ones are left out."""

    training = False

    def batches(self) -> Iterator[Batch]:
        """Yield the batches; the last ones may be short or empty."""
        yield from self._show(
            [np.array([[0] * len(images), images], np.int64).T for images in self.eval_images()],
            self.img_size,
        )
