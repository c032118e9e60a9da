"""Batches of images with boxes, decoded as they are needed: the loaders of `ea_vision.data.imagenet`, other targets.

A batch's images are float32 (B, 3, S, S) in 0..1, not normalised, which the detector does. Its targets are a list:
boxes (n, 4), labels (n,), image_id and size, as `CocoFolder` has them.
"""

import torch

from ea_vision.data.batches import Batch, sent
from ea_vision.data.imagenet import Decoder, DecodingLoader, ImageEvalLoader, ImageTrainLoader


class _Boxes(DecodingLoader):
    """Beside a loader of images: its source is a `CocoFolder`."""

    def _decoder(self, img_size: int) -> Decoder:
        transform = self.transform(img_size)

        def read(index: int) -> tuple[torch.Tensor, dict]:
            """Boxes travel as NumPy arrays: every tensor would take a file descriptor on its way."""
            image, target = transform(*self.source[index])
            return image.mul(255).round_(), {
                **target,
                **{key: target[key].numpy() for key in ("boxes", "labels")},
            }

        return Decoder(read, (3, img_size, img_size))

    def _batch(self, images: torch.Tensor, targets: list[dict], ids: torch.Tensor) -> Batch:
        images = images.to(self.device, non_blocking=True).float().div_(255)
        targets = [
            {
                **target,
                **{
                    name: sent(torch.from_numpy(target[name]), self.device)
                    for name in ("boxes", "labels")
                },
            }
            for target in targets
        ]
        return Batch(images, targets, ids)


class BoxTrainLoader(_Boxes, ImageTrainLoader):
    """Shuffled, augmented batches; an unreadable image is replaced by another one of its batch."""


class BoxEvalLoader(_Boxes, ImageEvalLoader):
    """Every image once over all processes; unreadable ones are left out."""
