"""How maps are drawn: scales and colours, the photo below, query points, colour bars, and the names beside them.

Attention is drawn in units of uniform attention: a probability times the N keys that its query sees, so that 1 is what
a query gives to every key when it looks nowhere in particular. Its scale is logarithmic, reaches as far below 1 as
above, and has 1 in the middle, so uniform attention has the same colour in every figure and on the page; 0 has the
lowest colour. Logits and other signed parts have a diverging scale with 0 in its middle.

Lines, fonts and colours that are not data follow matplotlib's rcParams.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

import matplotlib
import numpy as np
import torch
from matplotlib import patheffects
from matplotlib.axes import Axes
from matplotlib.colors import Colormap, LogNorm, Normalize
from matplotlib.figure import Figure
from matplotlib.patches import Rectangle
from torch import Tensor, nn

from ea_vision.base.errors import UsageError
from ea_vision.base.figures import COLORS as QUERY_COLORS
from ea_vision.base.figures import PAGE
from ea_vision.base.print import points
from ea_vision.recorder.recording import PARTS, AttentionLayer, LayerMaps
from ea_vision.visualize.image_maps import MEAN, Head, Query, Recording, cell_of
from ea_vision.visualize.sheet import Bar, Block, Row, Tile, sheet

SCALES = ("layer", "tile", "all", "uniform")
SIGNED_MAP = (
    "coolwarm"  # Moreland's: even steps in CIELAB, both ends as dark, apart for the colour-blind
)


@dataclass(frozen=True)
class MapStyle:
    """How maps are drawn.

    overlay: over the photo in grey, or alone.
    scale: of the colours. "layer": one for the maps that are compared, which are those of a layer, and in figures of
        several layers or models those of a block; "tile": each map its own, its maximum written on it; "all": one for
        the figure; "uniform": from an eighth of uniform attention to eight times it, the same in every figure.
    cmap: a matplotlib colour map by name; by default rcParams["image.cmap"] for attention, "coolwarm" for logits.
    opacity: of maps over the photo, 0 to 1.

    Raises:
        UsageError: unknown scale or colour map, or an opacity outside 0..1.
    """

    overlay: bool = True
    scale: str = "layer"
    cmap: str | None = None
    opacity: float = 0.8

    def __post_init__(self) -> None:
        if self.scale not in SCALES:
            raise UsageError(f"scale must be {', '.join(SCALES)}, got {self.scale!r}")
        if not 0 <= self.opacity <= 1:
            raise UsageError(f"opacity must lie between 0 and 1, got {self.opacity}")
        if self.cmap is not None and self.cmap not in matplotlib.colormaps:
            raise UsageError(
                f"cmap must be one of matplotlib's colour maps, such as viridis, plasma or gray, got "
                f"{self.cmap!r}"
            )

    def colormap(self, part: str = "attn") -> Colormap:
        """Return the colours of a part: sequential for attention and what else has no sign, diverging for logits."""
        own = SIGNED_MAP if part in PARTS[1:] else matplotlib.rcParams["image.cmap"]
        return matplotlib.colormaps[self.cmap or own]


STYLE = MapStyle()


# ---- names ----------------------------------------------------------------------------------------------------------


def head_name(head: Head) -> str:
    return "mean of heads" if head == MEAN else f"head {head}"


def query_name(query: Query) -> str:
    """Name a query: `y 3, x 4`, `class token`, `distillation token`, `register 1`."""
    if not isinstance(query, str):
        return f"y {query[0]}, x {query[1]}"
    return {"cls": "class token", "dist": "distillation token"}.get(
        query, query.replace("reg", "register ")
    )


def queries_name(points: Sequence[Query]) -> str:
    """Name query points: `query y 3, x 4`, of several `queries 1: y 3, x 4; 2: class token`."""
    if len(points) == 1:
        return f"query {query_name(points[0])}"
    return "queries " + "; ".join(
        f"{number}: {query_name(point)}" for number, point in enumerate(points, start=1)
    )


def map_name(layer: LayerMaps, short: bool = False) -> str:
    """Name a layer and the size of its map at length, or beside a row of a grid in two lines."""
    size = "channels" if layer.channels else "x".join(map(str, layer.feat_size))
    if short:
        return f"layer {layer.number}\n{size}"
    what = "from channel to channel of a head" if layer.channels else f"map {size}"
    return f"layer {layer.number} ({layer.name}), {what}" + (
        f" after {', '.join(layer.prefix_names)}" if layer.prefix_names else ""
    )


def short_names(names: Sequence[str]) -> tuple[Sequence[str], str]:
    """Return names that fit above a map, letters unless all of them do, and what letters stand for."""
    if all(len(name) <= 14 for name in names):
        return names, ""
    short = [chr(ord("A") + index % 26) + "'" * (index // 26) for index in range(len(names))]
    return short, "\n" + "; ".join(
        f"{letter}: {name}" for letter, name in zip(short, names, strict=True)
    )


def layers_name(numbers: Sequence[int]) -> str:
    """Name layers: `layers 1 to 3` without a gap, `layers 1, 3` otherwise, `layer 4` alone."""
    if len(numbers) > 2 and list(numbers) == list(range(numbers[0], numbers[-1] + 1)):
        return f"layers {numbers[0]} to {numbers[-1]}"
    return f"layer{'s' * (len(numbers) > 1)} " + ", ".join(map(str, numbers))


def before_shares(model: nn.Module, name: str) -> dict[str, float]:
    """Return the weights of the recorded parts in the convolution's input of a layer; {} where it convolves no maps."""
    evolution = getattr(model.get_submodule(name), "evolution", None)
    return evolution.before_shares() if evolution else {}


def equation(model: nn.Module, layers: Sequence[AttentionLayer | LayerMaps]) -> str:
    """Say how the parts of the first layer that convolves maps of a layer before make each other, with its gates (of
    learnable ones their mean); "" where none does."""
    first = next((layer for layer in layers if before_shares(model, layer.name)), None)
    if first is None:
        return ""
    shares, gates = (
        before_shares(model, first.name),
        model.get_submodule(first.name).evolution.gates(),
    )
    alpha, beta = (
        float(torch.as_tensor(gates.get(gate, 1.0)).detach().float().mean())
        for gate in ("alpha", "beta")
    )
    names = {"prev_logits": "previous", "self_logits": "own"}
    mixed = " + ".join(
        f"{'' if share == 1 else f'{share:.2g} '}{names[part]}" for part, share in shares.items()
    )
    logits = f"relu(conv({mixed}))"
    if "self_logits" not in shares:
        logits = f"{alpha:.2g} {logits} + {1 - alpha:.2g} own"
    elif beta != 1:
        logits = f"{beta:.2g} {logits} + {1 - beta:.2g} ({mixed})"
    learned = any(isinstance(value, Tensor) for value in gates.values())
    return f"{f'layer {first.number}' if learned else 'a layer'}: logits = {logits}, attention = softmax(logits)"


# ---- photos and query points ----------------------------------------------------------------------------------------


def photo_of(
    recording: Recording, queries: Sequence[Query] = (), feat_size: tuple[int, int] | None = None
) -> Tile:
    """Return the photo with numbered query points, framed as cells of maps of `feat_size`; default: of the largest."""
    cells = feat_size or max(
        (layer.feat_size for layer in recording.maps.values()), key=math.prod, default=(1, 1)
    )

    def paint(axes: Axes, _) -> None:
        axes.set_label("photo")
        axes.imshow(recording.pixels(), extent=recording.extent)
        for number, query in enumerate(queries, start=1):
            mark_query(axes, recording, query, cells, number, numbered=True)

    return Tile(
        paint, " " * any(isinstance(query, str) for query in queries), aspect=recording.aspect
    )


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
        y, x = -0.09 * H, (0.08 + 0.2 * (number - 1)) * W
    else:
        row, col = cell_of(query, (H, W), feat_size)
        height, width = H / feat_size[0], W / feat_size[1]
        y, x = (row + 0.5) * height, (col + 0.5) * width
        rim = [patheffects.Stroke(linewidth=1.8, foreground="white"), patheffects.Normal()]
        axes.add_patch(
            Rectangle(
                (col * width, row * height),
                width,
                height,
                fill=False,
                edgecolor=color,
                linewidth=0.9,
                path_effects=rim,
                clip_on=False,
            )
        )
    if numbered:
        axes.text(
            x,
            y,
            str(number),
            color="white",
            fontsize=points(),
            fontweight="bold",
            ha="center",
            va="center_baseline",
            bbox=dict(
                boxstyle="circle,pad=0.15", facecolor=color, edgecolor="white", linewidth=0.7
            ),
        )


# ---- maps -----------------------------------------------------------------------------------------------------------


def map_of(
    values: np.ndarray,
    recording: Recording,
    style: MapStyle,
    title: str = "",
    note: str = "",
    *,
    point: Query | None = None,
    number: int = 1,
    cells: tuple[int, int] | None = None,
    part: str = "attn",
) -> Tile:
    """Return a tile of a map (H', W') over the input's area, its query's cell framed.

    Args:
        values: of a part, as `Recording.query_map` gives it; logits are never drawn over the photo.
        title, note: above and below it.
        point: the query, in pixels of the input or a token by name; number: which of the queries.
        cells: (height, width) of the map that the query's cell is of; default: this one.
    """
    overlay = style.overlay and part not in PARTS[1:]

    def paint(axes: Axes, norm: Normalize) -> None:
        if overlay:
            grey = recording.pixels() @ (0.299, 0.587, 0.114)
            axes.imshow(grey, "gray", vmin=0, vmax=1, extent=recording.extent)
        axes.imshow(
            values,
            style.colormap(part),
            norm,
            extent=recording.extent,
            interpolation="nearest",
            alpha=style.opacity if overlay else None,
        )
        if point is not None:
            mark_query(axes, recording, point, cells or values.shape, number)
        if style.scale == "tile" and part.startswith("attn"):
            axes.text(
                0.97,
                0.03,
                f"\N{MULTIPLICATION SIGN}{short(values.max())}",
                transform=axes.transAxes,
                ha="right",
                va="bottom",
                fontsize=points(),
                color="black",
                path_effects=[patheffects.withStroke(linewidth=1.5, foreground="white")],
            )

    return Tile(paint, title, note, recording.aspect, values, part)


def attention_of(
    recording: Recording,
    layer: int,
    head: Head,
    query: Query | None,
    style: MapStyle,
    title: str = "",
    number: int = 1,
) -> Tile:
    """Return a tile of where a query looks, of a transformer with what goes to the tokens before its patches; without a
    query of what every pixel gets. `number`: which of the queries."""
    if query is None:
        return map_of(recording.received(layer, head), recording, style, title)
    return map_of(
        recording.query_map(layer, query, head),
        recording,
        style,
        title,
        recording.beside_patches(layer, query, head),
        point=query,
        number=number,
    )


def scaled(groups: Sequence[Sequence[Tile]], style: MapStyle, label: str = "") -> list[Bar]:
    """Give the tiles of each group, whose maps are compared, their scale; return the colour bar of each group. All show
    attention, or all the same other part."""
    every = [tile for group in groups for tile in group]
    sharing = {"tile": [[tile] for tile in every], "layer": groups}.get(style.scale, [every])
    for tiles in sharing:
        norm = norm_of([tile.values for tile in tiles], style, tiles[0].part)
        for tile in tiles:
            tile.norm = norm
    return [bar_of(group[0].norm, style, group[0].part, label) for group in groups]


def norm_of(maps: Sequence[np.ndarray], style: MapStyle, part: str = "attn") -> Normalize:
    """Return the scale of maps that are compared with each other.

    Attention, in units of uniform attention, has a logarithmic one, as far down as up, so that uniform attention is in
    the middle. Logits: the middle 99% of their values, as far down as up. Other quantities: from 0.

    Args:
        part: one of PARTS, or another quantity's name.
    """
    values = np.concatenate([m.ravel() for m in maps]).astype(np.float64)
    if part.startswith("attn"):
        lowest = 1.05 if style.scale == "tile" else 2.0  # what is nearly uniform looks so
        top = 8.0 if style.scale == "uniform" else max(lowest, values.max())
        return LogNorm(1 / top, top, clip=True)  # clipped: 0 has the lowest colour
    reach = max(*np.abs(np.quantile(values, (0.005, 0.995))), 1e-12)
    return Normalize(-reach if part in PARTS else 0.0, reach)


def bar_of(norm: Normalize, style: MapStyle, part: str = "attn", label: str = "") -> Bar:
    """Return the colour bar of maps that are compared: of attention in units of uniform attention, which is marked; of
    other parts or quantities as they are. label: default: attention's, or logits'."""
    attention = part.startswith("attn")
    label = label or (
        "attention \N{MULTIPLICATION SIGN} N keys (1: uniform)" if attention else "logit"
    )
    if attention:
        ups = [short(norm.vmax**0.5), short(norm.vmax)]
        texts = [f"1/{ups[1]}", f"1/{ups[0]}", "1", *ups]
    else:
        texts = [short(value) for value in np.linspace(norm.vmin, norm.vmax, 5)]
    if style.scale == "tile":
        texts = ["lowest", "", "1" * attention, "", "highest"]
        label += (
            "; \N{MULTIPLICATION SIGN}: a map's highest" if attention else ", of each map its own"
        )
    return Bar(norm, style.colormap(part), label, texts, attention)


def short(value: float) -> str:
    """Write a number in two figures: 850, not 8.5e+02."""
    return f"{float(f'{value:.2g}'):g}"


# ---- figures --------------------------------------------------------------------------------------------------------


def map_sheet(
    title: str,
    groups: Sequence[tuple[str, Sequence[Row]]],
    style: MapStyle,
    *,
    width: float | None,
    note: str,
    photo: Tile | None = None,
    label: str = "",
    bars: Sequence[Bar] = (),
) -> Figure:
    """Draw a figure of maps: the photo with its query points, and a block a group; groups of one row each, of short
    names, are a grid.

    Args:
        groups: title and rows of each; the maps of a group are compared.
        photo: see `photo_of`.
        label: of the colour bars, unless it is attention's.
        bars: of the groups, where their tiles have their scale already.
    """
    bars = bars or scaled(
        [[tile for row in rows for tile in row.tiles] for _, rows in groups], style, label
    )
    own, foot = style.scale == "layer" and len(groups) > 1, ""  # else one bar of the whole figure
    names, lines = (
        [name for name, _ in groups],
        [rows[0].tiles for _, rows in groups if len(rows) == 1],
    )
    if (
        1 < len(lines) == len(groups)
        and max(len(line) for name in names for line in name.split("\n")) <= 24
    ):
        blocks = [_grid(names, lines, (width or PAGE) < 5)]
        if own:
            foot = f"colours: {bars[0].label}"
            blocks[0].bars = [
                replace(bar, label=name.split("\n")[0])
                for bar, name in zip(bars, names, strict=True)
            ]
    else:
        blocks = [
            Block(rows, name, [bar] * own) for (name, rows), bar in zip(groups, bars, strict=True)
        ]
    return sheet(
        title, blocks, width=width, note=note, photo=photo, bars=[] if own else bars[:1], foot=foot
    )


def _grid(names: Sequence[str], lines: Sequence[Sequence[Tile]], narrow: bool) -> Block:
    """Return a block of a row a name, whose titles stand once where they are alike; where that would be wider than high
    in a narrow figure, or higher than wide in another one, a column a name."""
    titles = [tile.title for tile in lines[0]]
    if all([tile.title for tile in line] == titles for line in lines):
        if len(titles) != len(lines) and (len(titles) > len(lines)) == narrow:
            lines, names, titles = list(zip(*lines, strict=True)), titles, names
        for number, line in enumerate(lines):
            for tile, title in zip(line, titles, strict=True):
                tile.title = "" if number else title
    return Block([Row(line, name) for line, name in zip(lines, names, strict=True)])
