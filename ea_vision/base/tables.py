"""Markdown tables on a terminal: aligned columns of at most 100 characters; Markdown as it is where it is piped."""

from __future__ import annotations

import argparse
import re
import sys
import textwrap
from collections.abc import Sequence

WIDTH, GAP, NARROWEST = 100, 2, 12  # characters


def add_wide(parser: argparse.ArgumentParser) -> None:
    """Add the option --wide of commands that print tables."""
    parser.add_argument("--wide", action="store_true",
                        help=f"on a terminal, tables as wide as they are (default: at most {WIDTH} characters; piped "
                             "tables are Markdown)")


def markdown(lines: Sequence[Sequence[str]]) -> str:
    """Return a Markdown table, its columns aligned; the first line is the heading."""
    widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
    lines = [lines[0], ["-" * width for width in widths], *lines[1:]]
    return "\n".join(
        "| " + " | ".join(cell.ljust(width) for cell, width in zip(line, widths, strict=True)) + " |" for line in lines)


def shown(text: str, wide: bool = False, terminal: bool | None = None) -> str:
    """Return text with its Markdown tables as they are printed.

    Args:
        wide: tables as wide as they are.
        terminal: whether it is printed on one; None: whether standard output is one.
    """
    if not (sys.stdout.isatty() if terminal is None else terminal):
        return text
    blocks = re.split(r"((?:^\|.*\n?)+)", text, flags=re.MULTILINE)
    return "".join(_aligned(block, wide) if block.startswith("|") else block for block in blocks)


def _aligned(table: str, wide: bool) -> str:
    rows = [[cell.strip().replace("\\|", "|") for cell in re.split(r"(?<!\\)\|", line.strip())[1:-1]]
            for line in table.splitlines()]
    rows = [row for row in rows if not all(re.fullmatch(":?-+:?", cell) for cell in row)]
    columns = min(map(len, rows))
    widths = [max(len(row[column]) for row in rows) for column in range(columns)]
    left_out: list[str] = []
    if not wide:
        widths, left_out = _fit(rows, widths)
    lines = []
    for number, row in enumerate(rows):
        cells = [textwrap.wrap(cell, width, break_on_hyphens=False) or [""]
                 for cell, width in zip(row, widths, strict=False)]
        for part in range(max(map(len, cells))):
            words = [(cell[part] if part < len(cell) else "").ljust(width)
                     for cell, width in zip(cells, widths, strict=True)]
            lines.append((" " * GAP).join(words).rstrip())
        if number == 0:
            lines.append((" " * GAP).join("-" * width for width in widths))
    if left_out:
        lines += textwrap.wrap(f"(left out: {', '.join(left_out)}; --wide shows all)", WIDTH)
    return "\n".join(lines) + ("\n" if table.endswith("\n") else "")


def _fit(rows: Sequence[Sequence[str]], widths: list[int]) -> tuple[list[int], list[str]]:
    """Narrow the widest columns of words, then leave out the last columns; return widths and what is left out."""
    longest = [max(len(word) for row in rows for word in row[column].split() or [""]) for column in range(len(widths))]
    widths, left_out = list(widths), []
    while sum(widths) + GAP * (len(widths) - 1) > WIDTH:
        narrow = [column for column, width in enumerate(widths) if width > max(NARROWEST, longest[column])]
        if narrow:
            widths[max(narrow, key=lambda column: widths[column])] -= 1
        elif len(widths) > 1:
            left_out.insert(0, rows[0][len(widths) - 1])
            widths.pop()
        else:
            break
    return widths, left_out
