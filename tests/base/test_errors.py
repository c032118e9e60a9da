"""Errors become one line and an exit code, also with several processes; torchrun receives them, too."""

import io
import json
import multiprocessing
import os
import sys

import pytest

from ea_vision import __main__ as commands
from ea_vision.base.errors import CommandParser, RunError, UsageError, as_usage_error, exit_code
from tests.refused import refused


@pytest.mark.parametrize(
    "error, message",
    [
        (ValueError("first\n" + "frame " * 500 + "last"), "^problem: first frame .* frame last$"),
        (KeyError("size"), "^problem: there is no 'size'$"),
        (ValueError(), "^problem: ValueError$"),
        (UsageError("of its own"), "^of its own$"),
    ],
)
def test_what_a_library_refuses_becomes_one_line(error, message):
    with refused(message) as info, as_usage_error("problem"):
        raise error
    assert len(str(info.value)) < 1000


def test_what_is_no_refusal_passes():
    with pytest.raises(RunError), as_usage_error("problem", Exception):
        raise RunError("stopped")


@pytest.mark.parametrize(
    "error, code", [(UsageError("no\n such  file"), 2), (RunError("no such file", 143), 143)]
)
def test_an_error_is_one_line_and_torchrun_gets_it(tmp_path, monkeypatch, capsys, error, code):
    def fail():
        raise error

    def check(said):
        assert exit_code(fail) == code
        assert capsys.readouterr().err == said

    path = tmp_path / "error.json"
    check("error: no such file\n")
    monkeypatch.setenv("RANK", "3")
    check("error: process 3: no such file\n")
    monkeypatch.setenv("TORCHELASTIC_ERROR_FILE", str(path))
    check("")
    report = json.loads(path.read_text())
    assert "such" in report["message"]["message"]


def test_a_list_of_negative_numbers_is_a_value():
    """The command then says what is wrong with the value, not that it lacks."""
    parser = CommandParser()
    parser.add_argument("--queries", nargs="+")
    parser.add_argument("--lr", type=float)
    options = parser.parse_args(["--queries", "-1,3", "-2", "--lr", "-1e-3"])
    assert options.queries == ["-1,3", "-2"]
    assert options.lr == -1e-3
    with refused("unknown argument '-q'"):
        parser.parse_args(["-q"])


@pytest.mark.parametrize("error", [KeyError("x"), BrokenPipeError("a worker's"), SystemExit(3)])
def test_other_errors_and_exits_are_raised(error):
    def fail():
        raise error

    with pytest.raises(type(error)):
        exit_code(fail)


FULL = "error: standard output cannot be written: No space left on device\n"


@pytest.mark.parametrize(
    "output, buffered, code, said",
    [("pipe", True, 141, ""), ("pipe", False, 141, ""), ("/dev/full", True, 1, FULL)],
)
def test_a_reader_that_goes_ends_a_command_quietly_and_a_full_disk_does_not(
    tmp_path, output, buffered, code, said
):
    errors = tmp_path / "errors"

    def command():
        os.dup2(written, 1)
        if buffered:
            sys.stdout = os.fdopen(1, "w")
        else:
            sys.stdout = io.TextIOWrapper(os.fdopen(1, "wb", 0), write_through=True)
        sys.stderr = open(errors, "w", encoding="utf-8")
        sys.exit(exit_code(lambda: commands.main(["--version"])))

    if output == "pipe":
        reader, written = os.pipe()
        os.close(reader)
    else:
        written = os.open(output, os.O_WRONLY)
    process = multiprocessing.get_context("fork").Process(target=command)
    process.start()
    process.join()
    os.close(written)
    assert process.exitcode == code
    assert errors.read_text(encoding="utf-8") == said
