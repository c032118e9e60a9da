"""Batches of images with boxes, decoded as they are needed: the loaders of `ea_vision.data.imagenet`, other targets.

A batch's images are float32 (B, 3, S, S) in 0..1, not normalised, which the detector does. Its targets are a list:
boxes (n, 4), labels (n,), image_id and size, as `CocoFolder` has them.
"""

from __future__ import annotations

from typing import Any

import torch
from torch.utils.data import Dataset

from ea_vision.data.batches import Batch, sent
from ea_vision.data.image_files import BrokenImage
from ea_vision.data.imagenet import DecodingLoader, ImageEvalLoader, ImageTrainLoader, seed_image
from ea_vision.detection.coco import CocoFolder


class _BoxDecoder(Dataset):
    """In the worker processes: a list of (epoch, index, number of the copy) -> one batch. Boxes travel as NumPy arrays:
    every tensor would take a file descriptor on its way."""

    def __init__(self, source: CocoFolder, img_size: int, seed: int):
        self.source, self.img_size, self.seed = source, img_size, seed

    def __getitems__(self, keys: list[tuple[int, int, int]]):
        """Return uint8 (B, 3, S, S), targets, ids (B,), bad [(place, error)]; the pixels of bad are 0."""
        images = torch.zeros(len(keys), 3, self.img_size, self.img_size, dtype=torch.uint8)
        targets: list[dict[str, Any]] = [{} for _ in keys]
        bad = []
        for place, (epoch, index, copy) in enumerate(keys):
            seed_image(self.seed, epoch, index, copy)
            try:
                image, target = self.source[index]
            except BrokenImage as error:
                bad.append((place, str(error)))
                continue
            images[place] = image.mul(255).round_()
            targets[place] = {**target, "boxes": target["boxes"].numpy(), "labels": target["labels"].numpy()}
        return images, targets, torch.tensor([index for _, index, _ in keys]), bad


class _Boxes(DecodingLoader):
    """Beside a loader of images: its source is a `CocoFolder`, which is given the transform."""

    def _decoder(self, transform, img_size: int) -> Dataset:
        return _BoxDecoder(self.source.select(range(len(self.source)), transform), img_size, self.seed)

    def _batch(self, images: torch.Tensor, targets: list[dict[str, Any]], ids: torch.Tensor) -> Batch:
        images = images.to(self.device, non_blocking=True).float().div_(255)
        targets = [{**target, **{name: sent(torch.from_numpy(target[name]), self.device)
                                 for name in ("boxes", "labels")}} for target in targets]
        return Batch(images, targets, ids)


class BoxTrainLoader(_Boxes, ImageTrainLoader):
    """Shuffled, augmented batches; an unreadable image is replaced by another one of its batch."""


class BoxEvalLoader(_Boxes, ImageEvalLoader):
    """Every image once over all processes; unreadable ones are left out."""
