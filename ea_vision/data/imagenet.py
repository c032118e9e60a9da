"""Images by name, decoded as they are needed: folders, tars, and what else timm's `create_dataset` can index.

Processes of their own read, decode and augment (0 workers: this process); pixels are normalised on the device. What
happens to an image is a function of seed, epoch and index, whatever the number of workers and wherever an epoch is
entered.
"""

from __future__ import annotations

import ctypes
import hashlib
import random
import signal
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import closing, contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import timm.data
import torch
from PIL import Image, ImageOps
from torch.utils.data import DataLoader, Dataset
from torchvision import transforms

from ea_vision.base.errors import UsageError
from ea_vision.data.augment import normalize
from ea_vision.data.bad_images import BadImages
from ea_vision.data.batches import Batch, Share, epoch_generator, sent
from ea_vision.data.image_files import BrokenImage, ImageFiles, check_scaled, decode_image, to_rgb

TERM_SECONDS = 30  # that workers serve on after a SIGTERM, which clusters send to every process of a job
GLOO_SECONDS = 0.3  # that gloo's threads have to end a collective in
STUCK_SECONDS = 900  # without a batch from a worker: the process ends with an error, and torchrun restarts it
PR_SET_PDEATHSIG = 1  # of <sys/prctl.h>
TRIVIAL = "ta_wide"  # torchvision's name of a policy that timm has not


class ImageSource:
    """One split: its classes and, by index, its images.

    Args:
        dataset: timm's name of the data set; empty for a folder or tar of class/name.jpg (`ImageFiles`).
        root: the folder or .tar of the split itself, or, with `dataset`, what that reader takes.
        split: for `dataset`.
        num_classes: of the targets; needed where the data does not say it.
        exif_rotation: turn images as their EXIF data says.

    Raises:
        UsageError: no such data, no images, a class folder without images, a data set that cannot be indexed.
    """

    def __init__(self, dataset: str, root: Path, split: str, num_classes: int = 0, exif_rotation: bool = False):
        self.name = f"{dataset} {split}" if dataset else str(root)
        self.exif_rotation = exif_rotation
        self.files = None if dataset else ImageFiles(root)
        if self.files is not None:
            self.classes = self.files.classes
        else:
            found = _timms(dataset, root, split, self.name)
            self.items = getattr(found, "reader", found)  # (file or image, target) by number
            self.classes = _class_names(self.items, num_classes, self.name)
        if num_classes and num_classes != len(self.classes):
            raise UsageError(f"{self.name} must have {num_classes} classes (--num-classes), got {len(self.classes)}")

    def __len__(self) -> int:
        return len(self.items if self.files is None else self.files)

    def describe(self, index: int) -> str:
        """Return the path of an image, where it has one."""
        return f"{self.name} {index}" if self.files is None else self.files.describe(index)

    def read(self, index: int) -> tuple[Image.Image, int]:
        """Decode an image to RGB, and give its target.

        Raises:
            BrokenImage: it cannot be read or decoded.
        """
        try:
            if self.files is not None:
                file, target = self.files.open(index), self.files.targets[index]
            else:
                file, target = self.items[index][:2]
            if isinstance(file, Image.Image):
                return to_rgb(ImageOps.exif_transpose(file) if self.exif_rotation else file), int(target)
        except (OSError, SyntaxError, ValueError) as error:
            raise BrokenImage(f"{type(error).__name__}: {error}") from error
        with file:
            return decode_image(file, self.exif_rotation), int(target)

    def fingerprint(self) -> str:
        """Return SHA-256 over the names of classes and, of files, their names and sizes: the same wherever they lie."""
        found = (self.files.fingerprint() if self.files is not None else
                 hashlib.sha256("\n".join([*self.classes, str(len(self))]).encode()).hexdigest())
        return f"{found} exif_rotation" if self.exif_rotation else found


def _timms(dataset: str, root: Path, split: str, name: str):
    try:
        found = timm.data.create_dataset(dataset, str(root), split=split, search_split=False)
    except (RuntimeError, AssertionError, OSError, ImportError, ValueError) as error:
        raise UsageError(f"no images in {name}: {error}") from error
    if not hasattr(found, "__getitem__") or isinstance(found, torch.utils.data.IterableDataset):
        raise UsageError(f"{dataset} is a stream; one that can be indexed is required (folder, tar, torch/*, hfds/*)")
    return found


def _class_names(items, num_classes: int, name: str) -> list[str]:
    """Return the names that a data set of timm's has for its classes, else numbers."""
    number = getattr(items, "class_to_idx", None) or getattr(items, "class_name_to_idx", None)
    if number:
        return sorted(number, key=number.get)
    if not num_classes:
        raise UsageError(f"{name} does not name its classes: --num-classes is required")
    return [str(number) for number in range(num_classes)]


def _pixels(image: Image.Image) -> torch.Tensor:
    """Return uint8 (H, W, 3): the channels come first on the device, where that costs less."""
    return torch.from_numpy(np.array(image))


def train_transform(img_size: int, *, scale: Sequence[float] = (0.08, 1.0), hflip: float = 0.5,
                    color_jitter: float = 0.0, auto_augment: str = "", interpolation: str = "bilinear", **more):
    """Return timm's transform: crop of random area and aspect ratio (Szegedy et al. 2015), flip, and further ones.

    Args:
        img_size: side of the result in pixels. scale: least and largest share of the image's area in the crop.
        auto_augment: timm's policy, or ta_wide, torchvision's TrivialAugmentWide.
        more: other keywords of timm's `create_transform`: vflip, ratio, train_crop_mode.
    """
    trivial = auto_augment == TRIVIAL
    steps = list(timm.data.create_transform(
        img_size, is_training=True, scale=tuple(scale), hflip=hflip, normalize=False, separate=True,
        color_jitter=color_jitter or None, auto_augment=None if trivial else auto_augment or None,
        interpolation=interpolation, use_prefetcher=True, **more)[:2])
    if trivial:
        steps.append(transforms.TrivialAugmentWide(interpolation=transforms.InterpolationMode(interpolation)))
    return transforms.Compose([*steps, _pixels])


def eval_transform(img_size: int, resize: int, interpolation: str = "bilinear"):
    """Scale the short side to `resize`, cut the middle `img_size` x `img_size`; BrokenImage where that is too large."""
    def limited(image: Image.Image) -> Image.Image:
        check_scaled(image.size, resize)
        return image

    mode = transforms.InterpolationMode(interpolation)
    return transforms.Compose([limited, transforms.Resize(resize, mode), transforms.CenterCrop(img_size), _pixels])


def image_seed(seed: int, epoch: int, index: int, copy: int = 0) -> int:
    """Return the seed, of 63 bits, of an image in an epoch of a run; copy: its number among several."""
    drawn_by = f"{seed} {epoch} {index}" + (f" {copy}" if copy else "")
    return int.from_bytes(hashlib.sha256(drawn_by.encode()).digest()[:8], "little") >> 1


def seed_image(seed: int, epoch: int, index: int, copy: int = 0) -> None:
    """Seed all that an image's augmentation may draw from."""
    number = image_seed(seed, epoch, index, copy)
    random.seed(number)
    np.random.seed(number % 2**32)
    torch.default_generator.manual_seed(number)


class Decoder(Dataset):
    """In the worker processes: a list of (epoch, index, number of the copy) -> one batch. A subclass has other images.

    shape: of an image.
    """

    def __init__(self, source, transform, shape: tuple[int, ...], seed: int):
        self.source, self.transform, self.shape, self.seed = source, transform, shape, seed

    def read(self, index: int) -> tuple[torch.Tensor, Any]:
        """Return the uint8 pixels of an image and its target. Raises BrokenImage."""
        image, target = self.source.read(index)
        return self.transform(image), target

    def __getitems__(self, keys: list[tuple[int, int, int]]):
        """Return uint8 (B, *shape), targets, ids (B,), bad [(place, error)]; the pixels of bad are 0."""
        images = torch.zeros(len(keys), *self.shape, dtype=torch.uint8)
        targets, bad = [0] * len(keys), []
        for place, (epoch, index, copy) in enumerate(keys):
            seed_image(self.seed, epoch, index, copy)
            try:
                images[place], targets[place] = self.read(index)
            except BrokenImage as error:
                bad.append((place, str(error)))
        return images, targets, torch.tensor([index for _, index, _ in keys], dtype=torch.int64), bad


def _begin_worker(_number: int) -> None:
    """Leave signals to the trainer, which finishes its update first. A killed trainer's workers go at once (on Linux):
    they hold the lock of its run folder too, and torchrun starts the next trainer before torch would notice."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGALRM, signal.SIG_DFL)
    signal.signal(signal.SIGTERM, lambda *_: signal.alarm(TERM_SECONDS))
    torch.set_num_threads(1)


def _as_it_is(batch):
    return batch


@contextmanager
def _own_random_state() -> Iterator[None]:
    """Keep what seeds the decoder sets from the trainer, whose random state is part of its checkpoints."""
    python, numpy = random.getstate(), np.random.get_state()
    with torch.random.fork_rng(devices=[]):
        yield
    random.setstate(python)
    np.random.set_state(numpy)


class DecodingLoader:
    """Common to all loaders that decode images as they are needed. Other images, or other ways to decode them, are
    subclasses with another `_decoder`, `_decoded`, `_pixels` or `_batch`.

    Args: transform: of images of img_size; mean and std of images in 0..1, per channel; batch_size: images per process;
    workers: processes that decode for this one, 0: none; prefetch: batches that each of them prepares ahead;
    bad_images: gets the unreadable ones.
    """

    size_of: Callable[[int], int] | None = None

    def __init__(self, source, *, transform, img_size: int, mean: Sequence[float], std: Sequence[float],
                 device: torch.device, batch_size: int, workers: int, bad_images: BadImages, rank: int = 0,
                 world_size: int = 1, seed: int = 0, prefetch: int = 2):
        self.source, self.bad_images = source, bad_images
        self.transform, self.img_size = transform, img_size
        self.mean, self.std = (torch.tensor(values, dtype=torch.float32, device=device) for values in (mean, std))
        self.share = Share(len(source), batch_size, rank, world_size)
        self.device, self.seed, self.workers, self.prefetch = device, seed, workers, prefetch

    def _decoder(self, img_size: int):
        """Return what makes images, targets, ids and bad ones [(place, error)] of a list of keys."""
        transform = self.transform(img_size) if self.size_of else self.transform
        return Decoder(self.source, transform, (img_size, img_size, 3), self.seed)

    def _decoded(self, decoder, batches: list[list[tuple[int, int, int]]]) -> Iterator[tuple]:
        """Yield the decoder's batches, in order."""
        of_workers = {"prefetch_factor": self.prefetch, "multiprocessing_context": "fork", "timeout": STUCK_SECONDS}
        if self.workers and self.share.world_size > 1 and self.device.type == "cpu":
            # A fork while one of gloo's threads enters the interpreter, as they do after a collective to drop its
            # tensors, leaves a worker that waits for ever for the interpreter's list of threads.
            time.sleep(GLOO_SECONDS)
        loader = iter(DataLoader(
            decoder, batch_sampler=batches, num_workers=self.workers, collate_fn=_as_it_is,
            pin_memory=self.device.type == "cuda", worker_init_fn=_begin_worker, **(of_workers if self.workers else {}),
            generator=torch.Generator()))  # its own: the trainer's random state is part of its checkpoints
        for _ in batches:
            with _own_random_state():
                batch = next(loader)
            yield batch

    def _show(self, batches: list[list[tuple[int, int, int]]], img_size: int, training: bool) -> Iterator[Batch]:
        """Yield the batches of these keys, in order."""
        with closing(self._decoded(self._decoder(img_size), batches)) as decoded:
            for images, targets, ids, bad in decoded:
                for place, error in bad:
                    self.bad_images.add(self.source.describe(int(ids[place])), error)
                if bad:
                    places = self.bad_images.places(len(ids), [place for place, _ in bad], training)
                    images, ids, targets = images[places], ids[places], [targets[place] for place in places]
                yield self._batch(images, targets, ids)

    def _batch(self, images: torch.Tensor, targets: list[int], ids: torch.Tensor) -> Batch:
        return Batch(self._pixels(images), sent(torch.tensor(targets, dtype=torch.int64), self.device), ids)

    def _pixels(self, images: torch.Tensor) -> torch.Tensor:
        """Return a decoder's images as the network takes them, on the device."""
        images = images.to(self.device, non_blocking=True).permute(0, 3, 1, 2)
        return normalize(images, self.mean, self.std)


class ImageTrainLoader(DecodingLoader):
    """Shuffled, augmented batches; an unreadable image is replaced by another one of its batch.

    Args:
        transform: of images of img_size; with `size_of`, a function from the size to the transform.
        size_of: side in pixels by epoch; None: img_size throughout.
        repeats: how often an epoch has each of its images (see `Share.repeated`).
    """

    def __init__(self, source, *, size_of: Callable[[int], int] | None = None, repeats: int = 1, **common):
        super().__init__(source, **common)
        self.size_of, self.repeats = size_of, repeats

    def __len__(self) -> int:
        return self.share.train_batches

    def _order(self, epoch: int) -> torch.Tensor:
        return torch.randperm(len(self.source), generator=epoch_generator(self.seed, epoch))

    def batches(self, epoch: int, first: int = 0) -> Iterator[Batch]:
        """Yield the batches of an epoch from number `first` on."""
        order, copies = (table.tolist() for table in self.share.repeated(self._order(epoch), self.repeats))
        keys = [[(epoch, index, copy) for index, copy in zip(order[places], copies[places], strict=True)]
                for places in self.share.train_places(first)]
        yield from self._show(keys, self.size_of(epoch) if self.size_of else self.img_size, training=True)


class ImageEvalLoader(DecodingLoader):
    """Every image once over all processes; unreadable ones are left out."""

    def __len__(self) -> int:
        return self.share.eval_batches

    def batches(self) -> Iterator[Batch]:
        """Yield the batches; the last ones may be short or empty."""
        keys = [[(0, index, 0) for index in images] for images in self.share.eval_images()]
        yield from self._show(keys, self.img_size, training=False)
