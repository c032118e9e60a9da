"""Attention maps of a run after each epoch: entropy and largest probability by layer; a warning when they collapse."""
import math

import pytest
import timm
import torch

from ea_vision.engine import run_folder, train_cifar
from ea_vision.engine.classification import ClassificationTrainer
from ea_vision.engine.watch import MapsWatch
from ea_vision.recorder.recording import record_attention
from tests.engine.runner import make_folder, weights_of, words

VIT = dict(img_size=16, patch_size=4, embed_dim=12, depth=2, num_heads=3, num_classes=3)


class Loader:
    """Two batches of images, of which the first is empty."""

    def batches(self):
        images = torch.randn(40, 3, 16, 16, generator=torch.Generator().manual_seed(0))
        yield images[:0], None, None
        yield images, torch.zeros(40, dtype=torch.int64), None


def watch_of(model) -> MapsWatch:
    watch = MapsWatch(Loader())
    assert watch(model) == {}, "nothing was evaluated yet"
    assert len(list(watch.batches())) == 2 and watch.images.shape == (32, 3, 16, 16)
    return watch


def test_the_columns_are_means_over_every_row_of_every_map():
    model = timm.create_model("ea_vit_tiny_patch16_224", **VIT).train()
    watch = watch_of(model)
    columns = watch(model)
    assert model.training and list(columns) == ["entropy_1", "largest_1", "entropy_2", "largest_2"]
    with torch.no_grad(), record_attention(model.eval()) as maps:
        model(watch.images)
    for number in (1, 2):
        rows = [row for image in maps[number].attn.tolist() for head in image for row in head]
        entropies = [-sum(p * math.log(p) for p in row if p) / math.log(len(row)) for row in rows]
        assert columns[f"entropy_{number}"] == pytest.approx(sum(entropies) / len(rows), rel=1e-4)
        assert columns[f"largest_{number}"] == pytest.approx(sum(map(max, rows)) / len(rows), rel=1e-4)


def test_a_collapse_is_said_once(caplog):
    model = timm.create_model("vit_tiny_patch16_224", **VIT)
    watch = watch_of(model)
    with torch.no_grad():
        model.blocks[1].attn.qkv.weight *= 1e4  # logits so large that each query looks at one token
    for _ in (1, 2):
        assert watch(model)["entropy_2"] < 0.05
    said = [record.message for record in caplog.records]
    assert said == ["layer 2: attention has collapsed to single pixels; see qk_norm"]


def test_maps_with_negative_entries_have_no_entropy_and_have_not_collapsed(caplog):
    """A mixture of the heads' probabilities by weights of both signs, after the softmax."""
    model = timm.create_model("ea_vit_tiny_patch16_224", **VIT, evolution="talking_heads")
    watch = watch_of(model)
    with torch.no_grad():
        for parameter in model.blocks[1].attn.evolution.parameters():
            parameter.copy_(torch.randn(parameter.shape) * 3)
    columns = watch(model)
    assert math.isnan(columns["entropy_2"]) and 0 < columns["entropy_1"] < 1 and not caplog.records


def test_a_network_without_attention_has_no_columns():
    model = timm.create_model("test_resnet", num_classes=3)
    assert watch_of(model)(model) == {}


def test_a_run_has_the_columns_and_is_otherwise_as_without(tmp_path, monkeypatch):
    data, weights = make_folder(tmp_path / "data", side=16), []
    for name in ("watched", "not"):
        monkeypatch.setattr(ClassificationTrainer, "watches", name == "watched")
        argv = words(f"--data-dir {data} --recipe none --model ea_conv_transformer_cifar --model-kwargs depth=1",
                     "widths=[8,8,8,8]", "--img-size 16 --epochs 2 --batch-size 8 --eval-epochs 2 --device cpu",
                     f"--output {tmp_path / name}")
        assert train_cifar.main(argv) == 0
        weights.append(weights_of(tmp_path / name))
    assert all(torch.equal(value, weights[1][key]) for key, value in weights[0].items())
    watched, plain = (run_folder.read_metrics(tmp_path / name) for name in ("watched", "not"))
    columns = [name for name in watched if name not in plain]
    assert columns and all(name.partition("_")[0] in ("entropy", "largest") for name in columns)
    for name in columns:
        assert math.isnan(watched[name][0]) and 0 < watched[name][1] <= 1, "the first epoch was not evaluated"
    assert watched["eval_loss"][1] == plain["eval_loss"][1] > 0
