"""A photo, a small EA network, and a run folder of it with checkpoints and snapshots."""

import numpy as np
import pytest
from matplotlib.text import Text

from ea_vision.recorder.recording import recordable_layers
from ea_vision.visualize import image_maps
from tests.recorder import networks

PHOTO, small = networks.photo((50, 40)), networks.tiny


@pytest.fixture(scope="session")
def run(tmp_path_factory):
    return networks.write_run(tmp_path_factory.mktemp("runs") / "small")


@pytest.fixture
def photo(tmp_path):
    PHOTO.save(tmp_path / "photo.png")
    return tmp_path / "photo.png"


def record(model, parts=("attn",), layers=None):
    """What a model makes of PHOTO in its first `layers` layers."""
    model = image_maps.as_model(model)
    return image_maps.record(model, PHOTO, recordable_layers(model.model)[:layers], parts)


def maps_of(figure):
    """The arrays of all that a figure shows."""
    return [np.asarray(image.get_array(), float) for axes in figure.axes for image in axes.images]


def overlaid(figure):
    """The artists of maps over the grey image."""
    return [axes.images[-1] for axes in figure.axes if len(axes.images) == 2]


def texts_of(figure) -> str:
    return " ".join(" ".join(text.get_text() for text in figure.findobj(Text)).split())
