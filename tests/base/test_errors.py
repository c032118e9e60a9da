"""Errors of one process among several: who tells of them, and what torchrun gets."""
import json
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
import torch.distributed as dist

from ea_vision.base.errors import RunError, UsageError, exit_code
from ea_vision.base.processes import World


@pytest.mark.parametrize("error, code", [(UsageError("no\n such  file"), 2), (RunError("no such file", 143), 143)])
def test_torchrun_gets_a_line(tmp_path, monkeypatch, capsys, error, code):
    monkeypatch.setenv("TORCHELASTIC_ERROR_FILE", str(tmp_path / "0" / "error.json"))

    def fail():
        raise error

    assert exit_code(fail) == code and capsys.readouterr().err == "error: no such file\n"
    message = json.loads((tmp_path / "0" / "error.json").read_text())["message"]
    assert message["message"] == message["extraInfo"]["py_callstack"] == "no such file"


@pytest.mark.parametrize("told, said", [(None, ""), (True, ""), (False, "error: process 3: no such file\n")])
def test_another_process_tells_of_what_it_meets_alone(monkeypatch, capsys, told, said):
    monkeypatch.setenv("RANK", "3")
    error = UsageError("no such file")
    if told is not None:
        error.told = told

    def fail():
        raise error

    assert exit_code(fail) == 2 and capsys.readouterr().err == said


def test_the_first_process_says_who_does_not_answer_and_one_of_them_tells():
    store = dist.HashStore()
    worlds = [World(rank, 3, torch.device("cpu"), store) for rank in range(3)]
    for world, updates in zip(worlds, (7, 6, 7), strict=True):
        world.note(updates)
    assert worlds[0].missing(0.2) == "; process 1 has not answered since update 7", "2 is not behind, if slow"
    with ThreadPoolExecutor(2) as pool:
        assert set(pool.map(World.missing, (worlds[1], worlds[0]))) == {"; process 2 has not answered since update 8"}
    assert not worlds[2].is_told(0.1) and worlds[1].is_told(0.1) and worlds[0].is_told()
