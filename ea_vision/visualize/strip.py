"""One query through the layers of a chain: previous, own and convolved logits, the attention they give, and that of
the own logits alone (PA paper, figure 8; EA paper, figure 11). The suffix .gif makes a film of the attention."""

from collections.abc import Iterator, Mapping, Sequence

import torch
from matplotlib.figure import Figure
from torch import nn

from ea_vision.base.errors import UsageError
from ea_vision.recorder.quantities import total_variation
from ea_vision.recorder.recording import PARTS, LayerMaps
from ea_vision.visualize.figure_options import (
    DEMO,
    FILM,
    MIDDLE,
    PICTURES,
    Asked,
    Heads,
    Layers,
    Model,
    Models,
    Queries,
    each_figure,
    epochs_of,
    loader,
    make_parser,
    only,
    run_label,
    save_film,
)
from ea_vision.visualize.heatmap import draw_columns, head_rows
from ea_vision.visualize.image_maps import (
    MEAN,
    OWN_ALONE,
    AnyImage,
    Head,
    Query,
    Recording,
    add_own_alone,
    of_head,
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


def plot_strip(
    model: Model,
    image: AnyImage,
    layers: Layers = None,
    head: Head = 0,
    query: Query | None = None,
    *,
    through: str = "layers",
    width: float | None = None,
    **style,
) -> Figure:
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
    return draw_strip(
        recording,
        asked.numbers[0],
        asked.heads[0],
        asked.points(MIDDLE, [recording])[0],
        **asked.how,
    )


def _draw_training(asked: Asked, image: AnyImage) -> Figure:
    """Draw attention through training: a row a layer, a column an epoch."""
    recordings = asked.record(image)
    return draw_columns(
        recordings,
        [f"epoch {model.epoch}" for model in asked.models],
        asked.numbers,
        asked.heads,
        asked.points(MIDDLE, recordings),
        **asked.how,
        photo=True,
        title=run_label(asked.models[0]),
        what=" through training",
    )


def chains_of(maps: Sequence[LayerMaps]) -> list[list[LayerMaps]]:
    """Group layers by chain; without evolution by the size of their maps, layers in a row together."""
    evolving, chains = any(layer.prev_logits is not None for layer in maps), []
    for layer in maps:
        begins = evolving and layer.prev_logits is None
        if not chains or begins or layer.feat_size != chains[-1][-1].feat_size:
            chains.append([])
        chains[-1].append(layer)
    return chains


def columns_of(model: nn.Module, maps: Sequence[LayerMaps]) -> dict[str, str]:
    """Return the parts to draw, with their names, in the order in which a layer computes them; no two columns alike.

    EA convolves the mixture of the previous and the layer's own logits, PA the previous ones alone. Logits that are the
    convolved ones (EA's beta = 1) have no column of their own, nor have own logits where nothing evolves.
    """
    evolved = [layer for layer in maps if layer.prev_logits is not None]
    if not evolved:
        return (
            {"logits": "logits", "attn": f"{ARROW} attn."}
            if all(m.logits is not None for m in maps)
            else {"attn": "attention"}
        )
    own_too = any("self_logits" in before_shares(model, layer.name) for layer in evolved)
    own = {"self_logits": "+ own\nlogits"}
    mixed = {"conv_logits": f"{ARROW} conv.\nof {'both' if own_too else 'prev.'}"}
    names = {
        "prev_logits": "prev.\nlogits",
        **(own | mixed if own_too else mixed | own),
        "logits": f"{ARROW}\nlogits",
        "attn": f"{ARROW}\nattn.",
        OWN_ALONE: "own\nalone",
    }
    if all(
        one.conv_logits is not None and torch.equal(one.conv_logits, one.logits) for one in evolved
    ):
        del names["logits"]
    return {
        part: name
        for part, name in names.items()
        if any(part in layer.recorded() for layer in maps)
    }


def draw_strip(
    recording: Recording,
    layers: Sequence[int],
    head: Head,
    point: Query,
    style: MapStyle = STYLE,
    *,
    width: float | None = None,
) -> Figure:
    """Draw for each chain among `layers` a block: a row a layer, and along it what the layer computes, from the
    previous logits to the attention; then the attention of the layer's own logits alone, at the same scale.

    A chain's first layer has no previous map; its logits are its own. Where there is attention alone, as of a plain
    vision transformer, the layers stand in a row.

    Args:
        recording: with all parts of `layers` (numbers).
        head: counted from 0, or "mean".
        point: the query, (y, x) in pixels of the input or a token by name.
        style: how maps are drawn; the logits of a chain share one scale, its attention another. Logits are bare.
        width: inches.
    """
    add_own_alone(recording)
    model, maps, title = (
        recording.model.model,
        [recording.maps[layer] for layer in layers],
        title_of(recording.model),
    )
    columns, chains = columns_of(model, maps), chains_of(maps)
    names = (
        [
            f"{layers_name([layer.number for layer in chain])}, {'x'.join(map(str, chain[0].feat_size))}"
            for chain in chains
        ]
        if len(chains) > 1
        else [""]
    )
    note, query = f"{layers_name(layers)}, {head_name(head)}", f", {queries_name([point])}"
    if len(columns) == 1:
        groups = [
            (
                name,
                [
                    Row(
                        [
                            attention_of(
                                recording, layer.number, head, point, style, f"layer {layer.number}"
                            )
                            for layer in chain
                        ]
                    )
                ],
            )
            for name, chain in zip(names, chains, strict=True)
        ]
        return map_sheet(
            title, groups, style, width=width, note=note + query, photo=photo_of(recording, [point])
        )
    blocks = [
        Block(
            [
                _row(recording, layer, columns, head, point, style, layer is chain[0])
                for layer in chain
            ],
            name,
            [],
        )
        for chain, name in zip(chains, names, strict=True)
    ]
    for attention in (False, True):
        compared = [
            (block, tiles)
            for block in blocks
            if (
                tiles := [
                    tile
                    for row in block.rows
                    for tile in row.tiles
                    if tile.paint and tile.part.startswith("attn") == attention
                ]
            )
        ]
        for (block, _), bar in zip(
            compared, scaled([tiles for _, tiles in compared], style), strict=True
        ):
            block.bars.append(bar)
    note += (" (of their logits, and of their attention)" if head == MEAN else "") + query
    if text := equation(model, maps):
        note += f"\n{text}; previous: the logits of the row above"
    if OWN_ALONE in columns:
        changes = [
            f"{_change(recording.maps[layer], recording, head, point):.2f} in layer {layer}"
            for layer in layers
            if OWN_ALONE in recording.maps[layer].recorded()
        ]
        note += f"; own alone: attention by own logits, at the same scale; differs by {', '.join(changes)}"
    return sheet(
        title, blocks, width=width, note=note, photo=photo_of(recording, [point], maps[0].feat_size)
    )


def _change(layer: LayerMaps, recording: Recording, head: Head, point: Query) -> float:
    """Return how much the attention of a query, of a head or the mean of heads, changes by the previous map: the total
    variation between it and that of the own logits alone."""
    token = layer.token(recording.cell(layer.number, point))
    attn, alone = (of_head(layer[part][0], head)[token] for part in ("attn", OWN_ALONE))
    return float(total_variation(attn, alone))


def _row(
    recording: Recording,
    layer: LayerMaps,
    columns: Mapping[str, str],
    head: Head,
    point: Query,
    style: MapStyle,
    titled: bool,
) -> Row:
    """Return a layer's maps; an empty place where it lacks the part, or its logits stand in the column of its own."""
    tiles, first = [], layer.prev_logits is None
    for part, title in columns.items():
        tile = Tile(None, aspect=recording.aspect)
        if part in layer.recorded() and not (
            part == "logits" and first and "self_logits" in columns
        ):
            values = recording.query_map(layer.number, point, head, part)
            tile = map_of(values, recording, style, point=point, part=part)
        tile.title = title * titled
        tiles.append(tile)
    return Row(tiles, f"layer {layer.number}")


def plot_frames(
    models: Models,
    image: AnyImage,
    layers: Layers = None,
    heads: Heads = MEAN,
    queries: Queries = None,
    *,
    width: float | None = None,
    **style,
) -> Iterator[Figure]:
    """Draw the pictures of a film, of one scale: for each model (such as the snapshots of a run) each layer in turn.
    See `ea_vision.visualize.figure_options` for the arguments."""
    return _draw_frames(Asked(models, layers, heads, queries, width=width, **style), image)


def _draw_frames(asked: Asked, image: AnyImage) -> Iterator[Figure]:
    recordings, style = asked.record(image), asked.how["style"]
    points = asked.points(seen=recordings)
    frames = [
        (recording, layer, head_rows(recording, layer, asked.heads, points, style))
        for recording in recordings
        for layer in recording.maps
    ]
    bars = scaled([[tile for *_, rows in frames for row in rows for tile in row.tiles]], style)
    for recording, layer, rows in frames:
        yield map_sheet(
            title_of(recording.model),
            [(map_name(recording.maps[layer]), rows)],
            **asked.how,
            bars=bars,
            photo=photo_of(recording, points),
            note=f"attention; {queries_name(points)}",
        )


def main(argv: Sequence[str] | None = None) -> int:
    parser = make_parser(
        __doc__, EXAMPLES, output="evolution.png", heads="0", suffixes=(*PICTURES, FILM)
    )
    parser.add_argument(
        "--through",
        default="layers",
        choices=("layers", "checkpoints"),
        help="layers: of one model, part by part (a film: attention); checkpoints: attention through "
        "the *.ckpt and snapshots (the trainers' --snapshot-epochs) of a run folder or the files "
        "of --model, by epoch (default: %(default)s)",
    )
    options = parser.parse_args(argv)
    film, training = options.output.lower().endswith(FILM), options.through == "checkpoints"
    asked = Asked.by_options(
        options, epochs_of(options.model or DEMO, loader(options)) if training else ()
    )
    if not training:
        only(asked.models, "model")
    if film:
        if training:
            only(asked.layers[0], "layer")
        return each_figure(options, asked, _draw_frames, save_film)
    only(asked.heads, "head")
    only(asked.points(MIDDLE), "query")
    return each_figure(options, asked, _draw_training if training else _draw)
