"""Maps while training: pictures in the run folder and on TensorBoard, and a run that does not notice."""
import csv

import numpy as np
import pytest
import timm
import torch
from PIL import Image

from ea_vision.base.errors import UsageError
from ea_vision.engine import train_cifar
from ea_vision.engine.watch import FirstImages, MapsWatch
from ea_vision.recorder.recording import record_attention
from ea_vision.visualize import plot_strip
from ea_vision.visualize.heatmap import draw_columns
from ea_vision.visualize.training_maps import draw_maps
from tests.recorder.networks import lively

MEAN, STD = (0.5, 0.4, 0.3), (0.2, 0.3, 0.4)
SWIN = ["--model", "swin_tiny_patch4_window7_224", "--model-kwargs", "patch_size=2", "window_size=4", "embed_dim=12",
        "depths=[2]", "num_heads=[2]"]


def train(output, *more):
    return train_cifar.main([
        "--dataset", "digits", "--recipe", "none", "--epochs", "3", "--img-size", "16", "--batch-size", "500",
        "--device", "cpu", "--workers", "0", "--seed", "1", "--output", str(output), *more])


def metrics(folder):
    with open(folder / "metrics.csv", newline="") as file:
        return [(row["epoch"], row["train_loss"], row["top1"]) for row in csv.DictReader(file)]


def test_a_run_of_a_windowed_network_leaves_pictures_and_its_figures_stay(tmp_path):
    """Every second epoch and the last; the same numbers as without; strip goes through its checkpoints."""
    pytest.importorskip("tensorboard", reason="needs tensorboard")
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    assert train(tmp_path / "plain", *SWIN) == 0
    assert train(tmp_path / "drawn", *SWIN, "--log-maps", "2", "--tensorboard", "--snapshot-epochs", "1") == 0
    assert metrics(tmp_path / "drawn") == metrics(tmp_path / "plain")
    pictures = sorted((tmp_path / "drawn" / "maps").iterdir())
    assert [path.name for path in pictures] == ["epoch_0002.png", "epoch_0003.png"]
    events = EventAccumulator(str(tmp_path / "drawn" / "tensorboard"), {"images": 0}).Reload()
    shown = events.Images("attention maps")
    assert len(shown) == 2 and shown[0].step < shown[1].step
    with Image.open(pictures[0]) as picture:
        assert picture.size == (shown[0].width, shown[0].height)
    assert not (tmp_path / "plain" / "maps").exists()
    figure = plot_strip(str(tmp_path / "drawn"), torch.rand(3, 16, 16), layers=[1, 2], through="checkpoints")
    assert len([axes for axes in figure.axes if axes.images]) >= 2 * 3


def test_the_drawn_maps_are_the_networks(tmp_path, monkeypatch):
    """Of the same images and query each time: the middle, or the class token where there is one."""
    torch.manual_seed(0)
    model = lively(timm.create_model("vit_tiny_patch16_224", img_size=32, patch_size=8, embed_dim=24, depth=2,
                                     num_heads=3, num_classes=2)).train()
    images = torch.rand(2, 3, 32, 32)
    normalised = (images - torch.tensor(MEAN).view(-1, 1, 1)) / torch.tensor(STD).view(-1, 1, 1)
    drawn = []
    monkeypatch.setattr("ea_vision.visualize.training_maps.draw_columns",
                        lambda *args, **named: drawn.extend(args) or draw_columns(*args, **named))
    (tmp_path / "ours").mkdir()
    names = ["image 0: cat", "image 1: dog"]
    path = draw_maps(tmp_path / "ours", model, 7, normalised, names, MEAN, STD)
    assert path == tmp_path / "ours" / "maps" / "epoch_0007.png" and np.asarray(Image.open(path)).std() > 1
    assert all(module.training for module in model.modules())
    recordings, *others = drawn
    assert others == [names, [[1, 2]] * 2, ["mean"], ["cls"]]
    with torch.no_grad(), record_attention(model.eval()) as expected:
        model(normalised)
    for number, recording in enumerate(recordings):
        torch.testing.assert_close(recording.image, images[number])
        torch.testing.assert_close(recording.maps[2].attn[0], expected[2].attn[number], atol=1e-5, rtol=1e-4)


def test_a_network_without_attention_is_refused_before_the_first_epoch(tmp_path):
    def watch(model):
        return MapsWatch(timm.create_model(model, num_classes=2), FirstImages([]), MEAN, STD, tmp_path, None, 1, 3)

    with pytest.raises(UsageError, match="--log-maps needs a network with attention that can be recorded"):
        watch("resnet18")
    (tmp_path / "maps").touch()
    with pytest.raises(UsageError, match="maps, which must be a folder, and is a file"):
        watch("test_vit")
    with pytest.raises(UsageError, match="log_maps"):
        train(tmp_path / "run", "--log-maps", "-1")
