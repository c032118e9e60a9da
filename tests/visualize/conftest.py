"""A photo, a small EA network, and a run folder of it with checkpoints and snapshots."""
import numpy as np
import pytest
import timm
import torch
from matplotlib.text import Text
from PIL import Image

from ea_vision.base.files import atomic_write
from ea_vision.engine import checkpoint, run_folder
from ea_vision.recorder.recording import recordable_layers
from ea_vision.visualize import image_maps

KWARGS = dict(num_classes=3, img_size=16, widths=[8, 8, 16, 16])
PHOTO = Image.fromarray(np.random.default_rng(0).integers(0, 256, (40, 50, 3), dtype=np.uint8))


def small(name="ea_conv_transformer_cifar", seed=0, **kwargs):
    torch.manual_seed(seed)
    return timm.create_model(name, **{**KWARGS, **kwargs}).eval()


@pytest.fixture(scope="session")
def run(tmp_path_factory):
    """Checkpoints of epochs 1 and 2, snapshots of 2 and 4, of different weights."""
    folder = tmp_path_factory.mktemp("runs") / "small"
    folder.mkdir()
    run_folder.write_config(folder, {"model": "ea_conv_transformer_cifar", "dataset": "digits"},
                            {"model_kwargs": KWARGS, "classes": ["one", "two", "three"]})
    run_folder.write_weights(folder, small().state_dict())
    for epoch, file in (2, "last.ckpt"), (1, "best.ckpt"):
        held = {"model": small(seed=epoch).state_dict(), "ema": None, "progress": {"epoch": epoch, "updates": epoch}}
        atomic_write(folder / file, checkpoint.encode(held))
    for epoch in (2, 4):
        run_folder.write_snapshot(folder, small(seed=epoch).state_dict(), epoch)
    return folder


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
