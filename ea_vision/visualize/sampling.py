"""Where a spatial transformer looks: the quadrilateral that it samples, on the input, and what it hands on."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from torch import Tensor

from ea_vision.base.errors import UsageError
from ea_vision.layers import SpatialTransformer, quadrilateral, sample_affine
from ea_vision.recorder.inputs import ImageSource, as_input
from ea_vision.visualize.figure_options import Model
from ea_vision.visualize.image_maps import as_model, evaluating, title_of
from ea_vision.visualize.map_style import QUERY_COLORS, draw_image
from ea_vision.visualize.sheet import Block, Row, Tile, sheet


def plot_sampling(model: Model, images: Sequence[ImageSource | Tensor], *, width: float | None = None) -> Figure:
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
    device = next(loaded.model.parameters()).device
    above, below = [], []
    for number, image in enumerate(images, start=1):
        x = as_input(loaded, image).to(device)
        with evaluating(loaded.model), torch.inference_mode():
            theta = transformers[0].theta(loaded.normalize(x[None]))
            size = transformers[0].out_size or tuple(x.shape[1:])
            seen = sample_affine(x[None], theta, size)[0]
        corners = quadrilateral(theta.float(), tuple(x.shape[1:]))[0].cpu().numpy()
        above.append(Tile(_input_painter(x, corners), f"image {number}" if len(images) > 1 else ""))
        below.append(Tile(lambda axes, seen=seen: draw_image(axes, seen.clamp(0, 1))))
    aspects = x.shape[1] / x.shape[2], size[0] / size[1]
    rows = [Row(above, "input", aspect=aspects[0]), Row(below, "sampled", aspect=aspects[1])]
    return sheet(title_of(loaded), [Block(rows)], width=width,
                 note="what the first spatial transformer samples of each input, its left upper corner marked")


def _input_painter(x: Tensor, corners):
    def paint(axes: Axes) -> None:
        draw_image(axes, x)
        axes.plot(*corners[[0, 1, 2, 3, 0]].T, color=QUERY_COLORS[0], linewidth=1.2, clip_on=False)
        axes.plot(*corners[0], "o", color=QUERY_COLORS[0], markersize=4, markeredgecolor="white", clip_on=False)
        H, W = x.shape[1:]
        axes.set(xlim=(min(0, corners[:, 0].min()), max(W, corners[:, 0].max())),
                 ylim=(max(H, corners[:, 1].max()), min(0, corners[:, 1].min())))

    return paint
