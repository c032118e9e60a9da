"""Maps of vision transformers: evolving ones in all their parts, timm's as its own unfused attention computes them."""
import pytest
import timm
import torch
from torch import nn

import ea_vision
from ea_vision.base.errors import UsageError
from ea_vision.recorder.quantities import attention_rollout, measure
from ea_vision.recorder.recording import PARTS, prefix_names, recordable_layers
from tests.models.test_vision_transformer import TINY, active, images, lively, tiny


@pytest.mark.parametrize("options", [
    dict(), dict(evolution="pa", num_layers=2, learnable=True), dict(learnable="per_head"), dict(prefix="pass"),
    dict(alpha=0.3, beta=1.0), dict(attn_layers=[3]), dict(reg_tokens=2, class_token=False, global_pool="avg")])
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
    assert [layer.parts for layer in recordable_layers(evolving)][:2] == [
        PARTS[:3], ("attn", "logits", "self_logits", "conv_logits", "prev_logits")]


def test_prefix_tokens_are_queries_by_their_names():
    for name, options, names in (
            ("vit_tiny_patch16_224", {}, ("cls",)), ("deit_tiny_distilled_patch16_224", {}, ("cls", "dist")),
            ("vit_small_patch14_reg4_dinov2", {}, ("cls", "reg1", "reg2", "reg3", "reg4")),
            ("vit_small_patch16_dinov3", {}, ("cls", "reg1", "reg2", "reg3", "reg4")),
            ("vit_pwee_patch16_reg1_gap_256", {}, ("reg1",)), ("vit_base_patch16_siglip_gap_224", {}, ()),
            ("beit_base_patch16_224", {}, ("cls",)), ("resnet18", None, ())):
        with torch.device("meta"):
            model = timm.create_model(name) if options is None else timm.create_model(name, **{**TINY, **options})
        assert prefix_names(model) == names, name
    model, x = active(tiny(reg_tokens=2)), images(32, 40)
    model.set_input_size((32, 40))
    with torch.no_grad(), ea_vision.record_attention(model) as maps:
        model(x)
    layer = maps[3]
    assert layer.prefix_names == ("cls", "reg1", "reg2")
    for query, token in (("cls", 0), ("reg2", 2), ((0, 0), 3), ((2, 3), 3 + 2 * 5 + 3)):
        prefix, patches = layer.of_query(query)
        assert prefix.shape == (2, 3, 3) and patches.shape == (2, 3, 4, 5)
        assert torch.equal(torch.cat([prefix, patches.flatten(-2)], -1), layer.attn[:, :, token])
    with pytest.raises(UsageError, match="query dist must be a token before the patches of layer 3 .* cls, reg1, reg2"):
        layer.of_query("dist")
    assert list(maps.arrays()["layer3.prefix_names"]) == ["cls", "reg1", "reg2"]


def test_quantities_and_rollout_of_a_transformer_are_those_by_hand():
    """Of looking at all tokens alike: entropy log T, prefix share P / T, distance that of uniform attention."""
    model = tiny(reg_tokens=2)
    with torch.no_grad():
        for block in model.blocks:
            block.attn.qkv.weight[:96] = 0
            block.attn.qkv.bias[:96] = 0
    for layer in measure(model, [images(), images()]):
        assert layer.uniform_entropy == pytest.approx(torch.tensor(19.0).log().item()) and layer.images == 4
        assert layer.entropy.tolist() == pytest.approx([torch.tensor(19.0).log().item()] * 3, rel=1e-5)
        assert layer.prefix.tolist() == pytest.approx([3 / 19] * 3, rel=1e-5)
        places = torch.stack(torch.meshgrid(torch.arange(4.0), torch.arange(4.0), indexing="ij")).flatten(1).T * 8
        assert layer.distance.tolist() == pytest.approx([torch.cdist(places, places).mean().item()] * 3, rel=1e-5)

    model = active(tiny(reg_tokens=2))
    with torch.no_grad(), ea_vision.record_attention(model) as maps:
        model(images())
    steps = [0.5 * layer.attn.mean(1) + 0.5 * torch.eye(19) for layer in maps.values()]
    torch.testing.assert_close(attention_rollout(maps), steps[2] @ steps[1] @ steps[0])


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
        assert torch.equal(output, expected)
        by_hand, handles = [], []
        for module in attentions:
            assert module.fused_attn  # as it was
            module.fused_attn = False
            handles.append(module.attn_drop.register_forward_hook(lambda _, args, output: by_hand.append(output)))
        model(x)
    assert len(maps) == 3 + (getattr(model, "attn_pool", None) is not None) and len(by_hand) == 3
    for number, attn in enumerate(by_hand, start=1):
        layer = maps[number]
        assert (layer.attn - attn).abs().max() <= 1e-5 and layer.attn.std(-1).max() > 1e-3
        assert layer.feat_size == (4, 4) and layer.num_prefix_tokens == prefix
        assert layer.attn.shape == (2, 3, 16 + prefix, 16 + prefix)
        torch.testing.assert_close(layer.attn.sum(-1), torch.ones(2, 3, 16 + prefix))
