"""Tiles on a sheet of fixed width: text keeps its size, tiles shrink.

A figure is a list of blocks, a block a grid of tiles with its colour bars. The width in inches is that of a paper's
column (3.3) or page (6.75). Text has 7 to 9 points, scaled in proportion to rcParams["font.size"]; every text is
measured, so that texts do not overlap. Lengths here are in points, 72 per inch.
"""

import logging
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from itertools import chain
from typing import Any

import matplotlib
import numpy as np
from matplotlib.axes import Axes
from matplotlib.cm import ScalarMappable
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
SLACK = 1.05  # how much higher than the lowest layout a figure may be for larger tiles


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
        norm, cmap: its scale and colours.
        label: text below it.
        texts: five, evenly spaced from its lower to its upper end.
        mark: whether a line crosses its middle.
    """

    norm: Normalize
    cmap: Colormap
    label: str
    texts: Sequence[str]
    mark: bool

    def widest_text(self) -> float:
        return max(text_width(text, points()) for text in self.texts) + 2

    def draw(self, axes: Axes) -> None:
        """Draw it with five texts, or with three if five do not fit."""
        places = self.norm.inverse(np.linspace(0, 1, 5))
        mappable = ScalarMappable(self.norm, self.cmap)
        drawn = axes.figure.colorbar(mappable, cax=axes, orientation="horizontal")
        axes.set_label("<colorbar>")
        drawn.outline.set_visible(False)
        width = 72 / axes.figure.dpi * axes.bbox.width
        step = 1 if width >= 6 * self.widest_text() else 2
        drawn.set_ticks(places[::step], labels=self.texts[::step])
        axes.minorticks_off()
        axes.tick_params(labelsize=points(), pad=1, length=2)
        texts = axes.get_xticklabels()
        texts[0].set_ha("left")
        texts[-1].set_ha("right")
        if self.mark:
            axes.axvline(places[2], color="black", linewidth=1.2, clip_on=False)


@dataclass
class Row:
    """Tiles side by side, all of the same aspect. label: text to their left."""

    tiles: Sequence[Tile]
    label: str = ""


@dataclass
class Block:
    """Rows of tiles.

    Attributes:
        rows: from top to bottom.
        title: text above them.
        bars: colour bars below them.
        enlarged: width of a tile relative to those of other blocks.
    """

    rows: Sequence[Row]
    title: str = ""
    bars: Sequence[Bar] = ()
    enlarged: float = 1.0

    def maps(self) -> list[Tile]:
        """Return the tiles that have a scale: photos and empty places have none."""
        tiles = chain.from_iterable(row.tiles for row in self.rows)
        return [tile for tile in tiles if tile.values is not None]


@dataclass
class _Box:
    """Axes on the sheet: position (from the upper left corner), size, drawing, and the drawing's title and labels."""

    x: float
    y: float
    width: float
    height: float
    drawing: Tile | Bar
    texts: dict[str, Any]


@dataclass
class _Text:
    x: float
    y: float
    text: str
    size: float


def _height(text: str, size: float) -> float:
    lines = 1 + text.count("\n") if text else 0
    return LEADING * size * lines


@dataclass
class _Laid:
    """Boxes and texts with their positions; new ones are added at the bottom. whole: no grid is broken into lines."""

    width: float = 0.0
    height: float = 0.0
    whole: bool = True
    boxes: list[_Box] = field(default_factory=list)
    texts: list[_Text] = field(default_factory=list)

    def place(self, other: "_Laid", x: float, y: float) -> None:
        """Add the contents of `other`, with its upper left corner at (x, y)."""
        for box in other.boxes:
            moved = replace(box, x=x + box.x, y=y + box.y)
            self.boxes.append(moved)
        for text in other.texts:
            moved = replace(text, x=x + text.x, y=y + text.y)
            self.texts.append(moved)
        self.width = max(self.width, x + other.width)
        self.height = max(self.height, y + other.height)
        self.whole &= other.whole

    def text(self, x: float, text: str, kind: str = "small") -> None:
        """Add text, broken into lines."""
        size = points(kind)
        lines = wrapped(text, self.width - x, size)
        self.texts.append(_Text(x, self.height, lines, size))
        self.height += _height(lines, size)

    def bars(self, bars: Sequence[Bar]) -> None:
        """Add colour bars side by side. A line holds as many as leave room for three numbers on each."""
        if not bars:
            return
        widest = max(bar.widest_text() for bar in bars)
        fitting = int(self.width / (3 * widest + 4 * GAP))
        each_line = max(1, min(len(bars), fitting))
        step = min(self.width / each_line, 1.4 * BAR_LENGTH)
        for first in range(0, len(bars), each_line):
            self._line_of_bars(bars[first : first + each_line], step)

    def _line_of_bars(self, bars: Sequence[Bar], step: float) -> None:
        small = points()
        length = step - 4 * GAP
        highest = 0.0
        for index, bar in enumerate(bars):
            label = wrapped(bar.label, length, small)
            highest = max(highest, _height(label, small))
            box = _Box(index * step, self.height + 1, length, BAR, bar, {"xlabel": label})
            self.boxes.append(box)
        self.height += BAR + 7 + LEADING * small + highest

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
        self.height += above + edge
        if above:
            self.height += 0.3 * small
        for tile, title, note in zip(tiles, titles, notes, strict=True):
            texts = {"title": title, "xlabel": note, "ylabel": label}
            self.boxes.append(_Box(left, self.height, side, high, tile, texts))
            left += side + GAP
            label = ""
        self.height += high + edge + GAP
        if below:
            self.height += below + 2.0


def _lay_block(block: Block, side: float, room: float, alone: bool) -> _Laid:
    """Lay a block with tiles of width `side`. Rows wider than `room` break into lines."""
    small = points()
    side = side * block.enlarged
    labels = []
    for row in block.rows:
        height = side * row.tiles[0].aspect
        labels.append(wrapped(row.label, max(height, 30.0), small))
    left = max(_height(label, small) for label in labels)
    if any(labels):
        left += 2.0
    columns = max(len(row.tiles) for row in block.rows)
    fitting = max(1, (room - left + GAP) // (side + GAP))
    lines = math.ceil(columns / fitting)
    each = math.ceil(columns / lines)
    grid = left + each * (side + GAP) - GAP
    no_other_beside = alone or 2 * grid + 3 * GAP > room
    least = BAR_LENGTH * len(block.bars)
    if no_other_beside:
        least = max(least, text_width(block.title, points("medium")))
    long_row = len(block.rows) == 1 and columns > 4
    most_lines = 2 if long_row else 1
    laid = _Laid(max(grid, min(room, least)), whole=lines <= most_lines)
    if block.title:
        laid.text(0, block.title, "medium")
        laid.height += 2.0
    for first in range(0, columns, each):
        for row, label in zip(block.rows, labels, strict=True):
            tiles = row.tiles[first : first + each]
            if tiles:
                laid.row(tiles, side, left, label)
    laid.bars(block.bars)
    return laid


def _lay_all(blocks: Sequence[Block], side: float, room: float) -> _Laid:
    """Lay blocks side by side where they fit, else below."""
    laid = _Laid()
    x = 0.0
    y = 0.0
    for block in blocks:
        one = _lay_block(block, side, room, len(blocks) == 1)
        if x and x + one.width > room + 0.5:
            x = 0.0
            y = laid.height + 2 * GAP
        laid.place(one, x, y)
        x += one.width + 3 * GAP
    return laid


def _smallest_tile(blocks: Sequence[Block]) -> float:
    """Return the smallest width of a tile, within bounds, that holds every word of the titles."""
    small = points()
    widest = SMALLEST_TILE
    for block in blocks:
        for tile in chain.from_iterable(row.tiles for row in block.rows):
            for word in tile.title.split():
                widest = max(widest, text_width(word, small) - GAP + 1)
    return min(46.0 * small / 7, widest)


def _best_layout(blocks: Sequence[Block], room: float, highest: float) -> _Laid:
    """Return the layout with the largest tiles that is whole and no higher than `highest`. If there is none, take the
    whole layouts (or all, if none is whole): of those at most SLACK times as high as the lowest, return the one with
    the largest tiles."""
    smallest = _smallest_tile(blocks)
    layouts = []
    for side in np.arange(max(LARGEST_TILE, smallest), smallest - 2, -2):
        laid = _lay_all(blocks, max(side, smallest), room)
        if laid.whole and laid.height <= highest:
            return laid
        layouts.append(laid)
    candidates = [laid for laid in layouts if laid.whole] or layouts
    least = min(laid.height for laid in candidates)
    return next(laid for laid in candidates if laid.height <= SLACK * least)


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
    picture = _Laid()
    left = 0.0
    if photo:
        side = min(PHOTO, 0.32 * whole.width)
        picture = _lay_block(Block([Row([photo])]), side, room, False)
        left = picture.width + 2 * GAP
    whole.text(left, title, "title")
    whole.text(left, note + (left_out or ""))
    picture.height -= GAP  # the gap below its row
    whole.place(picture, 0.0, 0.0)
    whole.place(body, 0.0, whole.height + 2 * GAP)
    whole.bars(bars)
    whole.text(0, foot)
    height = (whole.height + 2 * MARGIN) / 72
    if height > PAGE_HEIGHT and left_out is not None:
        raise TooHigh
    if height > PAGE_HEIGHT:
        log.warning(
            "a figure of %d tiles is %.1f inches high, more than a page (%g): draw fewer layers, heads, "
            "queries or models, or a wider figure",
            len(whole.boxes),
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
        for box in laid.boxes:
            left = (MARGIN + box.x) / width
            bottom = 1 - (MARGIN + box.y + box.height) / height
            axes = figure.add_axes((left, bottom, box.width / width, box.height / height))
            box.drawing.draw(axes)
            axes.set(**box.texts)
        for text in laid.texts:
            x = (MARGIN + text.x) / width
            y = 1 - (MARGIN + text.y) / height
            figure.text(x, y, text.text, fontsize=text.size, va="top")
    return figure
