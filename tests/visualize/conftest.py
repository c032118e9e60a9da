"""A photo, a small EA network, and a run folder of it with checkpoints and snapshots."""

import numpy as np
import pytest
from matplotlib.image import AxesImage
from matplotlib.text import Text

from ea_vision.recorder.recording import recordable_layers
from ea_vision.visualize.figure_request import record as record_layers
from ea_vision.zoo.loaded import as_model
from tests.recorder import networks

PHOTO = networks.photo((50, 40))
small = networks.tiny


@pytest.fixture(scope="session")
def run(tmp_path_factory):
    return networks.write_run(tmp_path_factory.mktemp("runs") / "small")


@pytest.fixture
def photo(tmp_path):
    path = tmp_path / "photo.png"
    PHOTO.save(path)
    return path


def record(model, parts=("attn",), layers=None, image=PHOTO):
    """Record an image in the first `layers` layers of a model."""
    model = as_model(model)
    return record_layers(model, image, recordable_layers(model.model)[:layers], parts)


def maps_of(figure):
    """Return the arrays of all images of a figure."""
    return [np.asarray(image.get_array(), float) for image in figure.findobj(AxesImage)]


def overlaid(figure):
    """Return the artists of maps over the grey image."""
    return [axes.images[-1] for axes in figure.axes if len(axes.images) == 2]


def tiles_of(figure):
    """Return the axes of maps, without photos and colour bars."""
    return [axes for axes in figure.axes if axes.images and not axes.get_label()]


def labelled(figure, label):
    """Return the axes of photos ("photo") or of colour bars ("<colorbar>")."""
    return [axes for axes in figure.axes if axes.get_label() == label]


def titles_of(figure):
    return [axes.get_title() for axes in figure.axes if axes.get_title()]


def written(figure):
    """Return the visible texts of a figure."""
    return [text for text in figure.findobj(Text) if text.get_text().strip() and text.get_visible()]


def texts_of(figure):
    texts = [text.get_text() for text in figure.findobj(Text)]
    return " ".join(" ".join(texts).split())
