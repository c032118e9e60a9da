"""How maps are drawn: scales, colours and colour bars, and the sheets of maps that are compared.

Attention is drawn in units of uniform attention: a probability times the number N of keys that its query sees, so 1 is
the attention of a query that weights all keys equally. The scale is logarithmic with 1 in its middle, so uniform
attention has the same colour in every figure and on the page; 0 has the lowest colour. Logits and other signed parts
have a scale with 0 in its middle.

Lines, fonts and colours that are not data follow matplotlib's rcParams.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import chain
from numbers import Real
from typing import Any

import matplotlib
import numpy as np
from matplotlib.colors import Colormap, LogNorm, Normalize
from matplotlib.figure import Figure

from ea_vision.base.errors import UsageError
from ea_vision.base.figures import PAGE
from ea_vision.recorder.recording import PARTS
from ea_vision.visualize.sheet import Bar, Block, Row, Tile, sheet

SCALES = ("uniform", "layer", "tile", "all")
STYLES = ("cells", "fog")
# negative: dark and blue; positive: light and yellow, so that signs survive greyscale print and colour-blind readers
SIGNED_MAP = "cividis"
CHANGE_MAP = "PuOr_r"  # of what evolution changed: both ends dark, so their signs are marked
CLEAR = 2.0  # times uniform attention, from which on fog is clear; at 1 / CLEAR it is full
WIDEST_SCALE = 8.0  # times uniform attention, of the scale "uniform"
FULL_CHANGE = 4.0  # times uniform attention, from which on changes have their full colour
TIMES = "\N{MULTIPLICATION SIGN}"
LABELS = {  # of colour bars, by part
    "attn": f"attention {TIMES} N keys (1: uniform)",
    "attn_rollout": f"share of the last map's pixel {TIMES} N (1: uniform)",
    "attn_evidence": f"share of the evidence {TIMES} N (1: uniform)",
    "change": f"change of attention {TIMES} N keys; + and \N{MINUS SIGN}: more than uniform attention",
    "jacobian": "|d logit / d pixel|",
}


@dataclass(frozen=True)
class MapStyle:
    """How maps are drawn.

    Attributes:
        style: how attention is drawn over a photo. "cells": coloured cells over the grey photo; "fog": the photo in
            colour, in fog where attention is below uniform, with a line at uniform attention.
        overlay: whether maps are drawn over the photo.
        scale: of the colours. "uniform": 1/8 to 8 times uniform attention, the same in every figure; logits are scaled
            as with "layer". "layer": the maps of a layer (of a block, if a block compares several layers or models)
            share one; "tile": each map has its own, with its maximum written on it; "all": the figure has one.
        cmap: a matplotlib colour map by name; by default rcParams["image.cmap"] for attention, "cividis" for logits.
        opacity: of cells over the photo, 0 to 1.

    Raises:
        UsageError: unknown style, scale or colour map, an opacity outside 0..1, or fog without the photo.
    """

    overlay: bool = True
    scale: str = "uniform"
    cmap: str | None = None
    opacity: float = 0.8
    style: str = "cells"

    def __post_init__(self) -> None:
        if self.style not in STYLES:
            raise UsageError(f"style must be {' or '.join(STYLES)}, got {self.style!r}")
        if self.style == "fog" and not self.overlay:
            raise UsageError("style fog covers the photo, which overlay=False (--bare) leaves out")
        if self.scale not in SCALES:
            raise UsageError(f"scale must be {', '.join(SCALES)}, got {self.scale!r}")
        if not isinstance(self.opacity, Real) or not 0 <= self.opacity <= 1:
            raise UsageError(f"opacity must lie between 0 and 1, got {self.opacity!r}")
        if self.cmap is not None and self.cmap not in list(matplotlib.colormaps):
            raise UsageError(
                f"cmap must be one of matplotlib's colour maps, such as viridis, plasma or gray, by name, got "
                f"{self.cmap!r}"
            )

    def has_fog(self, part: str) -> bool:
        """Return whether maps of a part are drawn as fog on the photo."""
        return self.style == "fog" and is_attention(part)

    def colormap(self, part: str = "attn") -> Colormap:
        """Return the colours of a part."""
        if part == "change":
            return matplotlib.colormaps[CHANGE_MAP]
        default = SIGNED_MAP if part in PARTS[1:] else matplotlib.rcParams["image.cmap"]
        return matplotlib.colormaps[self.cmap or default]


STYLE = MapStyle()
STYLE_FIELDS = tuple(MapStyle.__dataclass_fields__)


def is_attention(part: str) -> bool:
    """Return whether a part has probabilities."""
    return part.startswith("attn")


def style_of(keywords: Mapping[str, Any], fields: Sequence[str] = STYLE_FIELDS) -> MapStyle:
    """Return the style that a figure's keywords set.

    Args:
        fields: of `MapStyle` that the figure has.

    Raises:
        UsageError: a keyword that the figure lacks, or an invalid value.
    """
    unknown = [name for name in keywords if name not in fields]
    if unknown:
        raise UsageError(
            f"this figure has no keyword {unknown[0]}; those of its style are {', '.join(fields)}, and its docstring "
            "lists the others"
        )
    return MapStyle(**keywords)


# ---- scales ---------------------------------------------------------------------------------------------------------


def scaled(groups: Sequence[Sequence[Tile]], style: MapStyle) -> list[Bar]:
    """Set the scale of each group of compared tiles; return one colour bar per group, or a single one for all if they
    share their scale. All tiles must show attention, or all logits, or all the same other quantity."""
    tiles = list(chain.from_iterable(groups))
    part = tiles[0].part
    if _kind(part) not in ("attn", "logits"):
        style = replace(style, scale="all")
    one_for_all = style.scale == "all" or (style.scale == "uniform" and is_attention(part))
    if style.scale == "tile":
        sharing = [[tile] for tile in tiles]
    else:
        sharing = [tiles] if one_for_all else groups
    for group in sharing:
        norm = norm_of([tile.values for tile in group], style, part)
        for tile in group:
            tile.norm = norm
    firsts = [group[0] for group in groups]
    if one_for_all or style.scale == "tile":
        firsts = firsts[:1]
    return [_bar_of(first.norm, style, part) for first in firsts]


def _kind(part: str) -> str:
    """Return the kind of a part, whose maps can share a scale: "attn", "logits", or the other quantity itself."""
    if is_attention(part):
        return "attn"
    return "logits" if part in PARTS else part


def norm_of(maps: Sequence[np.ndarray], style: MapStyle, part: str = "attn") -> Normalize:
    """Return the scale of maps that are compared with each other.

    Attention, in units of uniform attention, has a logarithmic scale with 1 in its middle; in the style "fog" it
    reaches from 1/2 to 2. Logits have a linear scale with 0 in its middle, which covers the middle 99% of their values.
    "change" reaches FULL_CHANGE to both sides; other quantities have a linear scale from 0. Values of -inf, as a mask
    gives to logits, do not count.

    Args:
        part: one of PARTS, or another quantity's name.

    Raises:
        UsageError: NaN or inf among the values, as in a network that has diverged, or no finite value.
    """
    values = np.concatenate([values.ravel() for values in maps])
    values = values.astype(np.float64)
    finite = values[np.isfinite(values)]
    masked = np.count_nonzero(np.isneginf(values))
    wrong = len(values) - len(finite) - masked
    if wrong or not len(finite):
        raise UsageError(f"maps must be finite, got {wrong or masked} values that are not")
    if is_attention(part):
        if style.has_fog(part):
            top = CLEAR
        elif style.scale == "uniform":
            top = WIDEST_SCALE
        else:  # nearly uniform maps look nearly uniform
            top = max(1.05 if style.scale == "tile" else 2.0, finite.max())
        return LogNorm(1 / top, top, clip=True)  # clipped: 0 has the lowest colour
    if part == "change":
        return Normalize(-FULL_CHANGE, FULL_CHANGE, clip=True)
    low, high = np.quantile(finite, (0.005, 0.995))
    reach = max(abs(low), abs(high), 1e-12)
    return Normalize(-reach if part in PARTS else 0.0, reach)


def _bar_of(norm: Normalize, style: MapStyle, part: str) -> Bar:
    """Return the colour bar of compared maps. Attention's bar is in units of uniform attention and marks 1; other bars
    show plain values."""
    attention = is_attention(part)
    label = LABELS.get(part, LABELS["attn"] if attention else "logit")
    if style.scale == "tile":
        label += f"; {TIMES}: a map's highest" if attention else ", each map at its own scale"
        texts = ["lowest", "", "1" if attention else "0", "", "highest"]
    elif attention:
        half = short(norm.vmax**0.5)
        top = short(norm.vmax)
        texts = [f"1/{top}", f"1/{half}", "1", half, top]
    else:
        texts = [short(value) for value in np.linspace(norm.vmin, norm.vmax, 5)]
    if part == "change" or (attention and style.scale == "uniform"):
        texts[0] = f"\u2264{texts[0]}"
        texts[-1] = f"\u2265{texts[-1]}"
    return Bar(style.colormap(part), label, texts, mark=attention)


def short(value: float) -> str:
    """Write a number in two figures: 850, not 8.5e+02."""
    return f"{float(f'{value:.2g}'):g}"


# ---- figures --------------------------------------------------------------------------------------------------------


def map_sheet(
    title: str,
    blocks: Sequence[Block],
    style: MapStyle,
    *,
    note: str,
    photo: Tile | None = None,
    **page,
) -> Figure:
    """Draw a figure of maps: the photo with its query points, and one block per group of compared maps. Blocks of one
    row with short titles become a grid. In blocks that have attention beside logits, each row scales its logits. Colour
    bars of several blocks have their names.

    Args:
        photo: see `photo_of`.
        **page: width and left_out, see `sheet`.
    """
    maps = list(chain.from_iterable(block.maps() for block in blocks))
    kinds = dict.fromkeys(_kind(tile.part) for tile in maps)
    shared = []
    foot = ""
    for kind in kinds:
        scaled_by_row = kind == "logits" and len(kinds) > 1
        owners = []
        groups = []
        for owner in (
            chain.from_iterable(block.rows for block in blocks) if scaled_by_row else blocks
        ):
            tiles = [tile for tile in owner.maps() if _kind(tile.part) == kind]
            if tiles:
                owners.append(owner)
                groups.append(tiles)
        bars = scaled(groups, style)
        if style.has_fog(kind):
            note += f"; {fog_note(maps)}"
        elif len(bars) == 1:
            shared += bars
        elif scaled_by_row:
            for row, bar in zip(owners, bars, strict=True):
                row.label += f"\n\N{PLUS-MINUS SIGN}{bar.texts[-1]}"
            ends = ["lowest", "", "0", "", "highest"]
            shared.append(replace(bars[0], label="logit; ends: beside each row", texts=ends))
        else:
            foot = f"colours: {bars[0].label}"
            for block, bar in zip(owners, bars, strict=True):
                shared.append(replace(bar, label=block.title.partition("\n")[0]))
    if _fits_grid(blocks):
        blocks = [_grid(blocks, narrow=(page.get("width") or PAGE) < 5)]
    return sheet(title, blocks, note=note, photo=photo, bars=shared, foot=foot, **page)


def fog_note(tiles: Sequence[Tile]) -> str:
    """Explain the fog, and the number of its cells."""
    shapes = {tile.values.shape for tile in tiles if is_attention(tile.part)}
    sizes = " and ".join(f"{height} x {width}" for height, width in sorted(shapes, reverse=True))
    return (
        "full fog: at most half of uniform attention; clear: at least twice; line: uniform; interpolated "
        f"from {sizes} cells"
    )


def _fits_grid(blocks: Sequence[Block]) -> bool:
    # a row's own label has no place in a grid
    if len(blocks) < 2 or any(len(block.rows) != 1 or block.rows[0].label for block in blocks):
        return False
    lines = "\n".join(block.title for block in blocks).split("\n")
    return max(map(len, lines)) <= 24


def _grid(blocks: Sequence[Block], narrow: bool) -> Block:
    """Return a grid with one row per block; transposed where that fits better. Equal titles are drawn once. Blocks of
    one tile each become a single row."""
    names = [block.title for block in blocks]
    lines = [block.rows[0].tiles for block in blocks]
    if all(len(line) == 1 for line in lines):
        lines = [list(chain.from_iterable(lines))]
        titles = names
        names = [""]
    else:
        titles = [tile.title for tile in lines[0]]
        if any([tile.title for tile in line] != titles for line in lines):
            titles = []
        elif (len(titles) > len(lines)) == narrow and len(titles) != len(lines):
            lines = list(zip(*lines, strict=True))
            names, titles = titles, names
    for number, line in enumerate(lines):
        for tile, title in zip(line, titles, strict=False):
            tile.title = "" if number else title
    rows = [Row(line, name) for line, name in zip(lines, names, strict=True)]
    return Block(rows, enlarged=blocks[0].enlarged)
