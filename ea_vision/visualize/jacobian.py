"""A network's implicit attention: how much each pixel of the input moves the logit of a class, beside the maps.

The Jacobian of the outputs says what a network attends to whether or not it has attention; where it has, the two need
not agree.
"""

from __future__ import annotations

import numpy as np
import torch
from matplotlib.figure import Figure
from PIL import Image
from torch import Tensor, nn

from ea_vision.analysis.loading import LoadedModel
from ea_vision.analysis.recording import AttentionMaps, LayerMaps, attention_layers
from ea_vision.base.errors import UsageError
from ea_vision.visualize.drawing import (
    Look,
    add_scale,
    draw_map,
    draw_photo,
    layer_name,
    new_figure,
    norms_of,
    text_scale,
    wrapped,
)
from ea_vision.visualize.recordings import Recording, as_input, as_model, evaluating, record


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
        model: nn.Module | LoadedModel | str, image: Image.Image | Tensor, target: int | None = None,
        **look,
) -> Figure:
    """The input, the Jacobian of a class, and of each attention layer what every pixel gets, mean of heads and queries.

    Args:
        model, image: as in `ea_vision.visualize.plots`.
        target: class; the model's own first choice unless given.
        **look: those of `Look`.

    Raises:
        UsageError: a class that the model does not have.
    """
    look = Look(**look)
    loaded = as_model(model)
    x = as_input(loaded, image)
    device = next(loaded.model.parameters()).device
    with evaluating(loaded.model):
        jacobian, chosen = input_jacobian(loaded.model, loaded.normalize(x[None].to(device)), target)
    layers = attention_layers(loaded.model)
    maps = record(loaded, x, layers).maps if layers else AttentionMaps()
    recording = Recording(loaded, x, maps, None if isinstance(image, Tensor) else loaded.photo(image))
    text, columns = text_scale(), min(6, 2 + len(layers))
    rows = -(-(2 + len(layers)) // columns)
    cell = 1.7 * max(1.0, 0.7 * text)
    figure = new_figure(cell * columns + 0.7 * text, (cell + 0.45 * text) * rows + 0.3 * text)
    figure.suptitle(wrapped(loaded.label, cell * columns, 12))
    axes = figure.subplots(rows, columns, squeeze=False).ravel()
    draw_photo(axes[0], recording, look)
    values = jacobian.float().cpu().numpy()
    [[norm]] = norms_of([[values]], Look(), "jacobian")
    draw_map(axes[1], values, recording, norm, look, part="jacobian")
    axes[1].set_title(f"|d class {chosen} / d input|", fontsize="x-small")
    received = [_received(maps[layer.number]) for layer in layers]
    norms = norms_of([received], look)[0] if received else []
    for place, layer, values, norm in zip(axes[2:], layers, received, norms, strict=False):
        draw_map(place, values, recording, norm, look)
        place.set_title(wrapped(layer_name(layer), cell, 7), fontsize="x-small")
    for place in axes[2 + len(layers):]:
        place.set_visible(False)
    if norms:
        add_scale(figure, axes, norms[0], look)
    return figure


def _received(layer: LayerMaps) -> np.ndarray:
    """(H, W): what every pixel gets, mean of heads and queries, in units of uniform attention."""
    first = layer.num_prefix_tokens
    keys = torch.from_numpy(layer.num_keys().reshape(-1)).float()
    got = layer.attn[0].float().mean(0).cpu()[first:, first:] * keys[:, None]
    return got.mean(0).reshape(layer.feat_size).numpy()
