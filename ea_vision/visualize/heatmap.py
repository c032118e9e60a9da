"""Attention of query points by head (AA paper, figure 10), or of several models side by side (EA paper, figure 4)."""

from __future__ import annotations

import math
from collections.abc import Sequence

from matplotlib.figure import Figure

from ea_vision.visualize.figure_options import (
    add_style,
    load_models,
    make_parser,
    parse_heads,
    parse_queries,
    shown_layers,
    style_of,
)
from ea_vision.visualize.image_maps import MEAN, Head, Query, Recording, query_name, record
from ea_vision.visualize.map_style import (
    STYLE,
    MapStyle,
    add_scale,
    draw_map,
    draw_photo,
    head_name,
    map_name,
    new_figure,
    norms_of,
    text_scale,
    wrapped,
)
from ea_vision.visualize.side_by_side import models_side_by_side
from ea_vision.visualize.writing import each_image, save, save_maps

EXAMPLES = """\
  ea-vision heatmap --model ea_conv_transformer_cifar --layers 1,3 -o maps.png digits:0
  ea-vision heatmap --model runs/digits-ea_conv_transformer_cifar --heads 0,2,mean photo.jpg
  ea-vision heatmap --model ea_aa_resnet50 --layers 8 --queries 40,40 --bare -o a.pdf photo.jpg
  ea-vision heatmap --model vit_small_patch16_224.dino --layers 12 --queries cls -o class_token.png photo.jpg
  ea-vision heatmap --model aa_resnet34,ea_aa_resnet34 --layers 16,17,18 -o both.png photo.jpg
"""


def heads_by_queries(recording: Recording, layers: Sequence[int], heads: Sequence[Head], points: Sequence[Query],
                     style: MapStyle = STYLE) -> Figure:
    """The photo with numbered query points; below it, for each layer, a row a head and a column a query.

    Args:
        recording: with the "attn" of `layers` (numbers).
        heads: counted from 0, or "mean".
        points: queries, (y, x) in pixels of the input or tokens by name. Of a transformer each map says what share of
            attention goes to the tokens before the patches.
        style: how maps are drawn; the maps of a layer share a scale.
    """
    img_size = tuple(recording.image.shape[1:])
    aspect, text = img_size[0] / img_size[1], text_scale()
    per_row = min(len(layers), max(1, round(9 / len(points))))  # grids side by side
    cell = max(min(1.9, max(1.35, 4.0 / (per_row * len(points)))), 0.95 * text)
    grid_rows = -(-len(layers) // per_row)
    grid_width = cell * len(points) + 1.35 * text
    width = per_row * grid_width
    names = [wrapped(map_name(recording.maps[number]), grid_width - 0.1, 10) for number in layers]
    title = wrapped(recording.model.label, width - 0.1, 12)
    top = 2.2 * max(aspect, 0.5) + 0.25 * text * (1 + title.count("\n"))
    note = 0.14 * text * any(recording.maps[number].prefix_names for number in layers)
    above = (0.65 + 0.18 * (1 + max(name.count("\n") for name in names))) * text
    grid_height = len(heads) * (cell * aspect + 0.06 + note) + above
    figure = new_figure(width, top + grid_rows * grid_height)
    header, body = figure.subfigures(2, 1, height_ratios=(top, grid_rows * grid_height))
    finest = max((recording.maps[number].feat_size for number in layers), key=math.prod)
    draw_photo(header.subplots(), recording, style, points, finest)
    header.suptitle(title)
    grids = body.subfigures(grid_rows, per_row, squeeze=False).ravel()
    groups = [[recording.relative_map(number, point, head) for head in heads for point in points] for number in layers]
    for grid, layer, name, maps, norms in zip(grids, layers, names, groups, norms_of(groups, style), strict=False):
        cells = grid.subplots(len(heads), len(points), squeeze=False)
        for index, (axes, values, norm) in enumerate(zip(cells.ravel(), maps, norms, strict=True)):
            row, col = divmod(index, len(points))
            draw_map(axes, values, recording, norm, style, point=points[col], number=col + 1,
                     note=recording.beside_patches(layer, points[col], heads[row]))
            if row == 0:
                axes.set_title(f"query {col + 1}\n{query_name(points[col])}", fontsize="small")
            if col == 0:
                axes.set_ylabel("mean" if heads[row] == MEAN else head_name(heads[row]), fontsize="small")
        grid.suptitle(name, fontsize="medium")
        add_scale(grid, cells, norms[0], style)
    return figure


def main(argv: Sequence[str] | None = None) -> int:
    parser = make_parser(__doc__, EXAMPLES, output="attention.png", layers=None)
    add_style(parser)
    options = parser.parse_args(argv)
    style = style_of(options)
    models = load_models(options)
    layers = shown_layers(options, models)
    heads = parse_heads(options.heads, [layer for chosen in layers for layer in chosen])
    points = parse_queries(options.queries, models[0].img_size)
    for _, image, output in each_image(options):
        recordings = [record(model, image, chosen) for model, chosen in zip(models, layers, strict=True)]
        if len(models) > 1:
            figure = models_side_by_side(recordings, [[layer.number for layer in chosen] for chosen in layers],
                                         heads, points, style)
        else:
            figure = heads_by_queries(recordings[0], [layer.number for layer in layers[0]], heads, points, style)
        save(figure, output, options.dpi)
        if options.npz:
            save_maps(recordings, output)
    return 0
