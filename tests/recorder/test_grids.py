"""A map's grid is the grid of patches made by the network's stem; if the number of tokens differs, tokens have no
position in the image. Queries are pixels of the input."""

import re
from functools import partial

import pytest
import timm
import torch
import transformers
from torch import nn
from torch.testing import assert_close

from ea_vision import record_attention
from tests.models.zoo import on_meta
from tests.recorder.networks import TINY, images, recorded, timms, transformers_model
from tests.refused import refused


def dropping(rate, **options):
    """A network that drops patches at random."""
    network = timms("vit_tiny_patch16_224", patch_drop_rate=rate, **options, **TINY)
    network.patch_drop.train()
    return network


def pruning():
    """A network that keeps 9 of 4x4 patches after the first block."""
    network = timms("vit_tiny_patch16_224", **TINY)
    kept = [0, 3, 1, 4, 2, 5, 9, 7, 16, 11]
    network.blocks[0].register_forward_hook(lambda _, args, output: output[:, kept])
    return network


def masked_autoencoder(**options):
    decoder = {"hidden_size": 24, "num_hidden_layers": 1, "num_attention_heads": 3}
    options |= {f"decoder_{name}": value for name, value in decoder.items()}
    return transformers_model("ViTMAE", decoder_intermediate_size=32, **options)


def merging_one():
    """A network that drops a patch in each block, as ToMe does with r = 1."""
    network = timms("vit_tiny_patch16_224", **TINY)
    network.blocks[0].register_forward_hook(lambda _, args, output: output[:, :-1])
    return network


def shuffling():
    """A masked autoencoder that keeps all patches in another order."""
    model = masked_autoencoder()
    model.embeddings.config.mask_ratio = 0.0
    return model


@pytest.mark.parametrize(
    "make, tokens",
    [
        (partial(dropping, 0.75), 5),
        (pruning, 10),
        (masked_autoencoder, 5),
        (partial(dropping, 0.06), 16),  # as many as there are patches
        (partial(dropping, 0.12, reg_tokens=1), 16),
        (merging_one, 16),
        (shuffling, 17),
    ],
)
def test_tokens_that_are_no_grid_have_no_places(make, tokens):
    model = make()
    with torch.no_grad(), record_attention(model) as maps:
        model(images())
    if make is pruning:  # the grid before it stays
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
    config = masked_autoencoder(mask_ratio=ratio).config
    model = transformers.ViTMAEForPreTraining(config).eval()
    with record_attention(model) as maps:
        model(images())
    encoder, _, decoder = maps.values()
    assert encoder.layout.placeless
    assert decoder.feat_size == (4, 4)


@torch.no_grad()
def recorded_on_meta(name, *shape, **options):
    """Return the layers that a network without numbers records of images of this shape."""
    if not timm.is_model(name):
        pytest.skip("this timm lacks it")
    model = on_meta(name, **options).eval()
    with record_attention(model) as maps:
        model(torch.empty(shape, device="meta"))
    return maps.values()


@pytest.mark.parametrize("channels", [1, 2, 3, 4, 5, 6, 12, 13, 200])
@pytest.mark.parametrize("name", ["vit_tiny_patch16_224", "naflexvit_base_patch16_gap"])
def test_images_have_any_number_of_channels(name, channels):
    naflex = name.startswith("naflex")
    side = 64 if naflex else 32
    options = {"depth": 2} if naflex else TINY
    for layer in recorded_on_meta(name, 2, channels, side, side, in_chans=channels, **options):
        assert layer.feat_size == (4, 4)
        assert layer.layout.image == (side, side)
        assert len(layer.prefix_names) == (4 if naflex else 1)


@pytest.mark.parametrize(
    "name, size, grids",
    [
        ("pit_ti_224", (224, 224), {(27, 27), (14, 14), (7, 7)}),
        ("levit_128s", (224, 224), {(14, 14), (7, 7), (4, 4)}),
        ("naflexvit_base_patch16_gap", (48, 80), {(3, 5)}),
    ],
)
def test_grids_that_follow_no_stride_or_no_convolution(name, size, grids):
    """Overlapping patches, strides without a module, and patches embedded by a linear layer."""
    options = {"depth": 2} if name.startswith("naflex") else {}
    layers = recorded_on_meta(name, 1, 3, *size, **options)
    assert {layer.feat_size for layer in layers} == grids
    assert not any(layer.layout.placeless for layer in layers)


class Patches(nn.Module):
    """A network without a convolution: patches of 8x8 pixels by a linear layer, as people write it."""

    def __init__(self):
        super().__init__()
        self.embed = nn.Linear(192, 16)
        self.attn = nn.MultiheadAttention(16, 2, batch_first=True)

    def forward(self, image, kept=None):
        patches = nn.functional.unfold(image, 8, stride=8).transpose(1, 2)
        x = self.embed(patches)
        x = x[:, :kept]
        return self.attn(x, x, x, need_weights=False)[0]


def test_patches_by_a_linear_layer():
    model = Patches().eval()
    assert recorded(model, images(32, 48))[1].feat_size == (4, 6)
    assert recorded(model, images(32, 48), kept=6)[1].layout.placeless


class Sequence(nn.Module):
    """Tokens (B, T, 8) and a mask, the Annotated Transformer's way."""

    def __init__(self):
        super().__init__()
        self.attn = nn.MultiheadAttention(8, 2, batch_first=True)

    def forward(self, x, mask=None, padding=None, need_weights=False):
        if mask is not None:
            mask = mask[0, 0]
        masks = {"attn_mask": mask, "key_padding_mask": padding}
        return self.attn(x, x, x, need_weights=need_weights, **masks)[0]


@pytest.mark.parametrize("tokens", [16, 5])
@pytest.mark.parametrize("by_keyword", [False, True])
@torch.no_grad()
def test_a_mask_is_no_image(tokens, by_keyword):
    model = Sequence().eval()
    x = torch.randn(2, tokens, 8)
    mask = torch.zeros(2, 1, tokens, tokens)
    with record_attention(model) as maps:
        if by_keyword:
            model(mask=mask, x=x)
        else:
            model(x, mask)
    assert maps[1].feat_size == (1, tokens)
    assert maps[1].layout.image is None


class Either(nn.Module):
    """A network of images and of text."""

    def __init__(self):
        super().__init__()
        self.stem = nn.Conv2d(3, 8, 8, 8)
        self.attn = nn.MultiheadAttention(8, 2, batch_first=True)

    def forward(self, x):
        if x.ndim == 4:
            x = self.stem(x).flatten(2).transpose(1, 2)
        return self.attn(x, x, x)[0]


@torch.no_grad()
def test_an_image_does_not_outlive_its_forward():
    """The tokens of a text do not get the grid of an earlier image."""
    model = Either().eval()
    with record_attention(model) as maps:
        model(images(32, 32))
        assert maps[1].feat_size == (4, 4)
        model(torch.randn(2, 16, 8))
        assert maps[1].feat_size == (1, 16)


@pytest.mark.parametrize("need_weights", [False, True])
@torch.no_grad()
def test_rows_without_a_key_are_zero_where_the_output_is_finite(need_weights):
    model = Sequence().eval()
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


@pytest.fixture(scope="module")
def layer():
    """A layer of 2x3 patches of an input of 32x48 pixels."""
    return recorded(timms("vit_tiny_patch16_224", img_size=(32, 48), depth=1), images(32, 48))[1]


def test_queries_are_pixels_of_the_input(layer):
    """A cell's row of the map, test_networks.py compares."""
    for pixel, cell in {
        (0, 0): (0, 0),
        (15, 16): (0, 1),
        (16, 15): (1, 0),
        (31, 47): (1, 2),
    }.items():
        assert all(map(torch.equal, layer.of_query(pixel), layer.of_cell(cell)))


def test_queries_and_cells_that_the_layer_lacks_are_refused(layer):
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
    """Patches of 8 pixels on 30x39: transformers drops the remaining pixels, timm pads the image."""
    dinov2 = transformers_model("Dinov2")
    left_out = recorded(dinov2, images(30, 39))[1]
    any_size = {"dynamic_img_size": True, "dynamic_img_pad": True}
    padded = timms("vit_tiny_patch16_224", img_size=32, patch_size=8, depth=1, **any_size)
    filled = recorded(padded, images(30, 39))[1]
    assert left_out.feat_size == (3, 4)
    assert filled.feat_size == (4, 5)
    for layer in (left_out, filled):
        rows, columns = layer.feat_size
        for y in range(min(30, 8 * rows)):
            for x in range(min(39, 8 * columns)):
                assert layer.cell_of((y, x)) == (y // 8, x // 8)
    for pixel in ((24, 0), (0, 32), (29, 38)):
        with refused("which cover 24x32 of 30x39 pixels"):
            left_out.of_query(pixel)


def test_queries_of_a_sequence_are_its_tokens():
    layer = recorded(Sequence().eval(), torch.randn(2, 6, 8))[1]
    assert torch.equal(layer.of_query((0, 4))[1].flatten(2), layer.attn[:, :, 4])
    assert torch.equal(layer.of_query("token5")[1], layer.of_query((0, 4))[1])
    with refused("within the input of 1x6"):
        layer.of_query((1, 0))
