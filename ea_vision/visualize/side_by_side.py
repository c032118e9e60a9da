"""The same layers of several models side by side (EA paper, figure 4): a row a model, a column a layer."""

from __future__ import annotations

from collections.abc import Sequence

from matplotlib.figure import Figure

from ea_vision.base.errors import UsageError
from ea_vision.visualize.drawing import add_scale, draw_image, draw_map, head_name, mark_point, new_figure, scale_of
from ea_vision.visualize.recordings import Head, Point, Recording, query_map


def models_side_by_side(recordings: Sequence[Recording], layers: Sequence[Sequence[int]], heads: Sequence[Head],
                        points: Sequence[Point], overlay: bool = True) -> Figure:
    """For each query and head a block: a row a model, a column a layer, one scale for the block.

    Args:
        recordings: of the same image, one a model, with the "attn" of its `layers`.
        layers: numbers, by model; as many for each.
        heads: counted from 0, or "mean".
        points: (y, x) in pixels of the first model's input; scaled to the others' input sizes.
        overlay: on the image, or bare.

    Raises:
        UsageError: models with different numbers of layers.
    """
    columns = len(layers[0])
    if any(len(chosen) != columns for chosen in layers):
        counts = [f"{len(chosen)} of {r.model.label}" for chosen, r in zip(layers, recordings, strict=True)]
        raise UsageError(f"models side by side need as many layers each, got {', '.join(counts)}")
    H, W = recordings[0].image.shape[1:]
    cell = 1.5
    block_height = len(recordings) * (cell * H / W + 0.1) + 0.75
    queries = [(number, point, head) for number, point in enumerate(points, start=1) for head in heads]
    figure = new_figure(max(5.5, cell * (columns + 1) + 1.9), len(queries) * block_height)
    blocks = figure.subfigures(len(queries), 1, squeeze=False).ravel()
    for block, (number, point, head) in zip(blocks, queries, strict=True):
        cells = block.subplots(len(recordings), columns + 1, squeeze=False)
        sizes = [tuple(recording.image.shape[1:]) for recording in recordings]
        places = [(point[0] * size[0] // H, point[1] * size[1] // W) for size in sizes]
        maps = [[query_map(recording.maps[layer], place, size, head) for layer in chosen]
                for recording, chosen, place, size in zip(recordings, layers, places, sizes, strict=True)]
        scale = scale_of("attn", [values for row in maps for values in row])
        for row, (recording, chosen, place) in enumerate(zip(recordings, layers, places, strict=True)):
            draw_image(cells[row, 0], recording.image)
            mark_point(cells[row, 0], place, number)
            cells[row, 0].set_ylabel(recording.model.label.replace(", ", "\n"), fontsize=7.5)
            for col, layer in enumerate(chosen):
                artist = draw_map(cells[row, col + 1], maps[row][col], recording.image, scale, point=place,
                                  number=number, overlay=overlay)
                if row == 0 or layer != layers[0][col]:
                    cells[row, col + 1].set_title(f"layer {layer}", fontsize=8)
        block.suptitle(f"query {number} (y {point[0]}, x {point[1]}), {head_name(head)}", fontsize=9)
        add_scale(block, artist, cells)
    return figure
