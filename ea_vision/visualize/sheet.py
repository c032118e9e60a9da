"""Tiles on a sheet of fixed width: text keeps its size, tiles shrink.

A figure is a list of blocks, a block a grid of tiles with its colour bars. The width in inches is that of a paper's
column (3.3) or page (6.75). Text has 7 to 9 points (in proportion larger or smaller where rcParams["font.size"] is not
matplotlib's); every text is measured, so that none meets another one. Lengths here are points, 72 an inch.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

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
    values: what is drawn, of which part ("attn", "logits" or another quantity); norm: their scale, once the maps that
        are compared are known.
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
    """A colour bar: texts at five even places, from its lower to its upper end; `mark`: whether a line crosses its
    middle."""

    norm: Normalize
    cmap: Colormap
    label: str
    texts: Sequence[str]
    mark: bool

    def draw(self, axes: Axes) -> None:
        """Draw it with as many texts as have room, those at the ends within its length."""
        small, places = points(), self.norm.inverse(np.linspace(0, 1, 5))
        drawn = axes.figure.colorbar(
            ScalarMappable(self.norm, self.cmap), cax=axes, orientation="horizontal"
        )
        axes.set_label("<colorbar>")
        drawn.outline.set_visible(False)
        width = 72 / axes.figure.dpi * axes.bbox.width
        room = width / (max(text_width(text, small) for text in self.texts) + 2)
        shown = slice(0 if room >= 2 else 4, None, 1 if room >= 6 else 2 if room >= 3 else 4)
        drawn.set_ticks(places[shown], labels=self.texts[shown])
        axes.minorticks_off()
        axes.tick_params(labelsize=small, pad=1, length=2)
        texts = axes.get_xticklabels()
        texts[0].set_ha("left")
        texts[-1].set_ha("right")
        if self.mark:
            axes.axvline(places[2], color="black", linewidth=1.2, clip_on=False)


@dataclass
class Row:
    """Tiles side by side, of one aspect. label: left of them."""

    tiles: Sequence[Tile]
    label: str = ""


@dataclass
class Block:
    """Rows of tiles. bars: below all; enlarged: width of a tile over that of other blocks."""

    rows: Sequence[Row]
    title: str = ""
    bars: Sequence[Bar] = ()
    enlarged: float = 1.0


def _height(text: str, size: float) -> float:
    return LEADING * size * (1 + text.count("\n")) if text else 0.0


@dataclass
class _Laid:
    """What stands where, in points from the left upper corner; more is added at the lower end.

    boxes: axes, (x, y, width, height, what is drawn into them, title and labels). texts: (x, y, text, size). whole: no
    grid is broken.
    """

    width: float = 0.0
    height: float = 0.0
    whole: bool = True
    boxes: list[tuple] = field(default_factory=list)
    texts: list[tuple] = field(default_factory=list)

    def place(self, other: "_Laid", x: float, y: float) -> None:
        """Add what another one has, its corner at (x, y)."""
        for held, added in (self.boxes, other.boxes), (self.texts, other.texts):
            held += [(x + dx, y + dy, *rest) for dx, dy, *rest in added]
        self.width, self.height = (
            max(self.width, x + other.width),
            max(self.height, y + other.height),
        )
        self.whole &= other.whole

    def text(self, x: float, text: str, kind: str = "small") -> None:
        """Add text, broken into lines."""
        size = points(kind)
        lines = wrapped(text, self.width - x, size)
        self.texts.append((x, self.height, lines, size))
        self.height += _height(lines, size)

    def bars(self, bars: Sequence[Bar]) -> None:
        """Add colour bars side by side."""
        small, each = points(), min(self.width / max(1, len(bars)), 1.4 * BAR_LENGTH)
        labels = [wrapped(bar.label, each - 4 * GAP, small) for bar in bars]
        for index, (bar, label) in enumerate(zip(bars, labels, strict=True)):
            self.boxes.append(
                (index * each, self.height + 1, each - 4 * GAP, BAR, bar, {"xlabel": label})
            )
        self.height += max(
            [0, *(BAR + 7 + LEADING * small + _height(label, small) for label in labels)]
        )

    def row(self, tiles: Sequence[Tile], side: float, left: float, label: str) -> None:
        """Add a line of tiles, with the label of their row."""
        small, high = points(), side * tiles[0].aspect
        titles, notes = (
            [wrapped(text, side + GAP - 1, small) for text in texts]
            for texts in zip(*((tile.title, tile.note) for tile in tiles), strict=True)
        )
        above, below = (max(_height(text, small) for text in texts) for texts in (titles, notes))
        edge = max(0.0, text_width(label, small) - high) / 2
        self.height += above + 0.3 * small * bool(above) + edge
        for tile, title, note in zip(tiles, titles, notes, strict=True):
            texts = {"title": title, "xlabel": note, "ylabel": label}
            self.boxes.append((left, self.height, side, high, tile, texts))
            left, label = left + side + GAP, ""
        self.height += high + edge + (below + 2.0) * bool(below) + GAP


def _lay_block(block: Block, side: float, room: float, alone: bool) -> _Laid:
    """Lay a block with tiles of this width. Rows break into lines where `room` forces it."""
    small, side = points(), side * block.enlarged
    labels = [
        wrapped(row.label, max(side * row.tiles[0].aspect, 30.0), small) for row in block.rows
    ]
    left = max(_height(label, small) for label in labels) + 2.0 * any(labels)
    columns = max(len(row.tiles) for row in block.rows)
    lines = math.ceil(columns / max(1, (room - left + GAP) // (side + GAP)))
    each = math.ceil(columns / lines)
    grid = left + each * (side + GAP) - GAP
    alone |= 2 * grid + 3 * GAP > room  # no other fits beside it
    least = max(BAR_LENGTH * len(block.bars), text_width(block.title, points("medium")) * alone)
    laid = _Laid(
        max(grid, min(room, least)), whole=lines <= 1 + (len(block.rows) == 1 and columns > 4)
    )
    laid.text(0, block.title, "medium")
    laid.height += 2.0 * bool(block.title)
    for first in range(0, columns, each):
        for row, label in zip(block.rows, labels, strict=True):
            if tiles := row.tiles[first : first + each]:
                laid.row(tiles, side, left, label)
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


def sheet(
    title: str,
    blocks: Sequence[Block],
    *,
    width: float | None = None,
    photo: Tile | None = None,
    note: str = "",
    bars: Sequence[Bar] = (),
    foot: str = "",
) -> Figure:
    """Draw a figure: photo, title and note above, then the blocks. Tiles are as large as lets grids stay whole, single
    rows have two lines at most, words of titles stay whole, and the height stay below a limit.

    Args:
        width: inches; None: as wide as the blocks need, at most PAGE.
        photo: left of the title.
        note: below the title, in small text.
        bars, foot: of the whole figure, and small text, below.

    Raises:
        UsageError: a width that no text fits into.
    """
    small, room = points(), 72 * (check_width(width) or PAGE) - 2 * MARGIN
    words = [
        word
        for block in blocks
        for row in block.rows
        for tile in row.tiles
        for word in tile.title.split()
    ]
    smallest = min(
        46.0 * small / 7,
        max([SMALLEST_TILE, *(text_width(word, small) - GAP + 1 for word in words)]),
    )
    for side in np.arange(max(LARGEST_TILE, smallest), smallest - 2, -2):
        body = _lay_all(blocks, max(side, smallest), room)
        if body.whole and body.height <= 72 * min(7.0, 1.75 * (width or PAGE)):
            break
    whole = _Laid(room if width else min(room, max(body.width, 200.0)))
    side = min(PHOTO, 0.32 * whole.width)
    picture = _lay_block(Block([Row([photo])]), side, room, False) if photo else _Laid()
    left = picture.width + 2 * GAP * bool(photo)
    whole.text(left, title, "title")
    whole.text(left, note)
    picture.height -= GAP  # which ends a row
    whole.place(picture, 0.0, 0.0)
    whole.place(body, 0.0, whole.height + 2 * GAP)
    whole.bars(bars)
    whole.text(0, foot)
    W, H = whole.width + 2 * MARGIN, whole.height + 2 * MARGIN
    figure = new_figure(W / 72, H / 72)
    with matplotlib.rc_context(
        {
            "text.parse_math": False,
            "axes.titlesize": small,
            "axes.labelsize": small,
            "axes.titlepad": 0.3 * small,
            "axes.titley": 1.0,
            "axes.labelpad": 2.0,
        }
    ):
        for x, y, width, height, drawn, texts in whole.boxes:
            axes = figure.add_axes(
                ((MARGIN + x) / W, 1 - (MARGIN + y + height) / H, width / W, height / H)
            )
            drawn.draw(axes)
            axes.set(**texts)
        for x, y, text, size in whole.texts:
            figure.text((MARGIN + x) / W, 1 - (MARGIN + y) / H, text, fontsize=size, va="top")
    return figure
