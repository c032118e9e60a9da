"""The benchmark of loaders: one table with every loader that is installed."""
from __future__ import annotations

import importlib.util
import subprocess

import pytest

from ea_vision.__main__ import main
from ea_vision.base.errors import exit_code
from ea_vision.measure import loaders
from tests.data.photos import make_photos
from tests.engine import runner


@pytest.mark.slow
def test_table(tmp_path, capsys, monkeypatch):
    """Each loader in a process of its own, the first of them started as users' are."""
    def started(command, **options):
        if command[1:3] != ["-m", "ea_vision"] or command[-2] == "timm":
            return real(command, **options)
        log = tmp_path / command[-2]
        return subprocess.CompletedProcess(command, runner.run(command[3:], log, main=main), log.read_text())

    real = subprocess.run
    monkeypatch.setattr(loaders.subprocess, "run", started)
    make_photos(tmp_path, train=16)
    beton = []
    if importlib.util.find_spec("ffcv") is not None:
        from ea_vision.data import write_ffcv

        beton = ["--beton", str(tmp_path / "train.beton")]
        assert write_ffcv.main(["--data-dir", str(tmp_path), "--out", beton[1], "--workers", "1"]) == 0
        capsys.readouterr()
    argv = ["--data-dir", str(tmp_path), "--workers", "1", "--batch-size", "4", "--img-size", "16", "--seconds", "0.3"]
    assert loaders.main([*argv, *beton]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[0].startswith("16 images, 16 pixels, batch 4, 1 worker(s)") or "not installed" in lines[0]
    rows = {line[:22].strip(): line[22:].split() for line in lines[-3 - bool(beton):]}
    assert list(rows) == ["timm", "image files", "image files, threads", *["train.beton"] * bool(beton)]
    for values in rows.values():
        assert float(values[0]) > 0 and float(values[4]) > 50, "images per second, MiB"
    assert float(rows["timm"][1]) == float(rows["timm"][3]) == 1


@pytest.mark.parametrize("more, message", [(["--seconds", "0"], "--seconds must be positive, got 0"),
                                           (["--data-dir", "/nowhere"], "does not exist")])
def test_bad_input(tmp_path, capsys, more, message):
    make_photos(tmp_path, train=4)
    assert exit_code(lambda: loaders.main(["--data-dir", str(tmp_path), *more])) == 2
    assert message in capsys.readouterr().err
