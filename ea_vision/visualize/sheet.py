"""Tiles on a sheet of fixed width: text keeps its size, tiles shrink.

A figure is a list of blocks, a block a grid of tiles with its colour bars. The width in inches is that of a paper's
column (3.3) or page (6.75). Text has 7 to 9 points (in proportion larger or smaller where rcParams["font.size"] is not
matplotlib's); every text is measured, so that none meets another one. Lengths here are points, 72 an inch.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial

import matplotlib
import numpy as np
from matplotlib.axes import Axes
from matplotlib.cm import ScalarMappable
from matplotlib.colors import Colormap, Normalize
from matplotlib.figure import Figure

from ea_vision.base.figures import PAGE, check_width
from ea_vision.base.print import new_figure, points, text_width, wrapped

MARGIN, GAP = 4.0, 3.0
LARGEST_TILE, SMALLEST_TILE, PHOTO = 92.0, 16.0, 72.0
BAR, BAR_LENGTH = 5.0, 100.0
LEADING = 1.25  # height of a line of text over its size


@dataclass
class Tile:
    """A picture of a block.

    paint: draws it into axes, by `norm`; None leaves its place empty.
    title, note: above and below it.
    aspect: its height over its width.
    values: what is drawn; norm: their scale, once the maps that are compared are known.
    """

    paint: Callable[[Axes, Normalize | None], object] | None
    title: str = ""
    note: str = ""
    aspect: float = 1.0
    values: np.ndarray | None = None
    norm: Normalize | None = None


@dataclass
class Bar:
    """A colour bar: texts at five even places, from its lower to its upper end; `mark`: whether a line crosses its
    middle."""

    norm: Normalize
    cmap: Colormap
    label: str
    texts: Sequence[str]
    mark: bool


@dataclass
class Row:
    """Tiles side by side, of one aspect. label: left of them."""

    tiles: Sequence[Tile]
    label: str = ""


@dataclass
class Block:
    """Rows of tiles. bars: below all; row_bars, column_bars: one beside each row or below each column, their label
    below the figure; enlarged: width of a tile over that of other blocks."""

    rows: Sequence[Row]
    title: str = ""
    bars: Sequence[Bar] = ()
    row_bars: Sequence[Bar] = ()
    column_bars: Sequence[Bar] = ()
    enlarged: float = 1.0


def _height(text: str, size: float) -> float:
    return LEADING * size * (1 + text.count("\n")) if text else 0.0


@dataclass
class _Laid:
    """What stands where, in points from the left upper corner.

    boxes: axes, (x, y, width, height, function that draws into them). texts: (x, y, text, size). whole: no grid is
    broken.
    """

    width: float = 0.0
    height: float = 0.0
    whole: bool = True
    boxes: list[tuple[float, float, float, float, Callable[[Axes], object]]] = field(default_factory=list)
    texts: list[tuple[float, float, str, float]] = field(default_factory=list)

    def place(self, other: _Laid, x: float, y: float) -> None:
        """Add what another one has, its corner at (x, y)."""
        self.boxes += [(x + dx, y + dy, *rest) for dx, dy, *rest in other.boxes]
        self.texts += [(x + dx, y + dy, *rest) for dx, dy, *rest in other.texts]
        self.width, self.height = max(self.width, x + other.width), max(self.height, y + other.height)
        self.whole &= other.whole

    def text(self, x: float, text: str, kind: str = "small") -> None:
        """Add text, broken into lines, at the lower end."""
        size = points(kind)
        lines = wrapped(text, self.width - x, size)
        self.texts.append((x, self.height, lines, size))
        self.height += _height(lines, size)

    def bar(self, bar: Bar, x: float, length: float, label: str = "", flat: bool = True) -> None:
        """Add a colour bar at the lower end."""
        sides = (length, BAR) if flat else (BAR, length)
        self.boxes.append((x, self.height, *sides, partial(_paint_bar, bar, length, label, flat)))

    def bars(self, bars: Sequence[Bar]) -> None:
        """Add colour bars side by side at the lower end."""
        if not bars:
            return
        each = min(self.width / len(bars), 1.4 * BAR_LENGTH)
        labels = [wrapped(bar.label, each - 4 * GAP, points()) for bar in bars]
        self.height += 1
        for index, (bar, label) in enumerate(zip(bars, labels, strict=True)):
            self.bar(bar, index * each, each - 4 * GAP, label)
        self.height += BAR + LEADING * points() + max(_height(label, points()) for label in labels) + 6.0

    def row(self, tiles: Sequence[Tile], side: float, left: float, label: str, bar: Bar | None) -> None:
        """Add a line of tiles, with the label of their row and its colour bar, at the lower end."""
        small, high = points(), side * tiles[0].aspect
        titles, notes = ([wrapped(text, side + GAP - 1, small) for text in texts]
                         for texts in zip(*((tile.title, tile.note) for tile in tiles), strict=True))
        above, below = (max(_height(text, small) for text in texts) for texts in (titles, notes))
        edge = max(0.0, text_width(label, small) - high if label else 0.0) / 2
        self.height += above + (0.3 * small if above else 0.0) + edge
        for tile, title, note in zip(tiles, titles, notes, strict=True):
            self.boxes.append((left, self.height, side, high, partial(_paint_tile, tile, title, note, label)))
            left, label = left + side + GAP, ""
        if bar:
            self.bar(bar, left, high, flat=False)
        self.height += high + edge + (below + 2.0 if below else 0.0) + GAP


def _paint_tile(tile: Tile, title: str, note: str, label: str, axes: Axes) -> None:
    axes.set(xticks=[], yticks=[], frame_on=False, title=title, xlabel=note, ylabel=label)
    if tile.paint:
        tile.paint(axes, tile.norm)


def _paint_bar(bar: Bar, length: float, label: str, flat: bool, axes: Axes) -> None:
    """Draw a colour bar with as many of its texts as have room, those at the ends within its length."""
    drawn = axes.figure.colorbar(ScalarMappable(bar.norm, bar.cmap), cax=axes, label=label,
                                 orientation="horizontal" if flat else "vertical")
    axes.set_label("<colorbar>")
    drawn.outline.set_visible(False)
    room = length / (max(text_width(text, points()) for text in bar.texts) + 2 if flat else 1.2 * points())
    shown = slice(0 if room >= 2 else 4, None, 1 if room >= 6 else 2 if room >= 3 else 4)
    places = [bar.norm.inverse(place) for place in (0, 0.25, 0.5, 0.75, 1)]
    drawn.set_ticks(places[shown], labels=bar.texts[shown])
    axes.minorticks_off()
    axes.tick_params(labelsize=points(), pad=1, length=2)
    first, last = (drawn.long_axis.get_ticklabels()[end] for end in (0, -1))
    first.set(**{"ha": "left"} if flat else {"va": "bottom"})
    last.set(**{"ha": "right"} if flat else {"va": "top"})
    if bar.mark:
        (axes.axvline if flat else axes.axhline)(places[2], color="black", linewidth=1.2, clip_on=False)


def _lay_block(block: Block, side: float, room: float, alone: bool) -> _Laid:
    """Lay a block with tiles of this width. Rows break into lines where `room` forces it."""
    small, side = points(), side * block.enlarged
    labels = [wrapped(row.label, max(side * row.tiles[0].aspect, 30.0), small) for row in block.rows]
    left = max(_height(label, small) for label in labels) + 2.0 * any(labels)
    numbers = [text_width(text, small) for bar in block.row_bars for text in bar.texts]
    right = GAP + BAR + 4 + max(numbers) if numbers else 0.0
    columns = max(len(row.tiles) for row in block.rows)
    lines = math.ceil(columns / max(1, (room - left - right + GAP) // (side + GAP)))
    each = math.ceil(columns / lines)
    grid = left + each * (side + GAP) - GAP + right
    alone |= 2 * grid + 3 * GAP > room  # no other fits beside it
    least = max(BAR_LENGTH * len(block.bars), text_width(block.title, points("medium")) * alone)
    laid = _Laid(max(grid, min(room, least)), whole=lines <= 1 + (len(block.rows) == 1 and columns > 4))
    laid.text(0, block.title, "medium")
    laid.height += 2.0 * bool(block.title)
    for first in range(0, columns, each):
        for row, label, bar in zip(block.rows, labels, block.row_bars or [None] * len(labels), strict=True):
            if tiles := row.tiles[first:first + each]:
                laid.row(tiles, side, left, label, bar)
        for col, bar in enumerate(block.column_bars[first:first + each]):
            laid.bar(bar, left + col * (side + GAP) + GAP, side - 2 * GAP)
        laid.height += (BAR + 4 + LEADING * small) * bool(block.column_bars)
    laid.bars(block.bars)
    return laid


def _lay_all(blocks: Sequence[Block], side: float, room: float) -> _Laid:
    """Lay blocks side by side where they fit, else below."""
    laid, x, y = _Laid(), 0.0, 0.0
    for block in blocks:
        one = _lay_block(block, side, room, len(blocks) == 1)
        if x and x + one.width > room + 0.5:
            x, y = 0.0, laid.height + 2 * GAP
        laid.place(one, x, y)
        x += one.width + 3 * GAP
    return laid


def sheet(title: str, blocks: Sequence[Block], *, width: float | None = None, photo: Tile | None = None,
          note: str = "", bars: Sequence[Bar] = ()) -> Figure:
    """Draw a figure: photo, title and note above, then the blocks. Tiles are as large as lets grids stay whole, single
    rows have two lines at most, words of titles stay whole, and the height stay below a limit.

    Args:
        width: inches; None: as wide as the blocks need, at most PAGE.
        photo: left of the title.
        note: below the title, in small text.
        bars: of the whole figure, below.

    Raises:
        UsageError: a width that no text fits into.
    """
    small, room = points(), 72 * (check_width(width) or PAGE) - 2 * MARGIN
    words = [word for block in blocks for row in block.rows for tile in row.tiles for word in tile.title.split()]
    smallest = min(46.0 * small / 7, max([SMALLEST_TILE, *(text_width(word, small) - GAP + 1 for word in words)]))
    for side in np.arange(max(LARGEST_TILE, smallest), smallest - 2, -2):
        body = _lay_all(blocks, max(side, smallest), room)
        if body.whole and body.height <= 72 * min(7.0, 1.7 * (width or PAGE)):
            break
    whole, left = _Laid(room if width else min(room, max(body.width, 200.0))), 0.0
    if photo:
        side, above = min(PHOTO, 0.32 * whole.width), 10.0 * bool(photo.title)
        whole.boxes.append((0.0, above, side, side * photo.aspect, partial(_paint_tile, photo, "", "", "")))
        left = side + 2 * GAP
    whole.text(left, title, "title")
    whole.text(left, note)
    if photo:
        whole.height = max(whole.height, above + side * photo.aspect)
    whole.place(body, 0.0, whole.height + 2 * GAP)
    for bar in [bar for block in blocks for bar in (*block.row_bars, *block.column_bars)][:1]:
        whole.text(0, f"colours: {bar.label}")
    whole.bars(bars)
    W, H = whole.width + 2 * MARGIN, whole.height + 2 * MARGIN
    figure = new_figure(W / 72, H / 72)
    with matplotlib.rc_context({"text.parse_math": False, "axes.titlesize": small, "axes.labelsize": small,
                                "axes.titlepad": 0.3 * small, "axes.titley": 1.0, "axes.labelpad": 2.0}):
        for x, y, width, height, paint in whole.boxes:
            paint(figure.add_axes(((MARGIN + x) / W, 1 - (MARGIN + y + height) / H, width / W, height / H)))
        for x, y, text, size in whole.texts:
            figure.text((MARGIN + x) / W, 1 - (MARGIN + y) / H, text, fontsize=size, va="top")
    return figure
