"""Attention of query points by head (AA paper, figure 10), of several models side by side (EA paper, figure 4), or of
several images."""

from collections.abc import Sequence
from string import ascii_uppercase

from matplotlib.figure import Figure

from ea_vision.base.errors import UsageError
from ea_vision.visualize.figure_options import make_parser, run_figure
from ea_vision.visualize.figure_request import (
    AnyImage,
    FigureRequest,
    Heads,
    Layers,
    Models,
    Queries,
    as_images,
    only,
    title_of,
)
from ea_vision.visualize.map_style import STYLE, MapStyle, map_sheet
from ea_vision.visualize.sheet import Block, Row, in_one_row
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
    if isinstance(images, (list, tuple)) and queries is None:
        queries = ALL
    request = FigureRequest(models, layers, heads, queries, some=True, **how)
    images = as_images(images)
    many_images = len(images) > 1
    if many_images and len(request.models) > 1:
        raise UsageError(
            f"several models need one image, got {len(request.models)} models and a list of {len(images)}"
        )
    if many_images:
        only(request.queries, "query of several images")
    recordings = []
    for image in images:
        recordings += request.record(image)
    points = request.points(seen=recordings)
    heads = request.heads(recordings)

    def draw(*layers: Sequence[int], style: MapStyle, **page) -> Figure:
        if many_images:
            layers = layers * len(images)
            page |= {"names": names_of(images), "photos": True}
        return draw_heatmap(recordings, layers, heads, points, style, **page)

    return request.fit_page(draw)


def draw_heatmap(
    recordings: Sequence[Recording],
    layers: Sequence[Sequence[int]],
    heads: Sequence[Head],
    points: Sequence[Query],
    style: MapStyle = STYLE,
    *,
    names: Sequence[str] = (),
    title: str = "",
    photos: bool = False,
    **page,
) -> Figure:
    """Draw the maps of queries and heads, one block per layer. The columns are the recordings if there are several,
    else the heads, or of one head the queries.

    Args:
        recordings: with the "attn" of their `layers`: of one image by several models, or of several images.
        layers: one list of numbers per recording, all of the same length.
        heads: counted from 0, or "mean".
        points: queries, (y, x) in pixels of the first recording's input, scaled to the others', tokens by name, or
            "all". Below a transformer's maps stands the share of attention that goes to the tokens before the patches.
        style: how maps are drawn.
        names: of the recordings; default: the models' titles.
        title: of the figure; default: the number of models, or the only one.
        photos: whether the recordings are of several images, whose photos are drawn above their maps.
        **page: width and left_out, see `ea_vision.visualize.sheet.sheet`.

    Raises:
        UsageError: models with different numbers of layers.
    """
    first = recordings[0]
    titles = [title_of(recording.model) for recording in recordings]
    names = names or titles
    if len({len(numbers) for numbers in layers}) > 1:
        counts = [f"{len(numbers)} of {name}" for numbers, name in zip(layers, names, strict=True)]
        raise UsageError(f"models side by side need equally many layers, got {', '.join(counts)}")
    names, meaning = _short_names(names)
    note = f"attention on {len(recordings)} images" if photos else "attention"
    if len(heads) == 1:
        note += f", {head_name(heads[0])}"
    elif len(recordings) == 1:
        note += " by head"
    note += f"; {queries_name(points)}"
    one_model = photos or len(recordings) == 1
    blocks = []
    if photos:
        tiles = [photo_of(recording, points) for recording in recordings]
        photo_name = "photo" if len(heads) == 1 or len(layers[0]) == 1 else ""
        blocks.append(Block([Row(tiles)], photo_name))
    for numbers in zip(*layers, strict=True):
        rows = _rows(recordings, numbers, heads, points, style)
        in_a_grid = len(layers[0]) > 1 and len(rows) == 1
        pairs = zip(recordings, numbers, strict=True)
        sizes = [map_name(recording.maps[number], in_a_grid) for recording, number in pairs]
        blocks.append(Block(rows, "\n".join(dict.fromkeys(sizes))))
    if len(recordings) > 1:
        note += meaning
        for block in blocks[:1] if photos else blocks:
            for tile, name in zip(block.rows[0].tiles, names, strict=True):
                tile.title = name
    return map_sheet(
        title or (titles[0] if one_model else f"{len(recordings)} models"),
        blocks,
        style,
        note=note,
        photo=None if photos else photo_of(first, points),
        **page,
    )


def _rows(
    recordings: Sequence[Recording],
    numbers: Sequence[int],
    heads: Sequence[Head],
    points: Sequence[Query],
    style: MapStyle,
) -> list[Row]:
    """Return the rows of a layer, whose number each recording has in `numbers`."""
    pairs = list(zip(recordings, numbers, strict=True))
    lines = [[(*pair, head) for pair in pairs] for head in heads]
    if len(pairs) == 1:  # its heads stand side by side
        lines = [[line[0] for line in lines]]
    rows = []
    for index, point in enumerate(points, start=1):
        for line in lines:
            tiles = []
            for recording, number, head in line:
                place = cell_of(point, recordings[0].img_size, recording.img_size)
                title = "" if rows or len(pairs) > 1 else head_name(head)
                tiles.append(
                    tile_of(recording, number, style, head, place, title=title, number=index)
                )
            labels = [f"query {index}"] if len(points) > 1 else []
            if len(lines) > 1:
                labels.append(head_name(head))
            rows.append(Row(tiles, "\n".join(labels)))
    single_tiles = len(pairs) == len(heads) == 1 < len(points)
    return in_one_row(rows) if single_tiles else rows


def _short_names(names: Sequence[str]) -> tuple[Sequence[str], str]:
    """Return names that fit above a map, and a legend: letters with their meanings unless all names are short."""
    if all(len(name) <= 14 for name in names):
        return names, ""
    letters = [ascii_uppercase[index % 26] + "'" * (index // 26) for index in range(len(names))]
    meanings = map(": ".join, zip(letters, names, strict=True))
    return letters, "\n" + "; ".join(meanings)


def main(argv: Sequence[str] | None = None) -> int:
    parser = make_parser(__doc__, EXAMPLES, output="attention.png", some=True)
    return run_figure(parser.parse_args(argv), plot_heatmap, together=True)
