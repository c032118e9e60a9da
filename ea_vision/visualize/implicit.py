"""Attention of networks with or without maps: how much each pixel of the input moves the logit of a class.

The Jacobian of the outputs shows what a network attends to; attention maps, if it has them, need not agree with it.
"""

import logging
from collections.abc import Sequence
from typing import Any

import torch
from matplotlib.figure import Figure
from torch import Tensor, nn
from torchvision.transforms.v2.functional import crop

from ea_vision.base.errors import UsageError
from ea_vision.models.modes import evaluating
from ea_vision.recorder.class_evidence import class_scores
from ea_vision.recorder.recording import recordable_layers
from ea_vision.recorder.selection import parse_layers
from ea_vision.visualize.figure_request import (
    AnyImage,
    Layers,
    Model,
    record,
    spread,
    text_of,
    title_of,
)
from ea_vision.visualize.map_style import map_sheet, style_of
from ea_vision.visualize.sheet import Block, Row
from ea_vision.visualize.tiles import Recording, map_of, photo_of, tile_of
from ea_vision.zoo.inputs import as_image
from ea_vision.zoo.loaded import LoadedModel, as_model, check_classifies

log = logging.getLogger(__name__)


def input_jacobian(
    model: nn.Module, batch: Tensor, target: int | None = None
) -> tuple[Tensor, int]:
    """Return |d logit of a class / d pixel|, the maximum over the channels.

    Args:
        model: in evaluation mode.
        batch: (1, C, H, W), as the model takes it.
        target: class; default: the model's prediction.

    Returns:
        (H, W), and the class.

    Raises:
        UsageError: a class that the model does not have, a model that does not classify or has no gradients (ONNX).
    """
    with torch.inference_mode(False):
        x, score, _, [index] = class_scores(model, batch, None if target is None else [target])
        [gradient] = torch.autograd.grad(score, x)
    return gradient[0].abs().amax(0), int(index)


def plot_jacobian(
    model: Model,
    image: AnyImage,
    target: int | None = None,
    layers: Layers = None,
    *,
    width: float | None = None,
    mean: Sequence[float] | None = None,
    std: Sequence[float] | None = None,
    processor: Any = None,
    **style,
) -> Figure:
    """Draw the Jacobian of a class, and per layer the attention that each pixel receives, mean of heads and queries.

    Args:
        model, image, layers, width, mean, std, processor, **style: see `ea_vision.visualize.figure_request`; the model
            need not have attention.
        target: class; default: the model's prediction.

    Raises:
        UsageError: a class or a layer that the model does not have.
    """
    loaded = as_model(model, mean=mean, std=std, processor=processor)
    look = style_of(style)
    check_classifies(loaded)
    image = as_image(image)
    if layers is None:
        recording = _with_maps_if_any(loaded, image)
    else:
        recording = record(loaded, image, parse_layers(text_of(layers), loaded))
    with evaluating(loaded.model):
        jacobian, index = input_jacobian(loaded.model, recording.batch, target)
    name = f"class {index}"
    note = name
    if loaded.classes:
        name = loaded.classes[index]
        note += f" ({name})"
    note += ": how much each pixel moves its logit"
    [shown] = crop(jacobian[None].float(), 0, 0, *recording.img_size)
    title = f"|d {name} / d input|"
    subject = map_of(shown.cpu().numpy(), recording, look, title, part="jacobian")
    blocks = [Block([Row([photo_of(recording, title="photo"), subject])], enlarged=1.5)]
    tiles = []
    for layer, maps in recording.maps.items():
        if maps.pixels_ask or layers is not None:
            tiles.append(tile_of(recording, layer, look, title=f"layer {layer}"))
    if tiles:
        blocks.append(Block([Row(tiles)], "attention that every pixel gets"))
        note += "; attention: mean of heads and queries"
    return map_sheet(title_of(loaded), blocks, look, width=width, note=note)


def _with_maps_if_any(model: LoadedModel, image: AnyImage) -> Recording:
    """Record some of the layers. If they have no maps that can be recorded (ConViT), record none and log why."""
    try:
        return record(model, image, spread(recordable_layers(model.model)))
    except UsageError as error:
        recording = record(model, image, [])  # raises if the image is the cause
        log.warning("the Jacobian is drawn without attention maps: %s", error)
        return recording
