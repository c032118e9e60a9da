"""How maps are drawn: scales and colours, the photo below, query points, colour bars, and the names beside them.

Attention is drawn in units of uniform attention: a probability times the N keys that its query sees, so that 1 is what
a query gives to every key when it looks nowhere in particular. Its scale is logarithmic, reaches as far below 1 as
above, and has 1 in the middle, so uniform attention has the same colour in every figure and on the page; 0 has the
lowest colour. Logits and other signed parts have a diverging scale with 0 in its middle.

In the style "light" attention lights the photo: its colours are multiplied by 0.1 at half of uniform attention and by 1
at twice, linearly in the logarithm between, interpolated bilinearly from the map's cells.

Lines, fonts and colours that are not data follow matplotlib's rcParams.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import chain
from string import ascii_uppercase

import matplotlib
import numpy as np
import torch
from matplotlib import patheffects
from matplotlib.axes import Axes
from matplotlib.colors import Colormap, LinearSegmentedColormap, LogNorm, Normalize
from matplotlib.figure import Figure
from matplotlib.patches import Rectangle
from torch import Tensor, nn
from torch.nn.functional import interpolate

from ea_vision.base.errors import UsageError
from ea_vision.base.figures import COLORS as QUERY_COLORS
from ea_vision.base.figures import PAGE
from ea_vision.base.print import points
from ea_vision.recorder.recording import PARTS, AttentionLayer, LayerMaps
from ea_vision.visualize.image_maps import ALL, MEAN, Head, Query, Recording, cell_of
from ea_vision.visualize.sheet import Bar, Block, Row, Tile, sheet

SCALES = ("layer", "tile", "all", "uniform")
STYLES = ("cells", "light")
# Moreland's: even steps in CIELAB, both ends as dark, apart for the colour-blind
SIGNED_MAP = "coolwarm"
DARKEST = 0.1  # factor of a photo's colours in the style "light"
FULL_LIGHT = 2.0  # times uniform attention
LIGHT_SIDE = 192  # pixels of a lit photo's longer side, at least
TIMES = "\N{MULTIPLICATION SIGN}"
WHITE_RIM = patheffects.withStroke(linewidth=1.8, foreground="white")
THIN_RIM = patheffects.withStroke(linewidth=1.5, foreground="white")


@dataclass(frozen=True)
class MapStyle:
    """How maps are drawn.

    style: of attention over a photo. "cells": its cells in colours over the grey photo; "light": the photo in colour,
        lit where attention is above uniform and dark where it is below.
    overlay: over the photo, or alone.
    scale: of the colours. "layer": one for the maps that are compared, which are those of a layer, and in figures of
        several layers or models those of a block; "tile": each map its own, its maximum written on it; "all": one for
        the figure; "uniform": from an eighth of uniform attention to eight times it, the same in every figure.
    cmap: a matplotlib colour map by name; by default rcParams["image.cmap"] for attention, "coolwarm" for logits.
    opacity: of cells over the photo, 0 to 1.

    Raises:
        UsageError: unknown style, scale or colour map, or an opacity outside 0..1.
    """

    overlay: bool = True
    scale: str = "layer"
    cmap: str | None = None
    opacity: float = 0.8
    style: str = "cells"

    def __post_init__(self) -> None:
        if self.style not in STYLES:
            raise UsageError(f"style must be {' or '.join(STYLES)}, got {self.style!r}")
        if self.scale not in SCALES:
            raise UsageError(f"scale must be {', '.join(SCALES)}, got {self.scale!r}")
        if not 0 <= self.opacity <= 1:
            raise UsageError(f"opacity must lie between 0 and 1, got {self.opacity}")
        if self.cmap is not None and self.cmap not in matplotlib.colormaps:
            raise UsageError(
                f"cmap must be one of matplotlib's colour maps, such as viridis, plasma or gray, got "
                f"{self.cmap!r}"
            )

    def lights(self, part: str) -> bool:
        """Return whether maps of a part are drawn as light on the photo."""
        return self.style == "light" and self.overlay and part.startswith("attn")

    def colormap(self, part: str = "attn") -> Colormap:
        """Return the colours of a part: sequential for attention and what else has no sign, diverging for logits."""
        if self.lights(part):
            ends = [(DARKEST,) * 3, (1.0,) * 3]
            return LinearSegmentedColormap.from_list("light", ends)
        own = SIGNED_MAP if part in PARTS[1:] else matplotlib.rcParams["image.cmap"]
        return matplotlib.colormaps[self.cmap or own]


STYLE = MapStyle()


# ---- names ----------------------------------------------------------------------------------------------------------


def head_name(head: Head) -> str:
    return "mean of heads" if head == MEAN else f"head {head}"


def query_name(query: Query) -> str:
    """Name a query: `y 3, x 4`, `class token`, `distillation token`, `register 1`, `mean of all queries`."""
    if not isinstance(query, str):
        return f"y {query[0]}, x {query[1]}"
    names = {"cls": "class token", "dist": "distillation token", ALL: "mean of all queries"}
    return names.get(query, query.replace("reg", "register "))


def queries_name(queries: Sequence[Query]) -> str:
    """Name queries: `query y 3, x 4`, `mean of all queries`; several: `queries 1: y 3, x 4; 2: class token`."""
    if list(queries) == [ALL]:
        return query_name(ALL)
    if len(queries) == 1:
        return f"query {query_name(queries[0])}"
    names = [f"{number}: {query_name(query)}" for number, query in enumerate(queries, start=1)]
    return "queries " + "; ".join(names)


def map_name(layer: LayerMaps, short: bool = False) -> str:
    """Name a layer and the size of its map, beside a row of a grid in two lines."""
    size = "channels" if layer.channels else "x".join(map(str, layer.feat_size))
    if short:
        return f"layer {layer.number}\n{size}"
    what = "from channel to channel of a head" if layer.channels else f"map {size}"
    name = f"layer {layer.number}, {what}"
    if layer.prefix_names:
        name += f" after {', '.join(layer.prefix_names)}"
    return name


def short_names(names: Sequence[str]) -> tuple[Sequence[str], str]:
    """Return names that fit above a map, letters unless all of them do, and what letters stand for."""
    if all(len(name) <= 14 for name in names):
        return names, ""
    short = []
    meanings = []
    for index, name in enumerate(names):
        letter = ascii_uppercase[index % 26] + "'" * (index // 26)
        short.append(letter)
        meanings.append(f"{letter}: {name}")
    return short, "\n" + "; ".join(meanings)


def layers_name(numbers: Sequence[int]) -> str:
    """Name layers: `layers 1 to 3` without a gap, `layers 1, 3` otherwise, `layer 4` alone."""
    without_gap = range(numbers[0], numbers[-1] + 1)
    if len(numbers) > 2 and list(numbers) == list(without_gap):
        return f"layers {numbers[0]} to {numbers[-1]}"
    plural = "s" if len(numbers) > 1 else ""
    return f"layer{plural} " + ", ".join(map(str, numbers))


def before_shares(model: nn.Module, name: str) -> dict[str, float]:
    """Return the weights of the recorded parts in the convolution's input of a layer; {} where it convolves no maps."""
    evolution = getattr(model.get_submodule(name), "evolution", None)
    return evolution.before_shares() if evolution else {}


def _sum(*terms: tuple[float, str]) -> str:
    """Write a weighted sum: without terms of weight 0, without a weight of 1."""
    written = []
    for weight, term in terms:
        if weight == 1:
            written.append(term)
        elif weight != 0:
            factor = f"({term})" if " + " in term and not term.startswith("relu") else term
            written.append(f"{weight:.2g} {factor}")
    return " + ".join(written) or "0"


def equation(model: nn.Module, layers: Sequence[AttentionLayer | LayerMaps]) -> str:
    """Say how the parts of the first layer that convolves maps of a layer before make each other, with its gates (of
    learnable ones their mean); "" where none does."""
    convolving = [layer for layer in layers if before_shares(model, layer.name)]
    if not convolving:
        return ""
    first = convolving[0]
    shares = before_shares(model, first.name)
    gates = model.get_submodule(first.name).evolution.gates()
    mean = {}
    for name, gate in gates.items():
        mean[name] = torch.as_tensor(gate).detach().float().mean().item()
    previous = (shares.get("prev_logits", 0.0), "previous")
    own = (shares.get("self_logits", 0.0), "own")
    mixed = _sum(previous, own)
    convolved = f"relu(conv({mixed}))"
    if "self_logits" in shares:
        share = mean.get("beta", 1.0)
        rest = mixed
    else:
        share = mean.get("alpha", 1.0)
        rest = "own"
    logits = _sum((share, convolved), (1 - share, rest))
    learned = any(isinstance(gate, Tensor) for gate in gates.values())
    whose = f"layer {first.number}" if learned else "a layer"
    return f"{whose}: logits = {logits}, attention = softmax(logits)"


# ---- photos and query points ----------------------------------------------------------------------------------------


def photo_of(
    recording: Recording,
    queries: Sequence[Query] = (),
    feat_size: tuple[int, int] | None = None,
    title: str = "",
) -> Tile:
    """Return the photo with numbered query points, framed as cells of maps of `feat_size`; default: of the largest."""
    sizes = [layer.feat_size for layer in recording.maps.values()]
    cells = feat_size or max(sizes, key=math.prod, default=(1, 1))
    asked = [query for query in queries if query != ALL]

    def paint(axes: Axes, _) -> None:
        axes.set_label("photo")
        axes.imshow(recording.pixels(), extent=recording.extent)
        for number, query in enumerate(asked, start=1):
            mark_query(
                axes,
                recording,
                query,
                cells,
                number,
                numbered=True,
            )

    tokens = any(isinstance(query, str) for query in asked)
    return Tile(paint, title or (" " if tokens else ""), aspect=recording.aspect)


def mark_query(
    axes: Axes,
    recording: Recording,
    query: Query,
    feat_size: tuple[int, int],
    number: int,
    numbered: bool = False,
) -> None:
    """Draw the frame of the map's cell that a query lies in, and its number in a disc. White around both shows on any
    ground. A token that is no patch has no cell: its disc is above the image."""
    color = QUERY_COLORS[(number - 1) % len(QUERY_COLORS)]
    H, W = recording.img_size
    if isinstance(query, str):
        y = -0.09 * H
        x = (0.08 + 0.2 * (number - 1)) * W
    else:
        row, col = cell_of(query, (H, W), feat_size)
        height = H / feat_size[0]
        width = W / feat_size[1]
        y = (row + 0.5) * height
        x = (col + 0.5) * width
        frame = Rectangle(
            (col * width, row * height),
            width,
            height,
            fill=False,
            clip_on=False,
        )
        frame.set(edgecolor=color, linewidth=0.9, path_effects=[WHITE_RIM])
        axes.add_patch(frame)
    if numbered:
        disc = dict(boxstyle="circle,pad=0.15", facecolor=color, edgecolor="white", linewidth=0.7)
        text = axes.text(
            x,
            y,
            str(number),
            color="white",
            fontweight="bold",
            bbox=disc,
        )
        text.set(fontsize=points(), ha="center", va="center_baseline")


# ---- maps -----------------------------------------------------------------------------------------------------------


def tile_of(
    recording: Recording,
    layer: int,
    style: MapStyle,
    head: Head = MEAN,
    query: Query = ALL,
    part: str = "attn",
    title: str = "",
    number: int = 1,
) -> Tile:
    """Return the tile of where a query of a head of a layer looks, or of another part of the layer's map; below a
    transformer's attention what goes to the tokens before its patches.

    Args:
        layer: number. head: counted from 0, or "mean".
        query: (y, x) in pixels of the input, a token by name, or "all".
        title: above the tile.
        number: which of the figure's queries it is, for the colour of its frame.
    """
    values = recording.query_map(layer, query, head, part)
    note = ""
    if part == "attn" and query != ALL:
        note = recording.beside_patches(layer, query, head)
    return map_of(
        values,
        recording,
        style,
        title,
        note,
        point=query,
        number=number,
        part=part,
    )


def map_of(
    values: np.ndarray,
    recording: Recording,
    style: MapStyle,
    title: str = "",
    note: str = "",
    *,
    point: Query = ALL,
    number: int = 1,
    cells: tuple[int, int] | None = None,
    part: str = "attn",
) -> Tile:
    """Return a tile of a map (H', W') over the input's area, its query's cell framed.

    Args:
        values: of a part, as `Recording.query_map` gives it; logits are never drawn over the photo.
        title, note: above and below it.
        point: the query, in pixels of the input, a token by name or "all"; number: which of the queries.
        cells: (height, width) of the map that the query's cell is of; default: this one.
    """

    def paint(axes: Axes, norm: Normalize) -> None:
        if style.lights(part):
            axes.imshow(lit(recording.pixels(), values, norm), extent=recording.extent)
        else:
            _paint_cells(axes, values, recording, style, norm, part)
        if point != ALL:
            mark_query(axes, recording, point, cells or values.shape, number)
        if style.scale == "tile" and part.startswith("attn") and not style.lights(part):
            _write_maximum(axes, values)

    return Tile(paint, title, note, recording.aspect, values, part)


def lit(pixels: np.ndarray, values: np.ndarray, norm: Normalize) -> np.ndarray:
    """Return a photo (H, W, 3) in 0..1, lit by attention in units of uniform attention: multiplied by DARKEST where the
    norm gives 0 and by 1 where it gives 1. The factors are interpolated bilinearly from the map's cells."""
    repeats = math.ceil(LIGHT_SIDE / max(pixels.shape[:2]))
    photo = pixels.repeat(repeats, 0).repeat(repeats, 1)
    light = np.asarray(norm(values), dtype=np.float32)
    cells = torch.from_numpy(DARKEST + (1 - DARKEST) * light)
    factors = interpolate(cells[None, None], photo.shape[:2], mode="bilinear")
    return photo * factors[0, 0, :, :, None].numpy()


def _paint_cells(
    axes: Axes,
    values: np.ndarray,
    recording: Recording,
    style: MapStyle,
    norm: Normalize,
    part: str,
) -> None:
    over_photo = style.overlay and part not in PARTS[1:]
    if over_photo:
        grey = recording.pixels() @ (0.299, 0.587, 0.114)
        axes.imshow(
            grey,
            "gray",
            vmin=0,
            vmax=1,
            extent=recording.extent,
        )
    drawn = axes.imshow(values, style.colormap(part), norm, extent=recording.extent)
    drawn.set_interpolation("nearest")
    drawn.set_alpha(style.opacity if over_photo else None)


def _write_maximum(axes: Axes, values: np.ndarray) -> None:
    text = axes.text(0.97, 0.03, f"{TIMES}{short(values.max())}", transform=axes.transAxes)
    text.set(
        ha="right",
        va="bottom",
        fontsize=points(),
        color="black",
        path_effects=[THIN_RIM],
    )


# ---- scales ---------------------------------------------------------------------------------------------------------


def scaled(
    groups: Sequence[Sequence[Tile]],
    style: MapStyle,
    label: str = "",
) -> list[Bar]:
    """Give the tiles of each group, whose maps are compared, their scale; return the colour bar of each group. All show
    attention, or all the same other part."""
    every = list(chain.from_iterable(groups))
    if style.scale == "tile":
        sharing = [[tile] for tile in every]
    elif style.scale == "layer":
        sharing = groups
    else:
        sharing = [every]
    for tiles in sharing:
        maps = [tile.values for tile in tiles]
        norm = norm_of(maps, style, tiles[0].part)
        for tile in tiles:
            tile.norm = norm
    firsts = [group[0] for group in groups]
    return [bar_of(first.norm, style, first.part, label) for first in firsts]


def norm_of(
    maps: Sequence[np.ndarray],
    style: MapStyle,
    part: str = "attn",
) -> Normalize:
    """Return the scale of maps that are compared with each other.

    Attention, in units of uniform attention, has a logarithmic one, as far down as up, so that uniform attention is in
    the middle; light reaches from half to twice. Logits: the middle 99% of their values, as far down as up. Other
    quantities: from 0.

    Args:
        part: one of PARTS, or another quantity's name.
    """
    if style.lights(part):
        return LogNorm(1 / FULL_LIGHT, FULL_LIGHT, clip=True)
    values = np.concatenate([m.ravel() for m in maps]).astype(np.float64)
    if part.startswith("attn"):
        lowest = 1.05 if style.scale == "tile" else 2.0  # what is nearly uniform looks so
        top = 8.0 if style.scale == "uniform" else max(lowest, values.max())
        return LogNorm(1 / top, top, clip=True)  # clipped: 0 has the lowest colour
    low, high = np.quantile(values, (0.005, 0.995))
    reach = max(abs(low), abs(high), 1e-12)
    return Normalize(-reach if part in PARTS else 0.0, reach)


def bar_of(
    norm: Normalize,
    style: MapStyle,
    part: str = "attn",
    label: str = "",
) -> Bar:
    """Return the colour bar of maps that are compared: of attention in units of uniform attention, which is marked; of
    other parts or quantities as they are. label: default: attention's, or logits'."""
    attention = part.startswith("attn")
    if not label:
        label = f"attention {TIMES} N keys (1: uniform)" if attention else "logit"
    if style.lights(part):
        texts = ["1/2", "", "1", "", "2"]
    elif style.scale == "tile":
        label += f"; {TIMES}: a map's highest" if attention else ", of each map its own"
        texts = ["lowest", "", "1" if attention else "0", "", "highest"]
    elif attention:
        half = short(norm.vmax**0.5)
        top = short(norm.vmax)
        texts = [f"1/{top}", f"1/{half}", "1", half, top]
    else:
        values = np.linspace(norm.vmin, norm.vmax, 5)
        texts = [short(value) for value in values]
    mark = attention and not style.lights(part)
    return Bar(norm, style.colormap(part), label, texts, mark)


def short(value: float) -> str:
    """Write a number in two figures: 850, not 8.5e+02."""
    return f"{float(f'{value:.2g}'):g}"


# ---- figures --------------------------------------------------------------------------------------------------------


def map_sheet(
    title: str,
    blocks: Sequence[Block],
    style: MapStyle,
    *,
    width: float | None,
    note: str,
    photo: Tile | None = None,
    label: str = "",
    bars: Sequence[Bar] = (),
) -> Figure:
    """Draw a figure of maps: the photo with its query points, and the blocks, each of maps that are compared; blocks of
    one row each, of short titles, become a grid.

    Args:
        photo: see `photo_of`.
        label: of the colour bars, unless it is attention's.
        bars: of the blocks, where their tiles have their scale already.
    """
    compared = [block for block in blocks if block.maps()]
    maps = [block.maps() for block in compared]
    bars = bars or scaled(maps, style, label)
    light = style.lights(maps[0][0].part)
    if light:
        note += f"; light: {_light_note(maps)}"
    each_its_own = style.scale == "layer" and len(compared) > 1 and not light
    foot = ""
    if each_its_own:
        for block, bar in zip(compared, bars, strict=True):
            block.bars = [bar]
    if _fits_grid(blocks):
        grid = _grid(blocks, narrow=(width or PAGE) < 5)
        if each_its_own:
            foot = f"colours: {bars[0].label}"
            for block in compared:
                name = block.title.split("\n")[0]
                grid.bars.append(replace(block.bars[0], label=name))
        blocks = [grid]
    shared = [] if each_its_own else bars[:1]
    return sheet(
        title,
        blocks,
        width=width,
        note=note,
        photo=photo,
        bars=shared,
        foot=foot,
    )


def _light_note(maps: Sequence[Sequence[Tile]]) -> str:
    """Say what the light is, and how many cells it has."""
    shapes = {tile.values.shape for tile in chain.from_iterable(maps)}
    sizes = " and ".join(f"{height} x {width}" for height, width in sorted(shapes, reverse=True))
    return f"dark at half of uniform attention, full at twice, interpolated from {sizes} cells"


def _fits_grid(blocks: Sequence[Block]) -> bool:
    if len(blocks) < 2 or any(len(block.rows) != 1 for block in blocks):
        return False
    lines = "\n".join(block.title for block in blocks).split("\n")
    return max(map(len, lines)) <= 24


def _titles(tiles: Sequence[Tile]) -> list[str]:
    return [tile.title for tile in tiles]


def _grid(blocks: Sequence[Block], narrow: bool) -> Block:
    """Return a grid with one row per block; transposed where that fits better. Equal titles are drawn once."""
    names = [block.title for block in blocks]
    lines = [block.rows[0].tiles for block in blocks]
    titles = _titles(lines[0])
    if all(_titles(line) == titles for line in lines):
        if len(titles) != len(lines) and (len(titles) > len(lines)) == narrow:
            lines = list(zip(*lines, strict=True))
            names, titles = titles, names
        for number, line in enumerate(lines):
            for tile, title in zip(line, titles, strict=True):
                tile.title = "" if number else title
    return Block([Row(line, name) for line, name in zip(lines, names, strict=True)], bars=[])
