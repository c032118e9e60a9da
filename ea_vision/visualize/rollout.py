"""Attention rollout (Abnar and Zuidema 2020): where a pixel of the last map comes from, through all layers before it.
With a target it draws the evidence of a class (Chefer, Gur, Wolf 2021): the positive part of gradient times attention.

Heads are averaged, and the residual counts as identity. Convolutions also move information, so rollout is an
approximation in networks that have them, and the figure says so. Layers whose only query is the class token are left
out."""

from collections.abc import Sequence
from functools import partial

import numpy as np
from matplotlib.figure import Figure
from torch import nn

from ea_vision.base.errors import UsageError
from ea_vision.ops import Size
from ea_vision.recorder.class_evidence import add_class_evidence
from ea_vision.recorder.quantities import as_distributions, attention_rollout, class_rollout
from ea_vision.recorder.recording import LayerMaps
from ea_vision.visualize.figure_options import make_parser, run_figure
from ea_vision.visualize.figure_request import (
    DIAGONAL,
    AnyImage,
    FigureRequest,
    Layers,
    Models,
    Queries,
    record,
    title_of,
)
from ea_vision.visualize.map_style import STYLE, MapStyle, map_sheet
from ea_vision.visualize.sheet import Block, Row
from ea_vision.visualize.tiles import (
    ALL,
    Query,
    Recording,
    cell_of,
    layers_name,
    map_of,
    photo_of,
    queries_name,
)
from ea_vision.zoo.loaded import check_classifies

EXAMPLES = """\
  ea-vision rollout --model aa_resnet50,ea_aa_resnet50 --queries 60,60 -o rollout.png photo.jpg
  ea-vision rollout --model runs/ea --layers 1-3 -o rollout.svg images/
  ea-vision rollout --model ea_conv_transformer_cifar --target cat --style fog -o cat.png photo.jpg
"""


def plot_rollout(
    models: Models,
    image: AnyImage,
    layers: Layers = None,
    queries: Queries = None,
    *,
    target: int | str | None = None,
    **how,
) -> Figure:
    """Draw where pixels of the last map come from, through all `layers`: one row per model, one column per query.

    Args:
        models, image, layers, queries, **how: see `ea_vision.visualize.figure_request`.
        target: a class, by number or name, or "predicted": draw its evidence, see
            `ea_vision.recorder.quantities.class_rollout`, of the class token where there is one, else the mean of all
            pixels; and of the queries, if any are given.

    Raises:
        UsageError: a class, a layer or a query that the model does not have.
    """
    request = FigureRequest(models, layers, None, queries, **how)
    recordings = [
        record(model, image, its_layers)
        for model, its_layers in zip(request.models, request.layers, strict=True)
    ]
    points = request.points(DIAGONAL if target is None else (), recordings)
    names = []
    if target is not None:
        names = [_add_evidence(recording, target) for recording in recordings]
    return draw_rollout(recordings, points, request.style, classes=names, width=request.width)


def _add_evidence(recording: Recording, target: int | str) -> str:
    """Add the evidence of a class to a recording's maps; return the class's name and its probability."""
    model = recording.model
    check_classifies(model)
    names = list(model.classes or [])
    number = None
    if target in names:
        target = names.index(target)
    if target != "predicted":
        if not str(target).isdecimal():
            raise UsageError(
                f"target must be a class of {model.label} by number or name, or predicted, got {target!r}"
            )
        number = int(target)
    logits = add_class_evidence(
        model.model, recording.batch, recording.maps, None if number is None else [number]
    )
    index = int(logits.argmax()) if number is None else number
    name = names[index] if names else f"class {index}"
    return f"{name} ({logits[0].float().softmax(-1)[index]:.0%})"


def draw_rollout(
    recordings: Sequence[Recording],
    points: Sequence[Query],
    style: MapStyle = STYLE,
    *,
    classes: Sequence[str] = (),
    width: float | None = None,
) -> Figure:
    """Draw one row per model under its name: one column per query, and the mean of all queries; of evidence instead of
    that mean the class token, where there is one.

    Args:
        recordings: of the same image, one per model, with the "attn" of the layers to go through.
        points: queries, (y, x) in pixels of the first model's input, scaled to the others', or tokens by name.
        style: how maps are drawn.
        classes: names of the classes whose evidence the recordings have; () for attention rollout.
        width: inches.
    """
    first = recordings[0]
    points = [point for point in points if point != ALL]  # their mean is always drawn
    blocks = [
        _block(recording, first.img_size, points, style, name)
        for recording, name in zip(recordings, classes or [""] * len(recordings), strict=True)
    ]
    title = "attention rollout"
    note = "where the last map's pixels come from, through all layers; all pixels: their mean"
    if classes:
        title = "evidence of a class"
        note = "rollout of the positive part of gradient times attention, through all layers"
    if points:
        note += f"; {queries_name(points)}"
    photo = photo_of(first, points, _asking(first)[-1].feat_size)
    return map_sheet(title, blocks, style, width=width, photo=photo, note=note)


def _asking(recording: Recording) -> list[LayerMaps]:
    """Return the layers whose queries are pixels.

    Raises:
        UsageError: no layer has pixels as queries, or the rows and columns of a layer's maps are channels.
    """
    layers = list(recording.maps.values())
    for layer in layers:
        layer.check_places()
    with_pixels = [layer for layer in layers if layer.pixels_ask]
    if not with_pixels:
        layers[0].check_pixels_ask()
    return with_pixels


def evidence_of(recording: Recording, target: int) -> np.ndarray:
    """Return the evidence of a class in the class token, or where there is none in all pixels: (H, W), in units of its
    mean.

    Raises:
        UsageError: see `ea_vision.recorder.class_evidence.add_class_evidence`, and layers without queries of pixels.
    """
    add_class_evidence(recording.model.model, recording.batch, recording.maps, [target])
    return _rollout(_asking(recording), of_class=True)[1]


def _rollout(layers: Sequence[LayerMaps], of_class: bool) -> tuple[np.ndarray, np.ndarray, str]:
    """Return the rollout of a class's evidence, or of attention, in units of uniform attention.

    Returns:
        (T', H, W), for each token of the last layer; (H, W), the mean over its pixels, or of a class's evidence that
        of the class token; and what the second is of.
    """
    first = layers[0]
    last = layers[-1]
    maps = {layer.number: layer for layer in layers}
    [shares] = class_rollout(maps) if of_class else attention_rollout(maps)  # (T', T)
    rollout = shares[:, first.num_prefix_tokens :]
    if of_class:
        rollout = as_distributions(rollout) * rollout.shape[-1]
    else:
        rollout = rollout * shares.shape[-1]
    rollout = rollout.unflatten(-1, first.feat_size).cpu().numpy()
    if of_class and "cls" in last.prefix_names:
        return rollout, rollout[last.token("cls")], "class token"
    return rollout, rollout[last.num_prefix_tokens :].mean(0), "all pixels"


def _block(
    recording: Recording, img_size: Size, points: Sequence[Query], style: MapStyle, class_name: str
) -> Block:
    """Return a block with the model's name and one row in units of uniform attention: one tile per query, in pixels of
    an input of `img_size`, and one tile of all queries together, see `_rollout`."""
    layers = _asking(recording)
    last = layers[-1]
    rollout, values, title = _rollout(layers, bool(class_name))
    name = f"{title_of(recording.model)}, {layers_name([layer.number for layer in layers])}"
    part = "attn_rollout"
    if class_name:
        name = f"{class_name}: {name}"
        part = "attn_evidence"
    tiles = []
    for number, point in enumerate(points, start=1):
        place = cell_of(point, img_size, recording.img_size)
        row = rollout[last.token(recording.cell(last.number, place))]
        where = {"point": place, "number": number, "cells": last.feat_size}
        tiles.append(map_of(row, recording, style, f"query {number}", part=part, **where))
    tiles.append(map_of(values, recording, style, title, part=part))
    if _has_convolutions(recording.model.model):
        name += "; approximation: convolutions left out"
    if len(layers) < len(recording.maps):
        name += "; its class attention is left out"
    return Block([Row(tiles)], name)


def _has_convolutions(model: nn.Module) -> bool:
    """Return whether a network has spatial convolutions, other than those of its patch embedding and its maps."""
    for name, module in model.named_modules():
        if not isinstance(module, nn.Conv2d) or module.kernel_size == module.stride:
            continue  # each pixel of the input goes to one patch
        if "patch_embed" not in name and ".evolution." not in name and max(module.kernel_size) > 1:
            return True
    return False


def main(argv: Sequence[str] | None = None) -> int:
    parser = make_parser(__doc__, EXAMPLES, output="rollout.png", heads=None)
    parser.add_argument(
        "--target",
        metavar="CLASS",
        help="draw the evidence of a class, by number or name, or predicted (default: attention rollout)",
    )
    options = parser.parse_args(argv)
    return run_figure(options, partial(plot_rollout, target=options.target))
