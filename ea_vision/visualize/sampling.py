"""Where a spatial transformer looks: the quadrilateral that it samples, on the input, and what it hands on."""

from collections.abc import Sequence

import numpy as np
import torch
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from torch import Tensor

from ea_vision.base.errors import UsageError
from ea_vision.layers import SpatialTransformer, quadrilateral, sample_affine
from ea_vision.recorder.inputs import as_input
from ea_vision.visualize.figure_options import Model
from ea_vision.visualize.image_maps import AnyImage, as_batch, as_model, evaluating, title_of
from ea_vision.visualize.map_style import QUERY_COLORS, draw_image
from ea_vision.visualize.sheet import Block, Row, Tile, sheet


def plot_sampling(model: Model, images: Sequence[AnyImage], *, width: float | None = None) -> Figure:
    """Draw a column an image: above the input with the quadrilateral that the model's first spatial transformer
    samples, its left upper corner marked; below what it hands on.

    Args:
        model, images, width: see `ea_vision.visualize.figure_options`.

    Raises:
        UsageError: no image, or a model without a `SpatialTransformer` that reads the input.
    """
    loaded = as_model(model)
    transformers = [m for m in loaded.model.modules() if isinstance(m, SpatialTransformer)]
    if not transformers or not images:
        raise UsageError(f"plot_sampling needs a model with a SpatialTransformer and at least one image, got "
                         f"{loaded.label} with {len(transformers)} and {len(images)} images")
    above, below = [], []
    for number, image in enumerate(images, start=1):
        x = as_input(loaded, image)
        with evaluating(loaded.model), torch.inference_mode():
            theta = transformers[0].theta(as_batch(loaded, [x]))
            seen = sample_affine(x[None].to(theta.device), theta, transformers[0].out_size or tuple(x.shape[1:]))[0]
        corners = quadrilateral(theta.float(), tuple(x.shape[1:]))[0].cpu().numpy()
        above.append(_tile(x, f"input {number}", corners))
        below.append(_tile(seen.clamp(0, 1), f"sampled {number}"))
    return sheet(title_of(loaded), [Block([Row(above), Row(below)])], width=width,
                 note="what the first spatial transformer samples of each input, its left upper corner marked")


def _tile(image: Tensor, title: str, corners: np.ndarray | None = None) -> Tile:
    """Return an image (3, H, W), with the quadrilateral of these corners (4, 2), x and y."""
    H, W = image.shape[1:]

    def paint(axes: Axes, _) -> None:
        draw_image(axes, image.permute(1, 2, 0).cpu().numpy(), (H, W))
        if corners is not None:
            axes.plot(*corners[[0, 1, 2, 3, 0]].T, color=QUERY_COLORS[0], linewidth=1.2, clip_on=False)
            axes.plot(*corners[0], "o", color=QUERY_COLORS[0], markersize=4, markeredgecolor="white", clip_on=False)
            (left, top), (right, bottom) = np.minimum(corners.min(0), 0), np.maximum(corners.max(0), (W, H))
            axes.set(xlim=(left, right), ylim=(bottom, top))

    return Tile(paint, title, aspect=H / W)
