"""Transforms of images of any size, with their boxes, into a detector's square: for training and for evaluation.

Both return a float32 image (3, S, S) in 0..1, not normalised, and a target with boxes in its pixels. Attention with
relative positions has tables for one size of map, so all images of a detector have the same size.
"""

from collections.abc import Mapping
from typing import Any

import numpy as np
import torch
from PIL import Image
from torch import Tensor
from torchvision import tv_tensors
from torchvision.ops import clip_boxes_to_image
from torchvision.transforms import v2

from ea_vision.ops import Size
from ea_vision.zoo.preparation import PHOTO_SIDE, Preparation

FILL = (124, 116, 104)  # colour of the padding: ImageNet's mean, 0..255


def train_transform(
    img_size: int, scale: tuple[float, float] = (0.8, 1.2), flip: float = 0.5
) -> v2.Transform:
    """Return the transform: scale jitter, random crop or padding to a square, and flip. Boxes are clipped to the image;
    those below one pixel are left out.

    Args:
        img_size: S, the side in pixels.
        scale: of the longer side, in units of S; the AA paper's 512 to 768 at 640 pixels are 0.8 to 1.2.
        flip: probability of a horizontal flip.
    """
    fill = {tv_tensors.Image: FILL, "others": 0}
    steps = [
        v2.ClampBoundingBoxes(),
        ScaleJitter((img_size, img_size), scale, antialias=True),
        v2.RandomCrop((img_size, img_size), pad_if_needed=True, fill=fill),
        v2.RandomHorizontalFlip(flip),
    ]
    return v2.Compose(steps + _end())


def eval_transform(img_size: int) -> v2.Transform:
    """Return the transform that scales the longer side to `img_size` pixels and pads at the right and below.
    `boxes_to_original` undoes it for boxes."""
    return v2.Compose([v2.ClampBoundingBoxes(), Fit(img_size), *_end()])


def _end() -> list[v2.Transform]:
    return [
        v2.SanitizeBoundingBoxes(),
        v2.ToDtype({tv_tensors.Image: torch.float32, "others": None}, scale=True),
        v2.ToPureTensor(),
    ]


class ScaleJitter(v2.ScaleJitter):
    """torchvision's ScaleJitter, which keeps at least one pixel of the short side of narrow images."""

    def make_params(self, flat_inputs: list[Any]) -> dict:
        height, width = super().make_params(flat_inputs)["size"]
        return {"size": (max(1, height), max(1, width))}


class Fit(v2.Transform):
    """Scale an image so that its longer side has `img_size` pixels, and pad it to a square at the right and below."""

    def __init__(self, img_size: int):
        super().__init__()
        self.img_size = img_size

    def make_params(self, flat_inputs: list[Any]) -> dict:
        return {"size": fitted_size(v2.query_size(flat_inputs), self.img_size)}

    def transform(self, inpt: Any, params: dict) -> Any:
        height, width = params["size"]
        inpt = v2.functional.resize(inpt, [height, width], antialias=True)
        padding = [0, 0, self.img_size - width, self.img_size - height]
        fill = 0 if isinstance(inpt, tv_tensors.BoundingBoxes) else list(FILL)
        return v2.functional.pad(inpt, padding, fill=fill)


def fit_image(image: Image.Image, img_size: int) -> Tensor:
    """Apply `eval_transform` to an image without boxes."""
    to_float = v2.ToDtype(torch.float32, scale=True)
    return v2.Compose([v2.PILToTensor(), Fit(img_size), to_float])(image)


class Fitted(Preparation):
    """A detector's preparation: its images are fitted into a square, and it normalises them itself."""

    def __call__(self, image: Image.Image) -> Tensor:
        """Return (3, S, S) in 0..1; see `fit_image`."""
        return fit_image(image, self.size[0])

    def photo(self, image: Image.Image) -> np.ndarray | None:
        """Return uint8 (side, side, 3); see `Preparation.photo`."""
        side = min(max(image.size), PHOTO_SIDE)
        if side <= self.size[0]:
            return None
        levels = fit_image(image, side) * 255
        return levels.round().byte().permute(1, 2, 0).numpy()


def fitted_size(size: Size, img_size: int) -> Size:
    """Return (H, W), each at least 1, of an image of `size` (H, W) scaled to a longer side of `img_size` pixels."""
    height, width = size
    longer = max(size)
    return max(1, round(height * img_size / longer)), max(1, round(width * img_size / longer))


def found_in_original(found: Mapping[str, Tensor], size: Size, img_size: int) -> dict[str, Tensor]:
    """Return a detector's boxes (moved by `boxes_to_original`), scores and labels on the CPU, without those that lie in
    the padding."""
    boxes = boxes_to_original(found["boxes"].float().cpu(), size, img_size)
    inside = (boxes[:, 2:] > boxes[:, :2]).all(1)
    moved = {name: value.cpu() for name, value in found.items()} | {"boxes": boxes}
    return {name: value[inside] for name, value in moved.items()}


def boxes_to_original(boxes: Tensor, size: Size, img_size: int) -> Tensor:
    """Move boxes (n, 4) x1 y1 x2 y2 from the square of `eval_transform` to the image of `size` (H, W), and clip them to
    it."""
    height, width = fitted_size(size, img_size)
    across = size[1] / width
    down = size[0] / height
    boxes = boxes * boxes.new_tensor([across, down, across, down])
    return clip_boxes_to_image(boxes, size)
