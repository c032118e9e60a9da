"""Errors become one line and an exit code, also among several processes; torchrun gets them, too."""

import io
import json
import multiprocessing
import os
import sys

import pytest

from ea_vision import __main__ as commands
from ea_vision.base.errors import RunError, UsageError, exit_code


@pytest.mark.parametrize(
    "error, code", [(UsageError("no\n such  file"), 2), (RunError("no such file", 143), 143)]
)
def test_an_error_is_one_line_and_torchrun_gets_it(tmp_path, monkeypatch, capsys, error, code):
    def fail():
        raise error

    assert exit_code(fail) == code and capsys.readouterr().err == "error: no such file\n"
    monkeypatch.setenv("RANK", "3")
    assert exit_code(fail) == code and capsys.readouterr().err == "error: process 3: no such file\n"
    monkeypatch.setenv("TORCHELASTIC_ERROR_FILE", str(tmp_path / "error.json"))
    assert exit_code(fail) == code and capsys.readouterr().err == ""
    assert "such" in json.loads((tmp_path / "error.json").read_text())["message"]["message"]


def test_other_errors_and_ends_stay_what_they_are(capsys):
    for error in (KeyError("x"), BrokenPipeError("a worker's"), SystemExit(3)):
        with pytest.raises(type(error)):
            exit_code(lambda error=error: (_ for _ in ()).throw(error))
    assert exit_code(lambda: (_ for _ in ()).throw(KeyboardInterrupt())) == 130
    assert capsys.readouterr().err == "error: interrupted\n"


@pytest.mark.parametrize(
    "output, buffered, code, said",
    [
        ("pipe", True, 141, ""),
        ("pipe", False, 141, ""),
        (
            "/dev/full",
            True,
            1,
            "error: standard output cannot be written: No space left on device\n",
        ),
    ],
)
def test_a_reader_that_goes_ends_a_command_quietly_and_a_full_disk_does_not(
    tmp_path, output, buffered, code, said
):
    def command():
        os.dup2(written, 1)
        sys.stdout = (
            os.fdopen(1, "w")
            if buffered
            else io.TextIOWrapper(os.fdopen(1, "wb", 0), write_through=True)
        )
        sys.stderr = open(tmp_path / "errors", "w")
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
    assert (process.exitcode, (tmp_path / "errors").read_text()) == (code, said)
