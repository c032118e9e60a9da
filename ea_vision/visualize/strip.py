"""One query through the layers of a chain: previous, own and convolved logits, the attention they give, and what that
is without either (PA paper, figure 8; EA paper, figure 11). The suffix .gif makes a film of the attention."""

from collections.abc import Iterator, Sequence
from dataclasses import replace

import torch
from matplotlib.figure import Figure

from ea_vision.base.errors import UsageError
from ea_vision.recorder.recording import PARTS
from ea_vision.visualize import writing
from ea_vision.visualize.figure_options import (
    DEMO,
    MIDDLE,
    Asked,
    Heads,
    Layers,
    Model,
    Models,
    Queries,
    epochs_of,
    loader,
    make_parser,
    only,
    run_label,
)
from ea_vision.visualize.heatmap import draw_columns, head_rows
from ea_vision.visualize.image_maps import (
    MEAN,
    WITHOUT,
    AnyImage,
    Head,
    Query,
    Recording,
    add_contributions,
    query_name,
    title_of,
)
from ea_vision.visualize.map_style import (
    STYLE,
    MapStyle,
    attention_of,
    before_shares,
    equation,
    head_name,
    layers_name,
    map_name,
    map_of,
    map_sheet,
    photo_of,
    queries_name,
    scaled,
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


def plot_strip(model: Model, image: AnyImage, layers: Layers = None, head: Head = 0,
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
    models = epochs_of([str(model)]) if training else model
    asked = Asked(models, layers, [head], query and [query], width=width, **style)
    return _draw_training(asked, image) if training else _draw(asked, image)


def _draw(asked: Asked, image: AnyImage) -> Figure:
    [recording] = asked.record(image, PARTS)
    return draw_strip(recording, asked.numbers[0], asked.heads[0], asked.points(MIDDLE)[0], **asked.how)


def _draw_training(asked: Asked, image: AnyImage) -> Figure:
    """Draw attention through training: a row a layer, a column an epoch."""
    return draw_columns(asked.record(image), [f"epoch {model.epoch}" for model in asked.models], asked.numbers,
                        asked.heads, asked.points(MIDDLE), **asked.how, photo=True, title=run_label(asked.models[0]),
                        what=" through training")


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
    own = {"self_logits": "+ own\nlogits"}
    mixed = {"conv_logits": f"{ARROW} conv.\nof {'both' if own_too else 'prev.'}"}
    names = {"prev_logits": "prev.\nlogits", **(own | mixed if own_too else mixed | own),
             "logits": f"{ARROW}\nlogits", "attn": f"{ARROW}\nattn.",
             WITHOUT[0]: "without\nprev.", WITHOUT[1]: "without\nown"}
    if len(convolved) == len(evolved) and all(torch.equal(one.conv_logits, one.logits) for one in convolved):
        del names["logits"]
    return {part: name for part, name in names.items() if any(part in layer.recorded() for layer in maps)}


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
    names = [""] if len(chains) == 1 else [
        f"{layers_name(chain)}, {'x'.join(map(str, recording.maps[chain[0]].feat_size))}" for chain in chains]
    note, query = f"{layers_name(layers)}, {head_name(head)}", f", query {query_name(point)}"
    if len(columns) == 1:
        groups = [(name, [Row([attention_of(recording, layer, head, point, style, f"layer {layer}")
                               for layer in chain])]) for name, chain in zip(names, chains, strict=True)]
        return map_sheet(title_of(recording.model), groups, style, width=width, note=note + query,
                         photo=photo_of(recording, [point]))
    blocks = []
    for chain, name in zip(chains, names, strict=True):
        rows = [Row([_tile(recording, layer, part, head, point, style, title if layer == chain[0] else "",
                           "self_logits" in columns) for part, title in columns.items()], f"layer {layer}")
                for layer in chain]
        blocks.append(Block(rows, name, []))
    for kind in ("logits", "attn"):
        compared = [(block, tiles) for block in blocks if (tiles := [
            tile for row in block.rows for part, tile in zip(columns, row.tiles, strict=True)
            if tile.paint and part.startswith("attn") == (kind == "attn")])]
        for (block, _), bar in zip(compared, scaled([tiles for _, tiles in compared], style, kind), strict=True):
            block.bars.append(bar)
    note += (" (of their logits, and of their attention)" if head == MEAN else "") + query
    if text := equation(recording.model.model, [recording.maps[layer] for layer in layers]):
        note += f"\n{text}; previous: the logits of the row above"
    if WITHOUT[0] in columns:
        note += "; without: its attention where that part is 0"
    return sheet(title_of(recording.model), blocks, width=width, note=note,
                 photo=photo_of(recording, [point], recording.maps[layers[0]].feat_size))


def _tile(recording: Recording, layer: int, part: str, head: Head, point: Query, style: MapStyle, title: str,
          own_column: bool) -> Tile:
    """Return a layer's map; an empty place where it lacks the part, or its logits stand in the column of its own."""
    maps = recording.maps[layer]
    if part not in maps.recorded() or part == "logits" and own_column and maps.prev_logits is None:
        return Tile(None, title, aspect=recording.aspect)
    if part.startswith("attn"):
        return map_of(recording.relative_map(layer, point, head, part), recording, style, title, point=point)
    return map_of(recording.query_map(layer, point, head, part), recording, replace(style, overlay=False),
                  title, point=point, part=part)


def plot_frames(models: Models, image: AnyImage, layers: Layers = None, heads: Heads = MEAN,
                queries: Queries = None, *, width: float | None = None, **style) -> Iterator[Figure]:
    """Draw the pictures of a film, of one scale: for each model (such as the snapshots of a run) each layer in turn.
    See `ea_vision.visualize.figure_options` for the arguments."""
    return _draw_frames(Asked(models, layers, heads, queries, width=width, **style), image)


def _draw_frames(asked: Asked, image: AnyImage) -> Iterator[Figure]:
    recordings, points, style = asked.record(image), asked.points(), asked.how["style"]
    frames = [(recording, layer, head_rows(recording, layer, asked.heads, points, style))
              for recording in recordings for layer in recording.maps]
    bars = scaled([[tile for *_, rows in frames for row in rows for tile in row.tiles]], style)
    for recording, layer, rows in frames:
        yield map_sheet(title_of(recording.model), [(map_name(recording.maps[layer]), rows)], **asked.how, bars=bars,
                        photo=photo_of(recording, points), note=f"attention; {queries_name(points)}")


def main(argv: Sequence[str] | None = None) -> int:
    parser = make_parser(__doc__, EXAMPLES, output="evolution.png", heads="0",
                         suffixes=(*writing.PICTURES, writing.FILM))
    parser.add_argument("--through", default="layers", choices=("layers", "checkpoints"),
                        help="layers: of one model, part by part (a film: attention); checkpoints: attention through "
                             "the *.ckpt and snapshots (the trainers' --snapshot-epochs) of a run folder or the files "
                             "of --model, by epoch (default: %(default)s)")
    options = parser.parse_args(argv)
    film, training = options.output.lower().endswith(writing.FILM), options.through == "checkpoints"
    targets, load = options.model or DEMO, loader(options)
    asked = Asked.by_options(options, epochs_of(targets, load) if training else [load(only(targets, "model"))])
    if film:
        if training:
            only(asked.layers[0], "layer")
        return writing.each_figure(options, asked, _draw_frames, writing.save_film)
    only(asked.heads, "head")
    only(asked.points(MIDDLE), "query")
    return writing.each_figure(options, asked, _draw_training if training else _draw)
