"""Tables of commands: Markdown where they are piped, at most 100 characters on a terminal, all of it with --wide."""
import pytest

from ea_vision.__main__ import run
from ea_vision.base import tables
from ea_vision.base.tables import shown

TEXT = """before

| name | what it is | note |
| ---- | ---------- | ---- |
| a    | {words} | one |
| bb   | short | a \\| b |
after
""".format(words="word " * 60)


def test_piped_text_stays_as_it_is():
    assert shown(TEXT, terminal=False) == TEXT and shown(TEXT) == TEXT  # pytest's standard output is no terminal


def test_a_terminal_gets_columns_that_fit():
    text = shown(TEXT, terminal=True)
    lines = text.splitlines()
    assert text.startswith("before\n\nname  what it is") and text.endswith("after\n")
    assert max(map(len, lines)) <= 100 and "|" not in lines[4] and "a | b" in text
    assert text.count("word") == 60, "nothing is cut"
    assert max(map(len, shown(TEXT, wide=True, terminal=True).splitlines())) > 300


def test_columns_that_cannot_be_narrower_are_left_out_and_named():
    names = [f"column{number}" for number in range(20)]
    table = "\n".join(f"| {' | '.join(cells)} |" for cells in (names, ["---"] * 20, ["1.5"] * 20))
    lines = shown(table, terminal=True).splitlines()
    assert max(map(len, lines)) <= 100 and lines[0].startswith("column0  column1")
    told = " ".join(lines[lines.index(next(line for line in lines if line.startswith("(left out"))):])
    assert told.endswith("column19; --wide shows all)") and "column0," not in told


@pytest.mark.parametrize("command", [["models", "*cifar*"]])
def test_commands_fit_a_terminal(command, monkeypatch, capsys):
    run(command[0], command[1:])
    piped = capsys.readouterr().out
    assert "| -" in piped or "|---" in piped
    monkeypatch.setattr(tables.sys.stdout, "isatty", lambda: True)
    run(command[0], command[1:])
    short = [line for line in capsys.readouterr().out.splitlines() if "ea-vision" not in line and "http" not in line]
    run(command[0], [*command[1:], "--wide"])
    assert max(map(len, capsys.readouterr().out.splitlines())) > 100
    assert not any(line.startswith("|") for line in short)
