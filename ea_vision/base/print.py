"""Figures for print: their width in inches, that of a paper's column or page, text of 7 to 9 points whatever the width
(in proportion larger or smaller where rcParams["font.size"] is not matplotlib's), and how wide it is."""

from __future__ import annotations

import io
import re
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import lru_cache

import matplotlib
from matplotlib.artist import Artist
from matplotlib.axes import Axes
from matplotlib.figure import Figure, SubFigure
from matplotlib.font_manager import FontProperties
from matplotlib.legend import Legend
from matplotlib.textpath import text_to_path


def points(kind: str = "small") -> float:
    """Size of text: "title", "medium" or "small", by default 9, 8 and 7 points."""
    default = matplotlib.rcParamsDefault["font.size"]
    return {"title": 9.0, "medium": 8.0, "small": 7.0}[kind] * matplotlib.rcParams["font.size"] / default


@lru_cache(4096)
def _width(text: str, size: float, family: tuple[str, ...]) -> float:
    properties = FontProperties(family=list(family), size=size)
    return 1.06 * text_to_path.get_text_width_height_descent(text, properties, ismath=False)[0]


def text_width(text: str, size: float) -> float:
    """Of the longest line."""
    return max(_width(line, size, tuple(matplotlib.rcParams["font.family"])) if line else 0.0
               for line in text.split("\n"))


def wrapped(text: str, width: float, size: float) -> str:
    """Break text into lines no wider than `width`: between words, else after _ - . / , and last anywhere."""
    lines: list[str] = []
    for part in text.split("\n"):
        line = ""
        for word in part.split(" "):
            longer = f"{line} {word}" if line else word
            if text_width(longer, size) <= width:
                line = longer
                continue
            if line:
                lines.append(line)
            *whole, line = _broken(word, width, size)
            lines += whole
        lines.append(line)
    return "\n".join(lines)


def _broken(word: str, width: float, size: float) -> list[str]:
    lines = [""]
    for piece in re.findall(r"[^_\-./,]*[_\-./,]|[^_\-./,]+", word) or [""]:
        if text_width(lines[-1] + piece, size) <= width:
            lines[-1] += piece
            continue
        lines += [""] if lines[-1] else []
        for letter in piece:
            if lines[-1] and text_width(lines[-1] + letter, size) > width:
                lines.append("")
            lines[-1] += letter
    return lines


class Picture(Figure):
    """A figure that belongs to no window; notebooks show it whether or not pyplot is loaded. Files keep text as text:
    TrueType fonts in PDF, which venues ask for, and letters in SVG."""

    def savefig(self, fname, **kwargs) -> None:
        with matplotlib.rc_context({"svg.fonttype": "none", "pdf.fonttype": 42, "ps.fonttype": 42}):
            super().savefig(fname, **kwargs)

    def _repr_png_(self) -> bytes:
        data = io.BytesIO()
        self.savefig(data, format="png")
        return data.getvalue()


def new_figure(width: float, height: float, **kwargs) -> Figure:
    """A figure of width x height inches that belongs to no window."""
    return Picture(figsize=(width, height), dpi=150, **kwargs)


@contextmanager
def print_style() -> Iterator[None]:
    """Draw axes, lines and markers in the sizes of print while this lasts; for ticks see `small_ticks`, other text is
    told its `points`."""
    small, medium = points(), points("medium")
    with matplotlib.rc_context({
            "axes.titlesize": medium, "axes.labelsize": small, "legend.fontsize": small,
            "figure.titlesize": medium, "axes.linewidth": 0.6, "lines.linewidth": 1.0, "lines.markersize": 3.5,
            "errorbar.capsize": 1.5, "legend.columnspacing": 1.0, "legend.handlelength": 1.8, "grid.linewidth": 0.5}):
        yield


def small_ticks(axes: Axes) -> None:
    """Write the numbers of ticks, which matplotlib makes when it draws, in small letters."""
    axes.tick_params(labelsize=points(), width=0.6, length=2.5, pad=2)


def legend_below(figure: Figure | SubFigure, lines: Sequence[Artist], names: Sequence[str]) -> Legend:
    """Draw a legend below all, in as many columns as the width has room for; the figure grows by its lines."""
    small, root = points(), figure.figure
    width = 72 * root.get_size_inches()[0]
    names = [wrapped(name, width - 50, small) for name in names]
    each = max(text_width(name, small) for name in names) + 34
    ncols = max(1, min(len(names), int(width // each)))
    legend = figure.legend(lines, names, loc="outside lower center", ncols=ncols, fontsize=small, columnspacing=1.0,
                           handlelength=1.8)
    for text in legend.get_texts():
        text.set_parse_math(False)
    rows = sum(1 + name.count("\n") for name in names) / ncols
    size = root.get_size_inches()
    root.set_size_inches(size[0], size[1] + max(0.0, (rows - 3) * small * 1.4 / 72))
    return legend
