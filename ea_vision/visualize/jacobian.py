"""A network's implicit attention: how much each pixel of the input moves the logit of a class, beside the maps.

The Jacobian of the outputs says what a network attends to whether or not it has attention; where it has, the two need
not agree.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from matplotlib.figure import Figure
from torch import Tensor, nn

from ea_vision.analysis.inputs import ImageSource, as_image, as_input
from ea_vision.analysis.loading import LoadedModel, check_classifies, parse_layers
from ea_vision.analysis.recording import AttentionLayer, AttentionMaps, attention_layers
from ea_vision.base.errors import UsageError
from ea_vision.visualize.figure_options import (
    some_layers,
)
from ea_vision.visualize.image_maps import MEAN, Recording, as_model, evaluating, record
from ea_vision.visualize.map_style import (
    MapStyle,
    add_scale,
    draw_map,
    draw_photo,
    layer_name,
    new_figure,
    norms_of,
    text_scale,
    wrapped,
)


def input_jacobian(model: nn.Module, batch: Tensor, target: int | None = None) -> tuple[Tensor, int]:
    """|d logit of a class / d pixel|, the largest of the channels.

    Args:
        model: in evaluation mode.
        batch: (1, C, H, W), as the model takes it.
        target: class; the model's own first choice unless given.

    Returns:
        (H, W), and the class.

    Raises:
        UsageError: a class that the model does not have.
    """
    x = batch.detach().clone().requires_grad_()
    with torch.enable_grad():
        logits = model(x)
        chosen = int(logits[0].argmax()) if target is None else target
        if not 0 <= chosen < logits.shape[1]:
            raise UsageError(f"target must be a class from 0 to {logits.shape[1] - 1}, got {target}")
        gradient, = torch.autograd.grad(logits[0, chosen], x)
    return gradient[0].abs().amax(0), chosen


def plot_jacobian(
        model: nn.Module | LoadedModel | str, image: ImageSource | Tensor, target: int | None = None,
        layers: str | int | Sequence[int | str] | None = None, **style,
) -> Figure:
    """The input, the Jacobian of a class, and of attention layers what every pixel gets, mean of heads and queries.

    Args:
        model, image, layers: as in `ea_vision.visualize.plots`; a model may also have no attention.
        target: class; the model's own first choice unless given.
        **style: those of `MapStyle`.

    Raises:
        UsageError: a class or a layer that the model does not have.
    """
    loaded = as_model(model)
    if layers is None:
        shown = some_layers(attention_layers(loaded.model))
    else:
        several = [layers] if isinstance(layers, (str, int)) else layers
        shown = parse_layers(",".join(map(str, several)), loaded)
    recording, jacobian, chosen = _look_at(loaded, image, target, shown)
    return jacobian_figure(recording, jacobian, chosen, MapStyle(**style))


def _look_at(model: LoadedModel, image: ImageSource | Tensor, target: int | None, layers: Sequence[AttentionLayer],
             ) -> tuple[Recording, np.ndarray, int]:
    """The maps of layers, the Jacobian (H, W) and its class."""
    check_classifies(model)
    image = as_image(image)
    x = as_input(model, image)
    device = next(model.model.parameters()).device
    with evaluating(model.model):
        jacobian, chosen = input_jacobian(model.model, model.normalize(x[None].to(device)), target)
    maps = record(model, x, layers).maps if layers else AttentionMaps()
    recording = Recording(model, x, maps, None if isinstance(image, Tensor) else model.photo(image))
    return recording, jacobian.float().cpu().numpy(), chosen


def jacobian_figure(recording: Recording, jacobian: np.ndarray, chosen: int, style: MapStyle) -> Figure:
    """See `plot_jacobian`.

    Args:
        recording: with the "attn" of the layers to show, which may be none.
        jacobian, chosen: of `input_jacobian`.
    """
    layers = list(recording.maps.values())
    text, columns = text_scale(), min(6, 2 + len(layers))
    rows = -(-(2 + len(layers)) // columns)
    cell = 1.7 * max(1.0, 0.7 * text)
    figure = new_figure(cell * columns + 0.7 * text, (cell + 0.45 * text) * rows + 0.3 * text)
    figure.suptitle(wrapped(recording.model.label, cell * columns, 12))
    axes = figure.subplots(rows, columns, squeeze=False).ravel()
    draw_photo(axes[0], recording, style)
    [[norm]] = norms_of([[jacobian]], MapStyle(), "jacobian")
    draw_map(axes[1], jacobian, recording, norm, style, part="jacobian")
    axes[1].set_title(f"|d class {chosen} / d input|", fontsize="x-small")
    received = [recording.received(layer.number, MEAN) for layer in layers]
    norms = norms_of([received], style)[0] if received else []
    for place, layer, values, norm in zip(axes[2:], layers, received, norms, strict=False):
        draw_map(place, values, recording, norm, style)
        place.set_title(wrapped(layer_name(layer), cell, 7), fontsize="x-small")
    for place in axes[2 + len(layers):]:
        place.set_visible(False)
    if norms:
        add_scale(figure, axes, norms[0], style)
    return figure

