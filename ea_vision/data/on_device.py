"""Loaders for images that fit in memory: decoded once, kept as uint8 on the device, augmented there in batches."""

from collections.abc import Iterator
from dataclasses import dataclass

import torch

from ea_vision.data.augment import Augmentation, normalize
from ea_vision.data.batches import Batch, Loader, epoch_generator, sent
from ea_vision.data.small_images import Images


@dataclass(eq=False, repr=False)
class _OnDevice(Loader):
    source: Images

    def __post_init__(self):
        super().__post_init__()
        self.images = self.source.images.to(self.device)
        self.targets = self.source.targets.to(self.device)


@dataclass(kw_only=True, eq=False, repr=False)
class TrainLoader(_OnDevice):
    """Shuffled, augmented batches."""

    training = True
    augmentation: Augmentation

    def batches(self, epoch: int, first: int = 0) -> Iterator[Batch]:
        """Yield the batches of an epoch from number `first` on."""
        generator = epoch_generator(self.seed, epoch)
        order = torch.randperm(self.count, generator=generator)
        draws = self.augmentation.draw(self.count, self.images.shape[-2:], generator)
        if self.augmentation.flip == "alternate":
            # depends on the image, not on its place in the epoch's order
            flips = self.augmentation.alternating_flips(self.count, epoch, self.seed)
            draws[:, 2] = flips[order]
        # sent once, so that no batch has to wait
        draws = draws.to(self.device)
        order_there = order.to(self.device)
        for places in self.train_places(first):
            numbers = order_there[places]
            images = self.images[numbers]
            images = self.augmentation.apply(images, draws[places], self.mean, self.std)
            yield Batch(images, self.targets[numbers], order[places])


class EvalLoader(_OnDevice):
    """Every image once over all processes."""

    training = False

    def images_of(self, places: list[int] | torch.Tensor) -> torch.Tensor:
        """Return images by their numbers: float32 (B, C, H, W), normalised."""
        return normalize(self.images[places], self.mean, self.std)

    def batches(self) -> Iterator[Batch]:
        """Yield the batches; the last ones may be short or empty."""
        for images in self.eval_images():
            numbers = torch.tensor(list(images), dtype=torch.int64)
            there = sent(numbers, self.device)
            yield Batch(self.images_of(there), self.targets[there], numbers)
