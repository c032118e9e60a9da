"""Many images for one head, two images at once, a run's epochs side by side; and maps as a table."""
import sys

import numpy as np
import pytest
import timm
import torch
from PIL import Image

import ea_vision
from ea_vision.base.errors import UsageError
from ea_vision.visualize import heatmap, plot_heatmap, plot_strip, strip

from .conftest import KWARGS
from .test_layout import recording


@pytest.fixture(scope="module")
def model():
    torch.manual_seed(0)
    return timm.create_model("ea_conv_transformer_cifar", **KWARGS).eval()


def photos(count):
    random = np.random.default_rng(0)
    return [Image.fromarray(random.integers(0, 256, (40, 40, 3), dtype=np.uint8)) for _ in range(count)]


def maps_of(figure):
    return [axes.images[-1].get_array() for axes in figure.axes if len(axes.images) == 2]


def test_a_tile_is_its_images_map(model):
    images = [torch.rand(3, 16, 16) for _ in range(3)]
    mean, asked = maps_of(plot_heatmap(model, images, 2, 1)), maps_of(plot_heatmap(model, images, 2, 1, [(5, 9)]))
    for image, got, row in zip(images, mean, asked, strict=True):
        config = timm.data.resolve_model_data_config(model)
        m, s = (torch.tensor(config[key]).view(3, 1, 1) for key in ("mean", "std"))
        with torch.no_grad(), ea_vision.record_attention(model, [2]) as maps:
            model(((image - m) / s)[None])
        attn = maps[2].attn[0, 1]
        np.testing.assert_allclose(got, 16 * attn.mean(0).view(4, 4), rtol=1e-4)
        np.testing.assert_allclose(row, 16 * attn[1 * 4 + 2].view(4, 4), rtol=1e-4)


def test_training_goes_through_the_epochs_in_order(run):
    figure = plot_strip(str(run), photos(1)[0], layers="1,2", head=0, query=(5, 9), through="checkpoints")
    assert [axes.get_title() for axes in figure.axes if axes.get_title()] == ["epoch 1", "epoch 2", "epoch 4"]
    first, _, later = maps_of(figure)[:3]
    assert not np.allclose(first, later)
    with pytest.raises(UsageError, match="nor snapshots/"):
        plot_strip(str(run.parent), photos(1)[0], through="checkpoints")


def test_commands(run, tmp_path):
    for number, photo in enumerate(photos(2)):
        photo.save(tmp_path / f"{number}.png")
    images = [str(tmp_path / "0.png"), str(tmp_path / "1.png")]
    options = ["--model", str(run), "--layers", "2", "--npz"]
    assert heatmap.main([*options, "--heads", "1", "-o", str(tmp_path / "grid.png"), *images]) == 0
    assert (tmp_path / "grid.png").read_bytes().startswith(b"\x89PNG")
    with np.load(tmp_path / "grid.npz") as held:
        assert held["0.png/layer2.attn"].shape == held["1.png/layer2.attn"].shape == (1, 4, 16, 16)
    assert strip.main([*options, "--through", "checkpoints", "-o", str(tmp_path / "t.png"), images[0]]) == 0
    with np.load(tmp_path / "t.npz") as held:
        assert len([key for key in held if key.endswith("layer2.attn")]) == 3


def test_maps_as_a_table(monkeypatch):
    maps = recording(2, ((2, 3), (2, 3)), "a model").maps
    monkeypatch.setitem(sys.modules, "pandas", None)
    with pytest.raises(UsageError, match="needs pandas"):
        maps.to_dataframe()
    monkeypatch.undo()
    pytest.importorskip("pandas", reason="pandas is not installed")
    table = maps.to_dataframe()
    assert len(table) == 2 * 2 * 6 * 6 and table.conv_logits[table.layer == 1].isna().all()
    row = table[(table.layer == 2) & (table["head"] == 1) & (table["query"] == 4) & (table.key == 2)].iloc[0]
    assert (row.query_row, row.query_col, row.key_row, row.key_col) == (1, 1, 0, 2)
    assert row.attn == pytest.approx(maps[2].attn[0, 1, 4, 2].item())
    assert maps.to_dataframe((1, 1)).equals(table[table["query"] == 4].reset_index(drop=True))
