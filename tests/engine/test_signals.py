"""A signal before the first update ends a run at once; nothing was written that could be lost.

Private name: the signal comes while the trainer compiles.
"""

import os
import signal
import time

import pytest
import torch
from filelock import FileLock, Timeout
from torch._inductor import compile_fx

from ea_vision.data import image_files
from ea_vision.engine import checkpoint, data_module, train_imagenet
from ea_vision.engine.train import Trainer
from tests.data.photos import make_photos
from tests.engine.runner import around, saved, start, train, words
from tests.slow import slow_but, unix_only

unix_only()

WITHIN = 5.0  # seconds


def wait(mark):
    """Say that the place is reached, and wait for a signal."""
    mark.touch()
    time.sleep(600)


class SlowListing:
    def __init__(self, mark):
        self.mark = mark

    def __call__(self):
        image_files.os.walk = lambda *args, **kwargs: wait(self.mark)


class LockOfADownload(SlowListing):
    """As the hub's cache waits for it: with a timeout, again and again."""

    def __call__(self):
        lock = self.mark.with_suffix(".lock")

        def create_model(module):
            other = FileLock(lock, thread_local=False)
            other.acquire()
            self.mark.touch()
            while True:
                try:
                    FileLock(lock).acquire(timeout=1)
                except Timeout:
                    continue
                except Exception:
                    continue

        data_module.DataModule.create_model = create_model


class Compilation(SlowListing):
    def __call__(self):
        mark = self.mark

        class Compiled(torch.nn.Module):
            def forward(self, images):
                wait(mark)

        Trainer._compile = staticmethod(lambda model, **options: Compiled())


class RealCompilation(Compilation):
    """torch's compiler itself, which starts processes of its own."""

    def __call__(self):
        def compile_marked(real, *given, **more):
            self.mark.touch()
            return real(*given, **more)

        around(compile_fx, "compile_fx", compile_marked)


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
@pytest.mark.parametrize(
    "place",
    slow_but(
        (SlowListing, LockOfADownload, Compilation),
        (SlowListing, LockOfADownload, Compilation, RealCompilation),
    ),
)
def test_a_signal_before_the_first_update_ends_the_run_at_once(tmp_path, place, number):
    photos = make_photos(tmp_path / "photos", train=16, val=4)
    folder = tmp_path / "run"
    argv = words(
        "--model test_resnet --recipe none --img-size 16 --eval-resize 16 --batch-size 8 --workers 0",
        f"--epochs 1 --warmup-epochs 0 --device cpu --data-dir {photos} --output {folder}",
        "--compile" if issubclass(place, Compilation) else "",
    )
    argv = list(filter(None, argv))
    log = folder.with_suffix(".log")
    mark = tmp_path / "reached"
    process = start(argv, log, place(mark), main=train_imagenet.main)
    while not mark.exists():
        assert process.is_alive(), log.read_text()
        time.sleep(0.05)
    os.kill(process.pid, number)
    process.join(WITHIN)
    assert process.exitcode == 128 + number, log.read_text()
    [line] = [line for line in log.read_text().splitlines() if line.startswith("error: ")]
    assert f"stopped by signal {int(number)} before an update of this start" in line
    assert "Traceback" not in log.read_text()
    if issubclass(place, Compilation):
        assert saved(folder)["progress"]["updates"] == 0
        assert not list(folder.glob(".*"))
    else:
        assert not folder.exists()
    argv = [word for word in argv if word != "--compile"]
    train(argv, main=train_imagenet.main)
    assert saved(folder, checkpoint.LAST)["progress"]["updates"] == 2
