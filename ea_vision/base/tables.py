"""Markdown tables."""

from collections.abc import Sequence


def markdown(lines: Sequence[Sequence[str]]) -> str:
    """Return a Markdown table, its columns aligned; the first line is the heading."""
    widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
    heading, *rows = lines
    table = []
    for line in (heading, ["-" * width for width in widths], *rows):
        cells = map(str.ljust, line, widths)
        table.append(f"| {' | '.join(cells)} |")
    return "\n".join(table)
