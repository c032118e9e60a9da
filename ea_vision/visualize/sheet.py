"""Tiles on a sheet of fixed width: text keeps its size, tiles shrink.

A figure is a list of blocks, a block a grid of tiles with its colour bars. The width in inches is that of a paper's
column (3.3) or page (6.75). Text has 7 to 9 points (in proportion larger or smaller where rcParams["font.size"] is not
matplotlib's); every text is measured, so that none meets another one. Lengths here are points, 72 an inch.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import numpy as np
from matplotlib.axes import Axes
from matplotlib.cm import ScalarMappable
from matplotlib.colors import Colormap, Normalize
from matplotlib.figure import Figure
from matplotlib.ticker import NullLocator

from ea_vision.base.figures import PAGE, check_width
from ea_vision.base.print import new_figure, points, text_width, wrapped

MARGIN, GAP = 4.0, 3.0
LARGEST_TILE, SMALLEST_TILE = 92.0, 16.0
PHOTO = 72.0
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
    """A colour bar: values and texts of its ticks; `mark`: a value with a line across."""

    norm: Normalize
    cmap: Colormap
    label: str
    ticks: Sequence[tuple[float, str]]
    mark: float | None = None


@dataclass
class Row:
    """Tiles side by side, of one aspect. label: left of them; heading: above; bar: of this row alone, right of it, its
    label below the block."""

    tiles: Sequence[Tile]
    label: str = ""
    heading: str = ""
    bar: Bar | None = None

    @property
    def aspect(self) -> float:
        return self.tiles[0].aspect


@dataclass
class Block:
    """Rows of tiles. bars: below all; column_bars: one below each column; enlarged: width of a tile over that of other
    blocks."""

    rows: Sequence[Row]
    title: str = ""
    bars: Sequence[Bar] = ()
    column_bars: Sequence[Bar] = ()
    enlarged: float = 1.0


def _height(text: str, size: float) -> float:
    return LEADING * size * (1 + text.count("\n")) if text else 0.0


@dataclass
class _Laid:
    """What stands where, from the left upper corner: (x, y, function of figure, x and y)."""

    width: float = 0.0
    height: float = 0.0
    lines: int = 1  # that the row of a block of one row is broken into
    items: list[tuple[float, float, Callable]] = field(default_factory=list)

    def text(self, x: float, text: str, kind: str = "small") -> None:
        """Add text, broken into lines, at the lower end."""
        size = points(kind)
        lines = wrapped(text, self.width - x, size)
        if lines:
            self.items.append((x, self.height, lambda figure, x, y: figure.text(
                x, y, lines, fontsize=size, va="top", parse_math=False, linespacing=1.15)))
            self.height += _height(lines, size)

    def bars(self, bars: Sequence[Bar], left: float = 0.0) -> None:
        """Add colour bars at the lower end, side by side where they fit."""
        side_by_side = self.width >= len(bars) * BAR_LENGTH
        each = min(self.width / max(1, len(bars) if side_by_side else 1), 1.4 * BAR_LENGTH)
        labels = [wrapped(bar.label, each - 2, points()) for bar in bars]
        below = BAR + LEADING * points() + max([_height(label, points()) for label in labels] or [0.0]) + 7.0
        for index, (bar, label) in enumerate(zip(bars, labels, strict=True)):
            self.items.append(((index * each if side_by_side else 0.0) + 15, self.height + 1,
                               _bar_painter(bar, label, each - 30)))
            if not side_by_side or index == len(bars) - 1:
                self.height += below


def _lay_block(block: Block, side: float, room: float, alone: bool) -> _Laid:
    """Lay a block with tiles of this width. A single row breaks into lines, more rows only where `room` forces it."""
    small, side = points(), side * block.enlarged
    labels = [wrapped(row.label, max(side * row.aspect, 30.0), small) for row in block.rows]
    left = max(_height(label, small) for label in labels) + 2.0 * any(labels)
    bars = [row.bar for row in block.rows if row.bar]
    right = GAP + BAR + 4 + max(text_width(text, small) for bar in bars for _, text in bar.ticks) if bars else 0.0
    columns = max(len(row.tiles) for row in block.rows)
    lines = -(-columns // max(1, int((room - left - right + GAP) // (side + GAP))))
    each = -(-columns // lines)
    laid = _Laid(left + each * (side + GAP) - GAP + right, lines=lines)
    wanted = [text_width(block.title, points("medium")), *(text_width(row.heading, small) for row in block.rows)]
    least = max(laid.width, min(room, BAR_LENGTH * max(1, len(block.bars))))
    pair = not alone and 2 * least + 3 * GAP <= room  # another block may stand beside it
    laid.width = max(laid.width, least * bool(block.bars), 0.0 if pair else min(room, max(wanted)))
    laid.text(0, block.title, "medium")
    laid.height += 2.0 * bool(block.title)
    for first in range(0, columns, each):
        for row, label in zip(block.rows, labels, strict=True):
            if row.tiles[first:first + each]:
                laid.text(0, row.heading)
                _lay_tiles(laid, row, row.tiles[first:first + each], label, left, side)
        for col, bar in enumerate(block.column_bars[first:first + each]):
            painter = _bar_painter(bar, "", side - 6, inward=True)
            laid.items.append((left + col * (side + GAP) + 3, laid.height, painter))
        laid.height += (BAR + 4 + LEADING * small) * bool(block.column_bars)
    laid.bars(block.bars, left)
    shared = [*bars, *block.column_bars][:1]
    laid.text(left, f"colours: {shared[0].label}" if shared else "")
    return laid


def _lay_tiles(laid: _Laid, row: Row, tiles: Sequence[Tile], label: str, left: float, side: float) -> None:
    """Add a line of tiles, with the label of their row and its colour bar, at the lower end."""
    small, high = points(), side * row.aspect
    titles = [wrapped(tile.title, side + GAP - 1, small) for tile in tiles]
    notes = [wrapped(tile.note, side + GAP - 1, small) for tile in tiles]
    above, below = (max(_height(text, small) for text in texts) for texts in (titles, notes))
    tall = max(high, text_width(label, small) if label else 0.0)
    laid.height += above + (0.3 * small if above else 0.0) + (tall - high) / 2
    for col, (tile, title, note) in enumerate(zip(tiles, titles, notes, strict=True)):
        laid.items.append((left + col * (side + GAP), laid.height,
                           _tile_painter(tile, title, note, label if col == 0 else "", side, high)))
    if row.bar:
        inset = min(0.5 * small, 0.2 * high)  # so that the numbers at its ends stay beside the row
        laid.items.append((left + len(tiles) * (side + GAP), laid.height + inset,
                           _bar_painter(row.bar, "", high - 2 * inset, "vertical")))
    laid.height += (tall + high) / 2 + (below + 2.0 if below else 0.0) + GAP


def _add_axes(figure: Figure, x: float, y: float, width: float, height: float) -> Axes:
    """Return axes of points, whose left upper corner is at (x, y) of the figure's 0..1."""
    W, H = (72 * inches for inches in figure.get_size_inches())
    return figure.add_axes((x, y - height / H, width / W, height / H))


def _tile_painter(tile: Tile, title: str, note: str, label: str, width: float, height: float) -> Callable:
    def paint(figure: Figure, x: float, y: float) -> None:
        axes, small = _add_axes(figure, x, y, width, height), points()
        axes.set_xticks([])
        axes.set_yticks([])
        if tile.paint is None:
            axes.set_frame_on(False)
        else:
            tile.paint(axes, tile.norm)
        text = dict(fontsize=small, parse_math=False, linespacing=1.15)
        axes.set_title(title, pad=0.3 * small, y=1.0, **text)  # below the line hang letters
        axes.set_xlabel(note, labelpad=1.5, **text)
        axes.set_ylabel(label, labelpad=2.5, **text)

    return paint


def _bar_painter(bar: Bar, label: str, length: float, orientation: str = "horizontal",
                 inward: bool = False) -> Callable:
    """Return what draws a colour bar; `inward`: the numbers at its ends stay within it."""
    flat = orientation == "horizontal"

    def paint(figure: Figure, x: float, y: float) -> None:
        axes, small = _add_axes(figure, x, y, *((length, BAR) if flat else (BAR, length))), points()
        axes.set_label("<colorbar>")
        drawn = figure.colorbar(ScalarMappable(bar.norm, bar.cmap), cax=axes, orientation=orientation)
        kept: dict[float, str] = {}  # the mark and the ends first, others where they have room
        taken: list[tuple[float, float]] = []
        for value, text in sorted(bar.ticks, key=lambda tick: (tick[0] != bar.mark, -tick[0])):
            half = text_width(text, small) / 2 + (0.5 if inward else 1.5) if flat else 0.65 * small
            middle = float(drawn.norm(value)) * length
            if inward:
                middle = min(max(middle, half), length - half)
            if all(middle + half <= low or middle - half >= high for low, high in taken):
                kept[value] = text
                taken.append((middle - half, middle + half))
        drawn.set_ticks(sorted(kept), labels=[kept[value] for value in sorted(kept)])
        (axes.xaxis if flat else axes.yaxis).set_minor_locator(NullLocator())
        for tick in axes.get_xticklabels() if inward else ():
            place = float(drawn.norm(tick.get_position()[0]))
            tick.set_ha("left" if place < 0.1 else "right" if place > 0.9 else "center")
        axes.tick_params(labelsize=small, pad=1, length=2)
        drawn.outline.set_visible(False)
        drawn.set_label(label, fontsize=small, labelpad=1)
        if bar.mark is not None:
            (axes.axvline if flat else axes.axhline)(bar.mark, color="black", linewidth=1.2, clip_on=False)

    return paint


def _flow(blocks: Sequence[_Laid], width: float) -> tuple[list[tuple[float, float]], float, float]:
    """Return the places of blocks, side by side where they fit, else below; width and height of all."""
    places, x, y, line, reach = [], 0.0, 0.0, 0.0, 0.0
    for block in blocks:
        if x and x + block.width > width + 0.5:
            x, y, line = 0.0, y + line + 2 * GAP, 0.0
        places.append((x, y))
        reach = max(reach, x + block.width)
        x, line = x + block.width + 3 * GAP, max(line, block.height)
    return places, reach, y + line


def _lay_all(blocks: Sequence[Block], width: float, limit: float) -> tuple[list[_Laid], tuple]:
    """Return the blocks with the largest tiles that keep grids whole, single rows within two lines, titles' words whole
    and the height below the limit; else with the smallest."""
    words = [word for block in blocks for row in block.rows for tile in row.tiles for word in tile.title.split()]
    smallest = max(SMALLEST_TILE, *(text_width(word, points()) - GAP + 1 for word in words), 0.0)
    smallest = min(smallest, 46.0 * points() / 7)
    side = max(LARGEST_TILE, smallest)
    while True:
        laid = [_lay_block(block, side, width, len(blocks) == 1) for block in blocks]
        flow = _flow(laid, width)
        whole = all(one.lines <= (2 if len(block.rows) == 1 and len(block.rows[0].tiles) > 4 else 1)
                    for one, block in zip(laid, blocks, strict=True))
        if whole and flow[2] <= limit or side <= smallest:
            return laid, flow
        side = max(smallest, side - 2.0)


def sheet(title: str, blocks: Sequence[Block], *, width: float | None = None, photo: Tile | None = None,
          note: str = "", bars: Sequence[Bar] = ()) -> Figure:
    """Draw a figure: photo, title and note above, then the blocks.

    Args:
        width: inches; None: as wide as the blocks need, at most PAGE.
        photo: left of the title.
        note: below the title, in small text.
        bars: of the whole figure, below.

    Raises:
        UsageError: a width that no text fits into.
    """
    room = 72 * (check_width(width) or PAGE) - 2 * MARGIN
    laid, (places, reach, height) = _lay_all(blocks, room, 72 * min(7.0, 1.7 * (width or PAGE)))
    if width is None:
        room = min(room, max(reach, 200.0))
    head, foot, left = _Laid(room), _Laid(room), 0.0
    if photo:
        side, above = min(PHOTO, 0.32 * room), 10.0 * bool(photo.title)
        head.items.append((0.0, above, _tile_painter(photo, photo.title, "", "", side, side * photo.aspect)))
        left = side + 2 * GAP
    head.text(left, title, "title")
    head.text(left, note)
    head.height = max(head.height, above + side * photo.aspect if photo else 0.0) + 2 * GAP
    foot.bars(bars)
    total = head.height + height + foot.height + 2 * MARGIN
    figure = new_figure((room + 2 * MARGIN) / 72, total / 72)
    for part, (x, y) in [(head, (0.0, -head.height)), *zip(laid, places, strict=True), (foot, (0.0, height))]:
        for dx, dy, paint in part.items:
            paint(figure, (MARGIN + x + dx) / (room + 2 * MARGIN), 1 - (MARGIN + head.height + y + dy) / total)
    return figure
