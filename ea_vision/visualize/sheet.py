"""Tiles on a sheet of fixed width: text keeps its size, tiles shrink.

A figure is a list of blocks, a block a grid of tiles. The width in inches is that of a paper's
column (3.3) or page (6.75). Text has 7 to 9 points, scaled in proportion to rcParams["font.size"]; every text is
measured, so that texts do not overlap. Lengths here are in points, 72 per inch.
"""

import logging
import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field, replace
from itertools import chain
from typing import Any

import matplotlib
import numpy as np
from matplotlib.axes import Axes
from matplotlib.colors import Colormap, Normalize
from matplotlib.figure import Figure

from ea_vision.base.figures import PAGE, check_width
from ea_vision.base.print import new_figure, points, text_settings, text_width, wrapped

log = logging.getLogger(__name__)

MARGIN = 4.0
GAP = 3.0
LARGEST_TILE = 92.0
SMALLEST_TILE = 16.0
PHOTO = 72.0
BAR = 5.0  # height of a colour bar
BAR_LENGTH = 100.0
LEADING = 1.25  # line height divided by font size
HIGHEST = 7.0  # inches that the blocks of a figure may be high, if their tiles can shrink so far
PAGE_HEIGHT = 9.0  # inches


class TooHigh(Exception):
    """A figure that must fit a page does not."""


@dataclass
class Tile:
    """A picture of a block.

    Attributes:
        paint: function of axes and `norm` that draws it; None leaves its place empty.
        title: text above it.
        note: text below it.
        aspect: its height divided by its width.
        values: the numbers that are drawn; None for a photo.
        part: "attn", "logits" or another quantity.
        norm: the scale of the values, which `map_style.scaled` sets.
    """

    paint: Callable[[Axes, Normalize | None], object] | None
    title: str = ""
    note: str = ""
    aspect: float = 1.0
    values: np.ndarray | None = None
    part: str = "attn"
    norm: Normalize | None = None

    def draw(self, axes: Axes) -> None:
        axes.set(xticks=[], yticks=[], frame_on=False)
        if self.paint:
            self.paint(axes, self.norm)


@dataclass
class Bar:
    """A colour bar.

    Attributes:
        cmap: its colours.
        label: text below it.
        texts: five, evenly spaced from its lower to its upper end.
        mark: whether a line crosses its middle.
    """

    cmap: Colormap
    label: str
    texts: Sequence[str]
    mark: bool

    def widest_text(self) -> float:
        return max(text_width(text, points()) for text in self.texts) + 2

    def draw(self, axes: Axes) -> None:
        """Draw it with five texts, or with three if five do not fit."""
        axes.pcolormesh(np.linspace(0, 1, 257), [0, 1], [range(256)], cmap=self.cmap)
        axes.set(label="<colorbar>", yticks=[], frame_on=False)
        width = 72 / axes.figure.dpi * axes.bbox.width
        step = 1 if width >= 6 * self.widest_text() else 2
        axes.set_xticks(np.linspace(0, 1, 5)[::step], self.texts[::step])
        axes.tick_params(labelsize=points(), pad=1, length=2)
        first, *_, last = axes.get_xticklabels()
        first.set_ha("left")
        last.set_ha("right")
        if self.mark:
            axes.axvline(0.5, color="black", linewidth=1.2, clip_on=False)


@dataclass
class Row:
    """Tiles side by side, all of the same aspect. label: text to their left."""

    tiles: Sequence[Tile]
    label: str = ""

    def maps(self) -> list[Tile]:
        """Return the tiles that have a scale: photos and empty places have none."""
        return [tile for tile in self.tiles if tile.values is not None]


def in_one_row(rows: Sequence[Row]) -> list[Row]:
    """Put rows of one tile each side by side, under their labels."""
    for row in rows:
        row.tiles[0].title = row.label
    return [Row([row.tiles[0] for row in rows])]


@dataclass
class Block:
    """Rows of tiles.

    Attributes:
        rows: from top to bottom.
        title: text above them.
        enlarged: width of a tile relative to those of other blocks.
    """

    rows: Sequence[Row]
    title: str = ""
    enlarged: float = 1.0

    def maps(self) -> list[Tile]:
        """Return the tiles that have a scale."""
        return list(chain.from_iterable(row.maps() for row in self.rows))


@dataclass
class _Placed:
    """A drawing on axes, or a text, with its position (from the upper left corner) and size.

    Attributes:
        drawing: None for a text.
        texts: title and labels of the axes, or the text and its size.
    """

    x: float
    y: float
    width: float
    height: float
    drawing: Tile | Bar | None
    texts: dict[str, Any]


def _height(text: str, size: float) -> float:
    lines = 1 + text.count("\n") if text else 0
    return LEADING * size * lines


@dataclass
class _Laid:
    """Drawings and texts with their positions.

    Attributes:
        width, height: of all together; new ones are added at the bottom.
        whole: whether no grid is broken into lines.
        content: the drawings and texts.
    """

    width: float = 0.0
    height: float = 0.0
    whole: bool = True
    content: list[_Placed] = field(default_factory=list)

    def place(self, other: "_Laid", x: float, y: float) -> None:
        """Add the contents of `other`, with its upper left corner at (x, y)."""
        self.content += [replace(one, x=x + one.x, y=y + one.y) for one in other.content]
        self.width = max(self.width, x + other.width)
        self.height = max(self.height, y + other.height)
        self.whole &= other.whole

    def text(self, text: str, kind: str = "small", left: float = 0.0) -> None:
        """Add text, broken into lines."""
        size = points(kind)
        lines = wrapped(text, self.width - left, size)
        texts = {"s": lines, "fontsize": size}
        self.content.append(_Placed(left, self.height, 0, 0, None, texts))
        self.height += _height(lines, size)

    def row(self, tiles: Sequence[Tile], side: float, left: float, label: str) -> None:
        """Add a line of tiles, with the label of their row."""
        small = points()
        high = side * tiles[0].aspect
        room = side + GAP - 1
        titles = [wrapped(tile.title, room, small) for tile in tiles]
        notes = [wrapped(tile.note, room, small) for tile in tiles]
        above = max(_height(text, small) for text in titles)
        below = max(_height(text, small) for text in notes)
        edge = max(0.0, text_width(label, small) - high) / 2
        self.height += above + edge + (0.3 * small if above else 0.0)
        for tile, title, note in zip(tiles, titles, notes, strict=True):
            texts = {"title": title, "xlabel": note, "ylabel": label}
            self.content.append(_Placed(left, self.height, side, high, tile, texts))
            left += side + GAP
            label = ""
        self.height += high + edge + GAP + (below + 2.0 if below else 0.0)


def _side_by_side(parts: Iterable[_Laid], room: float, gap: float, below: float) -> _Laid:
    """Lay parts side by side, in lines no wider than `room`."""
    laid = _Laid()
    x = 0.0
    y = 0.0
    for part in parts:
        if x and x + part.width > room + 0.5:
            x = 0.0
            y = laid.height + below
        laid.place(part, x, y)
        x += part.width + gap
    return laid


def _bars(bars: Sequence[Bar], room: float) -> _Laid:
    """Lay colour bars. A line holds as many as leave room for three numbers on each."""
    small = points()
    widest = max((bar.widest_text() for bar in bars), default=1.0)
    fitting = min(len(bars), room // (3 * widest + 4 * GAP))
    length = min(room / max(1, fitting), 1.4 * BAR_LENGTH) - 4 * GAP
    parts = []
    for bar in bars:
        label = wrapped(bar.label, length, small)
        height = BAR + 7 + LEADING * small + _height(label, small)
        parts.append(
            _Laid(length, height, content=[_Placed(0, 1, length, BAR, bar, {"xlabel": label})])
        )
    return _side_by_side(parts, room, 4 * GAP, 0)


def _lay_block(block: Block, side: float, room: float, alone: bool) -> _Laid:
    """Lay a block with tiles of width `side`. Rows wider than `room` break into lines."""
    small = points()
    side = side * block.enlarged
    labels = []
    for row in block.rows:
        height = side * row.tiles[0].aspect
        labels.append(wrapped(row.label, max(height, 30.0), small))
    left = max(_height(label, small) + (2.0 if label else 0.0) for label in labels)
    columns = max(len(row.tiles) for row in block.rows)
    fitting = max(1, (room - left + GAP) // (side + GAP))
    lines = math.ceil(columns / fitting)
    each = math.ceil(columns / lines)
    grid = left + each * (side + GAP) - GAP
    least = 0.0
    if alone or 2 * grid + 3 * GAP > room:  # no other stands beside it
        least = text_width(block.title, points("medium"))
    long_row = len(block.rows) == 1 and columns > 4
    laid = _Laid(max(grid, min(room, least)), whole=lines <= 1 + long_row)
    if block.title:
        laid.text(block.title, "medium")
        laid.height += 2.0
    for first in range(0, columns, each):
        for row, label in zip(block.rows, labels, strict=True):
            tiles = row.tiles[first : first + each]
            if tiles:
                laid.row(tiles, side, left, label)
    return laid


def _best_layout(blocks: Sequence[Block], room: float, highest: float) -> _Laid:
    """Return the layout with the largest tiles that is whole and no higher than `highest`; if there is none, the lowest
    of the whole layouts, or of all. No word of the titles is wider than the smallest tile, within bounds."""
    small = points()
    titles = [tile.title for block in blocks for row in block.rows for tile in row.tiles]
    words = [text_width(word, small) - GAP + 1 for word in " ".join(titles).split()]
    smallest = min(46.0 * small / 7, max([SMALLEST_TILE, *words]))
    layouts = []
    for side in np.arange(max(LARGEST_TILE, smallest), smallest - 2, -2):
        tile = max(side, smallest)
        parts = [_lay_block(block, tile, room, len(blocks) == 1) for block in blocks]
        laid = _side_by_side(parts, room, 3 * GAP, 2 * GAP)
        if laid.whole and laid.height <= highest:
            return laid
        layouts.append(laid)
    return min(layouts, key=lambda laid: (not laid.whole, laid.height))


def sheet(
    title: str,
    blocks: Sequence[Block],
    *,
    width: float | None = None,
    photo: Tile | None = None,
    note: str = "",
    bars: Sequence[Bar] = (),
    foot: str = "",
    left_out: str | None = None,
) -> Figure:
    """Draw a figure: photo, title and note above, then the blocks. Tiles are as large as possible while grids stay
    whole, single rows have at most two lines, words of titles stay whole, and the height stays below a limit.

    Args:
        width: inches; None: as wide as the blocks need, at most PAGE.
        photo: left of the title.
        note: below the title, in small text.
        bars, foot: below the blocks: colour bars of the whole figure, then small text.
        left_out: end of the note: what a figure that must fit a page leaves out; None: it may be higher.

    Raises:
        UsageError: a width that no text fits into.
        TooHigh: a figure with `left_out` does not fit a page.
    """
    room = 72 * (check_width(width) or PAGE) - 2 * MARGIN
    highest = min(HIGHEST, 1.75 * (width or PAGE))
    body = _best_layout(blocks, room, 72 * highest)
    whole = _Laid(room if width else min(room, max(body.width, 200.0)))
    left = 0.0
    if photo:
        side = min(PHOTO, 0.32 * whole.width)
        whole.row([photo], side, 0.0, "")
        left = side + 2 * GAP
    below = whole.height - GAP if photo else 0.0
    whole.height = 0.0
    whole.text(title, "title", left)
    whole.text(note + (left_out or ""), left=left)
    whole.place(body, 0, max(below, whole.height) + 2 * GAP)
    whole.place(_bars(bars, whole.width), 0, whole.height)
    whole.text(foot)
    height = (whole.height + 2 * MARGIN) / 72
    if height > PAGE_HEIGHT and left_out is not None:
        raise TooHigh
    if height > PAGE_HEIGHT:
        log.warning(
            "a figure of %d tiles is %.1f inches high, more than a page (%g): draw fewer layers, heads, "
            "queries or models, or a wider figure",
            sum(one.drawing is not None for one in whole.content),
            height,
            PAGE_HEIGHT,
        )
    return _draw(whole)


def _draw(laid: _Laid) -> Figure:
    width = laid.width + 2 * MARGIN
    height = laid.height + 2 * MARGIN
    figure = new_figure(width / 72, height / 72)
    style = {
        **text_settings(),
        "axes.titlesize": points(),
        "axes.labelsize": points(),
        "axes.titlepad": 0.3 * points(),
        "axes.titley": 1.0,
        "axes.labelpad": 2.0,
    }
    with matplotlib.rc_context(style):
        for one in laid.content:
            left = (MARGIN + one.x) / width
            bottom = 1 - (MARGIN + one.y + one.height) / height
            if one.drawing is None:
                figure.text(left, bottom, va="top", **one.texts)
                continue
            axes = figure.add_axes((left, bottom, one.width / width, one.height / height))
            one.drawing.draw(axes)
            axes.set(**one.texts)
    return figure
