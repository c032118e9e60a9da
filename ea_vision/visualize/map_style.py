"""What the figures are made of: photos, maps over them, query points, colour bars, and the names beside them.

Attention is drawn in units of uniform attention: a probability times the N keys that its query sees, so that 1 is what
a query gives to every key when it looks nowhere in particular. Every colour bar marks that place, "1/N". Maps of
different sizes have one scale in these units.

Text has the sizes of matplotlib's rcParams, and so have lines, fonts and colours that are not data.
"""

from __future__ import annotations

import io
import textwrap
from collections.abc import Sequence
from dataclasses import dataclass

import matplotlib
import numpy as np
from matplotlib import colors, patheffects
from matplotlib.axes import Axes
from matplotlib.cm import ScalarMappable
from matplotlib.colors import Colormap, LogNorm, Normalize
from matplotlib.figure import Figure
from matplotlib.patches import Rectangle
from matplotlib.ticker import NullLocator
from torch import Tensor

from ea_vision.analysis.recording import PARTS, AttentionLayer, LayerMaps
from ea_vision.base.errors import UsageError
from ea_vision.base.figures import COLORS as QUERY_COLORS
from ea_vision.base.figures import font_points
from ea_vision.visualize.image_maps import MEAN, Head, Query, Recording, cell_of

SCALES = ("layer", "tile", "all", "uniform")
OVERLAY_MAP = "cool"  # cyan to magenta, bright all along: colours that few animals, meadows and rooms have
UNIFORM_TOP = 8.0  # times uniform attention: where --scale uniform ends
LOWEST_TOP = 2.0  # a scale goes on to at least twice uniform attention: what is nearly uniform looks so
PART_NAMES = {"attn": "attention", "logits": "logits", "self_logits": "own logits",
              "conv_logits": "convolved logits", "prev_logits": "previous logits"}


@dataclass(frozen=True)
class MapStyle:
    """How maps are drawn.

    overlay: over the photo, with an opacity that follows the attention: what gets less than uniform attention stays
        untouched. Or alone.
    scale: of the colours. "layer": one for the maps that are compared, which are those of a layer, and in figures of
        several layers or models those of a block; "tile": each map its own, its maximum written on it; "all": one for
        the figure; "uniform": from 1/N to 8/N, the same in every figure.
    cmap: a matplotlib colour map by name; by default "cool" over a photo, and rcParams["image.cmap"] alone.
    opacity: of the strongest attention over the photo, 0 to 1.
    smooth: shades between the cells of a map, or its cells as they are.
    as_seen: under the maps the pixels that the network saw, not the photo.

    Raises:
        UsageError: a scale or colour map that there is not, or an opacity outside 0..1.
    """

    overlay: bool = True
    scale: str = "layer"
    cmap: str | None = None
    opacity: float = 0.85
    smooth: bool = False
    as_seen: bool = False

    def __post_init__(self) -> None:
        if self.scale not in SCALES:
            raise UsageError(f"scale must be {', '.join(SCALES)}, got {self.scale!r}")
        if not 0 <= self.opacity <= 1:
            raise UsageError(f"opacity must lie between 0 and 1, got {self.opacity}")
        if self.cmap is not None and self.cmap not in matplotlib.colormaps:
            raise UsageError(f"cmap must be one of matplotlib's colour maps, such as viridis, plasma or gray, got "
                             f"{self.cmap!r}")

    def colormap(self, overlay: bool) -> Colormap:
        """That of the maps; over a photo with the opacity in it."""
        if not overlay:
            return matplotlib.colormaps[self.cmap or matplotlib.rcParams["image.cmap"]]
        steps = np.linspace(0, 1, 256)
        shades = matplotlib.colormaps[self.cmap or OVERLAY_MAP](steps)
        shades[:, 3] = self.opacity * steps ** 0.6
        return colors.ListedColormap(shades)


STYLE, BARE = MapStyle(), MapStyle(overlay=False)


# ---- figures, and what stands around maps ---------------------------------------------------------------------------

class Picture(Figure):
    """A figure that belongs to no window; notebooks show it whether or not pyplot is loaded."""

    def _repr_png_(self) -> bytes:
        data = io.BytesIO()
        self.savefig(data, format="png")
        return data.getvalue()


def text_scale() -> float:
    """How much larger than matplotlib's own the text is: what space for text is multiplied by."""
    return matplotlib.rcParams["font.size"] / 10


def new_figure(width: float, height: float) -> Figure:
    """A figure of width x height inches."""
    return Picture(figsize=(width, height), layout="constrained")


def wrapped(text: str, inches: float, size: float = 10.0) -> str:
    """Lines that are not longer than that, of text of so many points at matplotlib's own sizes."""
    characters = max(8, int(inches * 72 / (0.62 * size * text_scale())))
    return "\n".join(line for part in text.split("\n") for line in textwrap.wrap(part, characters) or [""])


def head_name(head: Head) -> str:
    return "mean of heads" if head == MEAN else f"head {head}"


def layer_name(layer: AttentionLayer | LayerMaps) -> str:
    return f"layer {layer.number} ({layer.name})"


def map_name(layer: LayerMaps) -> str:
    if layer.channels:
        return f"{layer_name(layer)}, from channel to channel of a head"
    names = [name for name in layer.prefix_names if not name.startswith("reg")]
    registers = len(layer.prefix_names) - len(names)
    names += [f"{registers} registers" if registers > 1 else "a register"] if registers else []
    prefix = f" after {', '.join(names)}" if names else ""
    return f"{layer_name(layer)}, map {layer.feat_size[0]}x{layer.feat_size[1]}{prefix}"


def name_row(axes: Axes, name: str, lines: int) -> None:
    """A name above a row of maps that begins with these axes and has titles of so many small lines. A blank title keeps
    its height free; a title as wide as the name would push the next axes aside."""
    pad = matplotlib.rcParams["axes.titlepad"] + lines * 1.4 * font_points("small")
    blank_lines = "\n".join(" " for _ in name.split("\n"))
    axes.set_title(blank_lines, fontsize="medium", loc="left", pad=pad + 0.6 * font_points("medium"))
    axes.annotate(name, (0, 1), (0, pad), xycoords="axes fraction", textcoords="offset points", fontsize="medium",
                  ha="left", va="bottom", annotation_clip=False).set_in_layout(False)


def layers_name(numbers: Sequence[int]) -> str:
    """`layer 4`, `layers 1 to 3` without a gap, `layers 1, 3` otherwise."""
    numbers = list(numbers)
    if len(numbers) == 1:
        return f"layer {numbers[0]}"
    if len(numbers) > 2 and numbers == list(range(numbers[0], numbers[-1] + 1)):
        return f"layers {numbers[0]} to {numbers[-1]}"
    return "layers " + ", ".join(map(str, numbers))


def bare(axes: Axes) -> None:
    axes.set_xticks([])
    axes.set_yticks([])
    for spine in axes.spines.values():
        spine.set_visible(False)


def blank(axes: Axes, img_size: tuple[int, int], text: str = "") -> None:
    """An empty place as large as a picture's, with a word where one belongs."""
    axes.set(xlim=(0, img_size[1]), ylim=(img_size[0], 0), aspect="equal")
    axes.text(img_size[1] / 2, img_size[0] / 2, text, ha="center", va="center", fontsize="small", color="0.5")
    bare(axes)


# ---- photos and query points ----------------------------------------------------------------------------------------

def draw_image(axes: Axes, image: Tensor) -> None:
    """(3, H, W) in 0..1, pixel by pixel."""
    H, W = image.shape[1:]
    axes.imshow(image.permute(1, 2, 0).cpu().numpy(), extent=(0, W, H, 0), interpolation="nearest")
    bare(axes)


def draw_photo(axes: Axes, recording: Recording, style: MapStyle, points: Sequence[Query] = (),
               feat_size: tuple[int, int] | None = None, first: int = 1) -> None:
    """The photo in the input's coordinates, with numbered query points, framed as cells of maps of `feat_size`."""
    if style.as_seen or recording.photo is None:
        draw_image(axes, recording.image)
    else:
        H, W = recording.image.shape[1:]
        axes.imshow(recording.photo, extent=(0, W, H, 0))
        bare(axes)
    for number, point in enumerate(points, start=first):
        mark_query(axes, recording, point, feat_size, number, numbered=True)


def mark_query(axes: Axes, recording: Recording, query: Query, feat_size: tuple[int, int] | None, number: int,
               numbered: bool = False) -> None:
    """The frame of the map's cell that a query lies in, and its number in a disc. White around both shows on any
    ground. A token that is no patch has no cell: its disc is above the image."""
    color = QUERY_COLORS[(number - 1) % len(QUERY_COLORS)]
    H, W = recording.image.shape[1:]
    if isinstance(query, str):
        y, x = -0.09 * H, (0.08 + 0.14 * (number - 1)) * W
    else:
        y, x = query[0] + 0.5, query[1] + 0.5
    if feat_size is not None and not isinstance(query, str):
        row, col = cell_of(query, (H, W), feat_size)
        height, width = H / feat_size[0], W / feat_size[1]
        y, x = (row + 0.5) * height, (col + 0.5) * width
        rim = [patheffects.Stroke(linewidth=2.4, foreground="white"), patheffects.Normal()]
        axes.add_patch(Rectangle((col * width, row * height), width, height, fill=False, edgecolor=color, linewidth=1.2,
                                 path_effects=rim, clip_on=False))
    if numbered:
        axes.text(x, y, str(number), color="white", fontsize="x-small", fontweight="bold", ha="center",
                  va="center_baseline", clip_on=False,
                  bbox=dict(boxstyle="circle,pad=0.25", facecolor=color, edgecolor="white", linewidth=1))


# ---- maps -----------------------------------------------------------------------------------------------------------

def norms_of(groups: Sequence[Sequence[np.ndarray]], style: MapStyle, part: str = "attn", overlay: bool | None = None,
             ) -> list[list[Normalize]]:
    """The scale of every map, in the nesting of `groups`, which are the maps that are compared with each other.

    Attention, in units of uniform attention, has a logarithmic one: over a photo from 1 to the largest value, alone as
    far down as up, so that uniform attention is in the middle. Other parts: the middle 99% of their values; a quantity
    over a photo begins at 0.

    Args:
        groups: maps by group.
        part: one of PARTS, or another quantity's name.
        overlay: over a photo; default: as `style` says.
    """
    overlay = style.overlay if overlay is None else overlay
    if style.scale == "tile":
        return [[_norm([values], part, overlay, 1.05) for values in group] for group in groups]
    if style.scale == "uniform" and part == "attn":
        norm = LogNorm(1 if overlay else 1 / UNIFORM_TOP, UNIFORM_TOP)
        return [[norm] * len(group) for group in groups]
    if style.scale != "layer":
        norm = _norm([values for group in groups for values in group], part, overlay)
        return [[norm] * len(group) for group in groups]
    return [[_norm(group, part, overlay)] * len(group) for group in groups]


def _norm(maps: Sequence[np.ndarray], part: str, overlay: bool, lowest_top: float = LOWEST_TOP) -> Normalize:
    values = np.concatenate([m.ravel() for m in maps])
    if part == "attn":
        top = max(lowest_top, float(values.max()))
        return LogNorm(1 if overlay else 1 / top, top)
    low, high = (float(value) for value in np.quantile(values, (0.005, 0.995)))
    low = 0.0 if overlay and low >= 0 else low
    return Normalize(low, max(high, low + 1e-12))


def draw_map(axes: Axes, values: np.ndarray, recording: Recording, norm: Normalize, style: MapStyle, *,
             point: Query | None = None, number: int = 1, overlay: bool | None = None, part: str = "attn",
             note: str = ""):
    """A map (H', W') over the input's area, its query's cell framed; return the artist.

    Args:
        values: attention in units of uniform attention (`Recording.relative_map`), or another part.
        norm: from `norms_of`.
        point: the query, in pixels of the input or a token by name; number: which of the queries.
        note: is written below the map.
        overlay: over a photo; default: as `style` says.
    """
    overlay = style.overlay if overlay is None else overlay
    H, W = recording.image.shape[1:]
    if overlay:
        draw_photo(axes, recording, style)
    artist = axes.imshow(values, extent=(0, W, H, 0), cmap=style.colormap(overlay), norm=norm,
                         interpolation="bilinear" if style.smooth else "nearest")
    if point is not None:
        mark_query(axes, recording, point, values.shape, number)
    if style.scale == "tile" and part == "attn":
        axes.text(0.97, 0.03, f"{_short(float(values.max()))}/N", transform=axes.transAxes, ha="right", va="bottom",
                  fontsize="xx-small", color="black",
                  path_effects=[patheffects.withStroke(linewidth=2, foreground="white")])
    bare(axes)
    if note:
        axes.set_xlabel(note, fontsize="xx-small", labelpad=1)
    return artist


def add_scale(figure, axes, norm: Normalize, style: MapStyle, part: str = "attn", overlay: bool | None = None,
              bar_label: str | None = None, short: bool = False) -> None:
    """The colour bar of maps that are compared: of attention in units of 1/N, which is marked; of other parts or
    quantities as they are. Over a photo it is on grey, where it can be seen how opaque it is. A short bar, beside one
    row of maps, has few ticks."""
    overlay = style.overlay if overlay is None else overlay
    own = style.scale == "tile"
    if own:
        norm = Normalize(0, 1)
    bar = figure.colorbar(ScalarMappable(norm, style.colormap(overlay)), ax=axes, pad=0.015, aspect=30, panchor=False,
                          shrink=0.65 if short else 0.8)
    bar.ax.tick_params(labelsize="x-small")
    bar.ax.yaxis.set_minor_locator(NullLocator())
    if overlay:
        bar.ax.set_facecolor("0.7")
    if part == "attn":
        places, labels = _own_ticks(overlay) if own else _uniform_ticks(norm, 0 if short else 3)
        bar.set_ticks(places, labels=labels)
        bar.ax.axhline(0 if own and overlay else 0.5 if own else 1, color=matplotlib.rcParams["axes.edgecolor"],
                       linewidth=1.5, clip_on=False)
    elif own:
        bar.set_ticks([0, 1], labels=["map's\nlowest", "map's\nhighest"])
    names = {"attn": "attention", **dict.fromkeys(PARTS[1:], "logit")}
    bar.set_label(bar_label or names.get(part, part), fontsize="small")
    bar.outline.set_visible(False)


def _own_ticks(overlay: bool) -> tuple[list[float], list[str]]:
    return ([0, 1], ["1/N", "map's\nhighest"]) if overlay else ([0.5, 1], ["1/N", "map's\nhighest"])


def _uniform_ticks(norm: Normalize, most: int) -> tuple[list[float], list[str]]:
    """Uniform attention, the largest value, at most so many powers of two between them, and as many down where the
    scale goes there."""
    octaves = float(np.log2(norm.vmax))
    step = max(1, round(octaves / 4))
    ups = [2 ** n for n in range(step, 64, step) if n < octaves - 0.5 * step]
    ups = [*ups[:most], norm.vmax]
    labels = [_short(up) for up in ups]
    if norm.vmin >= 1:
        return [1, *ups], ["1/N", *(f"{label}/N" for label in labels)]
    return ([*(1 / up for up in reversed(ups)), 1, *ups],
            [*(f"1/({label}N)" for label in reversed(labels)), "1/N", *(f"{label}/N" for label in labels)])


def _short(value: float) -> str:
    return f"{value:.3g}" if value >= 10 else f"{value:.2f}".rstrip("0").rstrip(".")
