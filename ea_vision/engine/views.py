"""Several views of an image, whose logits are averaged: test-time augmentation.

    mirror   the image and its mirror image, half each
    six      these two with one half of the weight; with the other, both shifted by one pixel up and left and by one
             pixel down and right, a quarter each pair, what comes in from outside reflected (Keller Jordan's airbench,
             https://arxiv.org/abs/2404.00498, section 3.5)
"""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.nn.functional as F

VIEWS = ("none", "mirror", "six")


def views(images: torch.Tensor, kind: str) -> list[tuple[float, torch.Tensor]]:
    """The views of images (B, C, H, W) as (weight, view), the images themselves first; the weights' sum is 1.

    Raises:
        ValueError: a kind that is none of VIEWS, or images of one pixel a side where shifted ones are wanted.
    """
    if kind not in VIEWS:
        raise ValueError(f"views must be one of {', '.join(VIEWS)}, got {kind!r}")
    if kind == "none":
        return [(1.0, images)]
    if kind == "mirror":
        return [(0.5, images), (0.5, images.flip(-1))]
    height, width = images.shape[-2:]
    if min(height, width) < 2:
        raise ValueError(f"six views need images of at least 2 x 2 pixels, got {height} x {width}")
    padded = F.pad(images, (1, 1, 1, 1), mode="reflect")
    shifted = [padded[..., 2 * s:2 * s + height, 2 * s:2 * s + width] for s in (0, 1)]
    return [(weight, view) for weight, source in ((0.25, images), *((0.125, s) for s in shifted))
            for view in (source, source.flip(-1))]


def logits_of_views(model: Callable[[torch.Tensor], torch.Tensor], images: torch.Tensor,
                    kind: str) -> tuple[torch.Tensor, torch.Tensor]:
    """float32 logits of the images (B, classes), and the weighted mean of those of their views."""
    plain = mean = None
    for weight, view in views(images, kind):
        logits = model(view).float()
        plain = logits if plain is None else plain
        mean = weight * logits if mean is None else mean + weight * logits
    return plain, mean
