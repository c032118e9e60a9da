"""Attention rollout (Abnar and Zuidema 2020): where a pixel of the last map comes from, through all layers before it.

Heads are averaged, the residual counts as identity. Where a network has convolutions, which move information too, this
is an approximation and the figure says so."""

from __future__ import annotations

import math
from collections.abc import Sequence

from matplotlib.figure import Figure
from torch import nn

from ea_vision.analysis.loading import parse_layers
from ea_vision.analysis.quantities import attention_rollout
from ea_vision.visualize.figure_options import add_style, load_models, make_parser, parse_queries, style_of
from ea_vision.visualize.image_maps import Query, Recording, cell_of_query, query_name, record, scaled
from ea_vision.visualize.map_style import (
    STYLE,
    MapStyle,
    add_scale,
    draw_map,
    draw_photo,
    layers_name,
    mark_query,
    name_row,
    new_figure,
    norms_of,
    text_scale,
    wrapped,
)
from ea_vision.visualize.writing import each_image, save, save_maps

EXAMPLES = """\
  ea-vision rollout --model aa_resnet50,ea_aa_resnet50 --queries 60,60 -o rollout.png photo.jpg
  ea-vision rollout --model runs/ea --layers 1-3 -o rollout.svg images/
"""


def rollout_figure(recordings: Sequence[Recording], points: Sequence[Query], style: MapStyle = STYLE) -> Figure:
    """A row a model under its name: the photo, a column a query, and the mean of all queries.

    Args:
        recordings: of the same image, one a model, with the "attn" of the layers to go through.
        points: queries, (y, x) in pixels of the first model's input, scaled to the others', or tokens by name.
        style: how maps are drawn; a row's maps share a scale.
    """
    H, W = recordings[0].image.shape[1:]
    columns, text = len(points) + 2, text_scale()
    cell = max(1.7, 0.95 * text)
    width = cell * columns + 1.5 * text
    rows = [_rollout(recording, points, (H, W)) for recording in recordings]
    names = [wrapped(name, width - 1.2 * text, 10) for name, *_ in rows]
    heights = [cell * H / W + (0.55 + 0.17 * (1 + name.count("\n"))) * text for name in names]
    figure = new_figure(width, sum(heights) + 0.4 * text)
    figure.suptitle("attention rollout")
    blocks = figure.subfigures(len(rows), 1, squeeze=False, height_ratios=heights).ravel()
    norms = norms_of([maps for *_, maps in rows], style)
    for block, recording, name, (_, last, places, maps), own in zip(
            blocks, recordings, names, rows, norms, strict=True):
        cells = block.subplots(1, columns)
        draw_photo(cells[0], recording, style, places, last)
        name_row(cells[0], name, 2)
        for col, (values, norm) in enumerate(zip(maps, own, strict=True)):
            query = col < len(points)
            draw_map(cells[col + 1], values, recording, norm, style)
            if query:
                mark_query(cells[col + 1], recording, places[col], last, col + 1)
            cells[col + 1].set_title(f"query {col + 1}\n{query_name(places[col])}" if query else
                                     "mean of\nall pixels", fontsize="small")
        add_scale(block, cells, own[0], style, bar_label="share of the last map's pixel")
    return figure


def _rollout(recording: Recording, points: Sequence[Query], img_size: tuple[int, int]) -> tuple:
    """Name of the row, size of the last map, queries, maps in units of uniform attention."""
    layers = list(recording.maps.values())
    first, last = layers[0], layers[-1]
    rollout = attention_rollout(recording.maps)[0, :, first.num_prefix_tokens:].unflatten(-1, first.feat_size)
    rollout = rollout.cpu().numpy() * (math.prod(first.feat_size) + first.num_prefix_tokens)  # (T', H, W)
    size = tuple(recording.image.shape[1:])
    places = [scaled(point, img_size, size) for point in points]
    maps = [rollout[last.token(cell_of_query(place, size, last.feat_size))] for place in places]
    maps.append(rollout[last.num_prefix_tokens:].mean(0))
    approximate = any(isinstance(module, nn.Conv2d) and max(module.kernel_size) > 1
                      for name, module in recording.model.model.named_modules()
                      if "patch_embed" not in name and ".evolution." not in name)
    note = "; approximation: convolutions left out" if approximate else ""
    name = f"{recording.model.label}, {layers_name([layer.number for layer in layers])}{note}"
    return name, last.feat_size, places, maps


def main(argv: Sequence[str] | None = None) -> int:
    parser = make_parser(__doc__, EXAMPLES, output="rollout.png", heads=None)
    add_style(parser)
    options = parser.parse_args(argv)
    style = style_of(options)
    models = load_models(options)
    layers = [parse_layers(options.layers, model) for model in models]
    points = parse_queries(options.queries, models[0].img_size)
    for _, image, output in each_image(options):
        recordings = [record(model, image, chosen) for model, chosen in zip(models, layers, strict=True)]
        save(rollout_figure(recordings, points, style), output, options.dpi)
        if options.npz:
            save_maps(recordings, output)
    return 0
