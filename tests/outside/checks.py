"""Features that a family and an evolution from outside get without a change in the package; run by test_outside.py."""

import json
import re

import pytest
import timm
import torch
from torch.testing import assert_close

from ea_vision import evolve, record_attention, unevolve
from ea_vision.__main__ import main
from ea_vision.layers import AugmentedConv2d, create_evolution, learnable_gates
from ea_vision.models import list_networks
from ea_vision.ops import use_implementation
from tests.models.zoo import (
    TINY,
    assert_checkpointing_changes_nothing,
    assert_fx_agrees,
    assert_onnx_agrees,
    images,
)
from tests.outside import tiny_attn

NAMES = ["aa_tiny", "ea_aa_tiny"]
IMAGES = images()
OURS = {"evolution": "shared", "start": 0.25}
KINDS = pytest.mark.parametrize(
    "name,options", [("aa_tiny", {}), ("ea_aa_tiny", {}), ("ea_aa_tiny", OURS)]
)


def create(name, **options):
    torch.manual_seed(0)
    return timm.create_model(name, **options).eval()


def test_is_registered_in_order():
    assert list_networks("tiny_attn") == NAMES
    assert list_networks()[-2:] == NAMES
    assert tiny_attn.ea_aa_tiny.__doc__ == "Tiny network with evolving attention."


@KINDS
def test_one_chain_runs_through_both_stages(name, options):
    layers = [m for m in create(name, **options).modules() if isinstance(m, AugmentedConv2d)]
    evolving = name == "ea_aa_tiny"
    assert [layer.evolution is not None for layer in layers] == [False] + [evolving] * 3
    assert [layer.need_logits for layer in layers] == [evolving] * 3 + [False]


def test_a_new_evolution_trains_with_checkpointing_and_goes_through_fx():
    model = create("ea_aa_tiny", **OURS)
    assert_checkpointing_changes_nothing(model, IMAGES)
    assert_fx_agrees(model, IMAGES)


@torch.no_grad()
def test_a_new_evolution_is_recorded_with_its_own_part():
    model = create("ea_aa_tiny", **OURS)
    gates = [gate.flatten().tolist() for gate in learnable_gates(model).values()]
    assert gates == [[0.25, 0.25]] * 3
    parts = ("logits", "self_logits", "prev_logits", "shared_logits")
    with record_attention(model, [2], parts=parts) as maps:
        y = model(IMAGES)
    layer = maps[2]
    assert_close(layer.logits, layer.self_logits + 0.25 * layer.prev_logits)
    assert_close(layer["shared_logits"], 0.25 * layer.prev_logits)
    with use_implementation("reference"):
        assert_close(model(IMAGES), y)
    with pytest.raises(ValueError, match="evolution='shared' has start; got beta"):
        create_evolution("shared", 2, beta=0.5)


@torch.no_grad()
def test_a_new_evolution_in_timms_transformer(tmp_path):
    torch.manual_seed(0)
    plain = timm.create_model("vit_tiny_patch16_224", **{**TINY, "num_heads": 2})
    for block in plain.eval().blocks:
        torch.nn.init.normal_(block.attn.qkv.weight)
        block.attn.fused_attn = False
    model = evolve(plain, "shared")
    assert torch.equal(model(IMAGES), plain(IMAGES))
    assert torch.equal(unevolve(model)(IMAGES), plain(IMAGES))
    gates = learnable_gates(model)
    assert list(gates) == ["blocks.1.attn.evolution.share", "blocks.2.attn.evolution.share"]
    for gate in gates.values():
        gate.fill_(0.7)
    with record_attention(model, [2], parts=("shared_logits", "prev_logits")) as maps:
        y = model(IMAGES)
    assert not torch.equal(y, plain(IMAGES))
    assert_close(maps[2]["shared_logits"], 0.7 * maps[2].prev_logits, atol=1e-5, rtol=1e-4)
    assert_onnx_agrees(model, IMAGES, tmp_path)
    started = evolve(plain, "shared", start="paper")
    gates = [gate.flatten().tolist() for gate in learnable_gates(started).values()]
    assert gates == [[0.5, 0.5]] * 2


def test_summary(capsys):
    assert main(["models", "--sizes", *NAMES]) == 0
    table = capsys.readouterr().out
    assert re.search(r"ea_aa_tiny +\| 32x32 .*4 x 2 x \(8x8\)", table)


def test_page_and_figures(tmp_path):
    run = tmp_path / "run"
    train = "train-cifar --recipe none --model ea_aa_tiny --epochs 1 --device cpu".split()
    options = ["--output", str(run), "--batch-size", "256", "--lr", "0.01"]
    keywords = [f"{key}={value}" for key, value in OURS.items()]
    assert main([*train, *options, "--model-kwargs", *keywords]) == 0
    page = tmp_path / "page.html"
    assert main(["explore", "--model", str(run), "-o", str(page), "digits#0"]) == 0
    assert "<html" in page.read_text()[:500].lower()
    strip = str(tmp_path / "strip.png")
    assert main(["strip", "--model", str(run), "--layers", "1-3", "-o", strip, "digits#0"]) == 0
    assert json.loads((run / "results.json").read_text())["model"] == "ea_aa_tiny"
