"""A trained detector on images: boxes, scores and names, and the same as COCO's results."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from PIL import Image
from torch import Tensor

from ea_vision.detection.coco import results_of
from ea_vision.detection.model import Detector
from ea_vision.detection.transforms import boxes_to_original, fit_image


@dataclass(frozen=True)
class Detections:
    """Detections of an image, the surest first.

    size: (H, W) of the image. boxes: (n, 4), x1 y1 x2 y2 in its pixels. scores: (n,), 0 to 1. labels: (n,), from 0.
    """

    size: tuple[int, int]
    boxes: Tensor
    scores: Tensor
    labels: Tensor

    def __len__(self) -> int:
        return len(self.scores)

    def above(self, score: float) -> Detections:
        """Return the detections with at least this score."""
        sure = self.scores >= score
        return Detections(self.size, self.boxes[sure], self.scores[sure], self.labels[sure])

    def results(self, image_id: int | str, category_ids: Sequence[int]) -> list[dict[str, Any]]:
        """COCO's results; see `results_of`."""
        return results_of(image_id, {"boxes": self.boxes, "scores": self.scores, "labels": self.labels}, category_ids)


def detect(detector: Detector, images: Sequence[Image.Image], batch_size: int = 8) -> Iterator[Detections]:
    """Run a detector, in evaluation mode, on RGB images of any size, in their order.

    An image is fitted into the detector's square as in evaluation; what the detector itself leaves out (score_thresh,
    at most detections_per_img) is not here either.
    """
    device = next(detector.parameters()).device
    for start in range(0, len(images), batch_size):
        chunk = images[start:start + batch_size]
        fitted = torch.stack([fit_image(image, detector.img_size) for image in chunk])
        with torch.inference_mode():
            found = detector(list(fitted.to(device)))
        for image, one in zip(chunk, found, strict=True):
            size = (image.height, image.width)
            boxes = boxes_to_original(one["boxes"].float().cpu(), size, detector.img_size)
            yield Detections(size, boxes, one["scores"].float().cpu(), one["labels"].cpu())
