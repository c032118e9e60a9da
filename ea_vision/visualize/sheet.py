"""Tiles on a sheet of fixed width: text keeps its size, tiles shrink or wrap.

A figure is a list of blocks, a block rows of tiles and the colour bars below them. The width in inches is that of a
paper's column (3.3) or page (6.75). Text has 7 to 9 points (in proportion larger or smaller where rcParams["font.size"]
is not matplotlib's); every text is measured, so that none meets another one. Lengths here are points, 72 an inch.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from matplotlib.axes import Axes
from matplotlib.cm import ScalarMappable
from matplotlib.colors import Colormap, Normalize
from matplotlib.figure import Figure
from matplotlib.ticker import NullLocator

from ea_vision.base.figures import PAGE, check_width
from ea_vision.base.print import new_figure, points, text_width, wrapped

MARGIN, GAP = 4.0, 3.0
LARGEST_TILE, SMALLEST_TILE = 92.0, 28.0
PHOTO = 72.0
BAR_WIDTH, BAR_HEIGHT = 100.0, 5.0
LEADING = 1.25  # height of a line of text over its size


@dataclass
class Tile:
    """A picture of a block.

    paint: draws it into axes; None leaves its place empty.
    title, note: above and below it.
    """

    paint: Callable[[Axes], None] | None
    title: str = ""
    note: str = ""


@dataclass
class Row:
    """Tiles side by side. label: left of them; heading: above; aspect: height of a tile over its width."""

    tiles: Sequence[Tile]
    label: str = ""
    heading: str = ""
    aspect: float = 1.0


@dataclass
class Bar:
    """A colour bar: values and texts of its ticks; `mark`: a value with a line across."""

    norm: Normalize
    cmap: Colormap
    label: str
    ticks: Sequence[tuple[float, str]]
    mark: float | None = None
    ground: str = "none"


@dataclass
class Block:
    rows: Sequence[Row]
    title: str = ""
    bars: Sequence[Bar] = ()


def _height(text: str, size: float) -> float:
    return LEADING * size * (1 + text.count("\n")) if text else 0.0


# ---- layout ---------------------------------------------------------------------------------------------------------

@dataclass
class _Laid:
    """What stands where, from the left upper corner: (x, y, function of figure, x and y)."""

    width: float = 0.0
    height: float = 0.0
    items: list[tuple[float, float, Callable]] = field(default_factory=list)

    def text(self, x: float, text: str, size: float, **how) -> None:
        """Add lines of text at the lower end."""
        if text:
            self.items.append((x, self.height, lambda figure, x, y: figure.text(
                x, y, text, fontsize=size, va="top", parse_math=False, linespacing=1.15, **how)))
            self.height += _height(text, size)


def _lay_block(block: Block, side: float, width: float, alone: bool) -> tuple[_Laid, bool]:
    """A block with tiles of this width, and whether its rows had to be broken."""
    small, medium = points(), points("medium")
    labels = [wrapped(row.label, max(side * row.aspect, 30.0), small) for row in block.rows]
    left = max(_height(label, small) for label in labels) + 2.0 * any(labels)
    columns = max(len(row.tiles) for row in block.rows)
    fitting = max(1, int((width - left + GAP) // (side + GAP)))
    times = -(-columns // fitting)
    each = -(-columns // times)
    laid = _Laid(left + each * (side + GAP) - GAP)
    wanted = [text_width(block.title, medium)] + [text_width(row.heading, small) for row in block.rows]
    pair = not alone and 2 * max(laid.width, BAR_WIDTH) + 3 * GAP <= width  # another block may stand beside it
    laid.width = max(laid.width, *(BAR_WIDTH for _ in block.bars), 0.0 if pair else min(width, max(wanted)))
    laid.text(0, wrapped(block.title, laid.width, medium), medium)
    laid.height += 2.0 * bool(block.title)
    for first in range(0, columns, each):
        for row, label in zip(block.rows, labels, strict=True):
            tiles = row.tiles[first:first + each]
            if not tiles:
                continue
            laid.text(0, wrapped(row.heading, laid.width, small), small)
            titles = [wrapped(tile.title, side + GAP - 1, small) for tile in tiles]
            notes = [wrapped(tile.note, side + GAP - 1, small) for tile in tiles]
            above, below = (max(_height(text, small) for text in texts) for texts in (titles, notes))
            tall = max(side * row.aspect, text_width(label, small) if label else 0.0)
            laid.height += above + (0.3 * small if above else 0.0) + (tall - side * row.aspect) / 2
            for col, (tile, title, note) in enumerate(zip(tiles, titles, notes, strict=True)):
                x = left + col * (side + GAP)
                laid.items.append((x, laid.height, _tile_painter(
                    tile, title, note, label if col == 0 else "", side, side * row.aspect)))
            laid.height += (tall + side * row.aspect) / 2 + (below + 2.0 if below else 0.0) + GAP
    _lay_bars(laid, block.bars, left)
    return laid, times > 1


def _lay_bars(laid: _Laid, bars: Sequence[Bar], left: float) -> None:
    """Colour bars below, side by side where they fit."""
    if not bars:
        return
    small, inset = points(), 15.0
    side_by_side = laid.width >= len(bars) * 100.0
    each = min(laid.width / len(bars) if side_by_side else laid.width, 1.4 * BAR_WIDTH)
    labels = [wrapped(bar.label, each - 2, small) for bar in bars]
    height = BAR_HEIGHT + 4.0 + LEADING * small + max(_height(label, small) for label in labels) + 2.0
    laid.height += 1.0
    for index, (bar, label) in enumerate(zip(bars, labels, strict=True)):
        x = index * each if side_by_side else 0.0
        laid.items.append((x + inset, laid.height, _bar_painter(bar, label, each - 2 * inset)))
        if not side_by_side or index == len(bars) - 1:
            laid.height += height


def _add_axes(figure: Figure, x: float, y: float, width: float, height: float) -> Axes:
    """Axes of points, whose left upper corner is at (x, y) of the figure's 0..1."""
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
            tile.paint(axes)
        text = dict(fontsize=small, parse_math=False, linespacing=1.15)
        axes.set_title(title, pad=0.3 * small, y=1.0, **text)  # below the line hang letters
        axes.set_xlabel(note, labelpad=1.5, **text)
        axes.set_ylabel(label, labelpad=2.5, **text)

    return paint


def _bar_painter(bar: Bar, label: str, width: float) -> Callable:
    def paint(figure: Figure, x: float, y: float) -> None:
        axes, small = _add_axes(figure, x, y, width, BAR_HEIGHT), points()
        axes.set_label("<colorbar>")
        drawn = figure.colorbar(ScalarMappable(bar.norm, bar.cmap), cax=axes, orientation="horizontal")
        places = drawn.norm(list(zip(*bar.ticks, strict=True))[0])
        kept: list[tuple[float, str]] = []
        taken: list[tuple[float, float]] = []
        for index in sorted(range(len(bar.ticks)), key=lambda i: (bar.ticks[i][0] != bar.mark, -bar.ticks[i][0])):
            value, text = bar.ticks[index]
            half, middle = text_width(text, small) / 2 + 1.5, places[index] * width
            if all(middle + half <= low or middle - half >= high for low, high in taken):
                kept.append((value, text))
                taken.append((middle - half, middle + half))
        kept.sort()
        drawn.set_ticks([value for value, _ in kept], labels=[text for _, text in kept])
        axes.xaxis.set_minor_locator(NullLocator())
        axes.tick_params(labelsize=small, pad=1, length=2)
        axes.set_facecolor(bar.ground)
        drawn.outline.set_visible(False)
        drawn.set_label(label, fontsize=small, labelpad=1)
        if bar.mark is not None:
            axes.axvline(bar.mark, color="black", linewidth=1.2, clip_on=False)

    return paint


def _flow(blocks: Sequence[_Laid], width: float) -> tuple[list[tuple[float, float]], float, float]:
    """Places of blocks side by side where they fit, else below; width and height of all."""
    places, x, y, line, reach = [], 0.0, 0.0, 0.0, 0.0
    for block in blocks:
        if x and x + block.width > width + 0.5:
            x, y, line = 0.0, y + line + 2 * GAP, 0.0
        places.append((x, y))
        reach = max(reach, x + block.width)
        x, line = x + block.width + 3 * GAP, max(line, block.height)
    return places, reach, y + line


def _lay_all(blocks: Sequence[Block], width: float, limit: float) -> tuple[list[_Laid], tuple]:
    """The blocks with the largest tiles that keep rows whole and the height below the limit, or the smallest."""
    words = [word for block in blocks for row in block.rows for tile in row.tiles for word in tile.title.split()]
    longest = max([text_width(word, points()) for word in words] or [0.0]) - GAP + 1
    smallest = min(max(SMALLEST_TILE, longest), 46.0 * points() / 7)
    side, best = max(LARGEST_TILE, smallest), None
    while True:
        laid = [_lay_block(block, side, width, len(blocks) == 1) for block in blocks]
        flow = _flow([block for block, _ in laid], width)
        fits, whole = flow[2] <= limit, not any(broken for _, broken in laid)
        if fits and (whole or best is None):
            best = laid, flow
        if (fits and whole) or side <= smallest:
            laid, flow = best or (laid, flow)
            return [block for block, _ in laid], flow
        side = max(smallest, side - 2.0)


def sheet(title: str, blocks: Sequence[Block], *, width: float | None = None, photo: Tile | None = None,
          aspect: float = 1.0, note: str = "", bars: Sequence[Bar] = ()) -> Figure:
    """Draw a figure: photo, title and note above, then the blocks.

    Args:
        width: inches; None: as wide as the blocks need, at most PAGE.
        photo: left of the title; aspect: its height over its width.
        note: below the title, in small text.
        bars: of the whole figure, below.

    Raises:
        UsageError: a width that no text fits into.
    """
    room = 72 * (check_width(width) or PAGE) - 2 * MARGIN
    laid, (places, reach, height) = _lay_all(blocks, room, 72 * min(8.5, 1.35 * (width or PAGE)))
    if width is None:
        room = min(room, max(reach, 200.0))
    head = _Laid(room)
    if photo:
        side = min(PHOTO, 0.32 * room)
        note_above = 10.0 if photo.title else 0.0
        head.items.append((0.0, note_above, _tile_painter(photo, photo.title, "", "", side, side * aspect)))
    left = side + 2 * GAP if photo else 0.0
    head.text(left, wrapped(title, room - left, points("title")), points("title"))
    head.text(left, wrapped(note, room - left, points()), points())
    if photo:
        head.height = max(head.height, note_above + side * aspect)
    head.height += 2 * GAP
    foot = _Laid(room)
    _lay_bars(foot, bars, 0.0)
    total = head.height + height + foot.height + 2 * MARGIN
    figure = new_figure((room + 2 * MARGIN) / 72, total / 72)
    for part, (x, y) in [(head, (0.0, 0.0)), *zip(laid, [(x, y + head.height) for x, y in places], strict=True),
                         (foot, (0.0, head.height + height))]:
        for dx, dy, paint in part.items:
            paint(figure, (MARGIN + x + dx) / (room + 2 * MARGIN), 1 - (MARGIN + y + dy) / total)
    return figure
