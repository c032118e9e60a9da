"""fusion="add" in every convolutional family: the network begins as the plain one, and supports all that networks with
concatenated attention support."""

import pytest
import timm
import torch
from torch.testing import assert_close

import ea_vision
from tests.models.zoo import (
    assert_checkpointing_changes_nothing,
    assert_fx_agrees,
    assert_onnx_agrees,
    idle,
    layers_of,
    lively,
    sample,
    shrunk,
    stepped,
    with_statistics,
    woken,
)

PLAIN = {
    "ea_aa_resnet34": "resnet34",
    "pa_aa_resnet50": "resnet50",
    "ea_aa_mnasnet_075": "semnasnet_075",
    "ea_aa_wrn28_10_cifar": "wrn28_10_cifar",
    "ea_conv_transformer_cifar": "cnn_cifar",
}
FEW = ["ea_aa_resnet34", "ea_aa_mnasnet_075"]  # of the layers and blocks that differ


def added(name, **options):
    """A network in evaluation mode, whose initial zeros are replaced."""
    return lively(name, num_classes=5, fusion="add", **options).eval()


@pytest.mark.parametrize("name", PLAIN)
def test_a_network_takes_the_plain_ones_state_begins_as_it_and_learns(name):
    options = {"num_classes": 5, **shrunk(name)}
    plain = woken(timm.create_model(PLAIN[name], **options)).eval()
    model = timm.create_model(name, fusion="add", **options).eval()
    x = sample(name)
    for strict in (True, False):
        model.load_state_dict(timm.create_model(PLAIN[name], **options).state_dict())
        left = model.load_state_dict(plain.state_dict(), strict=strict)
        assert (left.missing_keys, left.unexpected_keys) == ([], [])
        with torch.no_grad():
            assert torch.equal(model(x), plain(x))
    for layer in layers_of(model):
        assert not layer.proj.weight.any()
    assert idle(stepped(model, x)) == []


@torch.no_grad()
@pytest.mark.parametrize("name", FEW)
def test_a_plain_networks_state_is_loaded_by_its_path_and_what_does_not_fit_is_named(
    name, tmp_path
):
    options = {"num_classes": 5, **shrunk(name)}
    plain = woken(timm.create_model(PLAIN[name], **options)).eval()
    path = tmp_path / "plain.pth"
    torch.save(plain.state_dict(), path)
    model = timm.create_model(name, fusion="add", checkpoint_path=str(path), **options).eval()
    x = sample(name)
    assert torch.equal(model(x), plain(x))
    layer = layers_of(model)[0]
    layer.proj.weight.fill_(1.0)  # attention that has learned is none of the plain network's
    whole = next(path for path, module in model.named_modules() if module is layer)
    for more, message in (
        ({}, r"Missing key.*qkv\.weight"),
        ({f"{whole}.bias": torch.zeros(3)}, f"Unexpected key.*{whole}.bias"),  # folded norms
        ({f"{whole}.weight": torch.zeros(3, 3, 1, 1)}, r"must have .* got \(3, 3, 1, 1\)"),
    ):
        with pytest.raises(RuntimeError, match=message):
            model.load_state_dict({**plain.state_dict(), **more})


@pytest.mark.parametrize("name", ["pa_aa_resnet50", "ea_aa_mnasnet_075"])
def test_a_seed_gives_the_plain_networks_weights(name):
    torch.manual_seed(3)
    expected = timm.create_model(PLAIN[name], **shrunk(name)).eval()
    torch.manual_seed(3)
    model = timm.create_model(name, fusion="add", **shrunk(name)).eval()
    x = sample(name)
    with torch.no_grad():
        assert torch.equal(model(x), expected(x))


@pytest.mark.parametrize("name", FEW)
def test_fx_traces_and_checkpointing_change_nothing(name):
    model = added(name)
    # in float64, since a random MnasNet can enlarge float32's rounding a thousandfold
    assert_fx_agrees(added(name).double(), sample(name, 1).double())
    assert_checkpointing_changes_nothing(model, sample(name), atol=1e-5, rtol=1e-4)


def test_onnx_agrees(tmp_path):
    name = "ea_conv_transformer_cifar"
    assert_onnx_agrees(ea_vision.deploy(added(name)), sample(name, 1), tmp_path)


@torch.no_grad()
@pytest.mark.parametrize("name", PLAIN)
def test_deployed_is_the_same(name):
    model = with_statistics(added(name), 0.5)
    x = sample(name)
    assert_close(ea_vision.deploy(model)(x), model(x), atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize("mine, theirs", [("add", "concat"), ("concat", "add")])
@pytest.mark.parametrize("name", FEW)
def test_weights_of_the_other_fusion_are_refused(name, mine, theirs, tmp_path):
    options = shrunk(name)
    path = tmp_path / "weights.pth"
    torch.save(timm.create_model(name, fusion=theirs, **options).state_dict(), path)
    message = f"has fusion='{mine}': create it with fusion='{theirs}'"
    overlay = {"pretrained": True, "pretrained_cfg_overlay": {"file": str(path)}}
    for way in ({"checkpoint_path": path}, overlay):
        with pytest.raises(RuntimeError, match=message):
            timm.create_model(name, fusion=mine, **way, **options)
