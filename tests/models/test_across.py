"""Mechanisms across layers in networks: equal to the plain network at the start, learning after one step, and with
timm's interfaces."""

import copy

import pytest
import timm
import torch
from torch.testing import assert_close

from ea_vision import evolve, record_attention, unevolve
from ea_vision.layers import evolution_class
from ea_vision.ops import use_implementation
from tests.models.test_vision_transformer import fused, lively, plain
from tests.models.zoo import (
    KINDS,
    assert_fx_agrees,
    assert_intermediates,
    assert_onnx_agrees,
    idle,
    images,
    layers_of,
    stepped,
    woken,
)
from tests.refused import refused
from tests.slow import slow_but

NEW = KINDS[2:]
kinds = pytest.mark.parametrize("kind", KINDS)
new_kinds = pytest.mark.parametrize("kind", NEW)


def mini(**options):
    torch.manual_seed(0)
    options = {"depth": 3, "embed_dim": 32, "num_classes": 5, **options}
    return lively(timm.create_model("vit_mini_patch4_32", **options))


@new_kinds
@torch.no_grad()
def test_paper_starts_are_not_the_plain_network_but_for_mta(kind):
    evolved = fused(evolve(plain(), kind, start="paper"), False)
    expected = fused(plain(), False)(images())
    assert torch.equal(evolved(images()), expected) == (kind == "mta")


def test_eas_gates_are_fixed_at_the_papers_start():
    model = evolve(plain(), "ea", start="paper")
    assert isinstance(model.blocks[1].attn.evolution.beta, float)


@kinds
@torch.no_grad()
def test_timms_ways(kind):
    """Intermediates, features_only, other sizes, FX, a trace and pruning, with each kind."""
    options = dict(evolution=kind, value_residual="paper", token_conv="paper", start="paper")
    model = mini(**options)
    taken = assert_intermediates(model, images())
    features = mini(features_only=True, out_indices=(1,), **options)
    features.model.load_state_dict(model.state_dict(), strict=False)
    assert_close(features(images()), [taken[1]])
    assert_fx_agrees(mini(depth=2, **options), images())
    for sizes in (dict(img_size=(16, 24)), dict(dynamic_img_size=True)):  # not square
        y = mini(**options, **sizes)(images(16, 24))
        assert y.isfinite().all()
    pruned = copy.deepcopy(model)
    pruned.prune_intermediate_layers([1], prune_norm=True)
    assert_close(pruned.forward_intermediates(images(), [1], intermediates_only=True), [taken[1]])


@pytest.mark.parametrize("kind", slow_but({"conv2d", "ea"}, KINDS))
def test_onnx_and_torch_export_agree(kind, tmp_path):
    assert_onnx_agrees(mini(evolution=kind, start="paper", token_conv="paper"), images(), tmp_path)


@new_kinds
@torch.no_grad()
def test_recorded_maps_are_those_that_weigh_the_values_and_recording_changes_nothing(kind):
    # in training, since recording must not move batch statistics twice
    model = mini(evolution=kind, start="paper").train()
    twin = copy.deepcopy(model)
    layer = twin.blocks[1].attn
    seen = []
    layer.attn_drop.register_forward_pre_hook(lambda _, args: seen.append(args[0]))
    kind_class = evolution_class(kind)
    parts = ["attn", "logits", "self_logits", *kind_class.part_names]
    if kind_class.reads_previous:
        parts.append("prev_logits")
    with record_attention(model, [2], parts=parts) as maps:
        y = model(images())
    assert_close(y, twin(images()))
    assert_close(model.state_dict(), twin.state_dict())
    recorded = maps[2]
    assert_close(recorded.attn, seen[0])
    if kind_class.mixes_attn:
        assert_close(recorded["softmax"], recorded.logits.softmax(-1))
    if kind_class.reads_previous:
        size = [(8, 8)] if kind_class.spatial else []
        evolved = layer.evolution(recorded.self_logits, recorded.prev_logits, *size)
        assert_close(recorded.logits, evolved)
    if kind == "conv2d":
        mixed = recorded.self_logits + layer.evolution.alpha * recorded.prev_logits
        assert_close(recorded.logits, mixed + recorded.conv_logits)


RESNET = dict(layers=(1, 1, 1, 1), channels=(8, 8, 16, 16), num_heads=2, img_size=64)


@new_kinds
@pytest.mark.parametrize(
    "name,options",
    [("aa_resnet34", RESNET), ("conv_transformer_cifar", dict(widths=(8, 8, 16, 16), depth=2))],
)
def test_convolutional_networks_by_keyword(name, options, kind):
    torch.manual_seed(0)
    model = timm.create_model(name, evolution=kind, num_classes=5, start="identity", **options)
    first, *others = layers_of(model)
    assert (first.evolution is None) == evolution_class(kind).reads_previous
    assert any(layer.evolution is not None for layer in others)
    base = timm.create_model(name, num_classes=5, **options).eval()
    missing = model.load_state_dict(base.state_dict(), strict=False)
    assert not missing.unexpected_keys
    assert all(".evolution." in name for name in missing.missing_keys)
    side = options.get("img_size", 32)
    x = images(side, side)
    with torch.no_grad(), use_implementation("reference"):
        assert torch.equal(model.eval()(x), base(x))
    unmoved = idle(stepped(woken(model), x))
    assert all(name.endswith(".bias") for name in unmoved)  # a norm cancels biases


def test_general_initialisation_leaves_mechanisms_at_their_start():
    model = timm.create_model("conv_transformer_cifar", evolution="reattention", gain=0.0)
    conv = layers_of(model)[0].evolution.reatten_matrix
    assert conv.weight.abs().max() <= conv.in_channels**-0.5 + 1e-6  # torch's uniform start


@torch.no_grad()
def test_values_are_mixed_with_the_first_blocks():
    model = mini(value_residual="paper")
    values = []
    mixed = []

    def keep_values(module, args, output):
        heads = output[..., 64:].unflatten(2, (4, 8))
        values.append(heads.transpose(1, 2))

    for block in model.blocks:
        block.attn.qkv.register_forward_hook(keep_values)
        if block.attn.value_residual is not None:
            block.attn.value_residual.register_forward_hook(lambda _, args, y: mixed.append(y))
    model(images())
    assert_close(mixed, [0.5 * values[0] + 0.5 * own for own in values[1:]])


def test_token_convolutions_stand_before_each_block_but_the_first():
    first, *others = [block.token_conv for block in mini(token_conv=True).blocks]
    assert first is None
    assert len(others) == 2
    assert None not in others
    message = "got 2 that are not, the first of them blocks.1.token_conv"
    with refused(message, ValueError):
        unevolve(mini(token_conv="paper"))


def test_uniform_maps_pool_the_values():
    model = mini(evolution="uniform")
    with torch.no_grad(), record_attention(model) as maps:
        model(images())
    for layer in maps.values():
        assert_close(layer.attn, torch.full_like(layer.attn, 1 / 64), atol=1e-8, rtol=1e-5)


def test_an_evolving_layer_outside_its_block_is_refused():
    layer = evolve(plain(), "conv2d").blocks[1].attn
    with refused("must run inside its block", ValueError):
        layer(torch.randn(1, 17, 48))


@kinds
def test_half_precision(kind):
    model = stepped(mini(evolution=kind)).eval()
    with torch.no_grad():
        expected = model(images())
        with torch.autocast("cpu", torch.bfloat16):
            under = model(images())
        half = copy.deepcopy(model).bfloat16()(images().bfloat16())
    largest_error = 0.1 * expected.abs().max()
    assert (under - expected).abs().max() < largest_error
    assert (half - expected).abs().max() < largest_error
