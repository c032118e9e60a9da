"""Attention maps of a run: entropy and largest probability by layer after each epoch, with a warning when they
collapse, and pictures every few epochs."""

import math
import os
from types import SimpleNamespace

import numpy as np
import pytest
import timm
import torch
from PIL import Image

from ea_vision.base.processes import WorkerLost
from ea_vision.engine import train_cifar, train_imagenet
from ea_vision.engine.classification import ClassificationTrainer
from ea_vision.engine.watch import MapsPictures, MapsWatch
from ea_vision.recorder.recording import record_attention
from experiments.learning_curves import read_metrics
from tests.engine.runner import assert_equal, saved, weights_of

VIT = dict(img_size=16, patch_size=4, embed_dim=12, depth=2, num_heads=3, num_classes=3)
RUN = (
    "--model ea_vit_tiny_patch16_224 --recipe none --lr 0.01 --workers 0 --model-kwargs "
    "patch_size=4 embed_dim=12 depth=2 num_heads=3"
)
IMAGES = torch.randn(40, 3, 16, 16, generator=torch.Generator().manual_seed(0))


def test_the_columns_are_means_over_every_row_of_every_map():
    model = timm.create_model("ea_vit_tiny_patch16_224", **VIT).train()
    columns = MapsWatch()(model, IMAGES)
    assert list(columns) == ["entropy_1", "largest_1", "entropy_2", "largest_2"]
    with torch.no_grad(), record_attention(model.eval()) as maps:
        model(IMAGES)
    for number in (1, 2):
        rows = maps[number].attn.flatten(0, 2)
        entropies = torch.special.entr(rows).sum(1) / math.log(rows.shape[1])
        entropy = entropies.mean().item()
        largest = rows.amax(1).mean().item()
        assert columns[f"entropy_{number}"] == pytest.approx(entropy, rel=1e-4)
        assert columns[f"largest_{number}"] == pytest.approx(largest, rel=1e-4)


def test_a_collapse_is_said_once(caplog):
    model = timm.create_model("vit_tiny_patch16_224", **VIT)
    watch = MapsWatch()
    with torch.no_grad():
        model.blocks[1].attn.qkv.weight *= 1e4  # logits so large that each query looks at one token
    for _ in (1, 2):
        assert watch(model, IMAGES)["entropy_2"] < 0.05
    messages = [record.message for record in caplog.records]
    assert messages == ["layer 2: attention has collapsed to single pixels; see qk_norm"]


def test_maps_of_one_pixel_have_no_entropy_and_have_not_collapsed(caplog):
    """The last stage of a ResNet at 32 pixels. A collapse in another layer is still said."""
    options = {"layers": (1, 1, 1, 1), "channels": (16, 16, 32, 32), "img_size": 32}
    model = timm.create_model("aa_resnet34", num_classes=3, **options)
    watch = MapsWatch()
    images = torch.randn(4, 3, 32, 32)
    columns = watch(model, images)
    last = max(int(name.partition("_")[2]) for name in columns)
    assert math.isnan(columns[f"entropy_{last}"])
    assert columns[f"largest_{last}"] == 1
    assert 0.5 < columns["entropy_1"] <= 1
    assert not [record for record in caplog.records if record.name == "ea_vision.engine.watch"]
    with torch.no_grad():
        model.layer2[0].conv2.qkv.weight *= 1e4
    watch(model, images)
    assert "attention has collapsed" in caplog.text


def test_maps_with_negative_entries_have_no_entropy_and_have_not_collapsed(caplog):
    """After the softmax, the heads' probabilities are mixed with positive and negative weights."""
    model = timm.create_model("ea_vit_tiny_patch16_224", **VIT, evolution="talking_heads")
    with torch.no_grad():
        for parameter in model.blocks[1].attn.evolution.parameters():
            weights = torch.linspace(-3, 3, parameter.numel())  # one head's are all negative
            parameter.copy_(weights.view_as(parameter))
    columns = MapsWatch()(model, IMAGES)
    assert math.isnan(columns["entropy_2"])
    assert 0 < columns["entropy_1"] < 1
    assert not caplog.records


def test_a_run_has_columns_and_pictures_and_is_otherwise_as_without(
    arguments, tmp_path, monkeypatch
):
    """Its first epoch is neither evaluated nor drawn."""
    drawn = tmp_path / "drawn"
    without = tmp_path / "without"
    train_cifar.main(arguments(drawn, RUN, "--epochs 3 --eval-epochs 2 --draw-maps 2"))
    monkeypatch.setattr(ClassificationTrainer, "watches", False)
    train_cifar.main(arguments(without, RUN, "--epochs 3 --eval-epochs 2"))
    assert_equal(weights_of(drawn), weights_of(without))
    assert_equal(saved(drawn)["random"], saved(without)["random"])
    assert not (without / "maps").exists()
    assert os.listdir(drawn / "maps") == ["epoch_0002.png"]
    with Image.open(drawn / "maps" / "epoch_0002.png") as image:
        assert image.width > 400
        assert np.asarray(image).std() > 10
    watched = read_metrics(drawn)
    plain = read_metrics(without)
    columns = watched.keys() - plain.keys()
    assert columns == {"entropy_1", "largest_1", "entropy_2", "largest_2"}
    for name in columns:
        first, second, _ = watched[name]
        assert math.isnan(first)
        assert 0 < second <= 1
    assert watched["eval_loss"][1] == plain["eval_loss"][1] > 0


def test_a_run_may_begin_to_draw_when_it_continues(arguments, folder):
    train_cifar.main(arguments(folder, RUN, "--epochs 1"))
    train_cifar.main(arguments(folder, RUN, "--epochs 2 --draw-maps 1"))
    assert os.listdir(folder / "maps") == ["epoch_0002.png"]


def test_the_imagenet_trainer_sends_its_pictures(imagenet, folder, wandb_runs):
    train_imagenet.main(imagenet(folder, RUN, "--draw-maps 1 --wandb trial"))
    assert sorted(os.listdir(folder / "maps")) == ["epoch_0001.png", "epoch_0002.png"]
    [run] = wandb_runs
    pictures = [(step, len(row["maps"])) for step, row in run["logged"] if "maps" in row]
    assert pictures == [(5, 3), (10, 3)]  # height, width, colours


@pytest.mark.parametrize(
    "error", [WorkerLost("lost"), RuntimeError("DataLoader worker (pid 1) is killed by signal")]
)
def test_a_lost_worker_is_not_a_warning(error, tmp_path):
    def images_of(places):
        raise error

    loader = SimpleNamespace(device=torch.device("cpu"), count=4, images_of=images_of)
    loader.mean = loader.std = torch.ones(3)
    with pytest.raises(type(error), match=str(error).partition("(")[0]):
        MapsPictures(loader, tmp_path, 1).draw(torch.nn.Identity(), "net", 1)
