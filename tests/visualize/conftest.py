"""A photo, and a run folder of a small EA network with checkpoints and snapshots."""
import numpy as np
import pytest
import timm
import torch
from PIL import Image

from ea_vision.base.files import atomic_write
from ea_vision.engine import checkpoint, run_folder

KWARGS = dict(num_classes=3, img_size=16, widths=[8, 8, 16, 16])


def make_run(folder, name="ea_conv_transformer_cifar"):
    """Checkpoints of epochs 1 and 2, snapshots of 2 and 4, of different weights."""
    def state(seed):
        torch.manual_seed(seed)
        return timm.create_model(name, **KWARGS).state_dict()

    folder.mkdir()
    run_folder.write_config(folder, {"model": name, "dataset": "digits"},
                            {"model_kwargs": KWARGS, "classes": ["one", "two", "three"]})
    run_folder.write_weights(folder, state(0))
    for epoch, file in (2, "last.ckpt"), (1, "best.ckpt"):
        held = {"model": state(epoch), "ema": None, "progress": {"epoch": epoch, "updates": epoch}}
        atomic_write(folder / file, checkpoint.encode(held))
    for epoch in (2, 4):
        run_folder.write_snapshot(folder, state(epoch), epoch)
    return folder


@pytest.fixture(scope="session")
def run(tmp_path_factory):
    return make_run(tmp_path_factory.mktemp("runs") / "small")


@pytest.fixture
def photo(tmp_path):
    pixels = np.random.default_rng(0).integers(0, 256, (48, 64, 3), dtype=np.uint8)
    Image.fromarray(pixels).save(tmp_path / "photo.png")
    return tmp_path / "photo.png"
