"""The size of the code by room, which `make size` prints.

Statements and tokens of Python without docstrings and comments, so that packing lines gains nothing; lines of the rest.
"""

import ast
import io
import subprocess
import tokenize
from collections import defaultdict
from pathlib import Path

COUNTED = {tokenize.NAME, tokenize.NUMBER, tokenize.OP, tokenize.STRING}
OTHERS = {".c", ".h", ".js", ".css", ".html", ".yaml"}


def size_of(text: str) -> tuple[int, int, int]:
    """Return lines, statements and tokens of a Python file."""
    statements = [node for node in ast.walk(ast.parse(text)) if isinstance(node, ast.stmt)]
    docstrings = {
        node.lineno
        for node in statements
        if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant)
    }
    tokens = sum(
        t.type in COUNTED and not (t.type == tokenize.STRING and t.start[0] in docstrings)
        for t in tokenize.generate_tokens(io.StringIO(text).readline)
    )
    return len(text.splitlines()), len(statements) - len(docstrings), tokens


def table() -> str:
    """Return lines, statements and tokens of Python and lines of other code, by room."""
    rooms: dict[str, list[int]] = defaultdict(lambda: [0, 0, 0, 0])
    for path in map(Path, subprocess.check_output(["git", "ls-files"], text=True).splitlines()):
        if path.is_file() and (path.suffix == ".py" or path.suffix in OTHERS):
            text, package = path.read_text(), path.parts[0] == "ea_vision"
            size = (
                (*size_of(text), 0) if path.suffix == ".py" else (0, 0, 0, len(text.splitlines()))
            )
            for room in ("/".join(path.parts[:-1][: 1 + package]), *["ea_vision, all"] * package):
                rooms[room] = [sum(pair) for pair in zip(rooms[room], size, strict=True)]
    rows = [
        ("room", "lines", "statements", "tokens", "other lines"),
        *((room, *size) for room, size in sorted(rooms.items(), key=lambda item: -item[1][2])),
    ]
    return "\n".join(f"{name:28}{a:>8}{b:>12}{c:>9}{d:>13}" for name, a, b, c, d in rows)


def test_docstrings_and_comments_have_no_size():
    assert size_of('"""Doc."""\nx = 1  # one\n') == (2, 1, 3)


if __name__ == "__main__":
    print(table())
