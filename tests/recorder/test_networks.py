"""Maps of networks of every architecture are those of their own unfused attention, in the image's coordinates."""

from itertools import product

import pytest
import timm
import torch
import torch.nn.functional as F
from torch import nn
from torch.testing import assert_close

from ea_vision import evolve, record_attention
from ea_vision.base.errors import UsageError
from ea_vision.recorder.recording import recordable_layers
from tests.models.test_any_transformer import NAMES, create, size_of
from tests.models.test_vision_transformer import needs_attn_layer
from tests.recorder.networks import (
    LIMIT,
    NETWORKS,
    TINY,
    gap,
    hooks_of,
    images,
    in_image,
    lively,
    made,
    recorded,
    transformers_model,
    unfused,
)


def check(layer, attn, place):
    """Compare a layer with what was formed (B, K, T, T), (B * K, T, T), or in windows (B * W, K, n, n)."""
    attn = attn.unflatten(0, (-1, layer.attn.shape[1])) if attn.ndim == 3 else attn
    attn = attn if place.windows is None else in_image(attn, place)
    assert gap(layer.attn, attn) <= LIMIT and attn.std(-1).max() > 1e-3
    assert (layer.feat_size, layer.prefix_names, layer.key_size) == (
        *place[:2],
        place.keys or place.grid,
    )
    assert layer.query_names == (place.queries or place.names)
    rows = {name: row for row, name in enumerate(layer.query_names)}
    if place.alone:
        for refused in (layer.spatial, lambda: layer.of_cell((0, 0))):
            with pytest.raises(UsageError, match=place.alone):
                refused()
    else:
        (H, W), P = place.grid, len(place.names)
        rows |= {
            (row, col): P + row * W + col for row, col in ((0, 0), (1, W // 2), (H - 1, W - 1))
        }
        assert torch.equal(layer.spatial().flatten(-2).flatten(2, 3), layer.attn[:, :, P:, P:])
        seen = (attn.flatten(0, 1).amax(0)[P:] > 1e-20).sum(-1).view(H, W)
        assert torch.equal(torch.from_numpy(layer.num_keys()), seen)
        assert_close(layer.relative()[:, :, P:], layer.attn[:, :, P:] * seen.view(-1, 1))
    for query, row in rows.items():
        prefix, pixels = layer.of_cell(query)
        assert pixels.shape[-2:] == layer.key_size
        assert torch.equal(torch.cat([prefix, pixels.flatten(2)], -1), layer.attn[:, :, row])


@pytest.mark.parametrize("name", NETWORKS)
def test_maps_are_those_of_the_networks_own_unfused_attention(name):
    """And with its fused attention off."""
    (model, x), places = made(name), NETWORKS[name].places
    maps, found = recorded(model, x), recordable_layers(model)
    formed = unfused(model, x)
    assert [(layer.number, layer.name) for layer in maps.values()] == [
        (layer.number, layer.name) for layer in found
    ]
    assert [layer.pools for layer in found] == [bool(place.queries) for place in places]
    for layer, slow, attn, place in zip(
        maps.values(), recorded(model, x).values(), formed, places, strict=True
    ):
        check(layer, attn, place)
        check(slow, attn, place)


def test_windows_alone_are_kept_and_a_query_that_a_layer_lacks():
    layer = recorded(*made("swin"))[1]
    assert layer._parts["attn"].numel() < layer.attn.numel() / 4
    with pytest.raises(
        UsageError, match="query dist must be a token before the patches of layer 1 .* has none"
    ):
        layer.of_query("dist")


def test_talking_heads_mix_the_recorded_probabilities():
    model, x = made("cait")
    parts = ("attn", "mixed_attn")
    assert [layer.parts for layer in recordable_layers(model)] == [parts] * 2 + [parts[:1]] * 2
    maps = recorded(model, x, parts)
    for block, layer in zip(model.blocks, maps.values(), strict=False):
        with torch.no_grad():
            again = block.attn.proj_w(layer.attn.permute(0, 2, 3, 1)).permute(0, 3, 1, 2)
        assert_close(layer["mixed_attn"], again, atol=LIMIT, rtol=LIMIT)


@needs_attn_layer
@pytest.mark.parametrize("dual_lambda", [False, True])
def test_differential_attention(dual_lambda):
    """Both maps, and what weighs the values: their difference times the values, normed, is the layer's output."""
    from timm.layers import DiffAttention

    model, x = timm.create_model("vit_tiny_patch16_224", attn_layer="diff", **TINY), images()
    for number, block in enumerate(model.blocks):
        block.attn = DiffAttention(
            48, num_heads=3, qkv_bias=True, depth=number, dual_lambda=dual_lambda
        )
        with torch.no_grad():
            for name in ("lambda_a", "lambda_q1", "lambda_k1"):
                if getattr(block.attn, name) is not None:
                    getattr(block.attn, name).fill_(0.3)
    model, parts = lively(model), ("attn", "first_attn", "second_attn")
    assert [layer.parts for layer in recordable_layers(model)] == [parts] * 3
    maps, values = recorded(model, x, parts), []
    attention = model.blocks[2].attn
    attention.qkv.register_forward_hook(
        lambda _, args, output: values.append(
            output[..., 96:].reshape(2, 17, 3, 16).transpose(1, 2)
        )
    )
    attention.sub_norm.register_forward_pre_hook(lambda _, args: values.append(args[0]))
    formed = unfused(model, x)
    assert_close(maps[3].attn @ values[0], values[1], atol=1e-5, rtol=1e-5)
    for layer, slow, both in zip(
        maps.values(), recorded(model, x, parts).values(), formed, strict=True
    ):
        for part, expected in zip(parts[1:], both.view(2, 3, 2, 17, 17).unbind(2), strict=True):
            assert gap(layer[part], expected) <= LIMIT
        assert gap(slow.attn, layer.attn) <= LIMIT and layer.attn.min() < 0
        assert layer.feat_size == (4, 4) and layer.prefix_names == ("cls",)


@pytest.mark.parametrize("name", ["Llama", "Qwen2"])
def test_language_models_of_transformers(name):
    """Whole sequences, padded on the left, and a token after the kept keys of the others."""
    model = transformers_model(
        name,
        num_attention_heads=6,
        num_key_value_heads=2,
        vocab_size=30,
        max_position_embeddings=16,
        head_dim=4,
    )
    tokens = torch.randint(1, 30, (2, 7))
    padded = torch.tensor([[0, 0, 1, 1, 1, 1, 1], [1] * 7])

    def forward(queries, **more):
        """The last tokens, after those before them."""
        kept = model(tokens[:, :-1], attention_mask=padded[:, :-1], use_cache=True).past_key_values
        return model(
            tokens[:, -queries:],
            attention_mask=padded,
            past_key_values=kept if queries == 1 else None,
            use_cache=queries == 1,
            **more,
        )

    for queries in (7, 1):
        model.set_attn_implementation("sdpa")
        with torch.no_grad(), record_attention(model) as maps:
            forward(queries)
        model.set_attn_implementation("eager")
        with torch.no_grad():
            by_hand = forward(queries, output_attentions=True).attentions
        assert [layer.name for layer in maps.values()] == [
            "layers.0.self_attn",
            "layers.1.self_attn",
        ]
        for layer, attn in zip(maps.values(), by_hand, strict=True):
            real = padded[:, -queries:].bool()  # what padding attends to is nobody's matter
            assert layer.attn.shape == (2, 6, queries, 7)
            assert (layer.attn - attn).transpose(1, 2)[real].abs().max() <= LIMIT
            assert layer.feat_size == (1, queries) and layer.key_size == (1, 7)


def test_a_layer_of_one_tower_and_windows_that_are_not_known():
    """MaxViT's windows would pass for the grid of a small image, were it not for their number."""
    transformers = pytest.importorskip("transformers", reason="transformers is not installed")
    small = dict(hidden_size=24, num_hidden_layers=1, num_attention_heads=3, intermediate_size=32)
    clip = transformers.CLIPModel(
        transformers.CLIPConfig(
            text_config=dict(**small, vocab_size=30, max_position_embeddings=8),
            vision_config=dict(**small, image_size=32, patch_size=8),
            projection_dim=8,
        )
    ).eval()
    [vision] = [
        layer.name for layer in recordable_layers(clip) if layer.name.startswith("vision_model")
    ]
    with torch.no_grad(), record_attention(clip, vision) as maps:
        clip(input_ids=torch.ones(2, 5, dtype=torch.long), pixel_values=images())
    assert len(recordable_layers(clip)) == 2 and maps[vision].attn.shape == (2, 3, 17, 17)
    maxvit = timm.create_model("maxvit_rmlp_pico_rw_256", num_classes=3).eval()
    with (
        torch.no_grad(),
        pytest.raises(ValueError, match=r"attention layer 1 \(.*\) must attend over .*got maps of"),
        record_attention(maxvit),
    ):
        maxvit(images(256, 256, 1))


# ---- layers as anybody writes them -----------------------------------------------------------------------------------


class Fused(nn.Module):
    """Attention of 4 heads of queries, and as many or fewer of keys and values, by torch's function."""

    def __init__(self, key_heads):
        super().__init__()
        self.key_heads, self.qkv = key_heads, nn.Linear(16, 48)

    def heads(self, x):
        """Return queries, keys and values (B, heads, T, 4)."""
        q, k, v = self.qkv(x).unflatten(-1, (3, 4, 4)).permute(2, 0, 3, 1, 4)
        return q, k[:, : self.key_heads], v[:, : self.key_heads]

    def forward(self, x, **masks):
        out = F.scaled_dot_product_attention(
            *self.heads(x), scale=0.7, enable_gqa=self.key_heads < 4, **masks
        )
        return out.transpose(1, 2).flatten(2)


class Written(nn.Module):
    """Attention of heads (B, 5, T, D), with a softmax."""

    num_heads = 5

    def __init__(self, softmax):
        super().__init__()
        self.softmax = softmax

    def forward(self, x):
        return self.softmax(x @ x.mT) @ x


LOWER = torch.ones(6, 6, dtype=torch.bool).tril()
PADDED = (
    LOWER & torch.tensor([[False] * 2 + [True] * 4, [True] * 6])[:, None, None, :]
)  # the first lacks two tokens
FLOAT = torch.arange(36.0).sin().view(6, 6)
MASKS = {
    "none": ({}, 0.0),
    "causal": (dict(is_causal=True), LOWER.log()),
    "float": (dict(attn_mask=FLOAT), FLOAT),
    "padded": (dict(attn_mask=PADDED), PADDED.log()),
}  # and what is added to the logits


@pytest.mark.parametrize("key_heads", [4, 2])
@pytest.mark.parametrize("masked", MASKS)
def test_masks_and_grouped_queries(masked, key_heads):
    """Query by query; one whose keys are all masked has a row of zeros, as torch computes it. A sequence without an
    image is a map of height 1."""
    layer, x, (masks, bias) = lively(Fused(key_heads)), torch.randn(2, 6, 16), MASKS[masked]
    wrapped = nn.Sequential(nn.Identity(), layer) if masked == "none" else layer
    maps = recorded(wrapped, x, **masks)
    assert maps[1].heads == (0, 1, 2, 3) and maps[1].feat_size == (1, 6)
    with torch.no_grad():
        q, k, _ = layer.heads(x)
    bias = torch.as_tensor(bias).expand(2, 1, 6, 6)
    for b, head, i in product(range(2), range(4), range(6)):
        logits = 0.7 * k[b, head * key_heads // 4] @ q[b, head, i] + bias[b, 0, i]
        assert gap(maps[1].attn[b, head, i], logits.softmax(-1).nan_to_num(0)) <= LIMIT


@pytest.mark.parametrize(
    "how",
    [
        lambda a: a.softmax(-1),
        lambda a: torch.softmax(a, dim=3),
        lambda a: F.softmax(a, dim=-1),
        nn.Softmax(dim=-1),
        lambda a: torch.special.softmax(a, -1),
        lambda a: a.flatten(0, 1).softmax(dim=-1).view(a.shape),
    ],
)
def test_softmax_however_it_is_written(how):
    x = torch.randn(3, 5, 6, 4)
    assert torch.equal(recorded(Written(how), x)[1].attn, how(x @ x.mT))


@pytest.mark.parametrize(
    "kwargs",
    [dict(), dict(batch_first=True, kdim=5, vdim=7), dict(batch_first=True, add_bias_kv=True)],
)
@pytest.mark.parametrize("need_weights", [False, True])
def test_multihead_attention_alone(kwargs, need_weights):
    """Self and cross attention, with keys of another number than the queries."""
    layer = lively(nn.MultiheadAttention(8, 2, **kwargs))
    given = [
        torch.randn(3, T, kwargs.get(width, 8)) for T, width in ((6, ""), (4, "kdim"), (4, "vdim"))
    ]
    if not layer.batch_first:
        given = [x.transpose(0, 1) for x in given]
    with torch.no_grad():
        expected, attn = layer(*given, average_attn_weights=False)
        with record_attention(layer) as maps:
            output, weights = layer(*given, need_weights=need_weights)
    assert (weights is None) != need_weights and maps[1].attn.shape == attn.shape
    assert_close(output, expected, atol=1e-6, rtol=1e-6)
    assert gap(maps[1].attn, attn) <= LIMIT


# ---- networks that evolve --------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("kind", ["ea", "conv2d", "talking_heads", "xsa", None])
def test_evolved_transformers_begin_with_the_maps_of_the_plain_ones(name, kind):
    """CaiT has the maps that weigh the values; outputs are bit-identical, and the right logits are handed on."""
    plain, x = create(name).eval(), images(*size_of(name))
    model = evolve(plain, kind=kind, token_conv=kind is None).eval()
    found, hooks = (
        [layer for layer in recordable_layers(model) if "logits" in layer.parts],
        hooks_of(model),
    )
    theirs = "mixed_attn" if name.startswith("cait") else "attn"
    with torch.no_grad():
        expected = model(x)
        with (
            record_attention(
                model, parts={part for layer in found for part in layer.parts}
            ) as maps,
            record_attention(plain, parts=theirs) as before,
        ):
            assert torch.equal(model(x), expected)
            plain(x)
    assert len(found) >= 2 and len(maps) == len(recordable_layers(plain))
    for layer in found:
        own = maps[layer.number]
        assert gap(own.attn, before[layer.number][theirs]) <= LIMIT
        assert own.feat_size == tuple(side // 8 for side in size_of(name))
        if theirs == "attn":
            assert_close(own.attn, own.logits.softmax(-1), atol=LIMIT, rtol=LIMIT)
        if own.prev_logits is not None:
            assert torch.equal(own.prev_logits, maps[layer.number - 1].logits)
    assert hooks_of(model) == hooks and not any(
        "_attend" in vars(module) for module in model.modules()
    )
