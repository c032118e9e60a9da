"""Attention rollout (Abnar and Zuidema 2020): where a pixel of the last map comes from, through all layers before it.

Heads are averaged, the residual counts as identity. Where a network has convolutions, which move information too, this
is an approximation and the figure says so."""

from __future__ import annotations

import math
from collections.abc import Sequence

from matplotlib.figure import Figure
from torch import Tensor, nn

from ea_vision.analysis.inputs import ImageSource
from ea_vision.analysis.loading import parse_layers
from ea_vision.analysis.quantities import attention_rollout
from ea_vision.visualize.figure_options import (
    Layers,
    Models,
    Queries,
    add_style,
    chosen_points,
    load_models,
    make_parser,
    parse_queries,
    recorded,
    style_of,
)
from ea_vision.visualize.image_maps import (
    Query,
    Recording,
    as_models,
    cell_of_query,
    record,
    scaled,
    title_of,
)
from ea_vision.visualize.map_style import (
    STYLE,
    MapStyle,
    aspect_of,
    bars_of,
    draw_map,
    layers_name,
    mark_query,
    norms_of,
    photo_tile,
    queries_name,
)
from ea_vision.visualize.sheet import Block, Row, Tile, sheet
from ea_vision.visualize.writing import each_image, save, save_maps

EXAMPLES = """\
  ea-vision rollout --model aa_resnet50,ea_aa_resnet50 --queries 60,60 -o rollout.png photo.jpg
  ea-vision rollout --model runs/ea --layers 1-3 -o rollout.svg images/
"""


def plot_rollout(models: Models, image: ImageSource | Tensor, layers: Layers = None, queries: Queries = None, *,
                 width: float | None = None, **style) -> Figure:
    """Draw where pixels of the last map come from, through all `layers`: a row a model, a column a query. See
    `ea_vision.visualize.figure_options` for the arguments."""
    recordings = [recorded(model, image, layers)[0] for model in as_models(models)]
    points = chosen_points(queries, tuple(recordings[0].image.shape[1:]))
    return draw_rollout(recordings, points, MapStyle(**style), width=width)


def draw_rollout(recordings: Sequence[Recording], points: Sequence[Query], style: MapStyle = STYLE, *,
                 width: float | None = None) -> Figure:
    """Draw a row a model under its name: a column a query, and the mean of all queries.

    Args:
        recordings: of the same image, one a model, with the "attn" of the layers to go through.
        points: queries, (y, x) in pixels of the first model's input, scaled to the others', or tokens by name.
        style: how maps are drawn; a row's maps share a scale.
        width: inches.
    """
    first = recordings[0]
    rows = [_rollout(recording, points, tuple(first.image.shape[1:])) for recording in recordings]
    norms = norms_of([maps for *_, maps in rows], style)
    bars, common = bars_of(norms, style, label="share of the last map's pixel \N{MULTIPLICATION SIGN} N (1: uniform)")
    blocks = []
    for recording, (name, last, places, maps), scales, own in zip(recordings, rows, norms, bars, strict=True):
        tiles = [Tile(_painter(values, recording, norm, style, place, number, last), title)
                 for values, norm, place, number, title in zip(
                     maps, scales, [*places, None], range(1, len(maps) + 1),
                     [*(f"query {n}" for n in range(1, len(places) + 1)), "all pixels"], strict=True)]
        blocks.append(Block([Row(tiles, aspect=aspect_of(recording))], name, own))
    return sheet("attention rollout", blocks, width=width, aspect=aspect_of(first), bars=common,
                 note="where the last map's pixels come from, through all layers; "
                      f"{queries_name(rows[0][2])}; all pixels: their mean",
                 photo=photo_tile(first, style, rows[0][2], rows[0][1]))


def _painter(values, recording: Recording, norm, style: MapStyle, place: Query | None, number: int, last):
    def paint(axes) -> None:
        draw_map(axes, values, recording, norm, style)
        if place is not None:
            mark_query(axes, recording, place, last, number)

    return paint


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
    name = f"{title_of(recording.model)}, {layers_name([layer.number for layer in layers])}{note}"
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
        save(draw_rollout(recordings, points, style, width=options.width), output, options.dpi)
        if options.npz:
            save_maps(recordings, output)
    return 0
