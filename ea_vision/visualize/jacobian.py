"""A network's implicit attention: how much each pixel of the input moves the logit of a class, beside the maps.

The Jacobian of the outputs says what a network attends to whether or not it has attention; where it has, the two need
not agree.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence

import numpy as np
import torch
from matplotlib.figure import Figure
from PIL import Image
from torch import Tensor, nn

from ea_vision.analysis.loading import LoadedModel, check_classifies, parse_layers
from ea_vision.analysis.recording import AttentionLayer, AttentionMaps, attention_layers
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
from ea_vision.visualize.options import add_look, load_models, look_of, make_parser, only, shown_layers, some_layers
from ea_vision.visualize.recordings import MEAN, Recording, as_input, as_model, evaluating, record
from ea_vision.visualize.writing import each_image, save, save_maps

EXAMPLES = """\
  ea-vision jacobian --model ea_conv_transformer_cifar -o jacobian.png photo.jpg
  ea-vision jacobian --model runs/demo --target 3 --layers 1-3 --npz -o three.pdf digits:3
"""


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
        layers: str | int | Sequence[int | str] | None = None, **look,
) -> Figure:
    """The input, the Jacobian of a class, and of attention layers what every pixel gets, mean of heads and queries.

    Args:
        model, image, layers: as in `ea_vision.visualize.plots`; a model may also have no attention.
        target: class; the model's own first choice unless given.
        **look: those of `Look`.

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
    return jacobian_figure(recording, jacobian, chosen, Look(**look))


def _look_at(model: LoadedModel, image: Image.Image | Tensor, target: int | None, layers: Sequence[AttentionLayer],
             ) -> tuple[Recording, np.ndarray, int]:
    """The maps of layers, the Jacobian (H, W) and its class."""
    check_classifies(model)
    x = as_input(model, image)
    device = next(model.model.parameters()).device
    with evaluating(model.model):
        jacobian, chosen = input_jacobian(model.model, model.normalize(x[None].to(device)), target)
    maps = record(model, x, layers).maps if layers else AttentionMaps()
    recording = Recording(model, x, maps, None if isinstance(image, Tensor) else model.photo(image))
    return recording, jacobian.float().cpu().numpy(), chosen


def jacobian_figure(recording: Recording, jacobian: np.ndarray, chosen: int, look: Look) -> Figure:
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
    draw_photo(axes[0], recording, look)
    [[norm]] = norms_of([[jacobian]], Look(), "jacobian")
    draw_map(axes[1], jacobian, recording, norm, look, part="jacobian")
    axes[1].set_title(f"|d class {chosen} / d input|", fontsize="x-small")
    received = [recording.received(layer.number, MEAN) for layer in layers]
    norms = norms_of([received], look)[0] if received else []
    for place, layer, values, norm in zip(axes[2:], layers, received, norms, strict=False):
        draw_map(place, values, recording, norm, look)
        place.set_title(wrapped(layer_name(layer), cell, 7), fontsize="x-small")
    for place in axes[2 + len(layers):]:
        place.set_visible(False)
    if norms:
        add_scale(figure, axes, norms[0], look)
    return figure


def main(argv: Sequence[str] | None = None) -> int:
    parser = make_parser(__doc__, EXAMPLES, output="jacobian.png", layers=None, heads=None, queries=False)
    add_look(parser)
    parser.add_argument("--target", type=int, metavar="CLASS",
                        help="the class, counted from 0 (default: the model's first choice)")
    options = parser.parse_args(argv)
    look, model = look_of(options), only(load_models(options), "model")
    layers = _layers_of(options, model)
    for _, image, output in each_image(options):
        recording, jacobian, chosen = _look_at(model, image, options.target, layers)
        save(jacobian_figure(recording, jacobian, chosen, look), output, options.dpi)
        if options.npz:
            save_maps([recording], output, jacobian=jacobian)
    return 0


def _layers_of(options: argparse.Namespace, model: LoadedModel) -> list[AttentionLayer]:
    """Those of --layers; none of a model that has none, unless they are asked for."""
    if options.layers is None and not attention_layers(model.model):
        return []
    return shown_layers(options, [model])[0]
