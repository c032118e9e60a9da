"""Images shared by the trainers' tests; a test that changes images makes its own."""

import sys
from functools import partial
from types import SimpleNamespace

import pytest

from ea_vision.engine import train_cifar
from tests.data.photos import make_folder, make_photos
from tests.engine import runner


@pytest.fixture(scope="session")
def data(tmp_path_factory):
    """40 training images and 13 to test on, of 3 classes."""
    return make_folder(tmp_path_factory.mktemp("data"), side=16)


@pytest.fixture(scope="session")
def photos(tmp_path_factory):
    """JPEG files of 3 classes in train and val."""
    return make_photos(tmp_path_factory.mktemp("photos"))


@pytest.fixture(scope="module")
def arguments(data):
    """Return the command of a run of `data` in a folder, with further options."""
    return partial(runner.arguments, data)


@pytest.fixture(scope="module")
def imagenet(photos):
    """Return the command of a run of `photos`, likewise."""
    return partial(runner.imagenet, photos)


@pytest.fixture
def folder(tmp_path):
    """A run folder that does not exist yet."""
    return tmp_path / "run"


@pytest.fixture
def recipe(tmp_path):
    """Write a recipe; return its path."""

    def write(text, name="recipe"):
        path = tmp_path / f"{name}.yaml"
        path.write_text(text, encoding="utf-8", errors="surrogatepass")
        return path

    return write


@pytest.fixture
def refusal(capsys):
    """Run a trainer; return its error, which must be one line."""
    return lambda argv, main=train_cifar.main: runner.error_of(main, argv, capsys)


@pytest.fixture
def wandb_runs(monkeypatch):
    """The arguments of every `wandb.init` call and what was logged; the fake refuses a project named `refused`."""
    runs = []

    class Error(Exception):
        pass

    def init(**given):
        if given["project"] == "refused":
            raise Error("no login")
        logged = []
        runs.append({**given, "logged": logged})

        def log(values, step):
            logged.append((step, values))

        return SimpleNamespace(log=log, finish=lambda: None)

    wandb = SimpleNamespace(init=init, Error=Error, Image=lambda pixels: pixels.shape)
    monkeypatch.setitem(sys.modules, "wandb", wandb)
    return runs
