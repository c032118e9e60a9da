"""Common to all loaders: the batch, the order of an epoch, and each process's share of the images.

A loader has `len(loader)` batches and yields them from `loader.batches(...)`. In training this takes an epoch and the
number of the first batch, and shuffles; in evaluation it takes no arguments.
"""

import math
from collections.abc import Sequence
from dataclasses import KW_ONLY, dataclass
from typing import Any, ClassVar, NamedTuple

import torch
from torch import Tensor

from ea_vision.base.devices import pins_memory


class Batch(NamedTuple):
    images: Tensor  # float32 (B, C, H, W), normalised
    targets: Tensor  # int64 (B,)
    ids: Tensor  # int64 (B,), on the CPU: indices into the split


def sent(tensor: Tensor, device: torch.device) -> Tensor:
    """Copy a tensor from main memory to the device. For a GPU it is pinned first, since the host might otherwise wait
    until the device has finished all earlier work."""
    if pins_memory(device):
        tensor = tensor.pin_memory()
    return tensor.to(device, non_blocking=True)


def epoch_generator(seed: int, epoch: int) -> torch.Generator:
    """Return the generator of an epoch's random numbers, on the CPU; the order is drawn first."""
    # an odd factor keeps the pairs of seed and epoch apart
    return torch.Generator().manual_seed((seed * 1_000_003 + epoch) % 2**63)


@dataclass(frozen=True)
class GrowingSize:
    """Side of the training images by epoch, in pixels: `first` up to epoch `start`, `last` from epoch `end` on, and
    between them a multiple of 32, as in FFCV's recipes. Epochs count from 0."""

    first: int
    last: int
    start: float = 0.0
    end: float = 0.0

    def __call__(self, epoch: int) -> int:
        if epoch >= self.end:
            return self.last
        if epoch <= self.start:
            return self.first
        share = (epoch - self.start) / (self.end - self.start)
        side = self.first + share * (self.last - self.first)
        side = 32 * round(side / 32)
        return min(max(side, self.first), self.last)


@dataclass(eq=False, repr=False)
class Loader:
    """Base of all loaders: which images of a split process `rank` of `world_size` gets, and when.

    Training: with R processes and batches of B images, batch b of rank r has places [(b R + r) B, (b R + r + 1) B) of
    the epoch's order. So two processes together see what one process with twice the batch size sees. Images after
    the last full batch of all processes are not used. Evaluation: every image once over all processes; rank r gets
    those of number r, r + R, ... All processes get the same number of batches; the last ones may be short or empty.

    Attributes:
        source: the split; `len()` gives the number of its images.
        mean, std: (C,) on the device, of images in 0..1.
        batch_size: images per process.
        seed: of order and augmentation.
    """

    training: ClassVar[bool]
    source: Any
    _: KW_ONLY
    mean: Sequence[float]
    std: Sequence[float]
    device: torch.device
    batch_size: int
    rank: int = 0
    world_size: int = 1
    seed: int = 0

    def __post_init__(self):
        self.mean = torch.tensor(self.mean, dtype=torch.float32, device=self.device)
        self.std = torch.tensor(self.std, dtype=torch.float32, device=self.device)

    @property
    def count(self) -> int:
        """The number of the split's images."""
        return len(self.source)

    def unnormalize(self, images: Tensor) -> Tensor:
        """Return the images in 0..1 of a batch's (B, C, H, W)."""
        return images * self.std[:, None, None] + self.mean[:, None, None]

    def __len__(self) -> int:
        images = self.batch_size * self.world_size
        return self.count // images if self.training else math.ceil(self.count / images)

    def close(self) -> None:
        """End what the loader has started, such as worker processes."""

    def train_places(self, first: int = 0) -> list[slice]:
        """Return the places in the epoch's order of each batch from number `first` on."""
        places = []
        for number in range(first, len(self)):
            start = (number * self.world_size + self.rank) * self.batch_size
            places.append(slice(start, start + self.batch_size))
        return places

    def eval_images(self) -> list[range]:
        """Return the indices of the images of each batch."""
        indices = range(self.rank, self.count, self.world_size)
        starts = range(0, len(self) * self.batch_size, self.batch_size)
        return [indices[start : start + self.batch_size] for start in starts]

    def repeated(self, order: Tensor, times: int) -> Tensor:
        """Return an epoch that has each of its images `times` times (repeated augmentation, Hoffer et al. 2019), and so
        many times fewer different images.

        The copies of an image are in one update, on different processes if there are enough. timm's RepeatAugSampler
        gives process r the same images.

        Args:
            order: int64 (N,), a permutation.

        Returns:
            int64 (2, M), M images of whole updates: the new order, and the number of each copy, 0 to times - 1.
        """
        used = len(self) * self.batch_size * self.world_size
        copies = torch.arange(used) % times
        epoch = torch.stack([order.repeat_interleave(times)[:used], copies])
        if times == 1:
            return epoch
        updates = epoch.view(2, -1, self.batch_size, self.world_size)
        return updates.mT.reshape(2, -1)
