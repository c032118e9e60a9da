"""Weights of runs and of timm's ResNets in our networks."""

import logging
from dataclasses import replace

import pytest
import safetensors.torch
import timm
import torch

from ea_vision.base.errors import UsageError
from ea_vision.base.networks import create_classifier, encode_weights
from ea_vision.models import get_network
from ea_vision.models._convert import checkpoint_filter_fn
from ea_vision.recorder.loading import load_model
from tests.models.zoo import OUTLINES


@pytest.mark.parametrize(
    "name,plain,options",
    [
        ("ea_aa_resnet34", "resnet34", dict(layers=(1, 1, 1, 1))),
        ("aa_resnet50", "resnet50", dict(layers=(1, 1, 1, 1))),
        ("ea_aa_mnasnet_075", "semnasnet_075", {}),
    ],
)
def test_a_timm_network_fills_what_fits(name, plain, options, tmp_path, caplog):
    source = timm.create_model(plain, **options)
    path = tmp_path / "resnet.safetensors"
    safetensors.torch.save_file(source.state_dict(), path)
    torch.manual_seed(3)
    fresh = timm.create_model(name, **options)
    torch.manual_seed(3)
    with caplog.at_level(logging.INFO, logger="ea_vision"):
        model = timm.create_model(
            name, pretrained=True, pretrained_cfg_overlay={"file": str(path)}, **options
        )
    theirs, ours, initial = source.state_dict(), model.state_dict(), fresh.state_dict()
    for key, value in ours.items():
        if key in theirs:
            assert torch.equal(value, theirs[key]), key
        elif key.endswith(".conv.weight"):
            assert torch.equal(
                value, theirs[key.replace(".conv.weight", ".weight")][: len(value)]
            ), key
        else:
            assert torch.equal(value, initial[key]), key
    lines = [record.message for record in caplog.records if "output channels" in record.message]
    assert len(lines) == sum(key.endswith(".conv.weight") for key in ours)
    assert (
        f"{len(ours.keys() & theirs.keys())} tensors as they are, 0 of the checkpoint's not used"
        in caplog.text
    )


def test_another_depth_is_named():
    state = timm.create_model("resnet18").state_dict()
    state["layer2.0.conv1.weight"] = state["layer2.0.conv1.weight"][:, :8]
    with pytest.raises(
        ValueError, match=r"layer2\.0\.conv1\.weight must have at least 112 output channels"
    ):
        checkpoint_filter_fn(state, OUTLINES["aa_resnet34"])


def test_pretrained_weights_name_the_keywords_they_were_trained_with(tmp_path, monkeypatch):
    """As if the file of the default weights were of a network with `qk_norm`: each way by name builds that network."""
    name = "ea_conv_transformer_cifar"
    expected, path = (
        timm.create_model(name, qk_norm=True).state_dict(),
        tmp_path / "weights.safetensors",
    )
    path.write_bytes(encode_weights(expected))
    tag = timm.get_pretrained_cfg(name).tag
    monkeypatch.setitem(get_network(name).trained, tag, {"qk_norm": True})
    for key in (name, f"{name}.{tag}"):
        monkeypatch.setitem(
            timm.models._registry._model_pretrained_cfgs,
            key,
            replace(timm.get_pretrained_cfg(name), file=str(path)),
        )
    training, keywords = create_classifier(name, {}, num_classes=10, img_size=32, pretrained=True)
    for model in (
        timm.create_model(name, pretrained=True),
        timm.create_model(f"{name}.{tag}", pretrained=True),
        timm.create_model(name, pretrained=True, qk_norm=True),
        load_model(name).model,
        training,
    ):
        torch.testing.assert_close(model.state_dict(), expected, rtol=0, atol=0)
    timm.create_model(name, **keywords).load_state_dict(expected)  # as from a run folder
    assert timm.create_model(name).state_dict().keys() < expected.keys()
    message = f"the weights {name}.{tag} were trained with qk_norm=True, got qk_norm=False"
    for create in (timm.create_model, load_model):
        with pytest.raises(UsageError, match=message):
            create(
                name, qk_norm=False, **{"pretrained": True} if create is timm.create_model else {}
            )
    overlay = {
        "file": str(tmp_path / "own.safetensors")
    }  # a caller's own weights are what the caller says
    safetensors.torch.save_file(timm.create_model(name).state_dict(), overlay["file"])
    timm.create_model(name, pretrained=True, pretrained_cfg_overlay=overlay)
