"""What evolution changed: a layer's attention without the previous layer's map, with it, and the difference.

Without means own alone: the layer's mixture is its own logits (alpha 0), convolved and normalised as in training. The
difference of two rows of attention is half the sum of their absolute differences, 0 to 1: the share of a query's
attention that moves. Over queries or heads it is the mean of their differences,
not the difference of their means.
"""

from collections.abc import Sequence

import numpy as np
from matplotlib.axes import Axes
from matplotlib.colors import Normalize
from matplotlib.figure import Figure

from ea_vision.base.errors import UsageError
from ea_vision.models.modes import evaluating
from ea_vision.recorder.quantities import own_alone
from ea_vision.visualize.figure_request import title_of
from ea_vision.visualize.map_style import STYLE, MapStyle, map_sheet
from ea_vision.visualize.sheet import Block, Row, Tile
from ea_vision.visualize.tiles import (
    ALL,
    MEAN,
    OWN_ALONE,
    Head,
    Query,
    Recording,
    head_name,
    map_of,
    photo_of,
    queries_name,
    tile_of,
)

CHANGE = "change"  # the part: attention minus own alone, in units of uniform attention


def add_own_alone(recording: Recording) -> None:
    """Add the part OWN_ALONE to the maps of evolving layers: their attention without the previous map; see
    `ea_vision.recorder.quantities.own_alone`. The recording must have all parts and all heads."""
    for layer in recording.maps.values():
        module = recording.model.model.get_submodule(layer.name)
        with evaluating(module):
            alone = own_alone(layer, module)
        if alone is not None:
            layer.save(OWN_ALONE, alone)


def draw_change(
    recording: Recording,
    layers: Sequence[int],
    head: Head,
    point: Query,
    style: MapStyle = STYLE,
    **page,
) -> Figure:
    """Draw one row for each of `layers` that evolves: its attention without the previous map, with it, and what the map
    changed. Cells whose change is more than uniform attention are marked with + or -.

    Args:
        recording: with all parts of `layers` (numbers).
        head: counted from 0, or "mean".
        point: the query, (y, x) in pixels of the input, a token by name, or "all".
        style: how maps are drawn.
        **page: width and left_out, see `ea_vision.visualize.sheet.sheet`.

    Raises:
        UsageError: none of the layers evolves from a previous map.
    """
    add_own_alone(recording)
    maps = recording.maps
    evolving = [layer for layer in layers if OWN_ALONE in maps[layer].recorded()]
    if not evolving:
        raise UsageError(
            f"layers that evolve from a previous map are required, and {recording.model.label} has none of these "
            f"among {', '.join(map(str, layers))}"
        )
    blocks = [_block(recording, layer, head, point, style) for layer in evolving]
    same_scale = "" if style.scale == "tile" else ", at the same scale"
    note = f"{head_name(head)}, {queries_name([point])}; without: own logits alone{same_scale}"
    photo = photo_of(recording, [point], maps[evolving[0]].feat_size)
    return map_sheet(title_of(recording.model), blocks, style, note=note, photo=photo, **page)


def _block(recording: Recording, layer: int, head: Head, point: Query, style: MapStyle) -> Block:
    """Return a layer's row under a sentence that says how much the previous map changed."""
    previous = f"layer {layer - 1}"
    titles = {OWN_ALONE: f"without {previous}'s map", "attn": f"with {previous}'s map"}
    tiles = [
        tile_of(recording, layer, style, head, point, part, title) for part, title in titles.items()
    ]
    alone, attn = [tile.values for tile in tiles]
    title = f"what {previous}'s map changed"
    tiles.append(_change_tile(attn - alone, recording, style, point, title))
    share = f"{recording.change(layer, point, head):.0%}"
    if point == ALL or head == MEAN:
        sentence = f"on average {share} of a query's attention moves"
    else:
        sentence = f"{share} of this query's attention moves"
    title = f"Layer {layer}, {head_name(head)}: {sentence} because of {previous}"
    return Block([Row(tiles)], title, enlarged=1.6)


def _change_tile(
    values: np.ndarray, recording: Recording, style: MapStyle, point: Query, title: str
) -> Tile:
    """Return a tile of a change (H, W) in units of uniform attention, with its signs."""
    tile = map_of(values, recording, style, title, point=point, part=CHANGE)
    paint_cells = tile.paint
    H, W = values.shape

    def paint(axes: Axes, norm: Normalize) -> None:
        paint_cells(axes, norm)
        points_per_cell = 72 / axes.figure.dpi * axes.bbox.width / W
        for marker, change in (("+", values), ("_", -values)):
            for color, shown in (("black", change <= 2), ("white", change > 2)):
                rows, columns = np.nonzero((change > 1) & shown)
                x = (columns + 0.5) * recording.img_size[1] / W
                y = (rows + 0.5) * recording.img_size[0] / H
                size = min(6.0, 0.6 * points_per_cell)
                axes.plot(x, y, marker, color=color, markersize=size, markeredgewidth=size / 5)
        axes.set(xlim=recording.extent[:2], ylim=recording.extent[2:])

    tile.paint = paint
    return tile
