"""One query through the layers of a chain: previous, own and convolved logits, their attention, and the attention of
the own logits alone (PA paper, figure 8; EA paper, figure 11); or what the previous maps changed."""

from collections.abc import Callable, Sequence
from functools import partial

import numpy as np
import torch
from matplotlib.axes import Axes
from matplotlib.colors import Normalize
from matplotlib.figure import Figure
from torch import Tensor, nn

from ea_vision.base.errors import UsageError
from ea_vision.models.modes import evaluating
from ea_vision.recorder.quantities import own_alone
from ea_vision.recorder.recording import PARTS, AttentionLayer, LayerMaps
from ea_vision.visualize.figure_options import make_parser, run_figure
from ea_vision.visualize.figure_request import (
    MIDDLE,
    AnyImage,
    FigureRequest,
    Layers,
    Models,
    Queries,
    epochs_of,
    only,
    run_label,
    title_of,
)
from ea_vision.visualize.heatmap import draw_heatmap
from ea_vision.visualize.map_style import STYLE, MapStyle, map_sheet
from ea_vision.visualize.sheet import Block, Row, Tile, in_one_row
from ea_vision.visualize.tiles import (
    ALL,
    MEAN,
    OWN_ALONE,
    Head,
    Query,
    Recording,
    head_name,
    layers_name,
    map_of,
    photo_of,
    queries_name,
    tile_of,
)

ARROW = "\N{RIGHTWARDS ARROW}"
CHANGE = "change"  # the part: attention minus own alone, in units of uniform attention
THROUGH = ("layers", "checkpoints")
EXAMPLES = """\
  ea-vision strip --model ea_conv_transformer_cifar --queries 16,16 --heads 1 -o strip.png photo.jpg
  ea-vision strip --model ea_conv_transformer_cifar --change --style fog -o change.png photo.jpg
  ea-vision strip --model pa_aa_resnet50 --layers 5-10 --heads 3 --width 3.3 -o strip.pdf photo.jpg
  ea-vision strip --model runs/ea --through checkpoints --layers 1-3 -o training.png photo.jpg
"""


def plot_strip(
    model: Models,
    image: AnyImage,
    layers: Layers = None,
    head: Head = 0,
    query: Query | None = None,
    *,
    through: str = "layers",
    change: bool = False,
    **how,
) -> Figure:
    """Draw one query of one head through the layers of each chain, one row per layer, or through training.

    Args:
        model, image, layers, **how: see `ea_vision.visualize.figure_request`.
        head: counted from 0, or "mean".
        query: default: the middle.
        through: "layers", or "checkpoints": attention only, by epoch of the checkpoints and snapshots of run folders.
        change: draw what the previous layer's map changed in each layer, see `draw_change`.

    Raises:
        UsageError: a layer, head or query that the model does not have, or `change` of a network that does not evolve.
    """
    if through not in THROUGH:
        raise UsageError(f"through must be {' or '.join(THROUGH)}, got {through!r}")
    queries = None if query is None else [query]
    if through == "checkpoints":
        if change:
            raise UsageError("change is drawn through layers, got through='checkpoints'")
        request = FigureRequest(epochs_of(model), layers, [head], queries, **how)
        recordings = request.record(image)
    else:
        request = FigureRequest(model, layers, [head], queries, some=True, **how)
        only(request.models, "model")
        recordings = request.record(image, PARTS)
    points = request.points(MIDDLE, recordings)
    head = only(request.heads(recordings), "head")
    if through == "checkpoints":
        return _through_training(request, recordings, head, points)
    draw = partial(draw_change if change else draw_strip, *recordings, head=head, point=points[0])
    return request.fit_page(draw)


def _through_training(
    request: FigureRequest, recordings: Sequence[Recording], head: Head, points: Sequence[Query]
) -> Figure:
    """Draw attention through training: one row per layer, one column per epoch of each run."""
    runs = {run_label(model): None for model in request.models}
    names = [f"epoch {model.epoch}" for model in request.models]
    title = f"{' and '.join(runs)} through training"
    if len(runs) > 1:
        names = [model.label for model in request.models]
    elif len(names) == 1:
        title += f", {names[0]}"
    return draw_heatmap(
        recordings,
        request.numbers,
        [head],
        points,
        request.style,
        names=names,
        title=title,
        width=request.width,
    )


def add_own_alone(recording: Recording) -> None:
    """Add the part OWN_ALONE to the maps of evolving layers: their attention without the previous map; see
    `ea_vision.recorder.quantities.own_alone`. The recording must have all parts and all heads."""
    for layer in recording.maps.values():
        module = recording.model.model.get_submodule(layer.name)
        with evaluating(module):
            alone = own_alone(layer, module)
        if alone is not None:
            layer.save(OWN_ALONE, alone)


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
    self_column = {"self_logits": "+ own\nlogits"}
    names = {"prev_logits": "prev.\nlogits"}
    if any("self_logits" in convolved_parts(model, layer) for layer in evolved):
        names |= self_column | {"conv_logits": f"{ARROW} conv.\nof both"}
    else:
        names |= {"conv_logits": f"{ARROW} conv.\nof prev."} | self_column
    both = [(layer.conv_logits, layer.logits) for layer in evolved]
    if not all(
        convolved is not None and torch.equal(convolved, logits) for convolved, logits in both
    ):
        names["logits"] = f"{ARROW}\nlogits"
    names["attn"] = f"{ARROW}\nattn."
    names[OWN_ALONE] = "own\nalone"
    recorded = set().union(*(layer.recorded() for layer in maps))
    return {part: name for part, name in names.items() if part in recorded}


def convolved_parts(model: nn.Module, layer: AttentionLayer | LayerMaps) -> tuple[str, ...]:
    """Return the recorded parts that a layer's convolution mixes; () if it convolves no maps."""
    evolution = getattr(model.get_submodule(layer.name), "evolution", None)
    return () if evolution is None else evolution.convolved_parts


def _sum(*terms: tuple[float, str]) -> str:
    """Write a weighted sum, without terms of weight 0; a weight of 1 is not written."""
    written = []
    for weight, term in terms:
        if weight == 1:
            written.append(term)
        elif weight != 0:
            factor = f"({term})" if " + " in term and not term.startswith("relu") else term
            written.append(f"{weight:.2g} {factor}")
    return " + ".join(written) or "0"


def equation(model: nn.Module, layers: Sequence[AttentionLayer | LayerMaps]) -> str:
    """Write the equation of the first layer that convolves previous maps, with its gates (learnable ones: their mean);
    "" if there is no such layer."""
    convolving = [layer for layer in layers if convolved_parts(model, layer)]
    if not convolving:
        return ""
    first = convolving[0]
    evolution = model.get_submodule(first.name).evolution
    gates = (evolution.alpha, evolution.beta)
    alpha, beta = (torch.as_tensor(gate).detach().float().mean().item() for gate in gates)
    mixed = "previous"
    rest = (1 - alpha, "own")
    if "self_logits" in evolution.convolved_parts:
        mixed = _sum((alpha, mixed), rest)
        alpha = beta
        rest = (1 - beta, mixed)
    logits = _sum((alpha, f"relu(conv({mixed}))"), rest)
    learned = any(isinstance(gate, Tensor) for gate in gates)
    whose = f"layer {first.number}" if learned else "a layer"
    return f"{whose}: logits = {logits}, attention = softmax(logits)"


def draw_strip(
    recording: Recording,
    layers: Sequence[int],
    head: Head,
    point: Query,
    style: MapStyle = STYLE,
    **page,
) -> Figure:
    """Draw one block for each chain among `layers`, with one row per layer: its parts from the previous logits to the
    attention, then the attention of its own logits alone (at the same scale, unless that is each tile's), and by how
    much the two differ.

    A chain's first layer has no previous map; its logits are its own. If there is only attention, as in a plain vision
    transformer, the layers stand in one row.

    Args:
        recording: with all parts of `layers` (numbers).
        head: counted from 0, or "mean".
        point: the query, (y, x) in pixels of the input, a token by name, or "all".
        style: how maps are drawn. The logits of a row share a scale, unless its `scale` is "tile" or "all"; they are
            drawn without the photo.
        **page: width and left_out, see `ea_vision.visualize.sheet.sheet`.
    """
    add_own_alone(recording)
    model = recording.model.model
    maps = [recording.maps[layer] for layer in layers]
    columns = columns_of(model, maps)
    note = f"{layers_name(layers)}, {head_name(head)}"
    if head == MEAN and len(columns) > 1:
        note += " (of their logits, and of their attention)"
    note += f", {queries_name([point])}"
    text = equation(model, maps)
    if text:
        note += f"\n{text}; previous: from the layer before"
    if OWN_ALONE in columns:
        same_scale = "" if style.scale == "tile" else ", at the same scale"
        note += (
            f"; own alone: attention by own logits{same_scale}; differs by: half the sum of absolute "
            "differences, 0 to 1"
        )

    def part_of(layer: LayerMaps, part: str) -> Tile:
        # the logits of a chain's first layer are its own: they stand in the column of own logits only
        repeated = part == "logits" and layer.prev_logits is None and "self_logits" in columns
        if repeated or part not in layer.recorded():
            return Tile(None, aspect=recording.aspect)
        tile = tile_of(recording, layer.number, style, head, point, part)
        if part == OWN_ALONE:
            tile.note = f"differs by {recording.change(layer.number, point, head):.2f}"
        elif len(columns) > 1:
            tile.note = ""
        return tile

    chains = chains_of(maps)
    blocks = []
    for chain in chains:
        rows = []
        for layer in chain:
            tiles = [part_of(layer, part) for part in columns]
            rows.append(Row(tiles, f"layer {layer.number}"))
        for tile, heading in zip(rows[0].tiles, columns.values(), strict=True):
            tile.title = heading
        if len(columns) == 1:  # attention alone
            rows = in_one_row(rows)
        name = ""
        if len(chains) > 1:
            size = "x".join(map(str, chain[0].feat_size))
            name = f"{layers_name([layer.number for layer in chain])}, {size}"
        blocks.append(Block(rows, name))
    photo = photo_of(recording, [point], maps[0].feat_size)
    return map_sheet(title_of(recording.model), blocks, style, note=note, photo=photo, **page)


def draw_change(
    recording: Recording,
    layers: Sequence[int],
    head: Head,
    point: Query,
    style: MapStyle = STYLE,
    **page,
) -> Figure:
    """Draw one row for each of `layers` that evolves: its attention without the previous map, with it, and what the map
    changed. Cells whose change is more than uniform attention are marked with + or -.

    Without the previous map a layer's mixture is its own logits (alpha 0), convolved and normalised as in training. Two
    rows of attention differ by half the sum of their absolute differences, 0 to 1: the share of a query's attention
    that moves; over queries or heads, by the mean of this.

    Args:
        recording: with all parts of `layers` (numbers).
        head: counted from 0, or "mean".
        point: the query, (y, x) in pixels of the input, a token by name, or "all".
        style: how maps are drawn.
        **page: width and left_out, see `ea_vision.visualize.sheet.sheet`.

    Raises:
        UsageError: none of the layers evolves from a previous map.
    """
    add_own_alone(recording)
    maps = recording.maps
    evolving = [layer for layer in layers if OWN_ALONE in maps[layer].recorded()]
    if not evolving:
        raise UsageError(
            f"layers that evolve from a previous map are required, and {recording.model.label} has none of these "
            f"among {', '.join(map(str, layers))}"
        )
    blocks = [_changed(recording, layer, head, point, style) for layer in evolving]
    same_scale = "" if style.scale == "tile" else ", at the same scale"
    note = f"{head_name(head)}, {queries_name([point])}; without: own logits alone{same_scale}"
    photo = photo_of(recording, [point], maps[evolving[0]].feat_size)
    return map_sheet(title_of(recording.model), blocks, style, note=note, photo=photo, **page)


def _changed(recording: Recording, layer: int, head: Head, point: Query, style: MapStyle) -> Block:
    """Return a layer's row under a sentence that says how much the previous map changed."""
    previous = f"layer {layer - 1}"
    tile = partial(tile_of, recording, layer, style, head, point)
    without = tile(OWN_ALONE, f"without {previous}'s map")
    whole = tile("attn", f"with {previous}'s map")
    values = whole.values - without.values  # (H, W), in units of uniform attention
    title = f"what {previous}'s map changed"
    change = map_of(values, recording, style, title, point=point, part=CHANGE)
    change.paint = partial(_paint_change, change.paint, recording, values)
    share = f"{recording.change(layer, point, head):.0%}"
    sentence = f"{share} of this query's attention moves"
    if point == ALL or head == MEAN:
        sentence = f"on average {share} of a query's attention moves"
    title = f"Layer {layer}, {head_name(head)}: {sentence} because of {previous}"
    return Block([Row([without, whole, change])], title, enlarged=1.6)


def _paint_change(
    paint: Callable, recording: Recording, values: np.ndarray, axes: Axes, norm: Normalize
) -> None:
    """Paint a change, and mark with its sign each cell where it is more than uniform attention."""
    paint(axes, norm)
    H, W = values.shape
    points_per_cell = 72 / axes.figure.dpi * axes.bbox.width / W
    for marker, change in (("+", values), ("_", -values)):
        for color, shown in (("black", change <= 2), ("white", change > 2)):
            rows, columns = np.nonzero((change > 1) & shown)
            x = (columns + 0.5) * recording.img_size[1] / W
            y = (rows + 0.5) * recording.img_size[0] / H
            size = min(6.0, 0.6 * points_per_cell)
            axes.plot(x, y, marker, color=color, markersize=size, markeredgewidth=size / 5)
    axes.set(xlim=recording.extent[:2], ylim=recording.extent[2:])


def main(argv: Sequence[str] | None = None) -> int:
    parser = make_parser(__doc__, EXAMPLES, output="evolution.png", heads="0", some=True)
    parser.add_argument(
        "--change",
        action="store_true",
        help="what the previous layer's map changed: attention without it, with it, and the difference",
    )
    parser.add_argument(
        "--through",
        default="layers",
        choices=THROUGH,
        help="layers: of one model, part by part; checkpoints: attention through the *.ckpt and snapshots (the "
        "trainers' --snapshot-epochs) of the run folders or files of --model, by epoch (default: %(default)s)",
    )
    options = parser.parse_args(argv)

    def plot(models: Models, image: AnyImage, heads: str, queries: Queries, **how) -> Figure:
        query = only(queries, "query") if queries else None
        how |= {"through": options.through, "change": options.change}
        return plot_strip(models, image, head=heads, query=query, **how)

    return run_figure(options, plot)
