"""The shipped weights load by name, without internet access, and have a card with their accuracy. Weights know the
keywords they were trained with, and load and save in timm's usual ways."""

import inspect
import json
import re
import shutil
import tarfile
from functools import partial
from pathlib import Path

import huggingface_hub
import pandas as pd
import pytest
import safetensors.torch
import timm
import torch
from PIL import Image
from timm.models import adapt_input_conv, build_model_with_cfg, save_for_hf
from torch.testing import assert_close

import ea_vision
from ea_vision import predict, sizes
from ea_vision.engine import run_folder
from ea_vision.models.note import NOTE
from ea_vision.zoo.create import create_classifier
from ea_vision.zoo.loaded import load_model
from ea_vision.zoo.weights_file import encode_weights
from experiments.benchmark import live_network
from tests.models.test_convert import NARROW
from tests.models.zoo import from_file
from tests.process import ROOT
from tests.refused import refused
from tests.run_folders import write_run
from tests.slow import slow_but

OURS = timm.list_models(module="conv_transformer") + timm.list_models(module="attn_resnet")
PRETRAINED = [name for name in timm.list_pretrained() if name.split(".")[0] in OURS]
SHIPPED = [name for name in PRETRAINED if timm.get_pretrained_cfg(name).file]
DEFAULT = "ea_conv_transformer_cifar.long_c10"
CIFAR10 = [name for name in SHIPPED if name.endswith("_c10")]
NAME, TAG = DEFAULT.split(
    "."
)  # these weights need qk_norm=True, which is not the network's default


def card_of(name):
    path = Path(timm.get_pretrained_cfg(name).file)
    return path.with_suffix(".md").read_text(encoding="utf-8")


def test_each_has_its_card():
    networks = {name.split(".")[0] for name in SHIPPED}
    assert networks >= {"ea_conv_transformer_cifar", "conv_transformer_cifar"}
    for name in SHIPPED:
        card = card_of(name)
        assert name in card
        assert re.search(r"\d\d\.\d\d% top-1", card)
        assert "commit" in card
        assert "SHA-256" in card


@pytest.mark.parametrize("name", slow_but({DEFAULT}, SHIPPED))
@torch.no_grad()
def test_weights_are_adapted_in_timms_ways(name):
    plain = timm.create_model(name, pretrained=True).eval()
    grey = timm.create_model(name, pretrained=True, in_chans=1).eval()
    four = timm.create_model(name, pretrained=True, in_chans=4, num_classes=3).eval()
    side = plain.default_cfg["input_size"][-1]
    stem = plain.default_cfg["first_conv"] + ".weight"
    x = torch.randn(2, 1, side, side)
    # timm adapts the stem in the file's half precision
    assert_close(grey(x), plain(x.expand(-1, 3, -1, -1)), atol=0.02, rtol=0.01)
    adapted = adapt_input_conv(4, plain.get_parameter(stem))
    assert_close(four.get_parameter(stem), adapted, atol=1e-3, rtol=1e-3)
    assert four(x.expand(-1, 4, -1, -1)).shape == (2, 3)

    # the tables are resized on load, as the plain network resizes them at every call
    size = (side * 5 // 4, side * 3 // 2)
    x = torch.randn(1, 3, *size)
    larger = timm.create_model(name, pretrained=True, img_size=size).eval()
    assert_close(larger(x), plain(x), atol=1e-4, rtol=1e-4)


def test_results_are_those_of_the_cards():
    rows = pd.read_csv(ROOT / "experiments" / "results" / "results-cifar10.csv").set_index("model")
    ten = {name for name in SHIPPED if timm.get_pretrained_cfg(name).num_classes == 10}
    assert set(rows.index) == ten  # else `python experiments/shipped_weights.py` is due
    for name, row in rows.iterrows():
        top1, top5 = re.search(r"(\d+\.\d+)% top-1, (\d+\.\d+)% top-5", card_of(name)).groups()
        assert row["top1"] == pytest.approx(float(top1), abs=0.05)
        assert row["top5"] == pytest.approx(float(top5), abs=0.05)
        assert row["top1"] + row["top1_err"] == pytest.approx(100)


@pytest.mark.parametrize("name", slow_but({DEFAULT}, CIFAR10))
def test_weights_know_their_images(name, shared):
    loaded = load_model(name)
    names = loaded.model.pretrained_cfg["label_names"]
    inputs = []
    targets = []
    with tarfile.open(shared / "data" / "cifar10" / "test.tar") as tar:
        files = [member for member in tar if member.isfile()]
        for member in files[::100]:  # 100 images, all classes
            image = Image.open(tar.extractfile(member))
            inputs.append(loaded.input_of(image.convert("RGB")))
            targets.append(names.index(member.name.split("/")[-2]))
    with torch.no_grad():
        predicted = loaded.model(torch.stack(inputs)).argmax(1)
    right = predicted == torch.tensor(targets)
    assert right.sum() > 0.65 * len(targets)


# ---- timm's ways to load weights -------------------------------------------------------------------------------------


def assert_same(model, other):
    assert not model.training
    image = torch.randn(1, 3, 32, 32, generator=torch.Generator().manual_seed(0))
    with torch.no_grad():
        assert torch.equal(model(image), other(image))


@pytest.fixture(scope="module")
def shipped():
    return timm.create_model(NAME, pretrained=True).eval()


@pytest.fixture
def run(tmp_path, shipped):
    """A run folder of the shipped network, fine-tuned for three classes."""
    torch.manual_seed(0)
    model, kwargs = create_classifier(NAME, {}, num_classes=3, img_size=32, pretrained=True)
    about = {"classes": ["a", "b", "c"], "mean": [0.5] * 3, "std": [0.2] * 3}
    return write_run(tmp_path / "runs" / "mine", NAME, model, kwargs, **about), model.eval()


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"pretrained_cfg": TAG},
        {"pretrained_cfg_overlay": {"mean": (0.5, 0.5, 0.5), "crop_pct": 0.9}},
        {"pretrained_cfg": timm.get_pretrained_cfg(NAME)},
        {"pretrained_cfg": timm.create_model(NAME).pretrained_cfg},
        {"qk_norm": True, "alpha": 0.5, "beta": 1.0, "drop_rate": 0.1},
    ],
    ids=lambda options: "-".join(options) or "plain",
)
def test_shipped_weights_load_in_timms_ways(options, shipped):
    assert_same(timm.create_model(NAME, pretrained=True, **options).eval(), shipped)


@pytest.mark.parametrize(
    "options, message",
    [
        ({"evolution": "pa"}, f"{DEFAULT} were trained with evolution=ea, got evolution=pa"),
        ({"qk_norm": False}, "trained with qk_norm=True, got qk_norm=False"),
    ],
)
def test_shipped_weights_refuse_another_network(options, message):
    for create in (partial(timm.create_model, pretrained=True), ea_vision.load):
        with refused(re.escape(message)):
            create(NAME, **options)


def test_weights_in_place_of_the_shipped_ones_need_not_their_keywords(tmp_path, shipped):
    model = timm.create_model(NAME).eval()
    assert model.state_dict().keys() < shipped.state_dict().keys()
    path = tmp_path / "own.safetensors"
    safetensors.torch.save_file(model.state_dict(), path)
    assert_same(from_file(NAME, path).eval(), model)


def run_of(folder, name, kwargs):
    """Return the weights file of a run of an untrained network."""
    return write_run(folder, name, timm.create_model(name, **kwargs), kwargs) / run_folder.WEIGHTS


EVOLVED = "evolved_transformer"
BASE = {"base": "test_vit", "num_classes": 3}


@pytest.mark.parametrize(
    "trained, kwargs, name, options, message",
    [
        ("pa_conv_transformer_cifar", {}, NAME, {}, "evolution=pa, got evolution=ea"),
        (NAME, {"alpha": 0.7}, NAME, {}, "alpha=0.7, got alpha="),
        (NAME, {}, NAME, {"window": 3}, "the default window, got window=3"),
        (NAME, {"window": 3}, NAME, {}, "window=3, got window=None"),
        ("pa_aa_resnet34", {}, "ea_aa_resnet34", {}, "evolution=pa, got evolution=ea"),
        ("ea_aa_mnasnet_075", {}, "pa_aa_mnasnet_075", {}, "evolution=ea, got evolution=pa"),
        ("ea_vit_tiny_patch16_224", {}, "pa_vit_tiny_patch16_224", {}, "evolution=ea, got .*pa"),
        (
            EVOLVED,
            {**BASE, "evolution": {"kind": "ea"}},
            EVOLVED,
            {**BASE, "evolution": {"kind": "pa"}},
            "kind=ea, got kind=pa",
        ),
    ],
)
def test_a_file_refuses_weights_of_another_network(
    trained, kwargs, name, options, message, tmp_path
):
    """timm passes only the tensors to the network, and their names and shapes are the same."""
    path = run_of(tmp_path / "run", trained, kwargs)
    with refused(f"trained with .*{message}"):
        timm.create_model(name, checkpoint_path=path, **options)
    with refused("trained with"):
        timm.models.load_checkpoint(timm.create_model(name, **options), str(path))
    if not kwargs:  # else the network is built with them
        with refused(f"trained with .*{message}"):
            from_file(name, path, **options)
        with refused("trained with"):  # --pretrained-path
            create_classifier(name, options, num_classes=10, img_size=32, weights=str(path))
    timm.create_model(trained, checkpoint_path=path, **kwargs)


def test_a_checkpoint_path_takes_what_is_no_contradiction(tmp_path):
    """Learned gates are stored in the weights, so their start does not matter; nor does how a network was evolved."""
    path = run_of(tmp_path / "gates", NAME, {"alpha": 0.3, "learnable": True})
    loaded = timm.create_model(NAME, learnable=True, checkpoint_path=path)
    gates = ea_vision.layers.learnable_gates(loaded)
    assert {round(gate.item(), 4) for name, gate in gates.items() if "alpha" in name} == {0.3}
    path = run_of(tmp_path / "evolved", EVOLVED, {**BASE, "evolution": {"kind": "ea"}})
    model = ea_vision.evolve(timm.create_model("test_vit", num_classes=3), "ea")
    other = ea_vision.evolve(ea_vision.unevolve(model), "pa", alpha=0.3)
    model.load_state_dict(safetensors.torch.load_file(path))
    with refused("trained with evolution kind=ea, got kind=pa"):
        other.load_state_dict(safetensors.torch.load_file(path))


def test_an_aa_network_takes_the_evolution_of_its_weights(tmp_path):
    """AA names no evolution, so that of the weights' note is no contradiction."""
    model = timm.create_model("ea_aa_resnet34_050").eval()
    note = {"model": "aa_resnet34_050", "model_kwargs": {"evolution": "ea"}}
    path = tmp_path / "weights.safetensors"
    path.write_bytes(encode_weights(model.state_dict(), {NOTE: json.dumps(note)}))
    overlay = {"file": str(path)}
    again = timm.create_model("aa_resnet34_050", pretrained=True, pretrained_cfg_overlay=overlay)
    assert_same(again.eval(), model)
    assert again.trained_with == {"evolution": "ea"}


def test_a_fine_tuned_run_loads_as_docs_train_says(run):
    folder, model = run
    path = folder / "model.safetensors"
    assert_same(timm.create_model(NAME, num_classes=3, checkpoint_path=path).eval(), model)
    overlay = {"file": str(path), "num_classes": 3}
    again = timm.create_model(NAME, pretrained=True, num_classes=3, pretrained_cfg_overlay=overlay)
    assert_same(again.eval(), model)
    assert again.trained_with == {"qk_norm": True}
    created, kwargs = create_classifier(NAME, {}, num_classes=3, img_size=32, weights=str(path))
    assert_same(created.eval(), model)
    assert kwargs["qk_norm"] is True
    with pytest.raises(RuntimeError, match="qk_gain"):
        timm.create_model(NAME, num_classes=3, qk_norm=False, checkpoint_path=path)


@pytest.mark.parametrize(
    "name, options, plain",
    [
        ("ea_aa_resnet50", {"fusion": "add", "layers": (1, 1, 1, 1)}, "resnet50"),
        ("pa_deit_small_patch16_224", {"depth": 2, "img_size": 32}, "deit_small_patch16_224"),
    ],
)
def test_an_unevolved_network_is_saved_as_the_plain_one(name, options, plain, tmp_path):
    """The saved name is not the evolving network's, which would build the evolving network again."""
    model = timm.create_model(name, num_classes=3, **options)
    back = ea_vision.unevolve(model)
    assert back.pretrained_cfg["architecture"] == back.default_cfg["architecture"] == plain
    assert model.pretrained_cfg["architecture"] == name, "the evolving network's own"
    save_for_hf(back, tmp_path / "saved", model_args=back._model_args)
    again = timm.create_model(f"local-dir:{tmp_path / 'saved'}", pretrained=True)
    assert type(again) is type(timm.create_model(plain))
    assert_same(again.eval(), back.eval())


@pytest.mark.parametrize("safe", [False, True])
def test_a_network_saved_for_the_hub_loads_as_docs_faq_says(tmp_path, run, safe, monkeypatch):
    """From a folder, and from the hub (here from its cache)."""
    _, model = run
    save_for_hf(model, tmp_path / "saved", safe_serialization=safe)
    name = f"local-dir:{tmp_path / 'saved'}"
    assert_same(timm.create_model(name, pretrained=True).eval(), model)
    assert_same(ea_vision.load(name), model)
    assert_same(ea_vision.load(tmp_path / "saved"), model)
    # older timm does not hand on what config.json says
    if "pretrained_model_args" in inspect.signature(build_model_with_cfg).parameters:
        with refused("trained with evolution=ea, got evolution=pa"):
            timm.create_model(name, pretrained=True, evolution="pa")

    repository = tmp_path / "cache" / "models--me--net"
    shutil.copytree(tmp_path / "saved", repository / "snapshots" / "abc")
    (repository / "refs").mkdir()
    (repository / "refs" / "main").write_text("abc", encoding="utf-8")
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", True)
    cache = str(tmp_path / "cache")
    assert_same(ea_vision.load("hf-hub:me/net", cache_dir=cache), model)
    with refused("weights of hf-hub:me/other cannot be fetched"):
        ea_vision.load("hf-hub:me/other", cache_dir=cache)


SMALL_VIT = {"img_size": 32, "depth": 2}


@pytest.mark.parametrize(
    "plain, sizes, options",
    [
        (
            "vit_tiny_patch16_224",
            SMALL_VIT,
            {"kind": "pa", "start": "paper", "alpha": 0.3, "learnable": False, "attn_layers": [2]},
        ),
        (
            "vit_small_patch16_dinov3",
            SMALL_VIT,
            {"kind": "residual", "token_conv": True, "value_residual": True},
        ),
        ("resnet18d", NARROW, {"kind": "pa", "img_size": 64, "alpha": 0.3}),
    ],
)
def test_an_evolved_network_saved_for_the_hub_evolves(tmp_path, plain, sizes, options):
    torch.manual_seed(0)
    network = timm.create_model(plain, **sizes)
    model = ea_vision.evolve(network, **options).eval()
    for parameter in model.parameters():
        torch.nn.init.normal_(parameter, std=0.1)
    if plain == "resnet18d":
        model.set_input_size(96)
    arguments = (
        None if hasattr(network, "_model_args") else {**sizes, **model._model_args}
    )  # timm's since 1.0.30
    save_for_hf(model, tmp_path, safe_serialization=True, model_args=arguments)
    name = f"local-dir:{tmp_path}"
    loaded = timm.create_model(name, pretrained=True).eval()
    assert_same(loaded, model)
    assert getattr(loaded, "img_size", None) == getattr(model, "img_size", None)
    assert_same(ea_vision.load(name), model)
    assert network.pretrained_cfg["architecture"] == plain


def test_an_evolved_network_without_its_keywords_says_how_to_save_them():
    with refused(r"save_for_hf\(model, ..., model_args=model._model_args", ValueError):
        timm.create_model("evolved_transformer")


# ---- ea_vision.load and the commands ---------------------------------------------------------------------------------


@pytest.fixture
def targets(tmp_path, run):
    """What names the network of `run`: the folder, its weights there and elsewhere, and what timm saves for the hub."""
    folder, model = run
    weights = folder / run_folder.WEIGHTS
    copied = shutil.copy(weights, tmp_path / "copied.safetensors")
    save_for_hf(model, tmp_path / "saved", safe_serialization=True)
    return [str(folder), str(weights), str(copied), f"local-dir:{tmp_path / 'saved'}"]


def test_load_takes_names_runs_and_files(run, targets, shipped):
    folder, model = run
    for target in (folder, *targets):
        assert_same(ea_vision.load(target), model)
    for target in (NAME, DEFAULT, timm.get_pretrained_cfg(NAME).file):
        assert_same(ea_vision.load(target), shipped)


def test_load_says_what_is_missing(tmp_path, shipped):
    unnamed = tmp_path / "unnamed.safetensors"
    safetensors.torch.save_file(shipped.state_dict(), unnamed)
    for target, message in (
        ("ea_aa_resnet50", "no pretrained weights of ea_aa_resnet50: timm.create_model"),
        ("ea_aa_resnet5", "unknown model or run folder 'ea_aa_resnet5'"),
        (f"local-dir:{tmp_path}", "must be a folder with a config.json"),
        (unnamed, "unnamed.safetensors does not name its network"),
    ):
        with refused(message):
            ea_vision.load(target)


def test_commands_take_the_same_names(targets, capsys):
    printed = set()
    for target in targets:
        assert predict.main([target, str(ROOT / "docs" / "cat.jpg")]) == 0
        assert sizes.main(["--sizes", target]) == 0
        lines = capsys.readouterr().out.splitlines()
        printed.add(lines[-1].partition(target)[2].strip())
        measured = live_network(target, torch.randn(2, 3, 32, 32))
        assert measured.num_classes == 1000
        assert "stages.2.blocks.0.conv.qk_gain" in measured.state_dict()
    assert len(printed) == 1
