"""Images that the tests of the trainers share; who spoils them makes its own."""

import pytest

from tests.data.photos import make_photos
from tests.engine.runner import make_folder


@pytest.fixture(scope="session")
def data(tmp_path_factory):
    """40 training images and 13 to test on, of 3 classes."""
    return make_folder(tmp_path_factory.mktemp("data"), side=16)


@pytest.fixture(scope="session")
def photos(tmp_path_factory):
    """JPEG files of 3 classes in train and val."""
    return make_photos(tmp_path_factory.mktemp("photos"))
