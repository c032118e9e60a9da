"""Images shared by the trainers' tests; a test that changes images makes its own."""

import pytest

from ea_vision.engine import train_cifar
from tests.data.photos import make_folder, make_photos
from tests.engine.runner import error_of


@pytest.fixture(scope="session")
def data(tmp_path_factory):
    """40 training images and 13 to test on, of 3 classes."""
    return make_folder(tmp_path_factory.mktemp("data"), side=16)


@pytest.fixture(scope="session")
def photos(tmp_path_factory):
    """JPEG files of 3 classes in train and val."""
    return make_photos(tmp_path_factory.mktemp("photos"))


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
    """Run train_cifar; return its error, which must be one line."""
    return lambda argv: error_of(train_cifar.main, argv, capsys)
