"""Attention of query points by head (AA paper, figure 10), of several models side by side (EA paper, figure 4), or of
several images."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np
from matplotlib.figure import Figure
from PIL import Image
from torch import Tensor

from ea_vision.analysis.inputs import ImageSource, find_images, read_image
from ea_vision.base.errors import UsageError
from ea_vision.visualize.figure_options import (
    Heads,
    Layers,
    Models,
    Queries,
    add_style,
    chosen_heads,
    chosen_point,
    chosen_points,
    load_models,
    make_parser,
    numbers_of,
    only,
    parse_heads,
    parse_queries,
    recorded,
    shown_layers,
    style_of,
)
from ea_vision.visualize.image_maps import (
    MEAN,
    Head,
    Query,
    Recording,
    as_models,
    distinct,
    query_name,
    received_or_relative,
    record,
    scaled,
    title_of,
)
from ea_vision.visualize.map_style import (
    STYLE,
    MapStyle,
    aspect_of,
    bars_of,
    head_name,
    map_name,
    map_tile,
    norms_of,
    photo_tile,
    queries_name,
    short_head_name,
)
from ea_vision.visualize.sheet import Block, Row, sheet
from ea_vision.visualize.writing import check_output, each_image, save, save_maps

EXAMPLES = """\
  ea-vision heatmap --model ea_conv_transformer_cifar --layers 1,3 -o maps.png digits:0
  ea-vision heatmap --model runs/digits-ea_conv_transformer_cifar --heads 0,2,mean photo.jpg
  ea-vision heatmap --model ea_aa_resnet50 --layers 8 --queries 40,40 --bare --width 3.3 -o a.pdf photo.jpg
  ea-vision heatmap --model vit_small_patch16_224.dino --layers 12 --queries cls -o class_token.png photo.jpg
  ea-vision heatmap --model aa_resnet34,ea_aa_resnet34 --layers 16,17,18 -o both.png photo.jpg
  ea-vision heatmap --model ea_conv_transformer_cifar --layers 2 --heads 1 -o many.png images/
"""


def plot_heatmap(models: Models, images: ImageSource | Tensor | Sequence[ImageSource | Tensor], layers: Layers = None,
                 heads: Heads = None, queries: Queries = None, *, width: float | None = None, **style) -> Figure:
    """Draw what query points attend to. See `ea_vision.visualize.figure_options` for the arguments.

    One model and image: for each layer a row a head, a column a query. Several models: for each query and head (by
    default the mean of heads) a row a model, a column a layer. Several images of one model: for each layer a row a
    head, a column an image, of one query, or unless it is asked for of the mean of all.
    """
    models, look = as_models(models), MapStyle(**style)
    if isinstance(images, (list, tuple)):
        if len(models) > 1:
            raise UsageError(f"several models need one image, got {len(models)} models and {len(images)} images")
        return _of_images(models[0], images, layers, heads, queries, look, width)
    some = [recorded(model, images, layers, some=True) for model in models]
    recordings, chosen = [recording for recording, _ in some], [layers for _, layers in some]
    every = [layer for layers in chosen for layer in layers]
    points = chosen_points(queries, tuple(recordings[0].image.shape[1:]))
    if len(models) > 1:
        return draw_models(recordings, [numbers_of(layers) for layers in chosen], chosen_heads(heads, every, MEAN),
                           points, look, width=width)
    return draw_heatmap(recordings[0], numbers_of(chosen[0]), chosen_heads(heads, every), points, look, width=width)


def _of_images(model, images, layers, heads, queries, style, width) -> Figure:
    if not images:
        raise UsageError("at least one image required, got none")
    names = [Path(image).name if isinstance(image, (str, Path)) else f"image {number}"
             for number, image in enumerate(images, start=1)]
    named = distinct([replace(model, label=name) for name in names])
    some = [recorded(one, image, layers, some=True) for one, image in zip(named, images, strict=True)]
    recordings, chosen = [recording for recording, _ in some], some[0][1]
    if queries is not None and len(queries) != 1:
        raise UsageError(f"several images take one query, got {len(queries)}")
    point = None if queries is None else chosen_point(queries[0], tuple(recordings[0].image.shape[1:]))
    return draw_images(recordings, numbers_of(chosen), chosen_heads(heads, chosen), point, style, width=width,
                       title=title_of(model))


def draw_heatmap(recording: Recording, layers: Sequence[int], heads: Sequence[Head], points: Sequence[Query],
                 style: MapStyle = STYLE, *, width: float | None = None) -> Figure:
    """Draw the photo with numbered query points; below it, for each layer, a row a head and a column a query.

    Args:
        recording: with the "attn" of `layers` (numbers).
        heads: counted from 0, or "mean".
        points: queries, (y, x) in pixels of the input or tokens by name. Of a transformer each map says what share of
            attention goes to the tokens before the patches.
        style: how maps are drawn; the maps of a layer share a scale.
        width: inches.
    """
    finest = max((recording.maps[number].feat_size for number in layers), key=math.prod)
    groups = [[recording.relative_map(number, point, head) for head in heads for point in points] for number in layers]
    norms = norms_of(groups, style)
    bars, common = bars_of(norms, style)
    blocks = []
    for number, maps, scales, own in zip(layers, groups, norms, bars, strict=True):
        rows = []
        for row, head in enumerate(heads):
            tiles = []
            for col, point in enumerate(points):
                index = row * len(points) + col
                title = f"query {col + 1}" if row == 0 and len(points) > 1 else ""
                tiles.append(map_tile(maps[index], recording, scales[index], style, point=point, number=col + 1,
                                      title=title, note=recording.beside_patches(number, point, head)))
            rows.append(Row(tiles, short_head_name(head), aspect=aspect_of(recording)))
        blocks.append(Block(rows if len(points) > 1 else _across(rows), map_name(recording.maps[number]), own))
    note = f"attention by head; {queries_name(points)}" + ("; mean: of all heads" if MEAN in heads else "")
    return sheet(title_of(recording.model), blocks, width=width, photo=photo_tile(recording, style, points, finest),
                 aspect=aspect_of(recording), note=note, bars=common)


def _across(rows: Sequence[Row]) -> list[Row]:
    """Rows of one tile each, side by side."""
    tiles = [replace(row.tiles[0], title=row.label) for row in rows]
    return [Row(tiles, aspect=rows[0].aspect)]


def draw_models(recordings: Sequence[Recording], layers: Sequence[Sequence[int]], heads: Sequence[Head],
                points: Sequence[Query], style: MapStyle = STYLE, *, width: float | None = None) -> Figure:
    """Draw for each query and head a block: a row a model under its name, a column a layer.

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
    first = recordings[0]
    queries = [(number, point, head) for number, point in enumerate(points, start=1) for head in heads]
    groups = [[recording.relative_map(layer, _place(point, first, recording), head)
               for recording, chosen in zip(recordings, layers, strict=True) for layer in chosen]
              for _, point, head in queries]
    norms = norms_of(groups, style)
    bars, common = bars_of(norms, style)
    blocks = []
    for (number, point, head), maps, scales, own in zip(queries, groups, norms, bars, strict=True):
        rows = []
        for index, (recording, chosen) in enumerate(zip(recordings, layers, strict=True)):
            at = index * len(layers[0])
            rows.append(_model_row(recording, chosen, _place(point, first, recording), head, number, maps[at:],
                                   scales[at:], style))
        blocks.append(Block(rows, f"query {number} ({query_name(point)}), {head_name(head)}", own))
    finest = max((first.maps[layer].feat_size for layer in layers[0]), key=math.prod)
    return sheet(" and ".join(title_of(recording.model) for recording in recordings[:2]) if len(recordings) == 2 else
                 f"{len(recordings)} models", blocks, width=width, photo=photo_tile(first, style, points, finest),
                 aspect=aspect_of(first), note="a row a model, a column a layer", bars=common)


def _place(point: Query, first: Recording, recording: Recording) -> Query:
    """The query in another model's input."""
    return scaled(point, tuple(first.image.shape[1:]), tuple(recording.image.shape[1:]))


def _model_row(recording: Recording, layers: Sequence[int], place: Query, head: Head, number: int,
               maps: Sequence[np.ndarray], scales: Sequence, style: MapStyle) -> Row:
    tiles = []
    for layer, values, scale in zip(layers, maps, scales, strict=False):
        height, width = recording.maps[layer].feat_size
        tiles.append(map_tile(values, recording, scale, style, point=place, number=number,
                              title=f"layer {layer}, {height}x{width}",
                              note=recording.beside_patches(layer, place, head)))
    return Row(tiles, heading=title_of(recording.model), aspect=aspect_of(recording))


def draw_images(recordings: Sequence[Recording], layers: Sequence[int], heads: Sequence[Head],
                query: Query | None = None, style: MapStyle = STYLE, *, width: float | None = None,
                title: str = "") -> Figure:
    """Draw for each layer a row a head and a column an image, under its recording's label.

    Args:
        recordings: one an image, with the "attn" of `layers` (numbers).
        heads: counted from 0, or "mean".
        query: in pixels of the input or a token by name, the same for all; None: the mean of all queries, which is
            what every pixel gets.
        style: how maps are drawn; the maps of a layer share a scale.
        width: inches.
        title: the model.
    """
    first = recordings[0]
    groups = [[received_or_relative(recording, layer, query, head) for head in heads for recording in recordings]
              for layer in layers]
    norms = norms_of(groups, style)
    bars, common = bars_of(norms, style)
    blocks = []
    for layer, maps, scales, own in zip(layers, groups, norms, bars, strict=True):
        tiles = [map_tile(values, recording, scale, style, point=query,
                          title=recording.model.label if index < len(recordings) else "")
                 for index, (values, scale, recording) in enumerate(
                     zip(maps, scales, list(recordings) * len(heads), strict=True))]
        rows = [Row(tiles[at:at + len(recordings)], head_name(head) if len(heads) > 1 else "", aspect=aspect_of(first))
                for at, head in zip(range(0, len(tiles), len(recordings)), heads, strict=True)]
        blocks.append(Block(rows, map_name(first.maps[layer]), own))
    whose = "mean of all queries" if query is None else f"query ({query_name(query)})"
    which = f", {head_name(heads[0])}" if len(heads) == 1 else ""
    return sheet(title, blocks, width=width, note=f"attention on {len(recordings)} images: {whose}{which}", bars=common)


def main(argv: Sequence[str] | None = None) -> int:
    parser = make_parser(__doc__, EXAMPLES, output="attention.png", layers=None)
    add_style(parser)
    options = parser.parse_args(argv)
    style = style_of(options)
    models = load_models(options)
    layers = shown_layers(options, models)
    heads = parse_heads(options.heads, [layer for chosen in layers for layer in chosen])
    paths = find_images(options.images)
    if len(paths) > 1 and len(models) == 1:
        return _images_command(options, models[0], layers[0], heads, paths, style)
    points = parse_queries(options.queries, models[0].img_size)
    for _, image, output in each_image(options):
        recordings = [record(model, image, chosen) for model, chosen in zip(models, layers, strict=True)]
        if len(models) > 1:
            figure = draw_models(recordings, [numbers_of(chosen) for chosen in layers], heads, points, style,
                                 width=options.width)
        else:
            figure = draw_heatmap(recordings[0], numbers_of(layers[0]), heads, points, style, width=options.width)
        save(figure, output, options.dpi)
        if options.npz:
            save_maps(recordings, output)
    return 0


def _images_command(options, model, layers, heads, paths: Iterable[str], style: MapStyle) -> int:
    output = check_output(Path(options.output), options.suffixes)
    query = only(parse_queries(options.queries, model.img_size), "query") if options.queries else None
    named = distinct([replace(model, label=Path(path).name) for path in paths])
    pictures: list[Image.Image] = [read_image(path, exif_rotation=options.exif_rotation) for path in paths]
    recordings = [record(one, picture, layers) for one, picture in zip(named, pictures, strict=True)]
    figure = draw_images(recordings, numbers_of(layers), heads, query, style, width=options.width,
                         title=title_of(model))
    save(figure, output, options.dpi)
    print("written:", output, *([save_maps(recordings, output)] if options.npz else []))
    return 0
