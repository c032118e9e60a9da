"""Detections drawn on their images by torchvision: boxes, names and scores."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from matplotlib.font_manager import findfont
from torch import Tensor
from torchvision.transforms.v2 import functional as F
from torchvision.utils import draw_bounding_boxes

from ea_vision.base.figures import COLORS

SIDE = 640  # pixels: a smaller image is scaled up before it is drawn upon


def draw_detections(image: Tensor, found: Mapping[str, Tensor], classes: Sequence[str]) -> Tensor:
    """Draw boxes, names and scores on an image, the surest on top.

    Args:
        image: uint8 (3, H, W).
        found: boxes (n, 4) x1 y1 x2 y2 in pixels of the image, scores (n,), labels (n,).

    Returns:
        uint8 (3, H', W'), the longer side at least SIDE.
    """
    H, W = image.shape[1:]
    scale = max(1.0, SIDE / max(H, W))
    drawn = F.resize(image, [max(1, round(H * scale)), max(1, round(W * scale))], antialias=True)
    if not len(found["boxes"]):
        return drawn
    side, order = max(drawn.shape[1:]), found["scores"].argsort()
    labels, colors = found["labels"][order].tolist(), [COLORS[label % len(COLORS)] for label in found["labels"][order]]
    names = [f"{classes[label]} {score:.2f}" for label, score in zip(labels, found["scores"][order], strict=True)]
    return draw_bounding_boxes(drawn, found["boxes"][order] * scale, names, colors, width=max(2, side // 250),
                               font=findfont("DejaVu Sans:bold"), font_size=6 + side // 60, label_colors="white",
                               fill_labels=True)
