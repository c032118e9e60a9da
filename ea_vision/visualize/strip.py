"""One query through the layers of a chain: previous, own and convolved logits, the attention they give, and what that
is without either (PA paper, figure 8; EA paper, figure 11). The suffix .gif makes a film of the attention."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch
from matplotlib.figure import Figure
from torch import Tensor

from ea_vision.base.errors import UsageError
from ea_vision.recorder.inputs import ImageSource
from ea_vision.recorder.loading import load_model
from ea_vision.recorder.recording import PARTS
from ea_vision.visualize import writing
from ea_vision.visualize.figure_options import (
    MIDDLE,
    Asked,
    Heads,
    Layers,
    Model,
    Models,
    Queries,
    by_epoch,
    checkpoints_of,
    load_models,
    make_parser,
    only,
    style_of,
    targets_of,
)
from ea_vision.visualize.heatmap import head_rows
from ea_vision.visualize.image_maps import (
    MEAN,
    WITHOUT,
    Head,
    Query,
    Recording,
    add_contributions,
    as_model,
    as_models,
    query_map,
    query_name,
    title_of,
)
from ea_vision.visualize.map_style import (
    STYLE,
    MapStyle,
    aspect_of,
    before_shares,
    equation,
    head_name,
    layers_name,
    map_label,
    map_name,
    map_of,
    map_sheet,
    norms_of,
    photo_of,
    queries_name,
    query_row,
    scale_bar,
)
from ea_vision.visualize.sheet import Block, Row, Tile, sheet

ARROW = "\N{RIGHTWARDS ARROW}"
EXAMPLES = """\
  ea-vision strip --model ea_conv_transformer_cifar --queries 16,16 --heads 1 -o strip.png photo.jpg
  ea-vision strip --model pa_aa_resnet50 --layers 5-10 --heads 3 --width 3.3 -o strip.pdf photo.jpg
  ea-vision strip --model runs/ea --through checkpoints --layers 1-3 -o training.png photo.jpg
  ea-vision strip --model ea_aa_resnet34 --layers 1-20 --heads mean -o layers.gif photo.jpg
  ea-vision strip --model runs/ea --through checkpoints --layers 3 -o training.gif photo.jpg
"""
Frame = tuple[Recording, int]  # and the number of the layer to show


def plot_strip(model: Model, image: ImageSource | Tensor, layers: Layers = None, head: Head = 0,
               query: Query | None = None, *, through: str = "layers", width: float | None = None, **style) -> Figure:
    """Draw one query of one head through the layers of each chain, part by part, a row a layer; or through training.

    Args:
        model, image, layers, width, **style: see `ea_vision.visualize.figure_options`.
        head: counted from 0, or "mean".
        query: default: the middle.
        through: "layers", or "checkpoints": attention only, by epoch of the checkpoints and snapshots of a run folder.
    """
    if through not in ("layers", "checkpoints"):
        raise UsageError(f"through must be layers or checkpoints, got {through!r}")
    training = through == "checkpoints"
    models = by_epoch([load_model(file) for file in checkpoints_of([str(model)])]) if training else [as_model(model)]
    asked = Asked(models, layers, [head], None if query is None else [query])
    return _draw(asked, image, training, MapStyle(**style), width)[0]


def _draw(asked: Asked, image: ImageSource | Tensor, training: bool, style: MapStyle,
          width: float | None) -> tuple[Figure, list[Recording]]:
    parts = [part for part in PARTS[:1 if training else None] if any(part in layer.parts for layer in asked.layers[0])]
    recordings = asked.record(image, parts)
    what = asked.numbers[0], asked.heads[0], asked.points(recordings[0].img_size, MIDDLE)[0], style
    return (draw_training(recordings, *what, width=width) if training else
            draw_strip(recordings[0], *what, width=width)), recordings


def chains_of(recording: Recording, layers: Sequence[int]) -> list[list[int]]:
    """Group layers by chain; without evolution by the size of their maps, layers in a row together."""
    evolving = any(recording.maps[layer].prev_logits is not None for layer in layers)
    chains: list[list[int]] = []
    for layer in layers:
        maps = recording.maps[layer]
        begins = evolving and maps.prev_logits is None
        if not chains or begins or maps.feat_size != recording.maps[chains[-1][-1]].feat_size:
            chains.append([])
        chains[-1].append(layer)
    return chains


def columns_of(recording: Recording, layers: Sequence[int]) -> dict[str, str]:
    """Return the parts to draw, with their names, in the order in which a layer computes them; no two columns alike.

    EA convolves the mixture of the previous and the layer's own logits, PA the previous ones alone. Logits that are the
    convolved ones (EA's beta = 1) have no column of their own, nor have own logits where nothing evolves.
    """
    maps = [recording.maps[layer] for layer in layers]
    evolved = [layer for layer in maps if layer.prev_logits is not None]
    if not evolved:
        return {"logits": "logits", "attn": f"{ARROW} attn."} if all(m.logits is not None for m in maps) else {
            "attn": "attention"}
    convolved = [layer for layer in evolved if layer.conv_logits is not None]
    own_too = any("self_logits" in before_shares(recording.model.model, layer.name) for layer in convolved)
    order = ("prev_logits", *(("self_logits", "conv_logits") if own_too else ("conv_logits", "self_logits")), "logits")
    drawn = [part for part in order if any(getattr(layer, part) is not None for layer in maps)]
    if len(convolved) == len(evolved) and all(torch.equal(layer.conv_logits, layer.logits) for layer in convolved):
        drawn.remove("logits")
    names = {"prev_logits": "prev.\nlogits", "self_logits": "+ own\nlogits", "logits": f"{ARROW}\nlogits",
             "conv_logits": f"{ARROW} conv.\nof both" if own_too else f"{ARROW} conv.\nof prev."}
    without = {part: name for part, name in zip(WITHOUT, ("without\nprev.", "without\nown"), strict=True)
               if any(part in layer.recorded() for layer in evolved)}
    return {**{part: names[part] for part in drawn}, "attn": f"{ARROW}\nattn.", **without}


def draw_strip(recording: Recording, layers: Sequence[int], head: Head, point: Query, style: MapStyle = STYLE, *,
               width: float | None = None) -> Figure:
    """Draw for each chain among `layers` a block: a row a layer, and along it what the layer computes, from the
    previous logits to the attention; then the attention without the previous map, and without the layer's own logits.

    A chain's first layer has no previous map; its logits are its own. Where there is attention alone, as of a plain
    vision transformer, the layers stand in a row.

    Args:
        recording: with all parts of `layers` (numbers).
        head: counted from 0, or "mean".
        point: the query, (y, x) in pixels of the input or a token by name.
        style: how maps are drawn; the logits of a chain share one scale, its attention another. Logits are bare.
        width: inches.
    """
    add_contributions(recording)
    columns, chains = columns_of(recording, layers), chains_of(recording, layers)
    named = {chain[0]: f"{layers_name(chain)}, {'x'.join(map(str, recording.maps[chain[0]].feat_size))}"
             if len(chains) > 1 else "" for chain in chains}
    note, query = f"{layers_name(layers)}, {head_name(head)}", f", query {query_name(point)}"
    if len(columns) == 1:
        rows = [(named[chain[0]], [query_row(((f"layer {layer}", recording, layer) for layer in chain), head, point,
                                             style)]) for chain in chains]
        return map_sheet(title_of(recording.model), rows, style, width=width, note=note + query, photo=recording,
                         points=[point], feat_size=recording.maps[layers[0]].feat_size)
    maps = {}
    for chain in chains:
        for layer, part in ((layer, part) for layer in chain for part in columns):
            if _drawn(recording, layer, part, columns):
                attention = part.startswith("attn")
                maps[layer, part] = map_of(
                    recording.relative_map(layer, point, head, part) if attention else
                    query_map(recording.maps[layer], point, recording.img_size, head, part), recording, style,
                    columns[part] if layer == chain[0] else "", point=point, overlay=style.overlay and attention,
                    part="attn" if attention else part)
    kinds, norms, bars = ("logits", "attn"), {}, {}
    for kind in kinds:
        groups = [[key for key in maps if key[0] in chain and key[1].startswith("attn") == (kind == "attn")]
                  for chain in chains]
        groups = [group for group in groups if group]
        for group, scales in zip(groups, norms_of([[maps[key].values for key in group] for group in groups], style,
                                                  kind), strict=True):
            norms.update(zip(group, scales, strict=True))
            bars[group[0][0], kind] = scale_bar(scales[0], style, kind)
    blocks = []
    for chain in chains:
        rows = [Row([maps[layer, part].scaled(norms[layer, part]) if (layer, part) in maps else
                     Tile(None, name if layer == chain[0] else "") for part, name in columns.items()],
                    f"layer {layer}", aspect=aspect_of(recording)) for layer in chain]
        own = [bars[chain[0], kind] for kind in kinds if (chain[0], kind) in bars]
        blocks.append(Block(rows, named[chain[0]], own))
    note += (" (of their logits, and of their attention)" if head == MEAN else "") + query
    texts = [equation(recording.model.model, recording.maps[layer].name, layer) for layer in layers]
    if any(texts):
        note += f"\n{next(text for text in texts if text)}; previous: the logits of the row above"
    if WITHOUT[0] in columns:
        note += "; without: its attention where that part is 0"
    return sheet(title_of(recording.model), blocks, width=width, note=note,
                 **photo_of(recording, style, [point], recording.maps[layers[0]].feat_size))


def _drawn(recording: Recording, layer: int, part: str, columns: dict[str, str]) -> bool:
    """Return whether a layer's row has a map in the column: it has the part, and not as its own logits already."""
    maps = recording.maps[layer]
    again = part == "logits" and "self_logits" in columns and maps.prev_logits is None
    return part in maps.recorded() and not again


def draw_training(recordings: Sequence[Recording], layers: Sequence[int], head: Head, query: Query,
                  style: MapStyle = STYLE, *, width: float | None = None) -> Figure:
    """Draw attention through training: a row a layer, a column an epoch.

    Args:
        recordings: of one image, one a checkpoint of a run in the order of epochs, with the "attn" of `layers`.
        head: counted from 0, or "mean".
        query: (y, x) in pixels of the input or a token by name.
        style: how maps are drawn; the maps of a layer share a scale.
        width: inches.
    """
    first = recordings[0]
    groups = [(map_label(first.maps[layer]), [query_row(
        ((f"epoch {recording.model.epoch}", recording, layer) for recording in recordings), head, query, style)])
        for layer in layers]
    return map_sheet(first.model.label.rpartition(", epoch ")[0] or first.model.label, groups, style, width=width,
                     note=f"attention through training: {head_name(head)}, query {query_name(query)}"
                          + (f", {map_name(first.maps[layers[0]])}" if len(layers) == 1 else ""), photo=first,
                     points=[query], feat_size=first.maps[layers[0]].feat_size)


def plot_frames(models: Models, image: ImageSource | Tensor, layers: Layers = None, heads: Heads = MEAN,
                queries: Queries = None, *, width: float | None = None, **style) -> Iterator[Figure]:
    """Draw the pictures of a film, of one scale: for each model (such as the snapshots of a run) each layer in turn.
    See `ea_vision.visualize.figure_options` for the arguments."""
    return _draw_frames(Asked(as_models(models), layers, heads, queries), image, MapStyle(**style), width)[0]


def _draw_frames(asked: Asked, image: ImageSource | Tensor, style: MapStyle,
                 width: float | None) -> tuple[Iterator[Figure], list[Recording]]:
    recordings = asked.record(image)
    frames = [(recording, number) for recording, numbers in zip(recordings, asked.numbers, strict=True)
              for number in numbers]
    return draw_frames(frames, asked.heads, asked.points(recordings[0].img_size), style, width=width), recordings


def draw_frames(frames: Sequence[Frame], heads: Sequence[Head], points: Sequence[Query], style: MapStyle = STYLE, *,
                width: float | None = None) -> Iterator[Figure]:
    """Draw the pictures of a film in turn: the photo, and a row a head, a column a query.

    Args:
        heads: counted from 0, or "mean".
        points: (y, x) in pixels of the input.
        style: how maps are drawn. What is compared are all pictures: they share a scale.
        width: inches.
    """
    rows = [head_rows(*frame, heads, points, style, head_name, shares=False) for frame in frames]
    [norms] = norms_of([[tile.values for of_frame in rows for row in of_frame for tile in row.tiles]], style)
    each = len(heads) * len(points)
    for index, ((recording, number), of_frame) in enumerate(zip(frames, rows, strict=True)):
        layer = recording.maps[number]
        yield map_sheet(title_of(recording.model), [(map_name(layer), of_frame)], style, width=width, photo=recording,
                        points=points, feat_size=layer.feat_size, note=f"attention; {queries_name(points)}",
                        norms=[norms[index * each:(index + 1) * each]])


def main(argv: Sequence[str] | None = None) -> int:
    parser = make_parser(__doc__, EXAMPLES, output="evolution.png", heads="0",
                         suffixes=(*writing.PICTURES, writing.FILM))
    parser.add_argument("--through", default="layers", choices=("layers", "checkpoints"),
                        help="layers: of one model, part by part (a film: attention); checkpoints: attention through "
                             "the *.ckpt and snapshots (the trainers' --snapshot-epochs) of a run folder or the files "
                             "of --model, by epoch (default: %(default)s)")
    parser.add_argument("--seconds", type=float, default=0.6,
                        help="of a film: how long a picture is shown (default: %(default)s)")
    options = parser.parse_args(argv)
    film, training = options.output.lower().endswith(writing.FILM), options.through == "checkpoints"
    style, targets = style_of(options), targets_of(options)
    if not 0.02 <= options.seconds <= 60:
        raise UsageError(f"--seconds must lie between 0.02 and 60, got {options.seconds}")
    models = (by_epoch(load_models(options, checkpoints_of(targets))) if training else
              load_models(options, [only(targets, "model")]))
    asked = Asked.by_options(options, models)
    if film:
        if training:
            only(asked.layers[0], "layer")
        return writing.each_figure(options, lambda image: _draw_frames(asked, image, style, options.width),
                                   writing.film_writer(options.seconds))
    only(asked.heads, "head")
    only(asked.points(asked.models[0].img_size, MIDDLE), "query")
    return writing.each_figure(options, lambda image: _draw(asked, image, training, style, options.width))
