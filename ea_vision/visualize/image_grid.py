"""One head on many images: a tile an image."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from matplotlib.figure import Figure

from ea_vision.analysis.inputs import find_images, read_image
from ea_vision.analysis.loading import parse_layers
from ea_vision.visualize.figure_options import (
    add_style,
    load_models,
    make_parser,
    only,
    parse_heads,
    parse_queries,
    style_of,
)
from ea_vision.visualize.image_maps import Head, Query, Recording, distinct, query_name, record
from ea_vision.visualize.map_style import (
    STYLE,
    MapStyle,
    add_scale,
    draw_map,
    head_name,
    map_name,
    new_figure,
    norms_of,
    text_scale,
    wrapped,
)
from ea_vision.visualize.writing import check_output, save, save_maps

EXAMPLES = """\
  ea-vision grid --model ea_conv_transformer_cifar --layers 2 --heads 1 -o grid.png images/
  ea-vision grid --model ea_aa_resnet34 --layers 16 --heads mean --queries 112,112 -o middle.pdf *.jpg
"""


def images_grid(recordings: Sequence[Recording], layer: int, head: Head, query: Query | None = None,
                style: MapStyle = STYLE) -> Figure:
    """A tile an image, under its recording's label: what a head of a layer looks at.

    Args:
        recordings: one an image, with the "attn" of `layer` (a number).
        head: counted from 0, or "mean".
        query: in pixels of the input or a token by name, the same for all; None: the mean of all queries, which is
            what every pixel gets.
        style: how maps are drawn; all share a scale.
    """
    first, text = recordings[0], text_scale()
    H, W = first.image.shape[1:]
    cell = max(1.6, 0.9 * text)
    columns = min(len(recordings), math.ceil(math.sqrt(1.6 * len(recordings) * H / W)))
    rows = -(-len(recordings) // columns)
    width = max(cell * columns + 1.0 * text, 3.5 * text)
    names = [wrapped(recording.model.label, cell - 0.1, 8.3) for recording in recordings]
    lines = 1 + max(name.count("\n") for name in names)
    whose = "mean of all queries" if query is None else f"query ({query_name(query)})"
    title = wrapped(f"{map_name(first.maps[layer])}, {head_name(head)}, {whose}", width - 0.2, 12)
    figure = new_figure(width, rows * (cell * H / W + (0.1 + 0.15 * lines) * text) + (0.3 + 0.2 * (
        1 + title.count("\n"))) * text)
    figure.suptitle(title)
    maps = [recording.received(layer, head) if query is None else recording.relative_map(layer, query, head)
            for recording in recordings]
    [norms] = norms_of([maps], style)
    cells = figure.subplots(rows, columns, squeeze=False)
    for axes, recording, name, values, norm in zip(cells.ravel(), recordings, names, maps, norms, strict=False):
        draw_map(axes, values, recording, norm, style, point=query)
        axes.set_title(name, fontsize="small")
    for axes in cells.ravel()[len(recordings):]:
        axes.axis("off")
    add_scale(figure, cells, norms[0], style)
    return figure


def main(argv: Sequence[str] | None = None) -> int:
    parser = make_parser(__doc__, EXAMPLES, output="grid.png", layers="1", heads="mean")
    add_style(parser)
    options = parser.parse_args(argv)
    style, output = style_of(options), check_output(Path(options.output), options.suffixes)
    model = only(load_models(options), "model")
    layer = only(parse_layers(options.layers, model), "layer")
    head = only(parse_heads(options.heads, [layer]), "head")
    query = only(parse_queries(options.queries, model.img_size), "query") if options.queries else None
    paths = find_images(options.images)
    named = distinct([replace(model, label=Path(path).name) for path in paths])
    recordings = [record(one, read_image(path, exif_rotation=options.exif_rotation), [layer])
                  for one, path in zip(named, paths, strict=True)]
    save(images_grid(recordings, layer.number, head, query, style), output, options.dpi)
    written = [output]
    if options.npz:
        written.append(save_maps(recordings, output))
    print("written:", *written)
    return 0
