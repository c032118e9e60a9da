"""Maps of layers that attend inside windows, with fewer keys, by a class token alone or among channels: in the image's
coordinates, those of hooks on unfused attention, within 1e-5."""
import math

import pytest
import timm
import torch
import torchvision
from torch import nn

from ea_vision import record_attention
from ea_vision.base.errors import UsageError
from ea_vision.recorder.quantities import attention_rollout, measure
from ea_vision.recorder.recording import recordable_layers
from tests.recorder.test_any_transformer import LIMIT, images, lively, recorded
from tests.recorder.test_todays_attention import unfused


def softmaxes(model, x, kind):
    """What enters attn_drop of timm's layers of a kind, their fused attention off, in the order of the forward."""
    maps, handles = [], []
    for module in model.modules():
        if isinstance(getattr(module, "attn_drop", None), nn.Dropout) and type(module).__name__ == kind:
            module.fused_attn = False
            handles.append(module.attn_drop.register_forward_pre_hook(lambda _, args: maps.append(args[0])))
    with torch.no_grad():
        model(x)
    for handle in handles:
        handle.remove()
    return maps


def by_loops(maps, grid, window, shift, pad_first):
    """(B, K, N, N) of windows (B*W, K, n, n), pixel by pixel: shifted up and left, padded below and at the right."""
    H, W = grid
    rows, cols = math.ceil(H / window), math.ceil(W / window)
    B, K = len(maps) // (rows * cols), maps.shape[1]
    size = (rows * window, cols * window) if pad_first else grid
    image = torch.zeros(B, K, H, W, H, W)
    for number in range(rows * cols):
        places = []
        for n in range(window * window):
            y, x = number // cols * window + n // window, number % cols * window + n % window
            inside = y < size[0] and x < size[1]
            y, x = ((y + shift) % size[0], (x + shift) % size[1]) if inside else (y, x)
            places.append((y, x) if inside and y < H and x < W else None)
        for i, query in enumerate(places):
            for j, key in enumerate(places):
                if query and key:
                    for b in range(B):
                        image[b, :, query[0], query[1], key[0], key[1]] = maps[b * rows * cols + number, :, i, j]
    return image.view(B, K, H * W, H * W)


def check_layer(layer, expected, grid):
    assert (layer.attn - expected).abs().max() <= LIMIT and expected.max() > 0.05
    assert layer.feat_size == grid and layer.spatial().shape[2:] == (*grid, *grid)
    for row, col in ((0, 0), (grid[0] - 1, grid[1] - 1), (1, grid[1] // 2)):
        prefix, pixels = layer.of_query((row, col))
        assert prefix.shape[-1] == 0 and torch.equal(pixels, layer.spatial()[:, :, row, col])


SWIN = dict(patch_size=2, window_size=4, embed_dim=12, depths=(2, 2), num_heads=(2, 3), num_classes=3)


@pytest.mark.parametrize("name,side", [
    ("swin_tiny_patch4_window7_224", (32, 40)), ("swinv2_tiny_window8_256", (32, 48)),
    ("swin_tiny_patch4_window7_224", (36, 28))])
def test_timms_swin(name, side):
    """Also with a grid that windows of 4 do not divide."""
    torch.manual_seed(0)
    model, x = lively(timm.create_model(name, **{**SWIN, "img_size": side})), images(*side)
    maps = recorded(model, x)
    formed = softmaxes(model, x, "WindowAttention")
    assert len(maps) == len(formed) == 4
    for layer, attn in zip(maps.values(), formed, strict=True):
        block = model.get_submodule(layer.name.removesuffix(".attn"))
        grid = tuple(s // 2 // (1 if layer.number < 3 else 2) for s in side)
        check_layer(layer, by_loops(attn, grid, 4, block.shift_size[0], pad_first=False), grid)
    assert any(any(layer.shift_size) for layer in model.modules() if hasattr(layer, "shift_size"))
    assert maps[1]._parts["attn"].numel() < maps[1].attn.numel() / 4, "windows alone are kept"


@pytest.mark.parametrize("block", ["V1", "V2"])
def test_torchvisions_swin(block):
    torch.manual_seed(0)
    Block = torchvision.models.swin_transformer.SwinTransformerBlock
    options = {} if block == "V1" else dict(
        block=torchvision.models.swin_transformer.SwinTransformerBlockV2,
        downsample_layer=torchvision.models.swin_transformer.PatchMergingV2)
    model = lively(torchvision.models.SwinTransformer(
        patch_size=[2, 2], embed_dim=12, depths=[2, 2], num_heads=[2, 3], window_size=[4, 4], num_classes=3, **options))
    x, formed = images(36, 28), []
    maps = recorded(model, x)
    softmax = torch.nn.functional.softmax
    with pytest.MonkeyPatch.context() as patch, torch.no_grad():
        patch.setattr(torch.nn.functional, "softmax", lambda a, dim: formed.append(softmax(a, dim)) or formed[-1])
        model(x)
    assert len(maps) == len(formed) == 4 and issubclass(options.get("block", Block), Block)
    for layer, attn in zip(maps.values(), formed, strict=True):
        grid = (18, 14) if layer.number < 3 else (9, 7)
        shift = model.get_submodule(layer.name).shift_size[0]
        check_layer(layer, by_loops(attn, grid, 4, shift, pad_first=True), grid)


def test_transformers_swin():
    transformers = pytest.importorskip("transformers", reason="transformers is not installed")
    torch.manual_seed(0)
    model = lively(transformers.SwinModel(transformers.SwinConfig(
        image_size=36, patch_size=2, embed_dim=12, depths=[2, 2], num_heads=[2, 3], window_size=4)))
    maps = recorded(model, images(36, 36))
    model.set_attn_implementation("eager")
    formed, handles = [], []
    for module in model.modules():
        if type(module).__name__ in ("SwinAttention", "SwinSelfAttention") and not hasattr(module, "self"):
            handles.append(module.register_forward_hook(lambda _, args, output: formed.append(output[1])))
    with torch.no_grad():
        model(images(36, 36), output_attentions=True)
    assert len(maps) == len(formed) == 4
    for layer, attn, shift in zip(maps.values(), formed, (0, 2, 0, 2), strict=True):
        grid = (18, 18) if layer.number < 3 else (9, 9)
        check_layer(layer, by_loops(attn, grid, 4, shift, pad_first=True), grid)


@pytest.mark.parametrize("side", [(32, 32), (40, 40)])
def test_sams_windows_global_blocks_and_relative_positions(side):
    torch.manual_seed(0)
    model = lively(timm.create_model(
        "samvit_base_patch16", img_size=side, patch_size=4, embed_dim=24, depth=3, num_heads=2, window_size=4,
        global_attn_indexes=(1,), use_rel_pos=True, neck_chans=8))
    x, (H, W) = images(*side), (side[0] // 4, side[1] // 4)
    maps, formed = recorded(model, x), softmaxes(model, x, "Attention")
    assert len(maps) == len(formed) == 3 and maps[2].layout.windows is None
    for layer, attn in zip(maps.values(), formed, strict=True):
        attn = attn.unflatten(0, (-1, 2))
        expected = attn if layer.number == 2 else by_loops(attn, (H, W), 4, 0, pad_first=True)
        check_layer(layer, expected, (H, W))


@pytest.mark.parametrize("side", [64, 80])
def test_mobilevit_attends_from_a_pixel_to_those_of_its_place_in_all_patches(side):
    torch.manual_seed(0)
    model = lively(timm.create_model("mobilevit_xxs", num_classes=3))
    x = images(side, side)
    maps, formed = recorded(model, x), softmaxes(model, x, "Attention")
    assert len(maps) == len(formed) == 9
    for layer, attn in zip(maps.values(), formed, strict=True):
        H, W = layer.feat_size
        assert H == W == {64: (8, 4, 2), 80: (10, 6, 4)}[side][(layer.number > 2) + (layer.number > 6)]
        K = attn.shape[1]
        expected = torch.zeros(2, K, H, W, H, W)
        for b in range(2):
            for i in range(4):  # the place in a patch
                part = attn[b * 4 + i].view(K, H // 2, W // 2, H // 2, W // 2)
                expected[b, :, i // 2::2, i % 2::2, i // 2::2, i % 2::2] = part
        check_layer(layer, expected.view(2, K, H * W, H * W), (H, W))


def test_reduced_keys_have_a_grid_of_their_size():
    torch.manual_seed(0)
    model = lively(timm.create_model("pvt_v2_b0", num_classes=3))
    x = images(64, 96)
    maps, formed = recorded(model, x), softmaxes(model, x, "Attention")
    assert len(maps) == len(formed) == 8
    for layer, attn in zip(maps.values(), formed, strict=True):
        stage = int(layer.name.split(".")[1])
        assert layer.feat_size == (16 >> stage, 24 >> stage) and layer.key_size == (2, 3)
        assert (layer.attn - attn).abs().max() <= LIMIT
        assert (layer.num_keys() == 6).all() and layer.of_query((1, 2))[1].shape[-2:] == (2, 3)
        assert layer.spatial().shape[2:] == (*layer.feat_size, 2, 3)
    layer = maps[1]  # a query's row, and where a key lies
    torch.testing.assert_close(layer.of_query((3, 5))[1].flatten(2), formed[0][:, :, 3 * 24 + 5], atol=LIMIT, rtol=0)
    assert list(layer.num_keys().shape) == [16, 24]
    rollout = attention_rollout(maps)
    assert rollout.shape[-1] == 16 * 24 and torch.allclose(rollout.sum(-1), torch.ones(()), atol=1e-4)


def test_caits_talking_heads_and_class_attention():
    torch.manual_seed(0)
    model = lively(timm.create_model(
        "cait_xxs24_224", img_size=(32, 48), patch_size=8, embed_dim=24, depth=2, num_heads=3, num_classes=3))
    x = images(32, 48)
    mixed = softmaxes(model, x, "TalkingHeadAttn")
    with torch.no_grad():
        expected = model(x)

        with record_attention(model, parts=("attn", "mixed_attn")) as maps:
            assert torch.equal(model(x), expected)
    by_class = softmaxes(model, x, "ClassAttn")
    assert [layer.parts for layer in recordable_layers(model)] == [("attn", "mixed_attn")] * 2 + [("attn",)] * 2
    for number in (1, 2):
        layer, proj = maps[number], model.blocks[number - 1].attn.proj_w
        assert (layer["mixed_attn"] - mixed[number - 1]).abs().max() <= LIMIT and layer.feat_size == (4, 6)
        with torch.no_grad():  # what was mixed are the probabilities
            again = proj(layer.attn.permute(0, 2, 3, 1)).permute(0, 3, 1, 2)
        torch.testing.assert_close(again, layer["mixed_attn"], atol=LIMIT, rtol=LIMIT)
        torch.testing.assert_close(layer.attn.sum(-1), torch.ones(2, 3, 24))
        assert layer.prefix_names == ()
    for number in (3, 4):
        layer = maps[number]
        assert (layer.attn - by_class[number - 3]).abs().max() <= LIMIT and layer.attn.shape == (2, 3, 1, 25)
        prefix, pixels = layer.of_query("cls")
        assert torch.equal(torch.cat([prefix, pixels.flatten(2)], -1), layer.attn[:, :, 0])
        with pytest.raises(UsageError, match=r"layer . \(.*\) is class attention: its queries are cls alone"):
            layer.of_query((0, 0))


def test_xcits_maps_are_of_channels_and_have_no_place_in_the_image():
    torch.manual_seed(0)
    model = lively(timm.create_model(
        "xcit_nano_12_p16_224", img_size=32, embed_dim=24, depth=2, num_heads=3, cls_attn_layers=1, num_classes=3))
    x = images()
    maps, formed = recorded(model, x), softmaxes(model, x, "XCA")
    by_class = softmaxes(model, x, "ClassAttn")
    assert [layer.channels for layer in maps.values()] == [True, True, False]
    for number in (1, 2):
        layer = maps[number]
        assert (layer.attn - formed[number - 1]).abs().max() <= LIMIT and layer.attn.shape == (2, 3, 8, 8)
        for refused in (layer.num_keys, layer.spatial, lambda of=layer: of.of_query("cls"),
                        lambda of=layer: of.of_query((0, 0))):
            with pytest.raises(UsageError, match="attends from channel to channel of a head: its matrix can be drawn"):
                refused()
    assert (maps[3].attn - by_class[0]).abs().max() <= LIMIT and maps[3].feat_size == (2, 2)


def test_windows_that_are_not_known_are_refused():
    """MaxViT's windows would pass for the grid of a small image, were it not for their number."""
    model = timm.create_model("maxvit_rmlp_pico_rw_256", num_classes=3).eval()
    message = r"attention layer 1 \(.*\) must attend over .*got maps of shape"
    with torch.no_grad(), pytest.raises(ValueError, match=message), record_attention(model):
        model(images(256, 256, 1))


@pytest.mark.parametrize("name,kind,windows", [
    ("tiny_vit_5m_224", "Attention", [((8, 8), 7)] * 2 + [((4, 4), 14)] * 6 + [((2, 2), 7)] * 2),
    ("davit_tiny", "WindowAttention", [((16, 16), 7), ((8, 8), 7)] + [((4, 4), 7)] * 3 + [((2, 2), 7)]),
    ("gcvit_xxtiny", "WindowAttentionGlobal", [((16, 16), 2)] * 2 + [((8, 8), 2)] * 2 + [((4, 4), 4)] * 6
     + [((2, 2), 2)] * 2)])
def test_windows_that_do_not_shift(name, kind, windows):
    torch.manual_seed(0)
    options = {"img_size": 64} if name.startswith("gcvit") else {}
    model, x = lively(timm.create_model(name, num_classes=3, **options)), images(64, 64)
    maps = [layer for layer in recorded(model, x).values() if not layer.channels]
    formed, _ = unfused(model, kind, x)
    assert len(maps) == len(formed) == len(windows)
    for layer, attn, (grid, window) in zip(maps, formed, windows, strict=True):
        check_layer(layer, by_loops(attn, grid, window, 0, pad_first=True), grid)


def test_uniform_attention_in_windows():
    """Queries that look at all alike: entropy and distance are those of uniform attention over what a window shows."""
    torch.manual_seed(0)
    model = timm.create_model("swin_tiny_patch4_window7_224", **{**SWIN, "img_size": 32}).eval()
    with torch.no_grad():
        for block in (block for stage in model.layers for block in stage.blocks):
            block.attn.qkv.weight.zero_()
            block.attn.qkv.bias.zero_()
            block.attn.relative_position_bias_table.zero_()
    for layer in measure(model, [images()]):
        assert layer.entropy.tolist() == pytest.approx([layer.uniform_entropy] * len(layer.entropy), rel=1e-4)
        assert layer.distance.tolist() == pytest.approx([layer.uniform_distance] * len(layer.distance), rel=1e-4)


def test_transformers_text_layers_are_refused():
    transformers = pytest.importorskip("transformers", reason="transformers is not installed")
    small = dict(hidden_size=24, num_hidden_layers=1, num_attention_heads=3, intermediate_size=32)
    model = transformers.CLIPModel(transformers.CLIPConfig(
        text_config=dict(**small, vocab_size=30, max_position_embeddings=8),
        vision_config=dict(**small, image_size=32, patch_size=8), projection_dim=8)).eval()

    names = [layer.name for layer in recordable_layers(model)]
    vision = [name for name in names if name.startswith("vision_model")]
    assert len(names) == 2 and len(vision) == 1
    call = dict(input_ids=torch.ones(2, 5, dtype=torch.long), pixel_values=images())
    with torch.no_grad(), record_attention(model, vision) as maps:
        model(**call)
    assert maps[vision[0]].attn.shape == (2, 3, 17, 17) and maps[vision[0]].prefix_names == ("cls",)


@pytest.mark.parametrize("which", ["Swinv2", "SamVision"])
def test_other_windows_of_transformers(which):
    """What their layers give when they are asked for attentions."""
    transformers = pytest.importorskip("transformers", reason="transformers is not installed")
    torch.manual_seed(0)
    if which == "Swinv2":
        config = transformers.Swinv2Config(image_size=36, patch_size=2, embed_dim=12, depths=[2, 2], num_heads=[2, 3],
                                           window_size=4)
        shifts, grids = (0, 2, 0, 2), [(18, 18)] * 2 + [(9, 9)] * 2
    else:
        config = transformers.SamVisionConfig(
            hidden_size=24, num_hidden_layers=3, num_attention_heads=2, image_size=36, patch_size=4, window_size=4,
            global_attn_indexes=[1], output_channels=8, mlp_dim=32)
        shifts, grids = (0, None, 0), [(9, 9)] * 3
    model = lively(getattr(transformers, f"{which}Model")(config))
    maps = recorded(model, images(36, 36))
    if which == "SamVision":
        model.set_attn_implementation("eager")
        model = lively(type(model)(model.config))
    formed, handles = [], []
    for module in model.modules():
        if type(module).__name__ in ("Swinv2SelfAttention", "Swinv2Attention", "SamVisionAttention") and not any(
                type(child).__name__ == "Swinv2SelfAttention" for child in list(module.modules())[1:]):
            handles.append(module.register_forward_hook(lambda _, args, output: formed.append(output[1])))
    with torch.no_grad():
        model(images(36, 36), **({"output_attentions": True} if which == "Swinv2" else {}))
    assert len(maps) == len(formed) == len(shifts)
    for layer, attn, shift, grid in zip(maps.values(), formed, shifts, grids, strict=True):
        attn = attn.unflatten(0, (-1, 2)) if attn.ndim == 3 else attn
        expected = attn if shift is None else by_loops(attn, grid, 4, shift, pad_first=True)
        check_layer(layer, expected, grid)
