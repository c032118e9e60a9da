"""Detections drawn on their images: boxes, names and scores, the boxes that are right beside them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import torch
from matplotlib import patheffects
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.patches import Rectangle
from PIL import Image
from torch import Tensor

from ea_vision.base.figures import COLORS, PAGE, check_width
from ea_vision.base.print import new_figure, points, text_width
from ea_vision.data.image_files import BrokenImage
from ea_vision.detection.coco import CocoFolder
from ea_vision.detection.predict import Detections

INCHES = 6.4  # the longer side of a single picture
LEAST_SCORE = 0.4  # of what `gallery_of` draws
CELL = 1.6  # least width of an image among several


def draw_boxes(axes: Axes, image: Image.Image | Tensor, found: Detections, classes: Sequence[str],
               truth: Tensor | None = None) -> None:
    """An image with the boxes that were found, each class in its colour.

    Args:
        image: PIL, or a tensor (3, H, W), uint8 or 0..1.
        found: boxes in pixels of the image; see `Detections.above` for the sure ones.
        truth: (n, 4), the boxes that are right, dashed and white.
    """
    pixels = np.asarray(image) if isinstance(image, Image.Image) else image.permute(1, 2, 0).cpu().numpy()
    height, width = pixels.shape[:2]
    axes.imshow(pixels, extent=(0, width, height, 0), interpolation="nearest" if max(width, height) < 200 else None)
    axes.set(xlim=(0, width), ylim=(height, 0))
    axes.axis("off")
    rim = [patheffects.Stroke(linewidth=3, foreground="black", alpha=0.6), patheffects.Normal()]
    for x1, y1, x2, y2 in [] if truth is None else truth.tolist():
        axes.add_patch(Rectangle((x1, y1), x2 - x1, y2 - y1, fill=False, edgecolor="white", linewidth=1,
                                 linestyle="--", path_effects=rim, gid="truth"))
    axes.apply_aspect()
    size = points()
    point = width / (72 * axes.get_window_extent().width / axes.figure.dpi)  # in pixels of the image
    named: list[tuple[float, float, float]] = []  # left, right and lower end of the names of surer objects
    rows = list(zip(found.boxes.tolist(), found.scores.tolist(), found.labels.tolist(), strict=True))
    for rank, ((x1, y1, x2, y2), score, label) in enumerate(rows):
        color = COLORS[label % len(COLORS)]
        axes.add_patch(Rectangle((x1, y1), x2 - x1, y2 - y1, fill=False, edgecolor=color, linewidth=1.8,
                                 path_effects=rim, gid="found", zorder=3 - rank / len(rows)))  # the surest on top
        name = f"{classes[label]} {score:.2f}"
        long, tall = (text_width(name, size) + 0.3 * size) * point, 1.6 * size * point
        left = max(min(max(x1, 0), width - long), 0) + 0.15 * size * point
        top = max(y1, 0) - tall if y1 > tall else max(y1, 0)  # above the box, else inside
        for start, end, lower in sorted(named, key=lambda other: other[2]):
            if left < end and start < left + long and top < lower and lower - tall < top + tall:
                top = lower
        named.append((left, left + long, top + tall))
        axes.annotate(name, (left, top + 0.2 * size * point), fontsize=size, color="white", va="top", clip_on=True,
                      parse_math=False, zorder=4 - rank / len(rows),
                      bbox=dict(boxstyle="square,pad=0.15", facecolor=color, edgecolor="none", alpha=0.9))


def picture(image: Image.Image | Tensor, found: Detections, classes: Sequence[str], *,
            width: float | None = None) -> Figure:
    """Draw one image without a margin.

    Args:
        width: inches; None: INCHES for the longer side.
    """
    H, W = found.size
    scale = width / W if check_width(width) else INCHES / max(H, W)
    figure = new_figure(max(1.0, W * scale), max(1.0, H * scale))
    draw_boxes(figure.add_axes((0, 0, 1, 1)), image, found, classes)
    return figure


def gallery_of(source: CocoFolder, rows: Sequence[Mapping[str, Any]], count: int = 12) -> Figure:
    """Draw `count` images from all over a data set with detections and true boxes.

    Args:
        source: without transforms; images that cannot be read are passed over.
        rows: COCO's results, of all its images; those of at least LEAST_SCORE are drawn.
    """
    images, found, truths = [], [], []
    by_image: dict[Any, list[Mapping[str, Any]]] = {}
    for row in rows:
        by_image.setdefault(row["image_id"], []).append(row)
    for place in range(min(count, len(source))):
        try:
            image, target = source[place * len(source) // min(count, len(source))]
        except BrokenImage:
            continue
        own = [row for row in by_image.get(target["image_id"], []) if row["score"] >= LEAST_SCORE]
        boxes = torch.tensor([row["bbox"] for row in own], dtype=torch.float32).reshape(-1, 4)
        images.append(image)
        truths.append(target["boxes"])
        found.append(Detections(
            target["size"], torch.cat([boxes[:, :2], boxes[:, :2] + boxes[:, 2:]], dim=1),
            torch.tensor([row["score"] for row in own]),
            torch.tensor([source.label_of[row["category_id"]] for row in own], dtype=torch.int64)))
    return gallery(images, found, source.classes, truths)


def gallery(images: Sequence[Image.Image | Tensor], found: Sequence[Detections], classes: Sequence[str],
            truths: Sequence[Tensor] | None = None, *, width: float | None = None) -> Figure:
    """Draw several images in rows; with `truths` the boxes that are right are dashed. `width` is in inches."""
    width = check_width(width) or PAGE
    columns = max(1, int(width // CELL))
    rows = max(1, -(-len(images) // columns))
    figure = new_figure(width, width / columns * rows)
    cells = figure.subplots(rows, columns, squeeze=False, gridspec_kw={
        "left": 0.0, "right": 1.0, "bottom": 0.0, "top": 1.0, "wspace": 0.03, "hspace": 0.03}).ravel()
    for axes in cells[len(images):]:
        axes.axis("off")
    for index, (image, one) in enumerate(zip(images, found, strict=True)):
        draw_boxes(cells[index], image, one, classes, None if truths is None else truths[index])
    return figure
