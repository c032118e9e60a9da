"""A map's grid is the grid of patches made by the network's stem; if the number of tokens differs, tokens have no
position in the image. Queries are pixels of the input."""

import re
from functools import partial
from itertools import product

import pytest
import timm
import torch
import transformers
from torch import nn
from torch.testing import assert_close

from ea_vision import record_attention
from tests.models.zoo import on_meta
from tests.recorder.networks import TINY, images, padding_vit, recorded, timms, transformers_model
from tests.refused import refused


def dropping(rate, **options):
    """A network that drops patches at random."""
    network = timms("vit_tiny_patch16_224", patch_drop_rate=rate, **options, **TINY)
    network.patch_drop.train()
    return network


def keeping(kept):
    """A network that keeps some of 4x4 patches behind the first block."""
    network = timms("vit_tiny_patch16_224", **TINY)
    network.blocks[0].register_forward_hook(lambda _, args, output: output[:, kept])
    return network


def masked_autoencoder(ratio):
    options = {"hidden_size": 24, "num_hidden_layers": 1, "num_attention_heads": 3}
    options = {f"decoder_{name}": value for name, value in options.items()}
    options |= {"decoder_intermediate_size": 32, "mask_ratio": ratio}
    return transformers_model("ViTMAE", **options)


@pytest.mark.parametrize(
    "make, tokens",
    [
        (partial(dropping, 0.75), 5),
        (partial(keeping, [0, 3, 1, 4, 2, 5, 9, 7, 16, 11]), 10),  # pruning
        (partial(masked_autoencoder, 0.75), 5),
        (partial(dropping, 0.06), 16),  # as many as there are patches
        (partial(dropping, 0.12, reg_tokens=1), 16),
        (partial(keeping, slice(16)), 16),  # without the last, as ToMe does with r = 1
        (partial(masked_autoencoder, 0.0), 17),  # all in another order
    ],
)
def test_tokens_that_are_no_grid_have_no_places(make, tokens):
    model = make()
    with torch.no_grad(), record_attention(model) as maps:
        model(images())
    if make.func is keeping:  # the grid before it stays
        assert maps[1].feat_size == (4, 4)
        assert maps[1].prefix_names == ("cls",)
    layer = maps[2]
    assert layer.layout.placeless
    assert layer.feat_size == layer.key_size == (1, tokens)
    assert_close(layer.attn.sum(-1), torch.ones(2, 3, tokens))
    assert_close(layer.relative().mean(-1), torch.ones(2, 3, tokens))
    for query in (layer.spatial, layer.num_keys, lambda: layer.of_query((0, 0))):
        with refused(f"{tokens} tokens that are no grid of patches.*cls_token"):
            query()


@pytest.mark.parametrize("ratio", [0.0, 0.75])
@torch.no_grad()
def test_a_decoder_puts_the_patches_back_into_their_places(ratio):
    model = transformers.ViTMAEForPreTraining(masked_autoencoder(ratio).config).eval()
    with record_attention(model) as maps:
        model(images())
    encoder, _, decoder = maps.values()
    assert encoder.layout.placeless
    assert decoder.feat_size == (4, 4)


GRIDS = [
    ("pit_ti_224", 3, (224, 224), 1, {(27, 27), (14, 14), (7, 7)}),
    ("levit_128s", 3, (224, 224), 0, {(14, 14), (7, 7), (4, 4)}),
]
for channels in (1, 2, 3, 4, 5, 6, 12, 13, 200):
    GRIDS.append(("naflexvit_base_patch16_gap", channels, (48, 80), 4, {(3, 5)}))
    GRIDS.append(("vit_tiny_patch16_224", channels, (32, 32), 1, {(4, 4)}))


@pytest.mark.parametrize("name, channels, size, prefix, grids", GRIDS)
@torch.no_grad()
def test_grids_of_images_with_any_number_of_channels(name, channels, size, prefix, grids):
    """Patches that overlap, strides without a module, and patches embedded by a linear layer or a convolution."""
    if not timm.is_model(name):
        pytest.skip("this timm lacks it")
    depth = {"naflexvit_base_patch16_gap": {"depth": 2}, "vit_tiny_patch16_224": TINY}
    model = on_meta(name, in_chans=channels, **depth.get(name, {})).eval()
    with record_attention(model) as maps:
        model(torch.empty(2, channels, *size, device="meta"))
    assert {layer.feat_size for layer in maps.values()} == grids
    for layer in maps.values():
        assert not layer.layout.placeless
        assert layer.layout.image == size
        assert len(layer.prefix_names) == prefix


class Attention(nn.Module):
    """Attention of tokens (B, T, 8) with masks, the Annotated Transformer's way, or of the patches of images."""

    def __init__(self, stem=None):
        super().__init__()
        self.stem = stem
        self.attn = nn.MultiheadAttention(8, 2, batch_first=True)

    def forward(self, x, mask=None, padding=None, need_weights=False, kept=None):
        if isinstance(self.stem, nn.Linear):
            x = self.stem(nn.functional.unfold(x, 8, stride=8).mT)[:, :kept]
        elif x.ndim == 4:
            x = self.stem(x).flatten(2).mT
        if mask is not None:
            mask = mask[0, 0]
        masks = {"attn_mask": mask, "key_padding_mask": padding}
        return self.attn(x, x, x, need_weights=need_weights, **masks)[0]


def test_patches_by_a_linear_layer():
    """A network without a convolution, as people write it."""
    model = Attention(nn.Linear(192, 8)).eval()
    assert recorded(model, images(32, 48))[1].feat_size == (4, 6)
    assert recorded(model, images(32, 48), kept=6)[1].layout.placeless


@pytest.mark.parametrize("tokens", [16, 5])
@pytest.mark.parametrize("by_keyword", [False, True])
@torch.no_grad()
def test_a_mask_is_no_image(tokens, by_keyword):
    model = Attention().eval()
    x = torch.randn(2, tokens, 8)
    mask = torch.zeros(2, 1, tokens, tokens)
    with record_attention(model) as maps:
        if by_keyword:
            model(mask=mask, x=x)
        else:
            model(x, mask)
    assert maps[1].feat_size == (1, tokens)
    assert maps[1].layout.image is None


@torch.no_grad()
def test_an_image_does_not_outlive_its_forward():
    """The tokens of a text do not get the grid of an earlier image."""
    model = Attention(nn.Conv2d(3, 8, 8, 8)).eval()
    with record_attention(model) as maps:
        model(images(32, 32))
        assert maps[1].feat_size == (4, 4)
        model(torch.randn(2, 16, 8))
        assert maps[1].feat_size == (1, 16)


@pytest.mark.parametrize("need_weights", [False, True])
@torch.no_grad()
def test_rows_without_a_key_are_zero_where_the_output_is_finite(need_weights):
    model = Attention().eval()
    x = torch.randn(2, 6, 8)
    padding = torch.zeros(2, 6, dtype=torch.bool)
    padding[1] = True
    with record_attention(model) as maps:
        output = model(x, padding=padding, need_weights=need_weights)
    attn = maps[1].attn
    assert_close(attn[0].sum(-1), torch.ones(2, 6))
    assert output[1].isfinite().all() == attn[1].isfinite().all()
    if output.isfinite().all():
        assert (attn[1] == 0).all()


# ---- queries ---------------------------------------------------------------------------------------------------------


def test_queries_and_cells_that_the_layer_lacks_are_refused():
    """In a layer of 2x3 patches."""
    layer = recorded(timms("vit_tiny_patch16_224", img_size=(32, 48), depth=1), images(32, 48))[1]
    for pixel in ((0, -1), (-1, 0), (32, 0), (0, 48), (1000, 1000)):
        with refused(r"within the input of 32x48 pixels, got \("):
            layer.of_query(pixel)
    for cell in ((0, -1), (0, 3), (2, 0)):
        with refused("must lie within its map of 2x3"):
            layer.of_cell(cell)
    required = "must be two whole numbers, or a token's name, such as 'cls', got "
    for place in (5, (1.5, 2), (1, 2, 3), (1,), None):
        with refused(re.escape(f"a query (y, x) {required}{place!r}")):
            layer.of_query(place)
        with refused(re.escape(f"a cell (row, column) {required}{place!r}")):
            layer.of_cell(place)


def test_queries_are_pixels_of_the_patches_that_hold_them():
    """Patches of 8 pixels on 30x39: transformers drops the remaining pixels, timm pads the image. A cell's row of the
    map, test_networks.py compares."""
    left_out = recorded(transformers_model("Dinov2"), images(30, 39))[1]
    filled = recorded(padding_vit(), images(30, 39))[1]
    assert left_out.feat_size == (3, 4)
    assert filled.feat_size == (4, 5)
    for layer, rows, columns in ((left_out, 24, 32), (filled, 30, 39)):
        for y, x in product(range(rows), range(columns)):
            cell = layer.cell_of((y, x))
            assert cell == (y // 8, x // 8)
            assert all(map(torch.equal, layer.of_query((y, x)), layer.of_cell(cell)))
    for pixel in ((24, 0), (0, 32), (29, 38)):
        with refused("which cover 24x32 of 30x39 pixels"):
            left_out.of_query(pixel)


def test_queries_of_a_sequence_are_its_tokens():
    layer = recorded(Attention().eval(), torch.randn(2, 6, 8))[1]
    assert torch.equal(layer.of_query((0, 4))[1].flatten(2), layer.attn[:, :, 4])
    assert torch.equal(layer.of_query("token5")[1], layer.of_query((0, 4))[1])
    with refused("within the input of 1x6"):
        layer.of_query((1, 0))
