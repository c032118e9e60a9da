"""Maps of networks of every architecture are those of their own unfused attention, in the image's coordinates."""

import numpy as np
import pytest
import timm
import torch
import torch.nn.functional as F
from torch import nn
from torch.testing import assert_close

from ea_vision import evolve, record_attention
from ea_vision.recorder.recording import recordable_layers
from tests.models import test_huggingface as huggingface
from tests.models.test_any_transformer import NAMES, create, size_of
from tests.models.test_vision_transformer import needs_attn_layer
from tests.recorder.networks import (
    LIMIT,
    NETWORKS,
    TINY,
    gap,
    images,
    in_image,
    lively,
    made,
    recorded,
    transformers_model,
    unfused,
)
from tests.refused import refused


def check(layer, attn, place):
    """Compare a recorded layer with the network's attn: (B, K, T, T), (B * K, T, T), or windows (B * W, K, n, n)."""
    if attn.ndim == 3:
        attn = attn.unflatten(0, (-1, layer.attn.shape[1]))
    if place.windows is not None:
        attn = in_image(attn, place)
    assert gap(layer.attn, attn) <= LIMIT
    assert attn.std(-1).max() > 1e-3
    assert layer.feat_size == place.grid
    assert layer.prefix_names == place.names
    assert layer.key_size == (place.keys or place.grid)
    assert layer.query_names == (place.queries or place.names)
    rows = {name: row for row, name in enumerate(layer.query_names)}
    if place.alone:
        for ask in (layer.spatial, lambda: layer.of_cell((0, 0))):
            with refused(place.alone):
                ask()
    else:
        height, width = place.grid
        prefix = len(place.names)
        for row, column in ((0, 0), (1, width // 2), (height - 1, width - 1)):
            rows[row, column] = prefix + row * width + column
        spatial = layer.spatial().flatten(-2).flatten(2, 3)
        assert torch.equal(spatial, layer.attn[:, :, prefix:, prefix:])
        largest = attn.amax((0, 1))
        seen = (largest[prefix:] > 1e-20).sum(-1)
        assert np.array_equal(layer.num_keys(), seen.view(height, width))
        relative = layer.attn[:, :, prefix:] * seen.view(-1, 1)
        assert_close(layer.relative()[:, :, prefix:], relative)
    for query, row in rows.items():
        before, pixels = layer.of_cell(query)
        assert pixels.shape[-2:] == layer.key_size
        assert torch.equal(torch.cat([before, pixels.flatten(2)], -1), layer.attn[:, :, row])


@pytest.mark.parametrize("name", NETWORKS)
def test_maps_are_those_of_the_networks_own_unfused_attention(name):
    """Also with fused attention off."""
    model, x = made(name)
    places = NETWORKS[name].places
    maps = recorded(model, x).values()
    layers = recordable_layers(model)
    formed = unfused(model, x)
    again = recorded(model, x).values()
    for layer, one, slow, attn, place in zip(layers, maps, again, formed, places, strict=True):
        assert (layer.number, layer.name) == (one.number, one.name)
        assert layer.pools == bool(place.queries)
        check(one, attn, place)
        check(slow, attn, place)


def test_windows_alone_are_kept_and_a_query_that_a_layer_lacks():
    layer = recorded(*made("swin"))[1]
    assert layer.formed("attn").numel() < layer.attn.numel() / 4
    with refused("query dist must be a token before the patches of layer 1 .* has none"):
        layer.of_query("dist")


def test_talking_heads_mix_the_recorded_probabilities():
    model, x = made("cait")
    parts = ("attn", "mixed_attn")
    assert [layer.parts for layer in recordable_layers(model)] == [parts] * 2 + [parts[:1]] * 2
    maps = recorded(model, x, parts)
    for block, layer in zip(model.blocks, maps.values(), strict=False):
        mixed = block.attn.proj_w(layer.attn.permute(0, 2, 3, 1)).permute(0, 3, 1, 2)
        assert_close(layer["mixed_attn"], mixed, atol=LIMIT, rtol=LIMIT)


@needs_attn_layer
@pytest.mark.parametrize("dual_lambda", [False, True])
def test_differential_attention(dual_lambda):
    """Both maps are recorded, and the map that weighs the values: their difference, times the values, normed, gives the
    layer's output."""
    from timm.layers import DiffAttention

    model = timm.create_model("vit_tiny_patch16_224", attn_layer="diff", **TINY)
    options = {"num_heads": 3, "qkv_bias": True, "dual_lambda": dual_lambda}
    for number, block in enumerate(model.blocks):
        block.attn = DiffAttention(48, depth=number, **options)
    lively(model)
    for name, parameter in model.named_parameters():
        if name.endswith(("lambda_a", "lambda_q1", "lambda_k1")):
            nn.init.constant_(parameter, 0.3)
    x = images()
    parts = ("attn", "first_attn", "second_attn")
    assert [layer.parts for layer in recordable_layers(model)] == [parts] * 3
    maps = recorded(model, x, parts)
    seen = {}

    def keep_values(_, args, output):
        seen["values"] = output[..., 96:].reshape(2, 17, 3, 16).transpose(1, 2)

    def keep_result(_, args):
        seen["result"] = args[0]

    attention = model.blocks[2].attn
    attention.qkv.register_forward_hook(keep_values)
    attention.sub_norm.register_forward_pre_hook(keep_result)
    formed = unfused(model, x)
    assert_close(maps[3].attn @ seen["values"], seen["result"], atol=1e-5, rtol=1e-5)
    again = recorded(model, x, parts)
    for layer, slow, both in zip(maps.values(), again.values(), formed, strict=True):
        first, second = both.view(2, 3, 2, 17, 17).unbind(2)
        assert gap(layer["first_attn"], first) <= LIMIT
        assert gap(layer["second_attn"], second) <= LIMIT
        assert gap(slow.attn, layer.attn) <= LIMIT
        assert layer.attn.min() < 0
        assert layer.feat_size == (4, 4)
        assert layer.prefix_names == ("cls",)


@pytest.mark.parametrize("queries", [7, 1])
@pytest.mark.parametrize("name", ["Llama", "Qwen2"])
@torch.no_grad()
def test_language_models_of_transformers(name, queries):
    """Whole left-padded sequences, and a single token after the cached keys of the others."""
    heads = {"num_attention_heads": 6, "num_key_value_heads": 2, "head_dim": 4}
    model = transformers_model(name, vocab_size=30, max_position_embeddings=16, **heads)
    tokens = torch.randint(1, 30, (2, 7))
    padded = torch.tensor([[0, 0, 1, 1, 1, 1, 1], [1] * 7])

    def forward(**more):
        """The last tokens, after those before them."""
        options = {"attention_mask": padded, "use_cache": False}
        if queries == 1:
            before = model(tokens[:, :-1], attention_mask=padded[:, :-1], use_cache=True)
            options |= {"past_key_values": before.past_key_values, "use_cache": True}
        return model(tokens[:, -queries:], **options, **more)

    model.set_attn_implementation("sdpa")
    with record_attention(model) as maps:
        forward()
    model.set_attn_implementation("eager")
    expected = forward(output_attentions=True).attentions
    real = padded[:, -queries:].bool()  # rows of padding are not compared
    for number, (layer, attn) in enumerate(zip(maps.values(), expected, strict=True)):
        assert layer.name == f"layers.{number}.self_attn"
        assert layer.attn.shape == (2, 6, queries, 7)
        assert gap(layer.attn.transpose(1, 2)[real], attn.transpose(1, 2)[real]) <= LIMIT
        assert layer.feat_size == (1, queries)
        assert layer.key_size == (1, 7)


@torch.no_grad()
def test_a_layer_of_one_tower():
    clip = huggingface.create("CLIP")
    names = [layer.name for layer in recordable_layers(clip)]
    tower = next(name for name in names if name.startswith("vision_model"))
    with record_attention(clip, tower) as maps:
        clip(input_ids=torch.ones(2, 5, dtype=torch.long), pixel_values=images())
    assert len(names) == 6
    assert maps[tower].attn.shape == (2, 4, 17, 17)


@torch.no_grad()
def test_windows_that_are_not_known():
    """MaxViT's windows look like the grid of a small image; only their number tells them apart."""
    maxvit = timm.create_model("maxvit_rmlp_pico_rw_256", num_classes=3).eval()
    with refused(r"layer 1 \(.*\) must .*got maps of", ValueError), record_attention(maxvit):
        maxvit(images(256, 256, 1))


# ---- layers as anybody writes them -----------------------------------------------------------------------------------


class Fused(nn.Module):
    """Attention with 4 query heads and at most as many key and value heads, by torch's fused function."""

    def __init__(self, key_heads):
        super().__init__()
        self.key_heads = key_heads
        self.qkv = nn.Linear(16, 48)

    def heads(self, x):
        """Return queries, keys and values (B, heads, T, 4)."""
        q, k, v = self.qkv(x).unflatten(-1, (3, 4, 4)).permute(2, 0, 3, 1, 4)
        return q, k[:, : self.key_heads], v[:, : self.key_heads]

    def forward(self, x, **masks):
        grouped = self.key_heads < 4
        q, k, v = self.heads(x)
        out = F.scaled_dot_product_attention(q, k, v, scale=0.7, enable_gqa=grouped, **masks)
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
PADDING = torch.tensor([[False] * 2 + [True] * 4, [True] * 6])  # the first lacks two tokens
PADDED = LOWER & PADDING[:, None, None, :]
FLOAT = torch.arange(36.0).sin().view(6, 6)
MASKS = {  # and what is added to the logits
    "none": ({}, torch.zeros(6, 6)),
    "causal": ({"is_causal": True}, LOWER.log()),
    "float": ({"attn_mask": FLOAT}, FLOAT),
    "padded": ({"attn_mask": PADDED}, PADDED.log()),
}


@pytest.mark.parametrize("key_heads", [4, 2])
@pytest.mark.parametrize("masked", MASKS)
def test_masks_and_grouped_queries(masked, key_heads):
    """A query whose keys are all masked has a row of zeros, as in torch. A sequence without an image is a map of height
    1."""
    layer = lively(Fused(key_heads))
    x = torch.randn(2, 6, 16)
    masks, bias = MASKS[masked]
    wrapped = nn.Sequential(nn.Identity(), layer) if masked == "none" else layer
    maps = recorded(wrapped, x, **masks)
    assert maps[1].heads == (0, 1, 2, 3)
    assert maps[1].feat_size == (1, 6)
    q, k, _ = layer.heads(x)
    keys = k.repeat_interleave(4 // key_heads, 1)
    logits = 0.7 * q @ keys.mT + bias
    expected = logits.softmax(-1).nan_to_num(0)
    assert gap(maps[1].attn, expected) <= LIMIT


@pytest.mark.parametrize(
    "softmax",
    [
        lambda a: a.softmax(-1),
        lambda a: torch.softmax(a, dim=3),
        lambda a: F.softmax(a, dim=-1),
        nn.Softmax(dim=-1),
        lambda a: torch.special.softmax(a, -1),
        lambda a: a.flatten(0, 1).softmax(dim=-1).view(a.shape),
    ],
)
def test_softmax_however_it_is_written(softmax):
    x = torch.randn(3, 5, 6, 4)
    assert torch.equal(recorded(Written(softmax), x)[1].attn, softmax(x @ x.mT))


@pytest.mark.parametrize(
    "kwargs",
    [{}, {"batch_first": True, "kdim": 5, "vdim": 7}, {"batch_first": True, "add_bias_kv": True}],
)
@pytest.mark.parametrize("need_weights", [False, True])
def test_multihead_attention_alone(kwargs, need_weights):
    """Self and cross attention, with different numbers of keys and queries."""
    layer = lively(nn.MultiheadAttention(8, 2, **kwargs))
    queries = torch.randn(3, 6, 8)
    keys = torch.randn(3, 4, layer.kdim)
    values = torch.randn(3, 4, layer.vdim)
    inputs = [queries, keys, values]
    if not layer.batch_first:
        inputs = [x.transpose(0, 1) for x in inputs]
    with torch.no_grad():
        expected, attn = layer(*inputs, average_attn_weights=False)
        with record_attention(layer) as maps:
            output, weights = layer(*inputs, need_weights=need_weights)
    assert (weights is not None) == need_weights
    assert maps[1].attn.shape == attn.shape
    assert_close(output, expected, atol=1e-6, rtol=1e-6)
    assert gap(maps[1].attn, attn) <= LIMIT


# ---- networks that evolve --------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("kind", ["ea", "conv2d", "talking_heads", "xsa", None])
@torch.no_grad()
def test_evolved_transformers_begin_with_the_maps_of_the_plain_ones(name, kind):
    """CaiT has the maps that weigh the values; outputs are bit-identical, and the right logits are handed on."""
    size = size_of(name)
    plain = create(name).eval()
    x = images(*size)
    model = evolve(plain, kind=kind, token_conv=kind is None).eval()
    with_logits = [layer for layer in recordable_layers(model) if "logits" in layer.parts]
    parts = set().union(*(layer.parts for layer in with_logits))
    theirs = "mixed_attn" if name.startswith("cait") else "attn"
    maps = recorded(model, x, parts)
    before = recorded(plain, x, theirs)
    assert len(with_logits) >= 2
    assert len(maps) == len(recordable_layers(plain))
    for number in [layer.number for layer in with_logits]:
        layer_maps = maps[number]
        assert gap(layer_maps.attn, before[number][theirs]) <= LIMIT
        assert layer_maps.feat_size == (size[0] // 8, size[1] // 8)
        if theirs == "attn":
            assert_close(layer_maps.attn, layer_maps.logits.softmax(-1), atol=LIMIT, rtol=LIMIT)
        if layer_maps.prev_logits is not None:
            assert torch.equal(layer_maps.prev_logits, maps[number - 1].logits)
    assert not any("_attend" in vars(module) for module in model.modules())
