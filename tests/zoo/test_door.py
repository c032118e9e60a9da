"""The door: what a target names, and one line for whatever a constructor raises, wherever the target is given."""

import shutil

import pytest
import timm
import torch
import transformers
from PIL import Image

import ea_vision
from ea_vision.engine import train_cifar
from ea_vision.predict import main as predict
from ea_vision.predict import predict as predictions
from ea_vision.sizes import count_network
from ea_vision.zoo.loaded import load_model
from ea_vision.zoo.source import source_of
from tests.models import test_huggingface as huggingface
from tests.refused import refused
from tests.run_folders import write_run

VIT = "test_vit"
REFUSED = {"class_token": False}  # timm asserts that a pooling by token has one


@pytest.fixture
def refused_run(tmp_path):
    return write_run(tmp_path / "run", VIT, timm.create_model(VIT), REFUSED)


@pytest.mark.parametrize(
    "use",
    [
        load_model,
        ea_vision.load,
        count_network,
        lambda target: predict([target, "digits#0"]),
        lambda target: train_cifar.main(["--evaluate", target, "--device", "cpu"]),
        lambda target: ea_vision.visualize.plot_heatmap(target, "digits#0"),
    ],
    ids=["load_model", "load", "sizes", "predict", "evaluate", "plot_heatmap"],
)
def test_what_a_runs_network_raises_is_one_line_everywhere(refused_run, use):
    with refused(f"model {VIT} refuses class_token=False"):
        use(str(refused_run))


@pytest.mark.parametrize(
    "keywords, message",
    [
        ({"random": True, **REFUSED}, "refuses class_token=False"),
        (REFUSED, "refuses class_token=False"),
        ({"random": True, "nosuch": 1}, "no keyword 'nosuch'"),
    ],
)
def test_what_a_named_network_raises_is_one_line(keywords, message):
    with refused(message):
        load_model("vit_tiny_patch16_224", **keywords)


def test_keywords_beside_trained_weights_are_refused(tmp_path):
    """A run and a file have those that their weights were trained with; they were passed over without a word."""
    ten = {"num_classes": 10}
    config = {"model": VIT, "dataset": "digits", "img_size": 32}
    network = timm.create_model(VIT, **ten)
    run = write_run(tmp_path / "run", VIT, network, ten, config, classes=list("0123456789"))
    moved = shutil.copy(run / "model.safetensors", tmp_path)
    for target in (run, run / "model.safetensors", moved):
        ea_vision.load(target)
        with refused("qk_norm=True"):
            ea_vision.load(target, qk_norm=True)
        with refused("qk_norm"):
            words = f"--evaluate {target} --dataset digits --model-kwargs qk_norm=true"
            train_cifar.main([*words.split(), "--device", "cpu"])


@pytest.mark.parametrize("channels", [1, 4])
def test_preprocess_refuses_networks_of_other_images(channels):
    """They got an image of three channels."""
    image = Image.new("RGB", (40, 30))
    assert ea_vision.preprocess(timm.create_model(VIT), image).shape[1] == 3
    with refused(f"takes {channels}"):
        ea_vision.preprocess(timm.create_model(VIT, in_chans=channels), image)


@pytest.mark.parametrize("evolved", [False, True])
def test_a_folder_of_save_pretrained_is_a_target(evolved, tmp_path, capsys):
    classes = ["ant", "bee", "cow"]
    labels = dict(enumerate(classes))
    model = huggingface.create("ViT", "ForImageClassification", id2label=labels)
    if evolved:
        model = ea_vision.evolve(model, "ea")
    folder = tmp_path / "saved"
    model.eval().save_pretrained(folder)
    processor = transformers.ViTImageProcessor(size={"height": 32, "width": 32})
    processor.save_pretrained(folder)
    image = Image.effect_noise((40, 30), 60).convert("RGB")
    image.save(tmp_path / "noise.png")

    x = processor(image, return_tensors="pt")["pixel_values"]
    torch.testing.assert_close(ea_vision.preprocess(str(folder), image), x)
    loaded = ea_vision.load(folder)
    assert not loaded.training
    with torch.no_grad():
        logits = model(x).logits
        torch.testing.assert_close(loaded(x).logits, logits)
    share, index = logits.softmax(-1).max(-1)
    [result] = predictions(load_model(folder), [image], top=1)
    assert result["classes"][0]["name"] == classes[index]
    assert result["classes"][0]["probability"] == pytest.approx(float(share), abs=1e-5)
    assert predict([str(folder), str(tmp_path / "noise.png")]) == 0
    assert classes[index] in capsys.readouterr().out
    with refused("random weights"):
        load_model(folder, random=True)
    with refused("has no keyword 'foo'"):
        ea_vision.load(folder, foo=1)
    weights = folder / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:-100])
    with refused(f"weights in {folder} cannot be read: .+"):
        load_model(folder)


def test_a_broken_config_is_one_line(tmp_path):
    (tmp_path / "config.json").write_text("{")
    with refused("config.json"):
        source_of(str(tmp_path))
    with refused("config.json"):
        source_of(f"local-dir:{tmp_path}")
