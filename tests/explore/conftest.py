"""Images and models for the attention page."""

import pytest

from ea_vision.recorder.loading import load_model
from ea_vision.recorder.recording import PARTS, recordable_layers
from ea_vision.visualize.explore import Explorer
from ea_vision.visualize.image_maps import Recording, add_own_alone, record
from tests.data.photos import picture


@pytest.fixture(scope="session")
def explorer() -> Explorer:
    """An EA network on 64x96 images (layers of maps 4x6, and 2x3 at the end) and a PA network on 32x32 images."""
    models = [
        load_model("ea_aa_resnet34", random=True, img_size=(64, 96), seed=1),
        load_model("pa_conv_transformer_cifar", random=True, seed=2),
    ]
    every = [recordable_layers(model.model) for model in models]
    layers = [[layer for layer in every[0] if layer.number in (8, 9, 10, 21)], every[1]]
    models[0].classes, models[1].classes = None, [f"kind <{index}>" for index in range(10)]
    return Explorer(models, layers)


@pytest.fixture(scope="session")
def entries(explorer) -> list[dict]:
    """Two images' entries; the second one's name tries to end the page's script."""
    return [
        explorer.view("first.png", picture(0)),
        explorer.view("</script><b>second.png", picture(1)),
    ]


@pytest.fixture(scope="session")
def recordings(explorer) -> dict[tuple[int, int], Recording]:
    """(image, model) -> the page's images, recorded anew."""
    found = {}
    for image in range(2):
        for index, (model, layers) in enumerate(zip(explorer.models, explorer.layers, strict=True)):
            found[image, index] = record(model, picture(image), layers, PARTS)
            add_own_alone(found[image, index])
    return found
