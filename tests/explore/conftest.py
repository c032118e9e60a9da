"""Images and models for the attention page."""

import pytest

from ea_vision.recorder.recording import PARTS, recordable_layers
from ea_vision.visualize.explore import Explorer
from ea_vision.visualize.figure_request import record
from ea_vision.visualize.strip import add_own_alone
from ea_vision.zoo.loaded import load_model
from tests.data.photos import picture


@pytest.fixture(scope="session")
def explorer():
    """An EA network on 64x96 images (layers of maps 4x6, and 2x3 at the end) and a PA network on 32x32 images."""
    ea = load_model("ea_aa_resnet34", random=True, img_size=(64, 96), seed=1)
    pa = load_model("pa_conv_transformer_cifar", random=True, seed=2)
    ea.classes = None
    pa.classes = [f"kind <{index}>" for index in range(10)]
    ea_layers = [layer for layer in recordable_layers(ea.model) if layer.number in (8, 9, 10, 21)]
    return Explorer([ea, pa], [ea_layers, recordable_layers(pa.model)])


@pytest.fixture(scope="session")
def entries(explorer):
    """Two images' entries; the second one's name tries to end the page's script."""
    names = ["first.png", "</script><b>second.png"]
    return [explorer.view(name, picture(index)) for index, name in enumerate(names)]


@pytest.fixture(scope="session")
def recordings(explorer):
    """(image, model) -> the page's images, recorded anew."""
    recordings_by_name = {}
    for image in range(2):
        for index, model in enumerate(explorer.models):
            recording = record(model, picture(image), explorer.layers[index], PARTS)
            add_own_alone(recording)
            recordings_by_name[image, index] = recording
    return recordings_by_name
