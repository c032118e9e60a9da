"""Weights of runs and of timm's ResNets are loaded into our networks."""

import pytest
import safetensors.torch
import timm
import torch

import ea_vision
from ea_vision.base.errors import UsageError
from ea_vision.detection.model import create_detector
from ea_vision.layers import AugmentedConv2d
from ea_vision.layers.fit_weights import checkpoint_filter_fn
from ea_vision.models import get_network, list_networks
from ea_vision.zoo.create import create_classifier
from tests.models.zoo import OUTLINES, from_file, on_meta
from tests.refused import refused

LAYERS = dict(layers=(1, 1, 1, 1))


@pytest.mark.parametrize(
    "name, plain, options, ours",
    [
        ("ea_aa_resnet34", "resnet34", LAYERS, {}),
        ("aa_resnet50", "resnet50", LAYERS, {}),
        ("ea_aa_resnet50", "resnet50", LAYERS, dict(qk_ratio=1.0, v_ratio=1.0)),  # attention alone
        ("ea_aa_mnasnet_075", "semnasnet_075", {}, {}),
    ],
)
def test_a_timm_network_fills_what_fits(name, plain, options, ours, tmp_path, log):
    theirs = timm.create_model(plain, **options).state_dict()
    path = tmp_path / "resnet.safetensors"
    safetensors.torch.save_file(theirs, path)
    torch.manual_seed(3)
    expected = timm.create_model(name, **options, **ours).state_dict()
    torch.manual_seed(3)
    model = from_file(name, path, **options, **ours)
    same = expected.keys() & theirs.keys()
    expected |= {key: theirs[key] for key in same}
    layers = {path: m for path, m in model.named_modules() if isinstance(m, AugmentedConv2d)}
    for path, layer in layers.items():
        if layer.conv is not None:
            weight = theirs[f"{path}.weight"]
            expected[f"{path}.conv.weight"] = weight[: layer.conv.out_channels]
    assert any(layer.conv is None for layer in layers.values()) == bool(ours)
    torch.testing.assert_close(model.state_dict(), expected, rtol=0, atol=0)
    [line] = log.messages
    assert f"{len(same)} tensors as they are, 0 not used" in line
    assert f"{len(layers)} augmented convolutions" in line


def test_notes_on_weights_that_are_not_loaded_are_not_logged(tmp_path, log):
    """Those of the shipped weights of photos of scenes, where others are loaded."""
    name = "ea_aa_resnet34_050"
    path = tmp_path / "own.safetensors"
    state = timm.create_model(name, num_classes=6).state_dict()
    safetensors.torch.save_file(state, path)
    from_file(name, path, num_classes=6)
    assert "scenes" not in log.text
    timm.create_model(name, pretrained=True)
    assert "weights of ea_aa_resnet34_050: six kinds of scenes" in log.text


RESNETS = [name for name in list_networks("attn_resnet") if get_network(name).plain]
RESNETS = [name for name in RESNETS if "csan" not in name]
OURS = set(list_networks())
LISTED = [full for full in timm.list_pretrained() if full.split(".")[0] in OURS]
NARROW = dict(layers=(1, 1, 2, 1), channels=(16, 32, 32, 32), num_classes=5)


@torch.no_grad()
@pytest.mark.parametrize("name", RESNETS)
def test_a_resnet_begins_with_timms_weights(name, tmp_path):
    plain_name = get_network(name).plain
    plain = timm.create_model(plain_name, **NARROW).eval()
    path = tmp_path / "plain.pth"
    torch.save(plain.state_dict(), path)
    overlay = {"file": str(path), "num_classes": 5}
    options = dict(pretrained=True, pretrained_cfg_overlay=overlay, fusion="add", **NARROW)
    model = timm.create_model(name, **options).eval()
    x = torch.randn(2, 3, 64, 64)
    assert torch.equal(model(x), plain(x))
    other = timm.create_model(name, **{**options, "num_classes": 3}).eval()
    assert torch.equal(other.forward_features(x), plain.forward_features(x))
    grey = timm.create_model(name, **options, in_chans=1).eval()
    channel = x[:, :1]
    torch.testing.assert_close(grey(channel), plain(channel.expand(-1, 3, -1, -1)))
    features = timm.create_model(name, **options, features_only=True).eval()
    assert torch.equal(features(x)[-1], plain.forward_features(x))


def test_there_are_twelve_resnets_with_timms_weights():
    assert len(RESNETS) == 12
    for name in RESNETS:
        assert timm.get_pretrained_cfg(name).crop_pct == 0.875  # the published networks' own
        assert timm.list_pretrained(f"{name}.*") == []  # without fusion they have none


def states_of(cfg):
    """Return the state of the network of timm's whose weights a configuration names, on the meta device."""
    origin = cfg.hf_hub_id.removeprefix("timm/") if cfg.hf_hub_id else cfg.architecture
    return timm.create_model(origin).state_dict()


@pytest.mark.filterwarnings("ignore:.*which is a no-op")
@pytest.mark.parametrize("full", LISTED)
def test_every_listed_name_creates_with_pretrained_weights(full, monkeypatch):
    """Weights that would be downloaded are replaced by the state of the network to which they belong."""
    cfg = timm.get_pretrained_cfg(full)
    downloads = []

    def download(*_, **__):
        downloads.append(full)
        return states_of(cfg)

    builder = timm.models._builder
    for function in ("load_state_dict_from_hf", "load_state_dict_from_url"):
        monkeypatch.setattr(builder, function, download)
    for function in ("load_custom_from_hf", "load_custom_pretrained"):
        monkeypatch.setattr(builder, function, lambda model, *_, **__: download())
    model = on_meta(full, pretrained=True)
    assert bool(cfg.file) != bool(downloads)
    assert model.pretrained_cfg["tag"] == cfg.tag


@pytest.mark.parametrize("tag", ["", ".a2_in1k"])
def test_timms_hub_cache_and_configuration_are_used(tag, monkeypatch):
    plain = timm.create_model("resnet50", **NARROW)
    calls = []

    def from_hub(model_id, cache_dir=None, **_):
        calls.append((model_id, cache_dir))
        return plain.state_dict()

    monkeypatch.setattr(timm.models._builder, "load_state_dict_from_hf", from_hub)
    options = dict(NARROW, num_classes=1000, cache_dir="/cache", fusion="add")
    plain.reset_classifier(1000)
    model = timm.create_model(f"ea_aa_resnet50{tag}", pretrained=True, **options)
    default = timm.get_pretrained_cfg("resnet50").tag
    full = f"resnet50{tag}" if tag else f"resnet50.{default}"
    assert calls == [(f"timm/{full}", "/cache")]
    timms = timm.get_pretrained_cfg(full)
    for key in ("tag", "crop_pct", "mean", "std", "interpolation", "test_input_size"):
        assert model.pretrained_cfg[key] == getattr(timms, key), key
    keywords = {key: options[key] for key in ("layers", "channels", "fusion", "cache_dir")}
    name = f"ea_aa_resnet50{tag}"
    named, _ = create_classifier(name, keywords, num_classes=1000, img_size=64, pretrained=True)
    assert torch.equal(named.conv1.weight, plain.conv1.weight)
    loaded = ea_vision.load(f"ea_aa_resnet50{tag}", **keywords)
    assert torch.equal(loaded.conv1.weight, plain.conv1.weight)


@pytest.mark.parametrize("name", ["ea_aa_resnet50", "aa_resnet34", "ea_aa_mnasnet_075"])
def test_without_fusion_the_error_names_this_way(name):
    for options in ({}, {"fusion": "concat"}):
        with pytest.raises(UsageError) as error:
            timm.create_model(name, pretrained=True, **options)
        assert f"timm.create_model('{name}', pretrained=True, fusion='add')" in str(error.value)
    with refused(r"pretrained=True, fusion='add'\)"):
        create_classifier(name, {}, num_classes=5, img_size=64, pretrained=True)
    with refused(r"pretrained=True, fusion='add'\)"):
        create_detector(name, pretrained=True)


def test_another_depth_is_named():
    state = timm.create_model("resnet18").state_dict()
    state["layer2.0.conv1.weight"] = state["layer2.0.conv1.weight"][:, :8]
    message = r"layer2\.0\.conv1\.weight must have at least 112 output channels"
    with refused(message, ValueError):
        checkpoint_filter_fn(state, OUTLINES["aa_resnet34"])
