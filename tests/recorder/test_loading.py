"""Models by name, run folder and checkpoint; images from files, folders and the digits."""

import os
import shutil
from dataclasses import replace
from itertools import product

import numpy as np
import pytest
import timm
import torch
from timm.data import create_transform
from torch.testing import assert_close
from torchvision import transforms

from ea_vision.data.scaling import Scaling
from ea_vision.deployment.files import About, export_program, write
from ea_vision.engine import run_folder
from ea_vision.recorder.selection import parse_layers
from ea_vision.zoo.loaded import load_model
from ea_vision.zoo.source import parse_targets
from tests.recorder.networks import NAME, photo, tiny, write_run
from tests.refused import refused


@pytest.fixture
def run(tmp_path):
    return write_run(tmp_path / "runs" / "small")


@pytest.mark.parametrize(
    "path, seed, label, epoch",
    [
        ("", 0, "small", None),
        ("model.safetensors", 0, "small, model", None),
        ("snapshots/epoch_0004.safetensors", 4, "small, epoch 4", 4),
        ("last.ckpt", 2, "small, epoch 2", 2),
    ],
)
def test_a_run_folder_its_weights_and_its_checkpoint(run, path, seed, label, epoch):
    loaded = load_model(str(run / path))
    assert loaded.label == f"{NAME}, {label}"
    assert loaded.epoch == epoch
    assert loaded.img_size == (16, 16)
    assert loaded.classes == ["ant", "bee", "cow"]
    assert loaded.preparation.std == (0.2,) * 3
    assert not loaded.model.training
    assert_close(loaded.model.state_dict(), tiny(seed=seed).state_dict(), atol=0, rtol=0)


@pytest.mark.parametrize("config", ["defaults: [db]", "about: a demo", "about: 3", "- 1", "a: ["])
def test_weights_that_name_their_network_load_beside_another_programs_config(run, config):
    folder = run / "elsewhere"
    folder.mkdir()
    weights = shutil.copy(run / "model.safetensors", folder)
    (folder / "config.yaml").write_text(config)
    with refused("is not a run folder"):
        load_model(str(folder))
    state = load_model(weights).model.state_dict()
    assert_close(state, tiny().state_dict(), atol=0, rtol=0)


def test_a_run_with_random_weights_and_of_another_size(run):
    """What its own size is of a run of train-imagenet, zoo/test_preparation.py says to the bit."""
    untrained = load_model(str(run), random=True, img_size=(24, 32))
    assert untrained.label.endswith("(untrained)")
    assert untrained.model.num_classes == 3
    assert untrained.img_size == (24, 32)
    assert load_model(str(run), img_size=24).img_size == (24, 24)


def test_targets_are_separated_by_commas_and_a_name_that_has_some_is_one(
    run, tmp_path, monkeypatch
):
    """Run folders of a sweep have commas in their names: `model=a,seed=0`."""
    monkeypatch.chdir(tmp_path)
    name = "alpha=0.5,seed=0"
    run.rename(tmp_path / name)
    assert parse_targets(f"{NAME},x") == [NAME, "x"]
    assert parse_targets(name) == [name]
    assert load_model(name).label == f"{NAME}, {name}"


def test_random_weights_are_the_same_every_time_and_leave_the_generator_alone():
    before = torch.get_rng_state()
    weights = []
    for seed in (0, 0, 1):
        loaded = load_model("cnn_cifar", seed=seed)
        weights.append(torch.nn.utils.parameters_to_vector(loaded.model.parameters()))
    assert loaded.label == "cnn_cifar (untrained)"
    assert torch.equal(torch.get_rng_state(), before)
    assert torch.equal(weights[0], weights[1])
    assert not torch.equal(weights[0], weights[2])


@pytest.mark.parametrize("crop_pct", [0.8, 0.875, 0.95, 1.0])
@pytest.mark.parametrize("size", [(80, 60), (500, 300), (427, 640), (33, 33)])
def test_images_are_prepared_as_evaluation_does(size, crop_pct):
    """Pixels equal those of timm's evaluation (squares and rectangles) and of torchvision's."""
    shipped = load_model("cnn_cifar").preparation
    image = photo(size)
    sizes = [(32, 32), (32, 64), (64, 32)]
    for img_size, mode in product(sizes, ("center", "squash", "border")):
        config = {"crop_pct": crop_pct, "interpolation": "bilinear", "crop_mode": mode}
        prepare = replace(shipped, size=img_size, **config)
        transform = create_transform((3, *img_size), **config, mean=shipped.mean, std=shipped.std)
        assert_close(prepare(image), transform(image))
    for side, resize in ((32, 36), (29, 37), (49, 57)):
        cropped = transforms.CenterCrop(side)(transforms.Resize(resize)(image))
        pixels = Scaling.cropped(side, resize).pixels(image)
        assert torch.equal(pixels, torch.from_numpy(np.array(cropped)))


def test_what_cannot_be_loaded(run, tmp_path):
    (tmp_path / "net.pth").touch()
    (run / "bad.ckpt").write_bytes(b"no checkpoint")
    run_folder.write_weights(run, tiny(num_classes=4).state_dict())
    for target, message in (
        (tmp_path / "phtos", "unknown model or run folder .*phtos"),
        (tmp_path, "is not a run folder"),
        (tmp_path / "net.pth", "must be a .safetensors file or lie in a run folder.*net.pth"),
        ("ea_conv_transformer", "unknown model or run folder 'ea_.*did you mean ea_conv"),
        (run / "bad.ckpt", "bad.ckpt cannot be read as a checkpoint"),
        (run, r"size mismatch for head.fc.weight: .*\[4, 16\].*\[3, 16\]"),
    ):
        with refused(message):
            load_model(str(target))
    (run / "model.safetensors").unlink()
    with refused("small has no model.safetensors yet: it appears with"):
        load_model(str(run))
    assert not load_model(str(run), random=True).trained


@pytest.mark.parametrize(
    "damage, message",
    [
        (lambda data: data[:-9], "cannot be fetched or loaded"),
        (lambda data: data[:-9] + b"x" + data[-8:], "checksum does not match"),
    ],
)
def test_damaged_shipped_weights_are_one_line(tmp_path, damage, message):
    """timm itself reads a flipped bit in silence."""
    name = "aa_resnet34_050.scenes"
    path = tmp_path / "weights.safetensors"
    shutil.copy(timm.get_pretrained_cfg(name).file, path)
    overlay = {"pretrained_cfg_overlay": {"file": str(path)}}
    assert load_model(name, **overlay).trained
    path.write_bytes(damage(path.read_bytes()))
    with refused(message):
        load_model(name, **overlay)


def test_layers_by_number_range_and_name():
    loaded = load_model(NAME)

    def numbers(text):
        return [layer.number for layer in parse_layers(text, loaded)]

    assert numbers("all") == [1, 2, 3, 4, 5, 6]
    assert numbers("5,1-3,stages.3.blocks.0.conv") == [5, 1, 2, 3, 4]
    message = r"has no attention layer .*; it has 1 \(stages.2.blocks.0.conv\), 2"
    for wrong in ("99", "0", "2-9", "3-1", "x", ""):
        with refused(message):
            numbers(wrong)


def test_names_that_are_no_utf8_are_names(tmp_path):
    """Of a run and of its files; safetensors and torch.export cannot open such names themselves."""
    folder = write_run(tmp_path / os.fsdecode(b"r\xff"))
    for part in ("", "model.safetensors", "snapshots/epoch_0004.safetensors", "last.ckpt"):
        assert load_model(str(folder / part)).trained
    copied = tmp_path / os.fsdecode(b"w\xfe.safetensors")
    shutil.copy(folder / "model.safetensors", copied)
    loaded = load_model(str(copied))
    assert loaded.classes == ["ant", "bee", "cow"]
    program = folder / "net.pt2"
    about = About((16, 16), mean=(0.5,) * 3, std=(0.2,) * 3, name="net", num_classes=3)
    write(export_program(loaded.model, (16, 16)), program, about)
    assert load_model(str(program)).img_size == (16, 16)
