"""One query through the layers of a chain: previous, own and convolved logits, their attention, and the attention of
the own logits alone (PA paper, figure 8; EA paper, figure 11). The suffix .gif makes a film of the attention."""

from collections.abc import Iterator, Sequence
from functools import partial
from itertools import chain as chained

import torch
from matplotlib.figure import Figure
from torch import nn

from ea_vision.base.errors import UsageError
from ea_vision.recorder.quantities import total_variation
from ea_vision.recorder.recording import PARTS, LayerMaps
from ea_vision.visualize.figure_options import (
    FILM,
    MIDDLE,
    PICTURES,
    Asked,
    Heads,
    Layers,
    Models,
    Queries,
    epochs_of,
    make_parser,
    only,
    refuse_arguments,
    run_figure,
    run_label,
    save_film,
)
from ea_vision.visualize.heatmap import draw_columns, head_rows
from ea_vision.visualize.image_maps import (
    AnyImage,
    add_own_alone,
    before_shares,
    equation,
    title_of,
)
from ea_vision.visualize.map_style import STYLE, MapStyle, map_sheet, scaled
from ea_vision.visualize.sheet import Block, Row, Tile, sheet
from ea_vision.visualize.tiles import (
    ALL,
    MEAN,
    OWN_ALONE,
    Head,
    Query,
    Recording,
    cell_of,
    head_name,
    layers_name,
    map_name,
    of_head,
    photo_of,
    queries_name,
    tile_of,
)

ARROW = "\N{RIGHTWARDS ARROW}"
THROUGH = ("layers", "checkpoints")
EXAMPLES = """\
  ea-vision strip --model ea_conv_transformer_cifar --queries 16,16 --heads 1 -o strip.png photo.jpg
  ea-vision strip --model pa_aa_resnet50 --layers 5-10 --heads 3 --width 3.3 -o strip.pdf photo.jpg
  ea-vision strip --model runs/ea --through checkpoints --layers 1-3 -o training.png photo.jpg
  ea-vision strip --model ea_aa_resnet34 --layers 1-20 --heads mean -o layers.gif photo.jpg
  ea-vision strip --model runs/ea --through checkpoints --layers 3 -o training.gif photo.jpg
"""


def _check_through(through: str) -> None:
    if through not in THROUGH:
        raise UsageError(f"through must be {' or '.join(THROUGH)}, got {through!r}")


def plot_strip(
    model: Models,
    image: AnyImage,
    layers: Layers = None,
    head: Head = 0,
    query: Query | None = None,
    *,
    through: str = "layers",
    **how,
) -> Figure:
    """Draw one query of one head through the layers of each chain, one row per layer, or through training.

    Args:
        model, image, layers, **how: see `ea_vision.visualize.figure_options`.
        head: counted from 0, or "mean".
        query: default: the middle.
        through: "layers", or "checkpoints": attention only, by epoch of the checkpoints and snapshots of run folders.
    """
    _check_through(through)
    refuse_arguments("plot_strip", how, heads="it takes one head", queries="it takes one query")
    queries = None if query is None else [query]
    if through == "checkpoints":
        return _through_training(Asked(epochs_of(model), layers, [head], queries, **how), image)
    asked = Asked(model, layers, [head], queries, **how)
    only(asked.models, "model")
    [recording] = asked.record(image, PARTS)
    [point] = asked.points(MIDDLE, [recording])
    head = only(asked.heads, "head")
    return draw_strip(recording, asked.numbers[0], head, point, asked.style, width=asked.width)


def _through_training(asked: Asked, image: AnyImage) -> Figure:
    """Draw attention through training: one row per layer, one column per epoch of each run."""
    recordings = asked.record(image)
    only(asked.heads, "head")
    runs = {run_label(model): None for model in asked.models}
    names = [f"epoch {model.epoch}" for model in asked.models]
    if len(runs) > 1:
        names = [model.label for model in asked.models]
    return draw_columns(
        recordings,
        names,
        asked.numbers,
        asked.heads,
        asked.points(MIDDLE, recordings),
        asked.style,
        width=asked.width,
        photos="first",
        title=" and ".join(runs),
        what=" through training",
    )


def chains_of(maps: Sequence[LayerMaps]) -> list[list[LayerMaps]]:
    """Group layers by chain; without evolution, group consecutive layers whose maps have the same size."""
    evolving = any(layer.prev_logits is not None for layer in maps)
    chains = []
    for layer in maps:
        begins = evolving and layer.prev_logits is None
        if not chains or begins or layer.feat_size != chains[-1][-1].feat_size:
            chains.append([])
        chains[-1].append(layer)
    return chains


def columns_of(model: nn.Module, maps: Sequence[LayerMaps]) -> dict[str, str]:
    """Return the parts to draw and their headings, in the order in which a layer computes them, without duplicates.

    EA convolves the mixture of the previous and the layer's own logits, PA the previous ones alone. Logits that equal
    the convolved ones (EA with beta = 1) get no column; nor do own logits if nothing evolves.
    """
    evolved = [layer for layer in maps if layer.prev_logits is not None]
    if not evolved:
        if all(layer.logits is not None for layer in maps):
            return {"logits": "logits", "attn": f"{ARROW} attn."}
        return {"attn": "attention"}
    own = {"self_logits": "+ own\nlogits"}
    names = {"prev_logits": "prev.\nlogits"}
    if any("self_logits" in before_shares(model, layer.name) for layer in evolved):
        names |= own | {"conv_logits": f"{ARROW} conv.\nof both"}
    else:
        names |= {"conv_logits": f"{ARROW} conv.\nof prev."} | own
    if not all(_logits_are_convolved(layer) for layer in evolved):
        names["logits"] = f"{ARROW}\nlogits"
    names["attn"] = f"{ARROW}\nattn."
    names[OWN_ALONE] = "own\nalone"
    recorded = set().union(*(layer.recorded() for layer in maps))
    return {part: name for part, name in names.items() if part in recorded}


def _logits_are_convolved(layer: LayerMaps) -> bool:
    return layer.conv_logits is not None and torch.equal(layer.conv_logits, layer.logits)


def draw_strip(
    recording: Recording,
    layers: Sequence[int],
    head: Head,
    point: Query,
    style: MapStyle = STYLE,
    *,
    width: float | None = None,
) -> Figure:
    """Draw one block for each chain among `layers`, with one row per layer: its parts from the previous logits to the
    attention, then the attention of its own logits alone, at the same scale.

    A chain's first layer has no previous map; its logits are its own. If there is only attention, as in a plain vision
    transformer, the layers stand in one row.

    Args:
        recording: with all parts of `layers` (numbers).
        head: counted from 0, or "mean".
        point: the query, (y, x) in pixels of the input, a token by name, or "all".
        style: how maps are drawn; the logits of a chain share one scale, its attention another. Logits are drawn
            without the photo.
        width: inches.
    """
    add_own_alone(recording)
    model = recording.model.model
    maps = [recording.maps[layer] for layer in layers]
    columns = columns_of(model, maps)
    title = title_of(recording.model)
    note = f"{layers_name(layers)}, {head_name(head)}"
    query = queries_name([point])
    blocks = _blocks(recording, maps, columns, head, point, style)
    if len(columns) == 1:
        photo = photo_of(recording, [point])
        note += f", {query}"
        return map_sheet(title, blocks, style, width=width, note=note, photo=photo)
    add_bars(blocks, style, attention=False)
    add_bars(blocks, style, attention=True)
    if head == MEAN:
        note += " (of their logits, and of their attention)"
    note += f", {query}"
    text = equation(model, maps)
    if text:
        note += f"\n{text}; previous: from the layer before"
    if OWN_ALONE in columns:
        changes = _changes(recording, maps, head, point)
        note += f"; own alone: attention by own logits, at the same scale; differs by {changes}"
    photo = photo_of(recording, [point], maps[0].feat_size)
    return sheet(title, blocks, width=width, note=note, photo=photo)


def _blocks(
    recording: Recording,
    maps: Sequence[LayerMaps],
    columns: dict[str, str],
    head: Head,
    point: Query,
    style: MapStyle,
) -> list[Block]:
    """Return one block per chain: one row per layer, one column per part; with attention alone a single row."""
    chains = chains_of(maps)
    blocks = []
    for chain in chains:
        rows = []
        for layer in chain:
            tiles = [_part(recording, layer, part, columns, head, point, style) for part in columns]
            rows.append(Row(tiles, f"layer {layer.number}"))
        if len(columns) == 1:
            tiles = []
            for row in rows:
                row.tiles[0].title = row.label
                tiles += row.tiles
            rows = [Row(tiles)]
        else:
            for tile, heading in zip(rows[0].tiles, columns.values(), strict=True):
                tile.title = heading
        name = ""
        if len(chains) > 1:
            size = "x".join(map(str, chain[0].feat_size))
            name = f"{layers_name([layer.number for layer in chain])}, {size}"
        blocks.append(Block(rows, name, []))
    return blocks


def _part(
    recording: Recording,
    layer: LayerMaps,
    part: str,
    columns: Sequence[str],
    head: Head,
    point: Query,
    style: MapStyle,
) -> Tile:
    """Return a part's tile, or an empty one if the layer lacks the part. The logits of a chain's first layer are its
    own: they stand in the column of own logits only."""
    repeated = part == "logits" and layer.prev_logits is None and "self_logits" in columns
    if repeated or part not in layer.recorded():
        return Tile(None, aspect=recording.aspect)
    tile = tile_of(recording, layer.number, style, head, point, part)
    if len(columns) > 1:
        tile.note = ""
    return tile


def add_bars(blocks: Sequence[Block], style: MapStyle, attention: bool) -> None:
    """Scale the attention maps of each block together, or its other maps, and add their colour bar to the block."""
    compared = []
    owners = []
    for block in blocks:
        chosen = [tile for tile in block.maps() if tile.part.startswith("attn") == attention]
        if chosen:
            compared.append(chosen)
            owners.append(block)
    for block, bar in zip(owners, scaled(compared, style), strict=True):
        block.bars.append(bar)


def _changes(recording: Recording, maps: Sequence[LayerMaps], head: Head, point: Query) -> str:
    """Write how far attention is from the attention of the own logits alone: "0.53 in layer 2, 0.54 in layer 3"."""
    changes = []
    for layer in maps:
        if OWN_ALONE not in layer.recorded():
            continue
        both = []
        for part in ("attn", OWN_ALONE):
            rows = of_head(layer[part][0], head)
            if point == ALL:
                both.append(rows[layer.num_prefix_tokens :].mean(0))
            else:
                both.append(rows[layer.token(recording.cell(layer.number, point))])
        change = float(total_variation(*both))
        changes.append(f"{change:.2f} in layer {layer.number}")
    return ", ".join(changes)


def plot_frames(
    models: Models,
    image: AnyImage,
    layers: Layers = None,
    heads: Heads = MEAN,
    queries: Queries = None,
    *,
    through: str = "layers",
    **how,
) -> Iterator[Figure]:
    """Draw the pictures of a film, all at one scale: each layer of each model (such as the snapshots of a run) in turn.
    See `ea_vision.visualize.figure_options` for the arguments, `plot_strip` for `through`."""
    _check_through(through)
    if through == "checkpoints":
        models = epochs_of(models)
    asked = Asked(models, layers, heads, queries, **how)
    if through == "checkpoints":
        only(asked.layers[0], "layer")
    recordings = asked.record(image)
    asked.warn_of_heads_left_out()
    points = asked.points(seen=recordings)
    size = recordings[0].img_size
    frames = []
    for recording in recordings:
        own_points = [cell_of(point, size, recording.img_size) for point in points]
        for layer, maps in recording.maps.items():
            rows = head_rows(recording, layer, asked.heads, own_points, asked.style)
            frames.append((recording, own_points, Block(rows, map_name(maps))))
    tiles = chained.from_iterable(block.maps() for *_, block in frames)
    bars = scaled([list(tiles)], asked.style)
    for recording, own_points, block in frames:
        yield map_sheet(
            title_of(recording.model),
            [block],
            asked.style,
            width=asked.width,
            bars=bars,
            photo=photo_of(recording, own_points),
            note=f"attention; {queries_name(own_points)}",
        )


def main(argv: Sequence[str] | None = None) -> int:
    suffixes = (*PICTURES, FILM)
    parser = make_parser(__doc__, EXAMPLES, output="evolution.png", heads="0", suffixes=suffixes)
    parser.add_argument(
        "--through",
        default="layers",
        choices=THROUGH,
        help="layers: of one model, part by part (a film: attention); checkpoints: attention through "
        "the *.ckpt and snapshots (the trainers' --snapshot-epochs) of the run folders or files "
        "of --model, by epoch (default: %(default)s)",
    )
    options = parser.parse_args(argv)
    if options.output.lower().endswith(FILM):
        frames = partial(plot_frames, through=options.through)
        return run_figure(options, frames, write=save_film)

    def plot(models: Models, image: AnyImage, heads: str, queries: Queries, **how) -> Figure:
        query = only(queries, "query") if queries else None
        return plot_strip(models, image, head=heads, query=query, through=options.through, **how)

    return run_figure(options, plot)
