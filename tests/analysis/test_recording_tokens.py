"""Maps of vision transformers: evolving ones in all their parts, timm's as its own unfused attention computes them."""
import pytest
import timm
import torch
from torch import nn

import ea_vision
from ea_vision.analysis.recording import PARTS, attention_layers
from tests.models.test_vision_transformer import HAS_ATTN_LAYER, TINY, active, images, lively, tiny


@pytest.mark.parametrize("options", [
    dict(), dict(evolution="pa", num_layers=2, learnable=True), dict(learnable="per_head"), dict(prefix="pass"),
    dict(alpha=0.3, beta=1.0), dict(layers=[3]), dict(reg_tokens=2, class_token=False, global_pool="avg")])
def test_parts_satisfy_the_equations(options):
    model, x = active(tiny(**options)), images(32, 40)
    model.set_input_size((32, 40))
    with torch.no_grad():
        expected = model(x)
        with ea_vision.record_attention(model, parts=PARTS) as maps:
            assert torch.equal(model(x), expected)  # recording changes no bit
    assert list(maps) == [1, 2, 3] and not any(m._forward_hooks or m._forward_pre_hooks for m in model.modules())
    P = model.num_prefix_tokens
    for number, layer in maps.items():
        assert layer.feat_size == (4, 5) and layer.num_prefix_tokens == P and layer.name == f"blocks.{number - 1}.attn"
        assert layer.logits.shape == (2, 3, P + 20, P + 20) and layer.spatial().shape == (2, 3, 4, 5, 4, 5)
        assert torch.equal(layer.attn, layer.logits.softmax(-1))
        evolution = model.blocks[number - 1].attn.evolution
        if evolution is None:
            assert layer.prev_logits is None and torch.equal(layer.self_logits, layer.logits)
            continue
        assert torch.equal(layer.prev_logits, maps[number - 1].logits)
        gates = [torch.as_tensor(gate).reshape(-1, 1, 1) for gate in evolution.gates().values()]
        with torch.no_grad():
            if options.get("evolution") == "pa":
                result = gates[0] * layer.conv_logits + (1 - gates[0]) * layer.self_logits
                convolved = evolution.convolve(layer.prev_logits)
            else:
                mixed = gates[0] * layer.prev_logits + (1 - gates[0]) * layer.self_logits
                result = gates[1] * layer.conv_logits + (1 - gates[1]) * mixed
                convolved = evolution.convolve(mixed)
        torch.testing.assert_close(layer.conv_logits, convolved, atol=1e-5, rtol=1e-4)
        torch.testing.assert_close(layer.logits, result, atol=1e-5, rtol=1e-4)


def test_at_the_identity_start_the_maps_are_timms():
    timms = tiny("vit_tiny_patch16_224", reg_tokens=4)
    evolving, x = ea_vision.evolve(timms), images()
    with torch.no_grad(), ea_vision.record_attention(timms) as theirs, ea_vision.record_attention(evolving) as ours:
        timms(x)
        evolving(x)
    for number in (1, 2, 3):
        torch.testing.assert_close(ours[number].attn, theirs[number].attn, atol=1e-6, rtol=1e-5)
    assert [layer.parts for layer in attention_layers(evolving)][:2] == [
        PARTS[:3], ("attn", "logits", "self_logits", "conv_logits", "prev_logits")]


FOREIGN = [
    ("deit_tiny_distilled_patch16_224", TINY, 2),
    ("vit_small_patch14_reg4_dinov2", {**TINY, "init_values": 0.5}, 5),
    ("eva02_tiny_patch14_224", TINY, 1),  # rope
    ("vit_small_patch16_dinov3", TINY, 5),  # rope and registers
    ("vit_base_patch16_rope_224", TINY, 1),  # rope in timm's own layer
    ("beit_base_patch16_224", TINY, 1),
    ("vit_relpos_small_patch16_224", TINY, 0),
    ("vit_base_patch16_siglip_224", TINY, 0),
    ("vit_pwee_patch16_reg1_gap_256", TINY, 1),  # blocks that attend themselves
]


@pytest.mark.parametrize("name,options,prefix", FOREIGN)
def test_maps_of_foreign_transformers_are_those_by_hand(name, options, prefix):
    torch.manual_seed(0)
    model, x = lively(timm.create_model(name, **options)), images()
    attentions = [module for path, module in model.named_modules()
                  if path.startswith("blocks.") and isinstance(getattr(module, "attn_drop", None), nn.Dropout)]
    with torch.no_grad():
        expected = model(x)
        with ea_vision.record_attention(model) as maps:
            output = model(x)
        torch.testing.assert_close(output, expected, atol=1e-4, rtol=1e-4)
        by_hand, handles = [], []
        for module in attentions:
            assert module.fused_attn  # as it was
            module.fused_attn = False
            handles.append(module.attn_drop.register_forward_hook(lambda _, args, output: by_hand.append(output)))
        model(x)
    assert len(maps) == len(by_hand) == 3
    for number, attn in enumerate(by_hand, start=1):
        layer = maps[number]
        assert (layer.attn - attn).abs().max() <= 1e-5 and layer.attn.std(-1).max() > 1e-3
        assert layer.feat_size == (4, 4) and layer.num_prefix_tokens == prefix
        assert layer.attn.shape == (2, 3, 16 + prefix, 16 + prefix)
        torch.testing.assert_close(layer.attn.sum(-1), torch.ones(2, 3, 16 + prefix))


def test_attention_that_has_no_maps_of_tokens_is_not_taken_for_one():
    with torch.device("meta"):
        for name, options in (("swin_tiny_patch4_window7_224", {}), ("xcit_nano_12_p16_224", {}),
                              ("cait_xxs24_224", {}),
                              *([("vit_tiny_patch16_224", dict(attn_layer="diff"))] if HAS_ATTN_LAYER else [])):
            assert attention_layers(timm.create_model(name, **options)) == []
