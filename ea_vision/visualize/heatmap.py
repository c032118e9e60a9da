"""Attention of query points by head (AA paper, figure 10), of several models side by side (EA paper, figure 4), or of
several images."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from matplotlib.figure import Figure
from torch import Tensor

from ea_vision.base.errors import UsageError
from ea_vision.recorder.inputs import ImageSource, find_images, names_of, read_image
from ea_vision.visualize.figure_options import (
    Asked,
    Heads,
    Layers,
    Models,
    Queries,
    make_parser,
    only,
    style_of,
)
from ea_vision.visualize.image_maps import (
    MEAN,
    Head,
    Query,
    Recording,
    as_models,
    cell_of_query,
    distinct,
    query_name,
    record,
    title_of,
)
from ea_vision.visualize.map_style import (
    STYLE,
    MapStyle,
    aspect_of,
    head_name,
    letters,
    map_of,
    map_sheet,
    names_of_layers,
    queries_name,
    short_head_name,
)
from ea_vision.visualize.sheet import Row
from ea_vision.visualize.writing import check_output, each_figure, save, save_maps

EXAMPLES = """\
  ea-vision heatmap --model ea_conv_transformer_cifar --layers 1,3 -o maps.png digits#0
  ea-vision heatmap --model runs/digits-ea_conv_transformer_cifar --heads 0,2,mean photo.jpg
  ea-vision heatmap --model ea_aa_resnet50 --layers 8 --queries 40,40 --bare --width 3.3 -o a.pdf photo.jpg
  ea-vision heatmap --model vit_small_patch16_224.dino --layers 12 --queries cls -o class_token.png photo.jpg
  ea-vision heatmap --model aa_resnet34,ea_aa_resnet34 --layers 16,17,18 -o both.png photo.jpg
  ea-vision heatmap --model ea_conv_transformer_cifar --layers 2 --heads 1 -o many.png images/
"""


def plot_heatmap(models: Models, images: ImageSource | Tensor | Sequence[ImageSource | Tensor], layers: Layers = None,
                 heads: Heads = None, queries: Queries = None, *, width: float | None = None, **style) -> Figure:
    """Draw what query points attend to. See `ea_vision.visualize.figure_options` for the arguments.

    One model and image: for each layer a row a head, a column a query; of one query a row a layer, a column a head.
    Several models: for each query and head (by default the mean of heads) a row a model, a column a layer. Several
    images of one model: for each layer a row a head, a column an image, of one query, or unless it is asked for of the
    mean of all.
    """
    models, look = as_models(models), MapStyle(**style)
    asked = Asked(models, layers, heads, queries, some=True, default_heads=MEAN if len(models) > 1 else f"all,{MEAN}")
    if not isinstance(images, (list, tuple)):
        return _draw(asked, images, look, width)[0]
    if len(models) > 1:
        raise UsageError(f"several models need one image, got {len(models)} models and {len(images)} images")
    if not images:
        raise UsageError("at least one image required, got none")
    if queries is not None and len(queries) != 1:
        raise UsageError(f"several images take one query, got {len(queries)}")
    return _draw_images(asked, images, names_of(images), look, width)[0]


def _draw(asked: Asked, image: ImageSource | Tensor, style: MapStyle,
          width: float | None) -> tuple[Figure, list[Recording]]:
    recordings = asked.record(image)
    points = asked.points(recordings[0].img_size)
    if len(recordings) > 1:
        return draw_models(recordings, asked.numbers, asked.heads, points, style, width=width), recordings
    return draw_heatmap(recordings[0], asked.numbers[0], asked.heads, points, style, width=width), recordings


def _draw_images(asked: Asked, images: Sequence, names: Sequence[str], style: MapStyle,
                 width: float | None) -> tuple[Figure, list[Recording]]:
    [model], [layers] = asked.models, asked.layers
    named = distinct([replace(model, label=name) for name in names])
    recordings = [record(one, image, layers) for one, image in zip(named, images, strict=True)]
    point = asked.points(recordings[0].img_size)[0] if asked.queries else None
    return draw_images(recordings, asked.numbers[0], asked.heads, point, style, width=width,
                       title=title_of(model)), recordings


def head_rows(recording: Recording, number: int, heads: Sequence[Head], points: Sequence[Query], style: MapStyle,
              name=short_head_name, shares: bool = True) -> list[Row]:
    """Return a row a head, a column a query; `shares`: below a map what goes to the tokens before the patches."""
    return [Row([map_of(recording.relative_map(number, point, head), recording, style,
                        f"query {col}" if row == 0 and len(points) > 1 else "",
                        recording.beside_patches(number, point, head) if shares else "", point=point, number=col)
                 for col, point in enumerate(points, start=1)], name(head), aspect=aspect_of(recording))
            for row, head in enumerate(heads)]


def draw_heatmap(recording: Recording, layers: Sequence[int], heads: Sequence[Head], points: Sequence[Query],
                 style: MapStyle = STYLE, *, width: float | None = None) -> Figure:
    """Draw the photo with numbered query points; below it, for each layer, a row a head and a column a query, or of one
    query a row a layer and a column a head.

    Args:
        recording: with the "attn" of `layers` (numbers).
        heads: counted from 0, or "mean".
        points: queries, (y, x) in pixels of the input or tokens by name. Of a transformer each map says what share of
            attention goes to the tokens before the patches.
        style: how maps are drawn; the maps of a layer share a scale.
        width: inches.
    """
    groups = []
    for number, name in zip(layers, names_of_layers(recording, layers, len(points) == 1), strict=True):
        rows = head_rows(recording, number, heads, points, style)
        if len(points) == 1:  # side by side
            rows = [Row([replace(row.tiles[0], title=row.label) for row in rows], aspect=rows[0].aspect)]
        groups.append((name, rows))
    note = f"attention by head; {queries_name(points)}" + ("; mean: of all heads" if MEAN in heads else "")
    return map_sheet(title_of(recording.model), groups, style, width=width, note=note, photo=recording, points=points,
                     feat_size=recording.finest(layers))


def draw_models(recordings: Sequence[Recording], layers: Sequence[Sequence[int]], heads: Sequence[Head],
                points: Sequence[Query], style: MapStyle = STYLE, *, width: float | None = None) -> Figure:
    """Draw for each query and head a block, a row a model, a column a layer; of one layer a row a query and head, a
    column a model.

    Args:
        recordings: of the same image, one a model, with the "attn" of its `layers`.
        layers: numbers, by model; as many for each.
        heads: counted from 0, or "mean".
        points: queries, (y, x) in pixels of the first model's input, scaled to the others', or tokens by name.
        style: how maps are drawn; the maps of a block share a scale.
        width: inches.

    Raises:
        UsageError: models with different numbers of layers.
    """
    if any(len(chosen) != len(layers[0]) for chosen in layers):
        counts = [f"{len(chosen)} of {r.model.label}" for chosen, r in zip(layers, recordings, strict=True)]
        raise UsageError(f"models side by side need as many layers each, got {', '.join(counts)}")
    first, groups = recordings[0], []
    names, meaning = letters(recordings)
    for number, point in enumerate(points, start=1):
        for head in heads:
            rows = []
            for recording, chosen, name in zip(recordings, layers, names, strict=True):
                place, tiles = cell_of_query(point, first.img_size, recording.img_size), []
                for layer in chosen:
                    title = f"layer {layer}, {'x'.join(map(str, recording.maps[layer].feat_size))}"
                    tiles.append(map_of(recording.relative_map(layer, place, head), recording, style, title,
                                        recording.beside_patches(layer, place, head), point=place, number=number))
                rows.append(Row(tiles, name, aspect=aspect_of(recording)))
            title = f"query {number} ({query_name(point)}), {head_name(head)}"
            if len(layers[0]) == 1:
                rows = [Row([replace(tile, title=f"{row.label}\n{tile.title}") for row in rows for tile in row.tiles],
                            aspect=aspect_of(first))]
            elif all([tile.title for tile in row.tiles] == [tile.title for tile in rows[0].tiles] for row in rows):
                rows[1:] = [replace(row, tiles=[replace(tile, title="") for tile in row.tiles]) for row in rows[1:]]
            groups.append((title, rows))
    if len(groups) > 1 and len(layers[0]) == 1:  # of a grid
        groups = [(f"query {number}\n{head_name(head)}", groups.pop(0)[1])
                  for number in range(1, len(points) + 1) for head in heads]
        meaning += f"\n{queries_name(points)}" if len(points) > 1 else ""
    note = "attention; a column a model" if len(layers[0]) == 1 else "attention; a row a model, a column a layer"
    return map_sheet(f"{len(recordings)} models", groups, style, width=width, note=note + meaning, photo=first,
                     points=points, feat_size=first.finest(layers[0]))


def draw_images(recordings: Sequence[Recording], layers: Sequence[int], heads: Sequence[Head],
                query: Query | None = None, style: MapStyle = STYLE, *, width: float | None = None,
                title: str = "", note: str = "") -> Figure:
    """Draw for each layer a row a head and a column an image, under its recording's label; of one head a row a layer.

    Args:
        recordings: one an image, with the "attn" of `layers` (numbers).
        heads: counted from 0, or "mean".
        query: in pixels of the input or a token by name, the same for all; None: the mean of all queries, which is
            what every pixel gets.
        style: how maps are drawn; the maps of a layer share a scale.
        width: inches.
        title: the model; note: what else is to be said.
    """
    first = recordings[0]
    groups = []
    for layer, name in zip(layers, names_of_layers(first, layers, len(heads) == 1), strict=True):
        groups.append((name, [Row([
            map_of(recording.received(layer, head) if query is None else recording.relative_map(layer, query, head),
                   recording, style, recording.model.label if row == 0 else "", point=query)
            for recording in recordings], head_name(head) if len(heads) > 1 else "", aspect=aspect_of(first))
            for row, head in enumerate(heads)]))
    whose = "mean of all queries" if query is None else f"query {query_name(query)}"
    which = f", {head_name(heads[0])}" if len(heads) == 1 else ""
    return map_sheet(title, groups, style, width=width,
                     note=f"attention on {len(recordings)} images: {whose}{which}" + (f"\n{note}" if note else ""))


def main(argv: Sequence[str] | None = None) -> int:
    options = make_parser(__doc__, EXAMPLES, output="attention.png", layers=None).parse_args(argv)
    style = style_of(options)
    asked, paths = Asked.by_options(options, some=True), find_images(options.images)
    if len(paths) == 1 or len(asked.models) > 1:
        return each_figure(options, lambda image: _draw(asked, image, style, options.width))
    output = check_output(Path(options.output), options.suffixes)
    if options.queries:
        only(options.queries, "query")
    pictures = [read_image(path, exif_rotation=options.exif_rotation) for path in paths]
    figure, recordings = _draw_images(asked, pictures, names_of(paths), style, options.width)
    save(figure, output, options.dpi)
    print("written:", output, *([save_maps(recordings, output)] if options.npz else []))
    return 0
