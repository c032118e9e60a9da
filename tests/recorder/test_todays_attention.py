"""Maps of differential attention, grouped queries, causal masks, rotary positions and pooling: against hooks of our own
on unfused attention, within 1e-5."""
import pytest
import timm
import torch
import torch.nn.functional as F
from timm.layers.attention_pool2d import AttentionPool2d, RotAttentionPool2d
from torch import nn

import ea_vision
from ea_vision.base.errors import UsageError
from ea_vision.recorder.quantities import measure
from ea_vision.recorder.recording import recordable_layers
from tests.models.test_vision_transformer import HAS_ATTN_LAYER, TINY
from tests.recorder.test_any_transformer import LIMIT, Plain, images, lively, recorded, torchvision_vit
from tests.recorder.test_recording import hooks_of

PATCHES = [(row, col) for row in range(4) for col in range(4)]


def unfused(model, kind, x):
    """What enters the products with the values: the softmaxes of torch.Tensor, called by modules of a kind."""
    formed, softmax, inside = [], torch.Tensor.softmax, []
    handles = []
    for module in model.modules():
        if type(module).__name__ == kind:
            module.fused_attn = False
            handles += [module.register_forward_pre_hook(lambda *_: inside.append(1)),
                        module.register_forward_hook(lambda *_: inside.pop() and None)]

    def watched(self, *args, **kwargs):
        result = softmax(self, *args, **kwargs)
        if inside:
            formed.append(result)
        return result

    with pytest.MonkeyPatch.context() as patch, torch.no_grad():
        patch.setattr(torch.Tensor, "softmax", watched)
        output = model(x)
    for handle in handles:
        handle.remove()
    return formed, output


@pytest.mark.skipif(not HAS_ATTN_LAYER, reason="this timm has no differential attention")
@pytest.mark.parametrize("dual_lambda", [False, True])
def test_differential_attention(dual_lambda):
    """Both maps, and what weighs the values: their difference times the values, normed, is the layer's output."""
    from timm.layers import DiffAttention

    torch.manual_seed(0)
    model, x = timm.create_model("vit_tiny_patch16_224", attn_layer="diff", **{**TINY, "embed_dim": 48}), images()
    for number, block in enumerate(model.blocks):
        block.attn = DiffAttention(48, num_heads=3, qkv_bias=True, depth=number, dual_lambda=dual_lambda)
        with torch.no_grad():
            for name in ("lambda_a", "lambda_q1", "lambda_k1"):
                if getattr(block.attn, name) is not None:
                    getattr(block.attn, name).fill_(0.3)
    model = lively(model)
    assert [layer.parts for layer in recordable_layers(model)] == [("attn", "first_attn", "second_attn")] * 3
    values = []
    hook = model.blocks[2].attn.qkv.register_forward_hook(
        lambda _, args, output: values.append(output[..., 96:].reshape(2, 17, 3, 16).transpose(1, 2)))
    inner = model.blocks[2].attn.sub_norm.register_forward_pre_hook(lambda _, args: values.append(args[0]))
    with torch.no_grad():
        expected = model(x)
        values.clear()
        with ea_vision.record_attention(model, parts=("attn", "first_attn", "second_attn")) as maps:
            assert torch.equal(model(x), expected)
    torch.testing.assert_close(maps[3].attn @ values[0], values[1], atol=1e-5, rtol=1e-5)
    hook.remove()
    inner.remove()
    formed, _ = unfused(model, "DiffAttention", x)
    assert len(maps) == len(formed) == 3
    for layer, both in zip(maps.values(), formed, strict=True):
        first, second = both.view(2, 3, 2, 17, 17).unbind(2)
        assert (layer["first_attn"] - first).abs().max() <= LIMIT
        assert (layer["second_attn"] - second).abs().max() <= LIMIT
        assert layer.feat_size == (4, 4) and layer.prefix_names == ("cls",)
        with ea_vision.record_attention(model, layer.number) as slow, torch.no_grad():
            model(x)  # unfused now
        assert (slow[layer.number].attn - layer.attn).abs().max() <= LIMIT and layer.attn.min() < 0


class Grouped(Plain):
    """Grouped queries as torch has them: 4 heads of queries, 2 of keys and values."""

    def forward(self, x, mask=None, is_causal=False):
        B, T, C = x.shape
        q, k, v = self.qkv(x).split((C, C, C), -1)
        q = q.view(B, T, 4, -1).transpose(1, 2)
        k, v = (part[..., :C // 2].view(B, T, 2, -1).transpose(1, 2) for part in (k, v))
        out = F.scaled_dot_product_attention(q, k, v, attn_mask=mask, is_causal=is_causal, enable_gqa=True)
        return out.transpose(1, 2).flatten(2)


@pytest.mark.parametrize("masked", ["no", "causal", "padded", "wider"])
def test_grouped_queries_and_masks(masked):
    """Head by head in a loop; a query whose keys are all masked has a row of zeros, as torch computes it."""
    torch.manual_seed(0)
    layer, x, T = lively(Grouped(None, dim=16)), torch.randn(2, 6, 16), 6
    mask = None
    if masked == "padded":  # on the left, as language models pad: the first sequence lacks two tokens
        real = torch.tensor([[False] * 2 + [True] * 4, [True] * 6])
        mask = (torch.ones(T, T, dtype=torch.bool).tril() & real[:, None, None, :])
    maps = recorded(layer, x, mask=mask, is_causal=masked == "causal")
    attn = maps[1].attn
    assert attn.shape == (2, 4, 6, 6) and maps[1].heads == (0, 1, 2, 3)
    q, k, _ = layer.qkv(x).split(16, -1)
    for b in range(2):
        for head in range(4):
            queries, keys = q[b].view(T, 4, 4)[:, head], k[b, :, :8].view(T, 2, 4)[:, head // 2]
            for i in range(T):
                logits = queries[i] @ keys.T / 2
                sees = torch.ones(T, dtype=torch.bool)
                sees = torch.arange(T) <= i if masked == "causal" else mask[b, 0, i] if mask is not None else sees
                row = torch.zeros(T)
                if sees.any():
                    row[sees] = logits[sees].softmax(-1)
                assert (attn[b, head, i] - row).abs().max() <= LIMIT


@pytest.mark.parametrize("name", ["Llama", "Mistral", "Qwen2"])
def test_language_models_of_transformers(name):
    """Whole sequences, padded on the left, and a token after the kept keys of the others: what eager attention says."""
    transformers = pytest.importorskip("transformers", reason="transformers is not installed")
    torch.manual_seed(0)
    config = getattr(transformers, f"{name}Config")(
        hidden_size=24, num_hidden_layers=2, num_attention_heads=6, num_key_value_heads=2, intermediate_size=32,
        vocab_size=30, max_position_embeddings=16, head_dim=4)
    model = lively(getattr(transformers, f"{name}Model")(config))
    tokens = torch.randint(1, 30, (2, 7), generator=torch.Generator().manual_seed(1))
    padded = torch.tensor([[0, 0, 1, 1, 1, 1, 1], [1] * 7])

    def forwards(kept=None):
        """The whole sequence, or its last token after the others."""
        if kept is None:
            return lambda **more: model(tokens, attention_mask=padded, use_cache=False, **more)
        return lambda **more: model(tokens[:, -1:], attention_mask=padded, past_key_values=model(
            tokens[:, :-1], attention_mask=padded[:, :-1], use_cache=True).past_key_values, **more)

    for forward, queries in ((forwards(), 7), (forwards("kept"), 1)):
        model.set_attn_implementation("sdpa")
        with torch.no_grad(), ea_vision.record_attention(model) as maps:
            forward()
        model.set_attn_implementation("eager")
        with torch.no_grad():
            by_hand = forward(output_attentions=True).attentions
        assert [layer.name for layer in maps.values()] == ["layers.0.self_attn", "layers.1.self_attn"]
        for layer, attn in zip(maps.values(), by_hand, strict=True):
            real = padded[:, -queries:].bool()  # what padding attends to is nobody's matter
            assert layer.attn.shape == (2, 6, queries, 7)
            assert (layer.attn - attn).transpose(1, 2)[real].abs().max() <= LIMIT
            assert layer.feat_size == (1, queries) and layer.key_size == (1, 7)


@pytest.mark.parametrize("name,options,kind", [
    ("eva02_tiny_patch14_224", {}, "EvaAttention"), ("eva02_tiny_patch14_224", dict(qkv_fused=False), "EvaAttention"),
    ("vit_small_patch16_dinov3", {}, "EvaAttention"), ("vit_pe_core_tiny_patch16_384", {}, "AttentionRope"),
    ("vit_base_patch16_rope_224", {}, "AttentionRope"), ("vit_base_patch16_rope_mixed_224", {}, "AttentionRope")])
def test_rotary_attention(name, options, kind):
    torch.manual_seed(0)
    if not timm.is_model(name):
        pytest.skip("this timm lacks it")
    model, x = lively(timm.create_model(name, **{**TINY, **options})), images()
    maps = recorded(model, x)
    kinds = {type(block.attn).__name__ for block in model.blocks}
    formed, _ = unfused(model, kinds.pop(), x)
    blocks = [layer for layer in maps.values() if layer.name.startswith("blocks.")]
    assert len(blocks) == len(formed) == 3
    for layer, attn in zip(blocks, formed, strict=True):
        assert (layer.attn - attn).abs().max() <= LIMIT and attn.std(-1).max() > 1e-3 and layer.feat_size == (4, 4)


EVOLVED = {
    "vit_tiny_patch16_224": TINY, "eva02_tiny_patch14_224": TINY, "vit_small_patch16_dinov3": TINY,
    "beit_base_patch16_224": TINY, "naflexvit_base_patch16_gap": {k: v for k, v in TINY.items() if k != "img_size"},
    "cait_xxs24_224": TINY, "torchvision": {}}


@pytest.mark.parametrize("name", EVOLVED)
@pytest.mark.parametrize("kind", ["ea", "conv2d", "talking_heads", "xsa", None])
def test_evolved_transformers_begin_with_the_maps_of_the_plain_ones(name, kind):
    """Of CaiT with those that weigh the values; outputs keep every bit, and logits hand on what they should."""
    torch.manual_seed(0)
    x, plain = images(), torchvision_vit(3) if name == "torchvision" else timm.create_model(name, **EVOLVED[name])
    plain = lively(plain)
    model = ea_vision.evolve(plain, kind=kind, **({} if kind else {"token_conv": True})).eval()
    found, hooks = [layer for layer in recordable_layers(model) if "logits" in layer.parts], hooks_of(model)
    parts = tuple(dict.fromkeys(part for layer in found for part in layer.parts))
    theirs = "mixed_attn" if name.startswith("cait") else "attn"
    with torch.no_grad():
        expected = model(x)
        with ea_vision.record_attention(model, parts=parts) as maps, \
                ea_vision.record_attention(plain, parts=theirs) as before:
            assert torch.equal(model(x), expected)
            plain(x)
    assert len(found) >= 2 and len(maps) == len(recordable_layers(plain))
    for layer in found:
        own = maps[layer.number]
        assert (own.attn - before[layer.number][theirs]).abs().max() <= LIMIT and own.feat_size == (4, 4)
        if theirs == "attn":
            torch.testing.assert_close(own.attn, own.logits.softmax(-1), atol=LIMIT, rtol=LIMIT)
        if own.prev_logits is not None:
            assert torch.equal(own.prev_logits, maps[layer.number - 1].logits)
    assert hooks_of(model) == hooks and not any("_attend" in vars(module) for module in model.modules())


@pytest.mark.parametrize("name,names", [
    ("vit_base_patch16_siglip_224", ()), ("vit_pe_core_tiny_patch16_384", ("cls",))])
def test_pooling_by_a_learned_query(name, names):
    """Its one query is called pool; statistics of all layers leave it out."""
    if not timm.is_model(name):
        pytest.skip("this timm lacks it")
    torch.manual_seed(0)
    model, x = lively(timm.create_model(name, **TINY)), images()
    maps = recorded(model, x)
    [attn], _ = unfused(model, "AttentionPoolLatent", x)
    layer = maps["attn_pool"]
    assert [entry.pools for entry in recordable_layers(model)] == [False] * 3 + [True] and layer.number == 4
    heads, keys = attn.shape[1], 16 + len(names)
    assert layer.attn.shape == (2, heads, 1, keys) and (layer.attn - attn).abs().max() <= LIMIT
    assert layer.query_names == ("pool",) and layer.prefix_names == names and layer.feat_size == (4, 4)
    prefix, pixels = layer.of_query("pool")
    assert torch.equal(torch.cat([prefix, pixels.flatten(2)], -1), layer.attn[:, :, 0])
    torch.testing.assert_close(layer.relative(), layer.attn * keys)
    with pytest.raises(UsageError, match="is pooling attention: its queries are pool alone"):
        layer.spatial()
    assert [found.number for found in measure(model, [x])] == [1, 2, 3]
    assert list(maps.arrays()["layer4.query_names"]) == ["pool"]


@pytest.mark.parametrize("kind", [AttentionPool2d, RotAttentionPool2d])
@pytest.mark.parametrize("class_token", [False, True])
def test_pooling_over_a_map(kind, class_token):
    """The first token is the mean, or a class token; CLIP's ResNets end so. timm 1.0.21 makes it for squares alone."""
    torch.manual_seed(0)
    size = {"feat_size" if kind is AttentionPool2d else "ref_feat_size": (4, 4)}
    pool = lively(kind(16, num_heads=2, class_token=class_token, **size))
    model = nn.Sequential(nn.Conv2d(3, 16, 8, 8), pool).eval()
    x = images(24, 40)
    maps = recorded(model, x)
    [attn], _ = unfused(model, kind.__name__, x)
    layer, name = maps[1], "cls" if class_token else "mean"
    assert layer.attn.shape == (2, 2, 16, 16) and (layer.attn - attn).abs().max() <= LIMIT
    assert layer.feat_size == (3, 5) and layer.prefix_names == (name,)
    assert torch.equal(layer.of_query(name)[1].flatten(2), layer.attn[:, :, 0, 1:])
