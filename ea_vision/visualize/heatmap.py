"""Attention of query points by head (AA paper, figure 10), of several models side by side (EA paper, figure 4), or of
several images."""

from collections.abc import Mapping, Sequence
from functools import partial
from string import ascii_uppercase
from typing import Any

from matplotlib.figure import Figure

from ea_vision.base.errors import UsageError
from ea_vision.visualize.figure_options import make_parser, run_figure
from ea_vision.visualize.figure_request import FigureRequest, Heads, Layers, Models, Queries
from ea_vision.visualize.image_maps import AnyImage, as_images, title_of
from ea_vision.visualize.map_style import STYLE, MapStyle, map_sheet
from ea_vision.visualize.sheet import Block, Row, Tile
from ea_vision.visualize.tiles import (
    ALL,
    Head,
    Query,
    Recording,
    cell_of,
    head_name,
    map_name,
    photo_of,
    queries_name,
    tile_of,
)
from ea_vision.zoo.inputs import names_of

EXAMPLES = """\
  ea-vision heatmap --model ea_conv_transformer_cifar --layers 1,3 -o maps.png digits#0
  ea-vision heatmap --model runs/digits-ea_conv_transformer_cifar --heads 0,2,mean photo.jpg
  ea-vision heatmap --model ea_aa_resnet50 --layers 8 --queries 40,40 --bare --width 3.3 -o a.pdf photo.jpg
  ea-vision heatmap --model vit_small_patch16_224.dino --layers 12 --queries cls -o class_token.png photo.jpg
  ea-vision heatmap --model aa_resnet34,ea_aa_resnet34 --layers 16,17,18 -o both.png photo.jpg
  ea-vision heatmap --model ea_conv_transformer_cifar --layers 1-3 --heads 0 --style fog -o fog.png images/
"""


def plot_heatmap(
    models: Models,
    images: AnyImage | Sequence[AnyImage],
    layers: Layers = None,
    heads: Heads = None,
    queries: Queries = None,
    **how,
) -> Figure:
    """Draw what query points attend to. See `ea_vision.visualize.figure_request` for the arguments.

    With one model and image, each layer has one row per query and one column per head; with one query or one head, one
    row. With several models, or several images of one model, each layer has one row per query and head, and one column
    per model or image. By default several models show the mean of heads, several images the mean of all queries.
    """
    if isinstance(images, (list, tuple)):
        return _plot_images(models, images, layers, heads, queries, how)
    request = FigureRequest(models, layers, heads, queries, some=True, **how)
    recordings = request.record(images)
    request.warn_of_heads_left_out()
    points = request.points(seen=recordings)
    if len(recordings) > 1:
        draw = partial(draw_models, recordings)
    else:
        draw = partial(draw_heatmap, recordings[0])
    return request.fit_page(draw, heads=request.heads, points=points)


def _plot_images(
    models: Models,
    images: Sequence[AnyImage],
    layers: Layers,
    heads: Heads,
    queries: Queries,
    how: Mapping[str, Any],
) -> Figure:
    queries = [ALL] if queries is None else queries
    request = FigureRequest(models, layers, heads, queries, some=True, **how)
    if len(request.models) > 1:
        raise UsageError(
            f"several models need one image, got {len(request.models)} models and a list of {len(images)}"
        )
    if len(request.queries) != 1:
        raise UsageError(f"several images take one query, got {len(request.queries)}")
    recordings = []
    for image in as_images(images):
        recordings += request.record(image)
    request.warn_of_heads_left_out()
    [point] = request.points(seen=recordings)
    draw = partial(draw_images, recordings, names_of(images))
    return request.fit_page(draw, heads=request.heads, point=point)


def head_rows(
    recording: Recording,
    layer: int,
    heads: Sequence[Head],
    points: Sequence[Query],
    style: MapStyle,
) -> list[Row]:
    """Return one row per query with one column per head; for one head a single row with one column per query."""
    in_a_row = len(heads) == 1 and len(points) > 1
    rows = []
    for number, point in enumerate(points, start=1):
        query = f"query {number}"
        tiles = []
        for head in heads:
            title = query if in_a_row else head_name(head)
            tile = tile_of(recording, layer, style, head, point, title=title, number=number)
            tiles.append(tile)
        rows.append(Row(tiles, query if len(points) > 1 else ""))
    if in_a_row:
        return [Row([row.tiles[0] for row in rows])]
    for row in rows[1:]:
        for tile in row.tiles:
            tile.title = ""
    return rows


def draw_heatmap(
    recording: Recording,
    layers: Sequence[int],
    heads: Sequence[Head],
    points: Sequence[Query],
    style: MapStyle = STYLE,
    *,
    width: float | None = None,
    left_out: str | None = None,
) -> Figure:
    """Draw the photo with numbered query points and, below it, one row per query and one column per head per layer.
    With one query or one head each layer is one row.

    Args:
        recording: with the "attn" of `layers` (numbers).
        heads: counted from 0, or "mean".
        points: queries, (y, x) in pixels of the input, tokens by name, or "all". Below a transformer's maps stands the
            share of attention that goes to the tokens before the patches.
        style: how maps are drawn.
        width: inches.
        left_out: see `ea_vision.visualize.sheet.sheet`.
    """
    grid = len(layers) > 1 and 1 in (len(points), len(heads))
    blocks = []
    for layer in layers:
        rows = head_rows(recording, layer, heads, points, style)
        blocks.append(Block(rows, map_name(recording.maps[layer], grid)))
    which = f", {head_name(heads[0])}" if len(heads) == 1 else " by head"
    return map_sheet(
        title_of(recording.model),
        blocks,
        style,
        width=width,
        photo=photo_of(recording, points),
        note=f"attention{which}; {queries_name(points)}",
        left_out=left_out,
    )


def draw_models(
    recordings: Sequence[Recording],
    layers: Sequence[Sequence[int]],
    heads: Sequence[Head],
    points: Sequence[Query],
    style: MapStyle = STYLE,
    *,
    names: Sequence[str] = (),
    title: str = "",
    width: float | None = None,
    left_out: str | None = None,
) -> Figure:
    """Draw several models side by side: for each layer one row per query and head, and one column per model. With one
    query and one head, each layer is one row.

    Args:
        recordings: of one image, one per model, with the "attn" of its `layers`.
        layers: one list of numbers per model, all of the same length.
        heads: counted from 0, or "mean".
        points: queries, (y, x) in pixels of the first recording's input, scaled to the others', tokens by name, or
            "all".
        style: how maps are drawn.
        names: of the columns; default: the models' titles.
        title: of the figure; default: the number of models.
        width, left_out: see `draw_heatmap`.

    Raises:
        UsageError: models with different numbers of layers.
    """
    names = names or [title_of(recording.model) for recording in recordings]
    if len({len(numbers) for numbers in layers}) > 1:
        counts = [f"{len(numbers)} of {name}" for numbers, name in zip(layers, names, strict=True)]
        raise UsageError(f"models side by side need equally many layers, got {', '.join(counts)}")
    names, meaning = _short_names(names)
    blocks = _columns(recordings, layers, heads, points, style)
    for block in blocks:
        _write_titles(block.rows[0].tiles, names)
    which = f", {head_name(heads[0])}" if len(heads) == 1 else ""
    return map_sheet(
        title or f"{len(recordings)} models",
        blocks,
        style,
        width=width,
        note=f"attention: {queries_name(points)}{which}{meaning}",
        photo=photo_of(recordings[0], points),
        left_out=left_out,
    )


def draw_images(
    recordings: Sequence[Recording],
    names: Sequence[str],
    layers: Sequence[int],
    heads: Sequence[Head],
    point: Query,
    style: MapStyle = STYLE,
    *,
    width: float | None = None,
    left_out: str | None = None,
) -> Figure:
    """Draw several images of one model side by side, one column each: the photos, and for each layer one row per head.

    Args:
        recordings: one per image, with the "attn" of `layers` (numbers).
        names: of the images.
        heads: counted from 0, or "mean".
        point: the query, (y, x) in pixels of the first recording's input, scaled to the others', a token by name, or
            "all".
        style: how maps are drawn.
        width, left_out: see `draw_heatmap`.
    """
    names, meaning = _short_names(names)
    photos = [photo_of(recording, [point]) for recording in recordings]
    _write_titles(photos, names)
    blocks = _columns(recordings, [layers] * len(recordings), heads, [point], style)
    photo_name = "photo" if len(heads) == 1 or len(layers) == 1 else ""
    which = f", {head_name(heads[0])}" if len(heads) == 1 else ""
    return map_sheet(
        title_of(recordings[0].model),
        [Block([Row(photos)], photo_name), *blocks],
        style,
        width=width,
        note=f"attention on {len(recordings)} images: {queries_name([point])}{which}{meaning}",
        left_out=left_out,
    )


def _columns(
    recordings: Sequence[Recording],
    layers: Sequence[Sequence[int]],
    heads: Sequence[Head],
    points: Sequence[Query],
    style: MapStyle,
) -> list[Block]:
    """Return one block per layer: one row per query and head, one column per recording. The points are in pixels of the
    first recording's input."""
    img_size = recordings[0].img_size
    grid = len(layers[0]) > 1 and len(points) == len(heads) == 1
    blocks = []
    for numbers in zip(*layers, strict=True):
        rows = []
        for index, point in enumerate(points, start=1):
            for head in heads:
                tiles = []
                for recording, number in zip(recordings, numbers, strict=True):
                    place = cell_of(point, img_size, recording.img_size)
                    tiles.append(tile_of(recording, number, style, head, place, number=index))
                label = []
                if len(points) > 1:
                    label.append(f"query {index}")
                if len(heads) > 1:
                    label.append(head_name(head))
                rows.append(Row(tiles, "\n".join(label)))
        names = []
        for recording, number in zip(recordings, numbers, strict=True):
            names.append(map_name(recording.maps[number], grid))
        blocks.append(Block(rows, "\n".join(dict.fromkeys(names))))
    return blocks


def _short_names(names: Sequence[str]) -> tuple[Sequence[str], str]:
    """Return names that fit above a map, and a legend: letters with their meanings unless all names are short."""
    if all(len(name) <= 14 for name in names):
        return names, ""
    short = []
    meanings = []
    for index, name in enumerate(names):
        letter = ascii_uppercase[index % 26] + "'" * (index // 26)
        short.append(letter)
        meanings.append(f"{letter}: {name}")
    return short, "\n" + "; ".join(meanings)


def _write_titles(tiles: Sequence[Tile], names: Sequence[str]) -> None:
    for tile, name in zip(tiles, names, strict=True):
        tile.title = name


def main(argv: Sequence[str] | None = None) -> int:
    parser = make_parser(__doc__, EXAMPLES, output="attention.png", some=True)
    return run_figure(parser.parse_args(argv), plot_heatmap, together=True)
