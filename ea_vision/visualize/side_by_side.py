"""The same layers of several models side by side (EA paper, figure 4): a row a model, a column a layer."""

from __future__ import annotations

import math
from collections.abc import Sequence

from matplotlib.figure import Figure

from ea_vision.base.errors import UsageError
from ea_vision.visualize.image_maps import Head, Query, Recording, query_name, scaled
from ea_vision.visualize.map_style import (
    STYLE,
    MapStyle,
    add_scale,
    draw_map,
    draw_photo,
    head_name,
    name_row,
    new_figure,
    norms_of,
    text_scale,
    wrapped,
)


def models_side_by_side(recordings: Sequence[Recording], layers: Sequence[Sequence[int]], heads: Sequence[Head],
                        points: Sequence[Query], style: MapStyle = STYLE) -> Figure:
    """For each query and head a block: a row a model under its name, a column a layer.

    Args:
        recordings: of the same image, one a model, with the "attn" of its `layers`.
        layers: numbers, by model; as many for each.
        heads: counted from 0, or "mean".
        points: queries, (y, x) in pixels of the first model's input, scaled to the others', or tokens by name.
        style: how maps are drawn; the maps of a block share a scale.

    Raises:
        UsageError: models with different numbers of layers.
    """
    columns = len(layers[0])
    if any(len(chosen) != columns for chosen in layers):
        counts = [f"{len(chosen)} of {r.model.label}" for chosen, r in zip(layers, recordings, strict=True)]
        raise UsageError(f"models side by side need as many layers each, got {', '.join(counts)}")
    H, W = recordings[0].image.shape[1:]
    cell, text = max(1.5, 0.8 * text_scale()), text_scale()
    width = cell * (columns + 1) + 1.5 * text
    names = [wrapped(recording.model.label, width - 1.2 * text, 10) for recording in recordings]
    note = 0.14 * any(layer.prefix_names for recording in recordings for layer in recording.maps.values())
    heights = [cell * H / W + (0.4 + note + 0.17 * (1 + name.count("\n"))) * text for name in names]
    queries = [(number, point, head) for number, point in enumerate(points, start=1) for head in heads]
    titles = [wrapped(f"query {number} ({query_name(point)}), {head_name(head)}", width - 0.1, 12)
              for number, point, head in queries]
    above = (0.15 + 0.2 * (1 + max(title.count("\n") for title in titles))) * text
    figure = new_figure(width, len(queries) * (sum(heights) + above))
    sizes = [tuple(recording.image.shape[1:]) for recording in recordings]
    places = {point: [scaled(point, (H, W), size) for size in sizes] for point in points}
    groups = [[recording.relative_map(layer, place, head)
               for recording, chosen, place in zip(recordings, layers, places[point], strict=True) for layer in chosen]
              for _, point, head in queries]
    blocks = figure.subfigures(len(queries), 1, squeeze=False).ravel()
    for block, (number, point, head), title, maps, norms in zip(
            blocks, queries, titles, groups, norms_of(groups, style), strict=True):
        block.suptitle(title)
        cells = block.subplots(len(recordings), columns + 1, squeeze=False, height_ratios=heights)
        for row, (recording, chosen, place, name) in enumerate(
                zip(recordings, layers, places[point], names, strict=True)):
            finest = max((recording.maps[layer].feat_size for layer in chosen), key=math.prod)
            draw_photo(cells[row, 0], recording, style, [place], finest, first=number)
            name_row(cells[row, 0], name, 1)
            for col, layer in enumerate(chosen):
                index = row * columns + col
                draw_map(cells[row, col + 1], maps[index], recording, norms[index], style, point=place, number=number,
                         note=recording.beside_patches(layer, place, head))
                H_map, W_map = recording.maps[layer].feat_size
                cells[row, col + 1].set_title(f"layer {layer}, {H_map}x{W_map}", fontsize="small")
        add_scale(block, cells, norms[0], style)
    return figure
