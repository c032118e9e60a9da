"""A signal before the first update ends a run at once; nothing was written that could be lost.

Private name: the signal comes while the trainer compiles.
"""

import os
import signal
import time
from functools import partial

import pytest
import torch
from filelock import FileLock
from torch._inductor import compile_fx

from ea_vision.data import image_files
from ea_vision.engine import data_module, train_imagenet
from ea_vision.engine.train import Trainer
from tests.engine.runner import around, saved, start, train
from tests.slow import slow_but, unix_only

unix_only()

WITHIN = 5.0  # seconds


def wait(mark):
    """Say that the place is reached, and wait for a signal."""
    mark.touch()
    time.sleep(600)


def slow_listing(mark):
    image_files.os.walk = lambda *args, **kwargs: wait(mark)


def lock_of_a_download(mark):
    """As the hub's cache waits for it: with a timeout, again and again."""
    lock = mark.with_suffix(".lock")

    def create_model(module):
        other = FileLock(lock, thread_local=False)
        other.acquire()
        mark.touch()
        while True:
            try:
                FileLock(lock).acquire(timeout=1)
            except Exception:  # its Timeout, and what may come instead
                continue

    data_module.DataModule.create_model = create_model


def compilation(mark):
    class Compiled(torch.nn.Module):
        def forward(self, images):
            wait(mark)

    Trainer._compile = staticmethod(lambda model, **options: Compiled())


def real_compilation(mark):
    """torch's compiler itself, which starts processes of its own."""

    def compile_marked(real, *given, **more):
        mark.touch()
        return real(*given, **more)

    around(compile_fx, "compile_fx", compile_marked)


PLACES = (slow_listing, lock_of_a_download, compilation)


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
@pytest.mark.parametrize("place", slow_but(PLACES, (*PLACES, real_compilation)))
def test_a_signal_before_the_first_update_ends_the_run_at_once(
    imagenet, folder, tmp_path, place, number
):
    argv = imagenet(folder, "--recipe none --workers 0 --epochs 1")
    compiling = ["--compile"] if place in (compilation, real_compilation) else []
    log = folder.with_suffix(".log")
    mark = tmp_path / "reached"
    process = start([*argv, *compiling], log, partial(place, mark), train_imagenet.main)
    while not mark.exists():
        assert process.is_alive(), log.read_text()
        time.sleep(0.05)
    os.kill(process.pid, number)
    process.join(WITHIN)
    assert process.exitcode == 128 + number, log.read_text()
    [line] = [line for line in log.read_text().splitlines() if line.startswith("error: ")]
    assert f"stopped by signal {int(number)} before an update of this start" in line
    assert "Traceback" not in log.read_text()
    if compiling:
        assert saved(folder)["progress"]["updates"] == 0
        assert not list(folder.glob(".*"))
    else:
        assert not folder.exists()
    train(argv, main=train_imagenet.main)
    assert saved(folder)["progress"]["updates"] == 5
