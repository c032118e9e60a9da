"""Attention maps of a run after each epoch: entropy and largest probability by layer; a warning when they collapse."""

import math

import pytest
import timm
import torch

from ea_vision.engine import train_cifar
from ea_vision.engine.classification import ClassificationTrainer
from ea_vision.engine.watch import MapsWatch
from ea_vision.recorder.recording import record_attention
from experiments.learning_curves import read_metrics
from tests.engine.runner import assert_equal, weights_of, words

VIT = dict(img_size=16, patch_size=4, embed_dim=12, depth=2, num_heads=3, num_classes=3)
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


def test_a_network_without_attention_has_no_columns():
    model = timm.create_model("test_resnet", num_classes=3)
    assert MapsWatch()(model, IMAGES) == {}


def test_a_run_has_the_columns_and_is_otherwise_as_without(data, tmp_path, monkeypatch):
    def run(watches):
        monkeypatch.setattr(ClassificationTrainer, "watches", watches)
        folder = tmp_path / str(watches)
        argv = words(
            "--recipe none --model ea_conv_transformer_cifar",
            "--model-kwargs depth=1 widths=[8,8,8,8]",
            "--img-size 16 --epochs 2 --batch-size 8 --eval-epochs 2 --device cpu",
            f"--data-dir {data} --output {folder}",
        )
        assert train_cifar.main(argv) == 0
        return weights_of(folder), read_metrics(folder)

    weights, watched = run(True)
    plain_weights, plain = run(False)
    assert_equal(weights, plain_weights, "weights")
    columns = watched.keys() - plain.keys()
    assert columns
    for name in columns:
        assert name.startswith(("entropy_", "largest_"))
        first, second = watched[name]
        assert math.isnan(first), "the first epoch was not evaluated"
        assert 0 < second <= 1
    assert watched["eval_loss"][1] == plain["eval_loss"][1] > 0
