"""Every command where `fcntl`, `resource`, signals of Unix, `fork` and /proc are missing (stub/sitecustomize.py), in a
folder whose path has a space, an umlaut and 200 characters."""

import os
import subprocess
import sys
import time
from pathlib import Path

import pytest

from ea_vision.engine import run_folder
from ea_vision.engine.checkpoint import LAST
from tests.data.photos import make_photos
from tests.process import ROOT, python

STUB = Path(__file__).parent / "stub"
# Python begins with the stub, which removes what only some systems have
ENVIRONMENT = {
    "PYTHONPATH": os.pathsep.join((str(STUB), str(ROOT))),
    "PYTHONWARNDEFAULTENCODING": "1",
    "OMP_NUM_THREADS": "1",
}
MODEL = "ea_conv_transformer_cifar"
PHOTO = str(ROOT / "docs" / "cat.jpg")
SECONDS = 300

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def place(tmp_path_factory):
    """A folder of 200 characters."""
    root = tmp_path_factory.mktemp("anywhere") / "mit Umlaut ä"
    folder = root / ("x" * (199 - len(str(root))))
    assert len(str(folder)) == 200
    folder.mkdir(parents=True)
    return folder


def started(place, *words):
    """Start a command in `place`."""
    return subprocess.Popen(
        [sys.executable, "-m", "ea_vision", *map(str, words)],
        cwd=place,
        env={**os.environ, **ENVIRONMENT},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        encoding="utf-8",
    )


def run(place, *words, code=0):
    """Run a command to its end; return what it says."""
    process = started(place, *words)
    said, _ = process.communicate(timeout=SECONDS)
    assert process.returncode == code, said
    assert "Traceback" not in said
    return said


def test_the_stub_takes_things_away():
    """Otherwise the tests below would prove nothing."""
    lines = (
        "import importlib.util, multiprocessing.context, os, signal",
        "assert not hasattr(os, 'fork') and not hasattr(signal, 'SIGKILL')",
        "assert list(multiprocessing.context._concrete_contexts) == ['spawn']",
        "assert importlib.util.find_spec('ffcv') is None",
        "__name__ = 'ea_vision.test'",
        "assert not os.path.exists('/proc/cpuinfo')",
        "try:\n    import fcntl\nexcept ImportError:\n    print('gone')",
    )
    done = python("-c", "\n".join(lines), **ENVIRONMENT)
    assert done.stdout == "gone\n", done.stderr


def test_a_run_that_was_killed_goes_on(place):
    folder = place / "run ü"
    options = "--recipe none --dataset digits --epochs 1 --batch-size 250 --checkpoint-steps 1"
    options = f"{options} --model-kwargs depth=1 widths=[8,8,8,8] --device cpu"
    words = ["train-cifar", *options.split(), "--output", folder]
    process = started(place, *words)
    while not (folder / "last.prev.ckpt").exists() and process.poll() is None:
        time.sleep(0.01)
    process.kill()
    process.communicate()
    assert (folder / LAST).exists()
    assert run_folder.read_results(folder) is None
    assert "resumed from" in run(place, *words)
    assert run_folder.read_results(folder)["epochs"] == 1
    for name in ("heatmap", "strip"):
        picture = place / f"{name} ü.png"
        words = [name, "--model", folder, "--layers", "1", "-o", picture, "digits#0"]
        run(place, *words)
        assert picture.stat().st_size > 1000


def test_training_on_a_folder_with_two_workers(place):
    photos = make_photos(place / "photos ü")
    folder = place / "imagenet ü"
    words = "train-imagenet --model test_resnet --img-size 16 --eval-resize 20 --batch-size 8"
    words = f"{words} --workers 2 --device cpu --epochs 1 --recipe none".split()
    run(place, *words, "--data-dir", photos, "--output", folder)
    assert run_folder.read_results(folder)["epochs"] == 1


@pytest.mark.parametrize(
    "command, output",
    [
        (f"predict {MODEL} PHOTO --json", "predict.json"),
        (f"heatmap --model {MODEL} --layers 1 PHOTO -o", "heatmap.png"),
        (f"strip --model {MODEL} --layers 1-3 --change PHOTO -o", "strip.png"),
        (f"statistics --model {MODEL} --layers 1 PHOTO -o", "statistics.pdf"),
        (f"explore --model {MODEL} --layers 1 PHOTO -o", "page.html"),
        ("export cnn_cifar --random -o", "net.pt2"),
        (
            f"probe --model {MODEL} --layers 1 --limit 12 --epochs 1 --width 8 --controls none -o",
            "probe/results.csv",
        ),
    ],
)
def test_commands(place, command, output):
    path = place / f"ü {output}"
    words = [PHOTO if word == "PHOTO" else word for word in command.split()]
    run(place, *words, path.parent if words[0] == "probe" else path)
    assert path.stat().st_size > 100


def test_ffcv_is_asked_for_in_one_line(place):
    words = ["write-ffcv", "--data-dir", place, "--split", "train", "--out", place / "a.beton"]
    [line] = run(place, *words, code=2).splitlines()
    assert line.startswith("error: ")
    assert "ffcv" in line
