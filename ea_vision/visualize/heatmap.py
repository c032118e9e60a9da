"""Attention of query points by head (AA paper, figure 10), of several models side by side (EA paper, figure 4), or of
several images."""

from collections.abc import Sequence
from itertools import product

from matplotlib.figure import Figure

from ea_vision.base.errors import UsageError
from ea_vision.recorder.inputs import names_of
from ea_vision.visualize.figure_options import (
    Asked,
    Heads,
    Layers,
    Models,
    Queries,
    each_figure,
    make_parser,
)
from ea_vision.visualize.image_maps import (
    AnyImage,
    Head,
    Query,
    Recording,
    as_images,
    cell_of,
    title_of,
)
from ea_vision.visualize.map_style import (
    STYLE,
    MapStyle,
    attention_of,
    head_name,
    map_name,
    map_sheet,
    photo_of,
    queries_name,
    short_names,
)
from ea_vision.visualize.sheet import Row

EXAMPLES = """\
  ea-vision heatmap --model ea_conv_transformer_cifar --layers 1,3 -o maps.png digits#0
  ea-vision heatmap --model runs/digits-ea_conv_transformer_cifar --heads 0,2,mean photo.jpg
  ea-vision heatmap --model ea_aa_resnet50 --layers 8 --queries 40,40 --bare --width 3.3 -o a.pdf photo.jpg
  ea-vision heatmap --model vit_small_patch16_224.dino --layers 12 --queries cls -o class_token.png photo.jpg
  ea-vision heatmap --model aa_resnet34,ea_aa_resnet34 --layers 16,17,18 -o both.png photo.jpg
  ea-vision heatmap --model ea_conv_transformer_cifar --layers 2 --heads 1 -o many.png images/
"""


def plot_heatmap(
    models: Models,
    images: AnyImage | Sequence[AnyImage],
    layers: Layers = None,
    heads: Heads = None,
    queries: Queries = None,
    *,
    width: float | None = None,
    **style,
) -> Figure:
    """Draw what query points attend to. See `ea_vision.visualize.figure_options` for the arguments.

    One model and image: for each layer a row a query, a column a head; of one query, or one head, a row a layer.
    Several models, or several images of one: for each layer a row a query and head, a column a model or an image. By
    default models show the mean of heads, and images the mean of all queries.
    """
    return _draw(Asked(models, layers, heads, queries, some=True, width=width, **style), images)


def _draw(asked: Asked, images: AnyImage | Sequence[AnyImage]) -> Figure:
    models, several = asked.models, isinstance(images, (list, tuple))
    if several and len(models) > 1:
        raise UsageError(
            f"several models need one image, got {len(models)} models and {len(images)} images"
        )
    if several and asked.queries and len(asked.queries) != 1:
        raise UsageError(f"several images take one query, got {len(asked.queries)}")
    recordings = [recording for image in as_images(images) for recording in asked.record(image)]
    points = asked.points(seen=recordings)
    if several:
        return draw_columns(
            recordings,
            names_of(images),
            asked.numbers * len(images),
            asked.heads,
            points if asked.queries else [None],
            **asked.how,
            title=title_of(models[0]),
            what=f" on {len(images)} images",
        )
    if len(models) == 1:
        return draw_heatmap(recordings[0], asked.numbers[0], asked.heads, points, **asked.how)
    return draw_columns(
        recordings,
        [title_of(model) for model in models],
        asked.numbers,
        asked.heads,
        points,
        **asked.how,
        title=f"{len(models)} models",
        photo=True,
    )


def head_rows(
    recording: Recording,
    layer: int,
    heads: Sequence[Head],
    points: Sequence[Query],
    style: MapStyle,
) -> list[Row]:
    """Return a row a query, a column a head; of one head a row whose columns are queries."""
    one_head = len(heads) == 1 and len(points) > 1
    rows = [
        [
            attention_of(
                recording,
                layer,
                head,
                point,
                style,
                f"query {number}" if one_head else head_name(head) if number == 1 else "",
                number,
            )
            for head in heads
        ]
        for number, point in enumerate(points, start=1)
    ]
    if one_head:
        return [Row([tile for [tile] in rows])]
    return [
        Row(tiles, f"query {number}" if len(points) > 1 else "")
        for number, tiles in enumerate(rows, start=1)
    ]


def draw_heatmap(
    recording: Recording,
    layers: Sequence[int],
    heads: Sequence[Head],
    points: Sequence[Query],
    style: MapStyle = STYLE,
    *,
    width: float | None = None,
) -> Figure:
    """Draw the photo with numbered query points; below it, for each layer, a row a query and a column a head, or of one
    query or head a row a layer.

    Args:
        recording: with the "attn" of `layers` (numbers).
        heads: counted from 0, or "mean".
        points: queries, (y, x) in pixels of the input or tokens by name. Of a transformer each map says what share of
            attention goes to the tokens before the patches.
        style: how maps are drawn; the maps of a layer share a scale.
        width: inches.
    """
    grid = len(layers) > 1 and 1 in (len(points), len(heads))
    groups = [
        (map_name(recording.maps[layer], grid), head_rows(recording, layer, heads, points, style))
        for layer in layers
    ]
    which = f", {head_name(heads[0])}" if len(heads) == 1 else " by head"
    return map_sheet(
        title_of(recording.model),
        groups,
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
    points: Sequence[Query | None],
    style: MapStyle = STYLE,
    *,
    width: float | None = None,
    title: str,
    what: str = "",
    photo: bool = False,
) -> Figure:
    """Draw for each layer a row a query and head, and a column a recording; of one query and head a row a layer.

    Args:
        recordings: by column, with the "attn" of its `layers`; names: of each.
        layers: numbers, by column; as many for each.
        heads: counted from 0, or "mean".
        points: queries, (y, x) in pixels of the first recording's input, scaled to the others', or tokens by name;
            [None]: the mean of all queries, which is what every pixel gets.
        style: how maps are drawn; the maps of a layer share a scale.
        width: inches.
        title: of the figure; what: of the attention is drawn; photo: whether to draw the first recording's, with the
            query points.

    Raises:
        UsageError: columns with different numbers of layers.
    """
    if len({len(chosen) for chosen in layers}) > 1:
        counts = [f"{len(chosen)} of {name}" for chosen, name in zip(layers, names, strict=True)]
        raise UsageError(f"models side by side need as many layers each, got {', '.join(counts)}")
    names, meaning = short_names(names)
    first, groups = recordings[0], []
    grid = len(layers[0]) > 1 and len(points) == len(heads) == 1
    for of_layer in zip(*layers, strict=True):
        columns, rows = list(zip(recordings, of_layer, names, strict=True)), []
        for (number, point), head in product(enumerate(points, start=1), heads):
            label = [f"query {number}"] * (len(points) > 1) + [head_name(head)] * (len(heads) > 1)
            rows.append(
                Row(
                    [
                        attention_of(
                            recording,
                            layer,
                            head,
                            point and cell_of(point, first.img_size, recording.img_size),
                            style,
                            "" if rows else name,
                            number,
                        )
                        for recording, layer, name in columns
                    ],
                    "\n".join(label),
                )
            )
        named = dict.fromkeys(
            map_name(recording.maps[layer], grid) for recording, layer, _ in columns
        )
        groups.append(("\n".join(named), rows))
    whose = "mean of all queries" if points[0] is None else queries_name(points)
    which = f", {head_name(heads[0])}" if len(heads) == 1 else ""
    return map_sheet(
        title,
        groups,
        style,
        width=width,
        note=f"attention{what}: {whose}{which}{meaning}",
        photo=photo_of(first, points) if photo else None,
    )


def main(argv: Sequence[str] | None = None) -> int:
    options = make_parser(
        __doc__, EXAMPLES, output="attention.png", layers=None, heads=""
    ).parse_args(argv)
    asked = Asked.by_options(options, some=True)
    return each_figure(options, asked, _draw, together=len(asked.models) == 1)
