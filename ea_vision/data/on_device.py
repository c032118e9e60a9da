"""Loaders for images that fit in memory: decoded once, kept as uint8 on the device, augmented there in batches.

The interface every loader of this project has: `len(loader)` batches, `loader.batches(...)` yields Batch.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from typing import NamedTuple

import torch

from ea_vision.data.augment import Augmentation, normalize
from ea_vision.data.cifar import Images


class Batch(NamedTuple):
    images: torch.Tensor  # float32 (B, C, H, W), normalised
    targets: torch.Tensor  # int64 (B,)
    ids: torch.Tensor  # int64 (B,), on the CPU: indices into the split


class _OnDevice:
    """Args: split; mean and std of images in 0..1, per channel; batch_size: images per process."""

    def __init__(self, split: Images, *, mean: Sequence[float], std: Sequence[float], device: torch.device,
                 batch_size: int, rank: int = 0, world_size: int = 1):
        self.images, self.targets = split.images.to(device), split.targets.to(device)
        self.mean = torch.tensor(mean, dtype=torch.float32, device=device)
        self.std = torch.tensor(std, dtype=torch.float32, device=device)
        self.device, self.batch_size, self.rank, self.world_size = device, batch_size, rank, world_size


class TrainLoader(_OnDevice):
    """Shuffled, augmented batches; what is left over after the last full batch of all processes is not used.

    Batch b of rank r takes the places [(b R + r) B, (b R + r + 1) B) of the epoch's order, R processes of B images: two
    processes see, together, what one process with twice the batch size sees.
    """

    def __init__(self, split: Images, *, augmentation: Augmentation, seed: int, **common):
        super().__init__(split, **common)
        self.augmentation, self.seed = augmentation, seed

    def __len__(self) -> int:
        return len(self.targets) // (self.batch_size * self.world_size)

    def batches(self, epoch: int, first: int = 0) -> Iterator[Batch]:
        """Yield the batches of an epoch from number `first` on."""
        # A fixed odd factor keeps (seed, epoch) pairs apart.
        generator = torch.Generator().manual_seed((self.seed * 1_000_003 + epoch) % 2**63)
        order = torch.randperm(len(self.targets), generator=generator)
        draws = self.augmentation.draw(len(self.targets), tuple(self.images.shape[-2:]), generator).to(self.device)
        for number in range(first, len(self)):
            start = (number * self.world_size + self.rank) * self.batch_size
            places = slice(start, start + self.batch_size)
            chosen = order[places]
            on_device = chosen.to(self.device)
            images = self.augmentation.apply(self.images[on_device], draws[places], self.mean, self.std)
            yield Batch(images, self.targets[on_device], chosen)


class EvalLoader(_OnDevice):
    """Every image once over all processes, which all get the same number of batches; the last may be short or empty."""

    def __len__(self) -> int:
        return math.ceil(math.ceil(len(self.targets) / self.world_size) / self.batch_size)

    def batches(self) -> Iterator[Batch]:
        own = torch.arange(self.rank, len(self.targets), self.world_size)
        for number in range(len(self)):
            chosen = own[number * self.batch_size:(number + 1) * self.batch_size]
            on_device = chosen.to(self.device)
            yield Batch(normalize(self.images[on_device], self.mean, self.std), self.targets[on_device],
                        chosen)
