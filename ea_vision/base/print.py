"""Figures for print: text of 7 to 9 points at any width (scaled in proportion to rcParams["font.size"]), the width of
texts, and fonts that have their letters."""

import re
from collections.abc import Sequence
from contextlib import AbstractContextManager
from functools import cache, lru_cache
from typing import Any

import matplotlib
from matplotlib.artist import Artist
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.font_manager import FontProperties, findfont, get_font, get_font_names
from matplotlib.textpath import text_to_path

from ea_vision.base.figures import figure_bytes

# Patterns for the pieces of a text: words, parts that end in punctuation, letters.
PIECES = (r"[^ \n]*[ \n]?", r"[^_\-./,]*[_\-./,]?", ".")
POINTS = {"title": 9.0, "medium": 8.0, "small": 7.0}
OWN_FONT = "DejaVu Sans"  # which matplotlib brings
# Fonts of Linux, Windows and macOS with Chinese, Japanese or Korean letters, which matplotlib's own fonts lack. Those
# with outlines of CFF, which matplotlib does not convert to TrueType in a PDF, are last.
CJK_FONTS = (
    "Noto Sans SC",
    "Noto Sans JP",
    "Noto Sans KR",
    "WenQuanYi Zen Hei",
    "WenQuanYi Micro Hei",
    "IPAexGothic",
    "NanumGothic",
    "Droid Sans Fallback",
    "Microsoft YaHei",
    "Yu Gothic",
    "Malgun Gothic",
    "PingFang SC",
    "Hiragino Sans GB",
    "Apple SD Gothic Neo",
    "Arial Unicode MS",
    "Noto Sans CJK SC",
    "Noto Sans CJK JP",
)


@cache
def _installed() -> tuple[str, ...]:
    installed = set(get_font_names())
    return tuple(name for name in CJK_FONTS if name in installed)


def fonts() -> list[str]:
    """Return rcParams["font.family"], matplotlib's own font, which has the letters if that family is not installed, and
    the installed CJK_FONTS: a letter is drawn in the first that has it."""
    return list(dict.fromkeys([*matplotlib.rcParams["font.family"], OWN_FONT, *_installed()]))


def font_file(text: str) -> str:
    """Return the path of the first bold font that has all letters of a text; OWN_FONT's if none has."""
    letters = set(map(ord, text))
    for family in (OWN_FONT, *_installed()):
        path = findfont(FontProperties(family=family, weight="bold"))
        if letters <= get_font(path).get_charmap().keys():
            return path
    return findfont(f"{OWN_FONT}:bold")


def text_settings() -> dict[str, Any]:
    """Return the rcParams that draw texts as they are written: names may have dollar signs, between which matplotlib
    would read a formula, and letters that its own fonts lack."""
    return {"text.parse_math": False, "font.family": fonts()}


def points(kind: str = "small") -> float:
    """Return the size of text: "title", "medium" or "small", by default 9, 8 and 7 points."""
    default = matplotlib.rcParamsDefault["font.size"]
    return POINTS[kind] * matplotlib.rcParams["font.size"] / default


@lru_cache(4096)
def _width(line: str, size: float, family: tuple[str, ...]) -> float:
    font = FontProperties(family=list(family), size=size)
    width, _, _ = text_to_path.get_text_width_height_descent(line or " ", font, ismath=False)
    return 1.06 * width


def text_width(text: str, size: float) -> float:
    """Return the width in points of the longest line of a text with letters of `size` points."""
    family = tuple(fonts())
    return max(_width(line, size, family) for line in text.split("\n"))


def wrapped(text: str, width: float, size: float, pieces: Sequence[str] = PIECES) -> str:
    """Break text into lines no wider than `width`: between words, else after _ - . / , and last anywhere."""
    done = ""
    for piece in re.findall(pieces[0], text):
        if len(pieces) > 1 and text_width(piece.rstrip(), size) > width:
            piece = wrapped(piece, width, size, pieces[1:])
        if done and text_width((done + piece).rstrip(), size) > width:
            done = done.rstrip() + "\n"
        done += piece
    return done


class Picture(Figure):
    """A figure that belongs to no window; notebooks show it whether or not pyplot is loaded. Its files keep text as
    text: TrueType fonts in PDF, which venues ask for, and letters in SVG."""

    def savefig(self, fname, **kwargs) -> None:
        with matplotlib.rc_context({"svg.fonttype": "none", "pdf.fonttype": 42, "ps.fonttype": 42}):
            super().savefig(fname, **kwargs)

    def _repr_png_(self) -> bytes:
        return figure_bytes(self, dpi=150)


def new_figure(width: float, height: float, **kwargs) -> Figure:
    """Return a figure of width x height inches that belongs to no window."""
    return Picture(figsize=(width, height), dpi=150, **kwargs)


def print_style() -> AbstractContextManager[None]:
    """Return a context in which axes, lines and markers have sizes for print, and no text is read as mathematics. For
    ticks see `small_ticks`; other text gets its size from `points`."""
    small = points()
    medium = points("medium")
    return matplotlib.rc_context(
        {
            "axes.titlesize": medium,
            "axes.labelsize": small,
            "legend.fontsize": small,
            "figure.titlesize": medium,
            "axes.linewidth": 0.6,
            "lines.linewidth": 1.0,
            "lines.markersize": 3.5,
            "errorbar.capsize": 1.5,
            "legend.columnspacing": 1.0,
            "legend.handlelength": 1.8,
            "grid.linewidth": 0.5,
            **text_settings(),
        }
    )


def small_ticks(axes: Axes) -> None:
    """Write the numbers of ticks in small letters; matplotlib makes them later, when it draws."""
    axes.tick_params(labelsize=points(), width=0.6, length=2.5, pad=2)


def legend_below(figure: Figure, lines: Sequence[Artist], names: Sequence[str]) -> None:
    """Draw a legend below all axes, in `print_style`, in as many columns as fit; the figure grows by its lines beyond
    three."""
    small = points()
    width, height = figure.get_size_inches()
    names = [wrapped(name, 72 * width - 50, small) for name in names]
    widest = max(text_width(name, small) for name in names)
    room = 72 * width // (widest + 34)
    ncols = int(max(1, min(len(names), room)))
    rows = sum(1 + name.count("\n") for name in names) / ncols
    more = max(0.0, (rows - 3) * small * 1.4 / 72)
    figure.set_size_inches(width, height + more)
    figure.legend(lines, names, loc="outside lower center", ncols=ncols)
