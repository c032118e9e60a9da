"""Detections drawn on their images by torchvision: boxes, names and scores."""

from collections.abc import Mapping, Sequence

from torch import Tensor
from torchvision.transforms.v2 import functional as F
from torchvision.utils import draw_bounding_boxes

from ea_vision.base.figures import COLORS
from ea_vision.base.print import font_file
from ea_vision.detection.transforms import fitted_size

SIDE = 640  # pixels: a smaller image is scaled up before boxes are drawn


def draw_detections(image: Tensor, found: Mapping[str, Tensor], classes: Sequence[str]) -> Tensor:
    """Draw boxes, names and scores on an image, those with the highest score on top.

    Args:
        image: uint8 (3, H, W).
        found: boxes (n, 4) x1 y1 x2 y2 in pixels of the image, scores (n,), labels (n,).

    Returns:
        uint8 (3, H', W'), the longer side at least SIDE.
    """
    longer = max(image.shape[1:])
    side = max(SIDE, longer)
    drawn = F.resize(image, list(fitted_size(image.shape[1:], side)), antialias=True)
    order = found["scores"].argsort()
    if not len(order):
        return drawn
    labels = found["labels"][order].tolist()
    scores = found["scores"][order].tolist()
    names = [f"{classes[label]} {score:.2f}" for label, score in zip(labels, scores, strict=True)]
    return draw_bounding_boxes(
        drawn,
        found["boxes"][order] * side / longer,
        names,
        [COLORS[label % len(COLORS)] for label in labels],
        width=max(2, side // 250),
        font=font_file("".join(names)),
        font_size=6 + side // 60,
        label_colors="white",
        fill_labels=True,
    )
