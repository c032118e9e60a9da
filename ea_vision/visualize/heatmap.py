"""Attention of query points by head (AA paper, figure 10), or of several models side by side (EA paper, figure 4)."""

from __future__ import annotations

from collections.abc import Sequence

from matplotlib.figure import Figure

from ea_vision.analysis.loading import parse_layers
from ea_vision.visualize.drawing import add_scale, draw_image, draw_map, head_name, layer_name, new_figure, scale_of
from ea_vision.visualize.options import load_models, make_parser, parse_heads, parse_queries
from ea_vision.visualize.recordings import MEAN, Head, Point, Recording, query_map, record
from ea_vision.visualize.side_by_side import models_side_by_side
from ea_vision.visualize.writing import each_image, save, save_maps

EXAMPLES = """\
  ea-vision heatmap --model ea_conv_transformer_cifar --layers 1,3 -o maps.png digits:0
  ea-vision heatmap --model runs/digits-ea_conv_transformer_cifar --heads 0,2,mean photo.jpg
  ea-vision heatmap --model ea_aa_resnet50 --layers 8 --queries 40,40 --bare -o a.pdf photo.jpg
  ea-vision heatmap --model aa_resnet34,ea_aa_resnet34 --layers 16,17,18 -o both.png photo.jpg
"""


def heads_by_queries(recording: Recording, layers: Sequence[int], heads: Sequence[Head], points: Sequence[Point],
                     overlay: bool = True) -> Figure:
    """The input with numbered query points; below it, for each layer, a row a head and a column a query.

    Args:
        recording: with the "attn" of `layers` (numbers).
        heads: counted from 0, or "mean".
        points: (y, x) in pixels of the input.
        overlay: on the image, or bare.
    """
    img_size = tuple(recording.image.shape[1:])
    aspect = img_size[0] / img_size[1]
    per_row = min(len(layers), max(1, round(9 / len(points))))  # grids side by side
    cell = min(1.9, max(1.35, 4.0 / (per_row * len(points))))
    grid_rows = -(-len(layers) // per_row)
    width = max(0.085 * len(recording.model.label), per_row * (cell * len(points) + 1.35))
    top = 2.7 if aspect <= 1 else 2.7 * aspect
    grid_height = len(heads) * (cell * aspect + 0.06) + 0.75
    figure = new_figure(width, top + grid_rows * grid_height)
    header, body = figure.subfigures(2, 1, height_ratios=(top, grid_rows * grid_height))
    axes = header.subplots()
    draw_image(axes, recording.image, points)
    header.suptitle(recording.model.label, fontsize=11, fontweight="bold")
    grids = body.subfigures(grid_rows, per_row, squeeze=False).ravel()
    for grid, number in zip(grids, layers, strict=False):
        layer = recording.maps[number]
        maps = [[query_map(layer, point, img_size, head) for point in points] for head in heads]
        scale = scale_of("attn", [m for row in maps for m in row])
        cells = grid.subplots(len(heads), len(points), squeeze=False)
        for row, head in enumerate(heads):
            for col, point in enumerate(points):
                artist = draw_map(cells[row, col], maps[row][col], recording.image, scale, point=point, number=col + 1,
                                  overlay=overlay)
                if row == 0:
                    cells[row, col].set_title(f"query {col + 1}\ny {point[0]}, x {point[1]}", fontsize=8)
            cells[row, 0].set_ylabel("mean" if head == MEAN else head_name(head), fontsize=8)
        H, W = layer.feat_size
        grid.suptitle(f"{layer_name(layer)}, {H}x{W}", fontsize=9)
        add_scale(grid, artist, cells)
    return figure


def main(argv: Sequence[str] | None = None) -> int:
    parser = make_parser(__doc__, EXAMPLES, output="attention.png")
    parser.add_argument("--bare", action="store_true", help="draw the maps alone, not over the image")
    options = parser.parse_args(argv)
    models = load_models(options)
    layers = [parse_layers(options.layers, model) for model in models]
    heads = parse_heads(options.heads, [layer for chosen in layers for layer in chosen])
    points = parse_queries(options.queries, models[0].img_size)
    for _, image, output in each_image(options):
        recordings = [record(model, image, chosen) for model, chosen in zip(models, layers, strict=True)]
        if len(models) > 1:
            figure = models_side_by_side(recordings, [[layer.number for layer in chosen] for chosen in layers],
                                         heads, points, not options.bare)
        else:
            figure = heads_by_queries(recordings[0], [layer.number for layer in layers[0]], heads, points,
                                      not options.bare)
        save(figure, output, options.dpi)
        if options.npz:
            save_maps(recordings, output)
    return 0
