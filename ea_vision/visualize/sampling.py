"""Where a spatial transformer looks: the quadrilateral that it samples, on the input, and what it hands on."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from matplotlib.figure import Figure
from torch import Tensor, nn

from ea_vision.analysis.inputs import ImageSource, as_input
from ea_vision.analysis.loading import LoadedModel
from ea_vision.base.errors import UsageError
from ea_vision.layers import SpatialTransformer, quadrilateral, sample_affine
from ea_vision.visualize.image_maps import as_model, evaluating
from ea_vision.visualize.map_style import QUERY_COLORS, draw_image, new_figure, text_scale


def plot_sampling(model: nn.Module | LoadedModel | str, images: Sequence[ImageSource | Tensor]) -> Figure:
    """A column an image: above the input with the quadrilateral that the model's first spatial transformer samples, its
    left upper corner marked; below what it hands on.

    Args:
        model, images: as in `ea_vision.visualize.plots`.

    Raises:
        UsageError: no image, or a model without a `SpatialTransformer` that reads the input.
    """
    loaded = as_model(model)
    found = [m for m in loaded.model.modules() if isinstance(m, SpatialTransformer)]
    if not found or not images:
        raise UsageError(f"plot_sampling needs a model with a SpatialTransformer and at least one image, got "
                         f"{loaded.label} with {len(found)} and {len(images)} images")
    figure = new_figure(1.6 * len(images) + 0.4, 3.2 + 0.4 * text_scale())
    rows = figure.subplots(2, len(images), squeeze=False)
    device = next(loaded.model.parameters()).device
    for (above, below), image in zip(rows.T, images, strict=True):
        x = as_input(loaded, image).to(device)
        with evaluating(loaded.model), torch.inference_mode():
            theta = found[0].theta(loaded.normalize(x[None]))
            size = found[0].out_size or tuple(x.shape[1:])
            seen = sample_affine(x[None], theta, size)[0]
        corners = quadrilateral(theta.float(), tuple(x.shape[1:]))[0].cpu().numpy()
        draw_image(above, x)
        above.plot(*corners[[0, 1, 2, 3, 0]].T, color=QUERY_COLORS[0], linewidth=1.5, clip_on=False)
        above.plot(*corners[0], "o", color=QUERY_COLORS[0], markersize=5, markeredgecolor="white",
                   clip_on=False)
        H, W = x.shape[1:]
        above.set(xlim=(min(0, corners[:, 0].min()), max(W, corners[:, 0].max())),
                  ylim=(max(H, corners[:, 1].max()), min(0, corners[:, 1].min())))
        draw_image(below, seen.clamp(0, 1))
    rows[0, 0].set_title("input", fontsize="small", loc="left")
    rows[1, 0].set_title("sampled", fontsize="small", loc="left")
    return figure

