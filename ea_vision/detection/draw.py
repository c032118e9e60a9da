"""Detections drawn on their images by torchvision: boxes, names and scores, true boxes in white."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from matplotlib.font_manager import findfont
from PIL import ImageColor, ImageFont
from torch import Tensor
from torchvision.io import encode_png
from torchvision.ops import box_convert
from torchvision.transforms.v2 import functional as F
from torchvision.utils import draw_bounding_boxes, make_grid

from ea_vision.base.figures import COLORS
from ea_vision.data.image_files import BrokenImage
from ea_vision.detection.coco import CocoFolder
from ea_vision.detection.transforms import Fit

SIDE = 640  # pixels: a smaller image is scaled up before it is drawn upon
LEAST_SCORE = 0.4  # of what a gallery draws


def draw_detections(image: Tensor, found: Mapping[str, Tensor], classes: Sequence[str], truth: Tensor | None = None,
                    ) -> Tensor:
    """Draw boxes, names and scores on an image, the surest on top.

    Args:
        image: uint8 (3, H, W).
        found: boxes (n, 4) x1 y1 x2 y2 in pixels of the image, scores (n,), labels (n,).
        truth: (m, 4), boxes to draw in white.

    Returns:
        uint8 (3, H', W'), the longer side at least SIDE.
    """
    H, W = image.shape[1:]
    scale = max(1.0, SIDE / max(H, W))
    drawn = F.resize(image, [max(1, round(H * scale)), max(1, round(W * scale))], antialias=True).clone()
    side = max(drawn.shape[1:])
    if truth is not None and len(truth):
        drawn = draw_bounding_boxes(drawn, truth * scale, colors="white", width=1 + side // 600)
    size, width, file = 6 + side // 60, max(2, side // 250), findfont("DejaVu Sans:bold")
    font = ImageFont.truetype(file, size)
    for index in found["scores"].argsort().tolist():
        label, box = int(found["labels"][index]), found["boxes"][index] * scale
        name, color = f"{classes[label]} {found['scores'][index]:.2f}", COLORS[label % len(COLORS)]
        left, top = box[:2].int().tolist()
        wide, tall = font.getbbox(name)[2:]
        ground = drawn[:, top:top + tall + 2 * width, left:left + wide + 2 * width]
        ground[:] = torch.tensor(ImageColor.getrgb(color)).view(3, 1, 1)
        drawn = draw_bounding_boxes(drawn, box[None], [name], color, width=width, font=file, font_size=size,
                                    label_colors="white")
    return drawn


def gallery(source: CocoFolder, rows: Sequence[Mapping[str, Any]], count: int = 12) -> Tensor:
    """Draw `count` images from all over a data set with detections and true boxes, in rows of four.

    Args:
        source: without transforms; images that cannot be read are passed over.
        rows: COCO's results, of all its images; those of at least LEAST_SCORE are drawn.

    Returns:
        uint8 (3, H, W).
    """
    cells = []
    for place in range(min(count, len(source))):
        try:
            image, target = source[place * len(source) // min(count, len(source))]
        except BrokenImage:
            continue
        own = [row for row in rows if row["image_id"] == target["image_id"] and row["score"] >= LEAST_SCORE]
        found = {
            "boxes": box_convert(torch.tensor([row["bbox"] for row in own]).reshape(-1, 4), "xywh", "xyxy"),
            "scores": torch.tensor([row["score"] for row in own]),
            "labels": torch.tensor([source.label_of[row["category_id"]] for row in own], dtype=torch.int64)}
        cells.append(Fit(SIDE // 2)(draw_detections(image.as_subclass(Tensor), found, source.classes,
                                                    target["boxes"].as_subclass(Tensor))))
    return make_grid(cells, nrow=4, pad_value=255)


def png_bytes(picture: Tensor) -> bytes:
    """Return uint8 (3, H, W) as a PNG file."""
    return encode_png(picture.contiguous()).numpy().tobytes()
