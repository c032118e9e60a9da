"""A network's implicit attention: how much each pixel of the input moves the logit of a class, beside the maps.

The Jacobian of the outputs says what a network attends to whether or not it has attention; where it has, the two need
not agree.
"""

from __future__ import annotations

import torch
from matplotlib.figure import Figure
from PIL import Image
from torch import Tensor, nn

from ea_vision.analysis.loading import LoadedModel
from ea_vision.analysis.recording import attention_layers
from ea_vision.base.errors import UsageError
from ea_vision.visualize.drawing import draw_image, draw_map, layer_name, new_figure, scale_of
from ea_vision.visualize.recordings import as_input, as_model, evaluating, record


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
) -> Figure:
    """The input, the Jacobian of a class, and of each attention layer what every pixel gets, mean of heads and queries.

    Args:
        model, image: as in `ea_vision.visualize.plots`.
        target: class; the model's own first choice unless given.

    Raises:
        UsageError: a class that the model does not have.
    """
    loaded = as_model(model)
    x = as_input(loaded, image)
    device = next(loaded.model.parameters()).device
    with evaluating(loaded.model):
        jacobian, chosen = input_jacobian(loaded.model, loaded.normalize(x[None].to(device)), target)
    layers = attention_layers(loaded.model)
    maps = record(loaded, x, layers).maps if layers else {}
    columns = min(6, 2 + len(layers))
    rows = -(-(2 + len(layers)) // columns)
    figure = new_figure(1.7 * columns, 1.9 * rows)
    axes = figure.subplots(rows, columns, squeeze=False).ravel()
    draw_image(axes[0], x)
    axes[0].set_title(loaded.label, fontsize=7)
    values = jacobian.float().cpu().numpy()
    draw_map(axes[1], values, x, scale_of("jacobian", [values]))
    axes[1].set_title(f"|d class {chosen} / d input|", fontsize=7)
    for place, layer in zip(axes[2:], layers, strict=False):
        recorded = maps[layer.number]
        H, W = recorded.feat_size
        first = recorded.num_prefix_tokens
        got = recorded.attn[0].float().mean((0, 1))[first:].reshape(H, W).cpu().numpy()
        draw_map(place, got, x, scale_of("attn", [got]))
        place.set_title(layer_name(layer), fontsize=6)
    for place in axes[2 + len(layers):]:
        place.set_visible(False)
    return figure
