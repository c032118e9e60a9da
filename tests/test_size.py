"""The size of the code by room, which `make size` prints.

Statements and tokens of Python without docstrings and comments, so that packing lines gains nothing; lines of the rest.
"""

import ast
import io
import subprocess
import tokenize
from collections import Counter, defaultdict
from pathlib import Path

COUNTED = {tokenize.NAME, tokenize.NUMBER, tokenize.OP, tokenize.STRING}
COLUMNS = ("lines", "statements", "tokens", "other lines")
OTHERS = {".c", ".h", ".js", ".css", ".html", ".yaml"}


def size_of(text):
    """Return lines, statements and tokens of a Python file."""
    statements = [node for node in ast.walk(ast.parse(text)) if isinstance(node, ast.stmt)]
    docstrings = set()
    for node in statements:
        if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant):
            docstrings.add(node.lineno)
    tokens = 0
    for token in tokenize.generate_tokens(io.StringIO(text).readline):
        docstring = token.type == tokenize.STRING and token.start[0] in docstrings
        tokens += token.type in COUNTED and not docstring
    return len(text.splitlines()), len(statements) - len(docstrings), tokens


def table():
    """Return lines, statements and tokens of Python and lines of other code, by room."""
    sizes = defaultdict(Counter)
    for name in subprocess.check_output(["git", "ls-files"], text=True).splitlines():
        path = Path(name)
        if not path.is_file() or path.suffix not in OTHERS | {".py"}:
            continue
        text = path.read_text(encoding="utf-8")
        if path.suffix == ".py":
            size = Counter(dict(zip(COLUMNS, size_of(text), strict=False)))
        else:
            size = Counter({"other lines": len(text.splitlines())})
        rooms = [path.parent.parts[:1]]
        if path.parts[0] == "ea_vision":
            rooms = [path.parent.parts[:2], ("ea_vision, all",)]
        for room in rooms:
            sizes["/".join(room)] += size
    row = ("{:28}" + "{:>13}" * len(COLUMNS)).format
    lines = [row("room", *COLUMNS)]
    for room, size in sorted(sizes.items(), key=lambda item: -item[1]["tokens"]):
        lines.append(row(room, *(size[column] for column in COLUMNS)))
    return "\n".join(lines)


def test_docstrings_and_comments_have_no_size():
    assert size_of('"""Doc."""\nx = 1  # one\n') == (2, 1, 3)
    assert "ea_vision, all" in table()


if __name__ == "__main__":
    print(table())
