"""Images and models for the attention page."""
import numpy as np
import pytest
from PIL import Image

from ea_vision.recorder.loading import load_model
from ea_vision.recorder.recording import recordable_layers
from ea_vision.visualize.page import Explorer


def picture(seed: int, size: tuple[int, int] = (120, 90)) -> Image.Image:
    """A smooth image of (width, height) with blobs of colour."""
    small = np.random.default_rng(seed).integers(0, 255, (5, 6, 3), dtype=np.uint8)
    return Image.fromarray(small).resize(size, Image.Resampling.BICUBIC)


@pytest.fixture(scope="session")
def explorer() -> Explorer:
    """An EA network on 64x96 images (layers of maps 4x6, and 2x3 at the end) and a PA network on 32x32 images."""
    models = [load_model("ea_aa_resnet34", random=True, img_size=(64, 96), seed=1),
              load_model("pa_conv_transformer_cifar", random=True, seed=2)]
    every = [recordable_layers(model.model) for model in models]
    layers = [[layer for layer in every[0] if layer.number in (8, 9, 10, 21)], every[1]]
    models[0].classes, models[1].classes = None, [f"kind <{index}>" for index in range(10)]
    return Explorer(models, layers)


@pytest.fixture(scope="session")
def entries(explorer) -> list[dict]:
    """Two images' entries; the second one's name tries to end the page's script."""
    return [explorer.view("first.png", picture(0)), explorer.view("</script><b>second.png", picture(1))]
