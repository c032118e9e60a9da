"""Batches of images with boxes, decoded as they are needed: loaders of `ea_vision.data.imagenet` with other targets.

A batch's images are float32 (B, 3, S, S) in 0..1; the detector normalises them. Its targets are a list of dicts with
boxes (n, 4), labels (n,), image_id and size, as in `CocoFolder`.
"""

import torch

from ea_vision.data.batches import Batch, sent
from ea_vision.data.imagenet import Decoder, DecodingLoader, ImageEvalLoader, ImageTrainLoader

ARRAYS = ("boxes", "labels")  # of a target


class BoxDecoder(Decoder):
    """Its source is a `CocoFolder`; the transform takes an image and its target."""

    def read(self, index: int) -> tuple[torch.Tensor, dict]:
        """Return image and target, with boxes as NumPy arrays: each tensor sent by a worker needs a file descriptor."""
        image, target = self.transform(*self.source[index])
        arrays = {name: target[name].numpy() for name in ARRAYS}
        return image.mul(255).round_(), {**target, **arrays}


class _Boxes(DecodingLoader):
    """Mixed into a loader of images: its source is a `CocoFolder`."""

    def _decoder(self, img_size: int) -> Decoder:
        return BoxDecoder(self.source, self.transform(img_size), (3, img_size, img_size))

    def _batch(self, images: torch.Tensor, targets: list[dict], ids: torch.Tensor) -> Batch:
        images = images.to(self.device, non_blocking=True).float().div_(255)
        return Batch(images, [self._sent(target) for target in targets], ids)

    def _sent(self, target: dict) -> dict:
        """Return a target whose boxes and labels are on the device."""
        there = {name: sent(torch.from_numpy(target[name]), self.device) for name in ARRAYS}
        return {**target, **there}


class BoxTrainLoader(_Boxes, ImageTrainLoader):
    """Shuffled, augmented batches; an unreadable image is replaced by another one of its batch."""


class BoxEvalLoader(_Boxes, ImageEvalLoader):
    """Every image once over all processes; unreadable ones are left out."""
