"""Markdown tables."""

from collections.abc import Sequence


def markdown(lines: Sequence[Sequence[str]]) -> str:
    """Return a Markdown table, its columns aligned; the first line is the heading."""
    widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
    lines = [lines[0], ["-" * width for width in widths], *lines[1:]]
    return "\n".join(
        "| "
        + " | ".join(cell.ljust(width) for cell, width in zip(line, widths, strict=True))
        + " |"
        for line in lines
    )
