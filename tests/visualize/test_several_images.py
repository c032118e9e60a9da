"""Commands of several images and of a run's epochs; maps as a table."""

import numpy as np
import pytest

from ea_vision.base.errors import UsageError
from ea_vision.visualize import heatmap, plot_strip

from .conftest import PHOTO


def test_training_goes_through_the_epochs_in_order(run):
    figure = plot_strip(str(run), PHOTO, layers="1,2", head=0, query=(5, 9), through="checkpoints")
    assert [axes.get_title() for axes in figure.axes if axes.get_title()] == ["epoch 1", "epoch 2", "epoch 4"]
    first, _, later = [axes.images[-1].get_array() for axes in figure.axes if len(axes.images) == 2][:3]
    assert not np.allclose(first, later)
    with pytest.raises(UsageError, match="nor snapshots/"):
        plot_strip(str(run.parent), PHOTO, through="checkpoints")


def test_images_side_by_side_and_their_maps(run, photo, tmp_path):
    PHOTO.rotate(90).save(tmp_path / "1.png")
    assert heatmap.main(["--model", str(run), "--layers", "2", "--dpi", "40", "--npz", "--heads", "1", "-o",
                         str(tmp_path / "grid.png"), str(photo), str(tmp_path / "1.png")]) == 0
    assert (tmp_path / "grid.png").read_bytes().startswith(b"\x89PNG")
    with np.load(tmp_path / "grid.npz") as held:
        assert held["photo.png/layer2.attn"].shape == held["1.png/layer2.attn"].shape == (1, 4, 16, 16)
