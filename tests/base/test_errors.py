"""Errors become one line and an exit code, also among several processes; torchrun gets them, too."""
import json
import subprocess
import sys

import pytest

from ea_vision.base.errors import RunError, UsageError, exit_code


@pytest.mark.parametrize("error, code", [(UsageError("no\n such  file"), 2), (RunError("no such file", 143), 143)])
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


def test_a_reader_that_goes_ends_a_command_quietly():
    lines = "import sys; from ea_vision.base.errors import exit_code; " \
            "sys.exit(exit_code(lambda: [print(n) for n in range(10**5)] and 0))"
    done = subprocess.run(["bash", "-c", '"$@" | head -1; exit ${PIPESTATUS[0]}', "bash", sys.executable, "-u", "-c",
                           lines], capture_output=True, text=True)
    assert (done.stdout, done.stderr, done.returncode) == ("0\n", "", 141)
    with open("/dev/full", "w") as full:
        done = subprocess.run([sys.executable, "-m", "ea_vision", "--version"], stdout=full, stderr=subprocess.PIPE,
                              text=True)
    assert (done.stderr, done.returncode) == ("error: standard output cannot be written: No space left on device\n", 1)
