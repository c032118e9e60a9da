"""Attention of query points by head (AA paper, figure 10), of several models side by side (EA paper, figure 4), or of
several images."""

from collections.abc import Sequence
from string import ascii_uppercase

from matplotlib.figure import Figure

from ea_vision.base.errors import UsageError
from ea_vision.recorder.inputs import names_of
from ea_vision.visualize.figure_options import (
    Asked,
    Heads,
    Layers,
    Models,
    Queries,
    make_parser,
    run_figure,
)
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

EXAMPLES = """\
  ea-vision heatmap --model ea_conv_transformer_cifar --layers 1,3 -o maps.png digits#0
  ea-vision heatmap --model runs/digits-ea_conv_transformer_cifar --heads 0,2,mean photo.jpg
  ea-vision heatmap --model ea_aa_resnet50 --layers 8 --queries 40,40 --bare --width 3.3 -o a.pdf photo.jpg
  ea-vision heatmap --model vit_small_patch16_224.dino --layers 12 --queries cls -o class_token.png photo.jpg
  ea-vision heatmap --model aa_resnet34,ea_aa_resnet34 --layers 16,17,18 -o both.png photo.jpg
  ea-vision heatmap --model ea_conv_transformer_cifar --layers 1-3 --heads 0 --style light -o light.png images/
"""


def plot_heatmap(
    models: Models,
    images: AnyImage | Sequence[AnyImage],
    layers: Layers = None,
    heads: Heads = None,
    queries: Queries = None,
    **how,
) -> Figure:
    """Draw what query points attend to. See `ea_vision.visualize.figure_options` for the arguments.

    With one model and image, each layer has one row per query and one column per head; with one query or one head, one
    row. With several models, or several images of one model, each layer has one row per query and head, and one column
    per model or image. By default several models show the mean of heads, several images the mean of all queries.
    """
    several = isinstance(images, (list, tuple))
    if several and queries is None:
        queries = [ALL]
    asked = Asked(models, layers, heads, queries, some=True, **how)
    if several and len(asked.models) > 1:
        raise UsageError(
            f"several models need one image, got {len(asked.models)} models and a list of {len(images)}"
        )
    if several and len(asked.queries) != 1:
        raise UsageError(f"several images take one query, got {len(asked.queries)}")
    recordings = []
    for image in as_images(images):
        recordings += asked.record(image)
    asked.warn_of_heads_left_out()
    points = asked.points(seen=recordings)
    if several:
        return draw_columns(
            recordings,
            names_of(images),
            asked.numbers * len(images),
            asked.heads,
            points,
            asked.style,
            width=asked.width,
            title=title_of(asked.models[0]),
            what=f" on {len(images)} images",
            photos="each",
        )
    if len(asked.models) == 1:
        [recording] = recordings
        numbers = asked.numbers[0]
        return draw_heatmap(recording, numbers, asked.heads, points, asked.style, width=asked.width)
    return draw_columns(
        recordings,
        [title_of(model) for model in asked.models],
        asked.numbers,
        asked.heads,
        points,
        asked.style,
        width=asked.width,
        title=f"{len(asked.models)} models",
        photos="first",
    )


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
) -> Figure:
    """Draw the photo with numbered query points and, below it, one row per query and one column per head per layer.
    With one query or one head each layer is one row.

    Args:
        recording: with the "attn" of `layers` (numbers).
        heads: counted from 0, or "mean".
        points: queries, (y, x) in pixels of the input, tokens by name, or "all". Below a transformer's maps stands the
            share of attention that goes to the tokens before the patches.
        style: how maps are drawn; the maps of a layer share a scale.
        width: inches.
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
    )


def draw_columns(
    recordings: Sequence[Recording],
    names: Sequence[str],
    layers: Sequence[Sequence[int]],
    heads: Sequence[Head],
    points: Sequence[Query],
    style: MapStyle = STYLE,
    *,
    width: float | None = None,
    title: str,
    what: str = "",
    photos: str = "",
) -> Figure:
    """Draw for each layer one row per query and head, and one column per recording. With one query and one head, each
    layer is one row.

    Args:
        recordings: one per column, with the "attn" of its `layers`; names: one per column.
        layers: one list of numbers per column, all of the same length.
        heads: counted from 0, or "mean".
        points: queries, (y, x) in pixels of the first recording's input, scaled to the others', tokens by name, or
            "all".
        style: how maps are drawn; the maps of a layer share a scale.
        width: inches.
        title: of the figure; what: text that follows the word attention in the note.
        photos: "each": a row with every column's photo; "first": the first photo, beside the title; "": none.

    Raises:
        UsageError: columns with different numbers of layers.
    """
    if len({len(chosen) for chosen in layers}) > 1:
        counts = [f"{len(chosen)} of {name}" for chosen, name in zip(layers, names, strict=True)]
        raise UsageError(f"models side by side need equally many layers, got {', '.join(counts)}")
    names, meaning = _short_names(names)
    first = recordings[0]
    one_row = len(points) == len(heads) == 1
    grid = len(layers[0]) > 1 and one_row
    blocks = []
    if photos == "each":
        pictures = [photo_of(recording, points) for recording in recordings]
        _write_titles(pictures, names)
        name = "photo" if grid or len(layers[0]) == 1 else ""
        blocks.append(Block([Row(pictures)], name))
    for of_layer in zip(*layers, strict=True):
        columns = list(zip(recordings, of_layer, strict=True))
        rows = []
        for number, point in enumerate(points, start=1):
            for head in heads:
                tiles = []
                for recording, layer in columns:
                    place = cell_of(point, first.img_size, recording.img_size)
                    tiles.append(tile_of(recording, layer, style, head, place, number=number))
                label = []
                if len(points) > 1:
                    label.append(f"query {number}")
                if len(heads) > 1:
                    label.append(head_name(head))
                rows.append(Row(tiles, "\n".join(label)))
        if photos == "first" or not blocks:
            _write_titles(rows[0].tiles, names)
        maps = [map_name(recording.maps[layer], grid) for recording, layer in columns]
        blocks.append(Block(rows, "\n".join(dict.fromkeys(maps))))
    which = f", {head_name(heads[0])}" if len(heads) == 1 else ""
    return map_sheet(
        title,
        blocks,
        style,
        width=width,
        note=f"attention{what}: {queries_name(points)}{which}{meaning}",
        photo=photo_of(first, points) if photos == "first" else None,
    )


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
