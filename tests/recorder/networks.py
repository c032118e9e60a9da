"""Small networks of every recorded architecture, the positions of their queries and keys, and their own attention.

Shape letters: B images, K heads, W windows of n cells each, H x W a layer's grid.
"""

from collections.abc import Callable
from functools import partial
from itertools import product
from typing import NamedTuple
from unittest import mock

import numpy as np
import pytest
import timm
import torch
import torchvision
from PIL import Image
from timm.layers.attention_pool2d import AttentionPool2d, RotAttentionPool2d
from timm.layers.bottleneck_attn import BottleneckAttn
from torch import nn
from torchvision.models import swin_transformer

import ea_vision
from ea_vision.base.files import atomic_write
from ea_vision.engine import checkpoint, run_folder
from tests import run_folders
from tests.models.zoo import TINY, images

NAME = "ea_conv_transformer_cifar"
KWARGS = {"num_classes": 3, "img_size": 16, "widths": [8, 8, 16, 16]}
SWIN = {"patch_size": 2, "window_size": 4, "embed_dim": 12, "depths": [2, 2], "num_heads": [2, 3]}
CAIT = {"img_size": 32, "patch_size": 8, "embed_dim": 24, "depth": 2, "num_heads": 3}
XCIT = {"img_size": 32, "embed_dim": 24, "depth": 2, "num_heads": 3, "cls_attn_layers": 1}
LIMIT = 1e-5


def photo(size=(80, 60)):
    shape = (size[1], size[0], 3)
    return Image.fromarray(np.random.default_rng(0).integers(0, 256, shape, dtype=np.uint8))


def lively(model):
    """Return the model in evaluation mode, with weights so large that maps are far from uniform."""
    generator = torch.Generator().manual_seed(2)
    for parameter in model.parameters():
        if parameter.ndim > 1:
            std = 1.5 * parameter[0].numel() ** -0.5
            nn.init.normal_(parameter, std=std, generator=generator)
    return model.eval()


def gap(a, b):
    """Return the largest difference of two tensors."""
    return (a - b).abs().max()


def timms(name, **options):
    if not timm.is_model(name):
        pytest.skip("this timm lacks it")
    return lively(timm.create_model(name, **{"num_classes": 3, **options}))


def tiny(name=NAME, seed=0, **options):
    """One of our convolutional networks: maps of 4x4 and 2x2, two chains of three layers."""
    torch.manual_seed(seed)
    return timm.create_model(name, **{**KWARGS, **options}).eval()


def padding_vit():
    """One of timm's, with patches of 8 pixels: images of other sizes are padded."""
    any_size = {"dynamic_img_size": True, "dynamic_img_pad": True}
    return timms("vit_tiny_patch16_224", img_size=32, patch_size=8, depth=1, **any_size)


def small_swin(img_size=32):
    """One of timm's: layers in windows of 4 cells, in two grids."""
    return timms("swin_tiny_patch4_window7_224", img_size=img_size, **SWIN)


def write_run(folder):
    """Write a run folder of `tiny`: checkpoints of epochs 1 and 2, snapshots of 2 and 4; the epoch is the seed."""
    about = {"classes": ["ant", "bee", "cow"], "mean": [0.5] * 3, "std": [0.2] * 3}
    run_folders.write_run(folder, NAME, tiny(), KWARGS, **about)
    for epoch, file in ((2, "last.ckpt"), (1, "best.ckpt")):
        progress = {"epoch": epoch, "updates": epoch}
        held = {"model": tiny(seed=epoch).state_dict(), "ema": None, "progress": progress}
        atomic_write(folder / file, checkpoint.encode(held))
    for epoch in (2, 4):
        run_folder.write_snapshot(folder, tiny(seed=epoch).state_dict(), epoch)
    return folder


def torchvision_vit(**kwargs):
    network = torchvision.models.VisionTransformer(
        image_size=32,
        patch_size=8,
        num_layers=2,
        num_heads=3,
        hidden_dim=24,
        mlp_dim=32,
        num_classes=5,
        **kwargs,
    )
    return lively(network)


def torchvision_swin():
    """Swin V2, whose layers are those of V1 with other logits."""
    network = swin_transformer.SwinTransformer(
        **SWIN | {"patch_size": [2, 2], "window_size": [4, 4]},
        block=swin_transformer.SwinTransformerBlockV2,
        downsample_layer=swin_transformer.PatchMergingV2,
    )
    return lively(network)


def transformers_model(name, **kwargs):
    import transformers

    if name.startswith("Swin"):
        options = {**SWIN, "image_size": 36}
    else:
        options = {"num_hidden_layers": 2, "num_attention_heads": 3, "intermediate_size": 32}
        options |= {"image_size": 32, "patch_size": 8, "hidden_size": 24}
    config = getattr(transformers, f"{name}Config")(**options | kwargs)
    return lively(getattr(transformers, f"{name}Model")(config))


def pool(kind, class_token):
    size = {"feat_size" if kind is AttentionPool2d else "ref_feat_size": (3, 5)}
    pooling = kind(16, num_heads=2, class_token=class_token, **size)
    return lively(nn.Sequential(nn.Conv2d(3, 16, 8, 8), pooling))


def bottleneck():
    attention = BottleneckAttn(8, 8, feat_size=(3, 5), num_heads=2)
    return lively(nn.Sequential(nn.Conv2d(3, 8, 8, 8), attention))


def windows_of(grid, side, shift, pad_first):
    """Return the cells (row, column) of each window, row by row, None for padding: shifted up and to the left, padded
    below and at the right."""
    H, W = grid
    height, width = grid
    if pad_first:
        height = -(-H // side) * side
        width = -(-W // side) * side
    windows = []
    for top, left in product(range(0, H, side), range(0, W, side)):
        cells = []
        for y, x in product(range(top, top + side), range(left, left + side)):
            if y < height and x < width:
                y = (y + shift) % height
                x = (x + shift) % width
            cells.append((y, x) if y < H and x < W else None)
        windows.append(cells)
    return windows


class Place(NamedTuple):
    """The positions of a layer's queries and keys.

    names: prefix tokens. keys: the keys' grid if it differs from the queries'. windows: their cells, see `windows_of`.
    queries: names of queries that are not pixels. alone: error message of a layer that has only such queries.
    """

    grid: tuple[int, int]
    names: tuple[str, ...] = ()
    keys: tuple[int, int] | None = None
    windows: list | None = None
    queries: tuple[str, ...] = ()
    alone: str = ""


def within(grid, side, shift=0, pad_first=True):
    return Place(grid, windows=windows_of(grid, side, shift, pad_first))


def swin(*grids, pad_first=True):
    """Two layers a grid, the second one's windows of 4 shifted by 2."""
    return [within(grid, 4, shift, pad_first) for grid, shift in product(grids, (0, 2))]


def sam(side):
    return [within((side, side), 4), Place((side, side)), within((side, side), 4)]


def same_places(H, W):
    """MobileViT: a cell attends to the cells at the same position in all 2x2 patches."""
    cells = []
    for i, j in product((0, 1), (0, 1)):
        cells.append(list(product(range(i, H, 2), range(j, W, 2))))
    return Place((H, W), windows=cells)


def by_class(grid):
    return Place(grid, ("cls",), alone="is class attention: its queries are cls alone")


def pooled(names=()):
    return Place(
        (4, 4), names, queries=("pool",), alone="is pooling attention: its queries are pool alone"
    )


CHANNELS = Place((0, 0), alone="attends from channel to channel of a head: draw its matrix")
PATCHES = Place((4, 4))
CLS = Place((4, 4), ("cls",))
DIST = Place((4, 4), ("cls", "dist"))
REG2 = Place((4, 4), ("cls", "reg1", "reg2"))
REG4 = Place((4, 4), ("cls", "reg1", "reg2", "reg3", "reg4"))


def davit(*sides):
    """Attention in windows, then among channels, at each side."""
    places = []
    for side in sides:
        places += [within((side, side), 7), CHANNELS]
    return places


def pvt(*grids):
    """Two layers a grid, whose keys are reduced to 2x3."""
    places = []
    for grid in grids:
        places += [Place(grid, keys=(2, 3))] * 2
    return places


class Network(NamedTuple):
    """How a network is created, the size of its images, and its layers' positions."""

    make: Callable[[], nn.Module]
    places: list[Place]
    side: tuple[int, int] = (32, 32)


def of_timm(name, places, side=(32, 32), **options):
    return Network(partial(timms, name, **options), places, side)


def of_transformers(name, places, side=(32, 32), **options):
    return Network(partial(transformers_model, name, **options), places, side)


def tiny_vits(**places):
    """Return vision transformers of timm's of three blocks by name."""
    return {name: of_timm(name, of_name, **TINY) for name, of_name in places.items()}


SAM = {"patch_size": 4, "window_size": 4}
NETWORKS = {
    "torchvision vit": Network(torchvision_vit, [CLS] * 2),
    "DeiT": of_transformers("DeiT", [DIST] * 2),
    "Dinov2": of_transformers("Dinov2WithRegisters", [REG2] * 2, num_register_tokens=2),
    "DINOv3": of_transformers("DINOv3ViT", [REG2] * 2, num_register_tokens=2),
    "CLIPVision": of_transformers("CLIPVision", [CLS] * 2),
    "SiglipVision": of_transformers("SiglipVision", [PATCHES] * 2 + [pooled()]),
    "transformers, wide": of_transformers(
        "ViT", [Place((2, 5), ("cls",))] * 2, (16, 40), image_size=(16, 40)
    ),
    **tiny_vits(
        deit_tiny_distilled_patch16_224=[DIST] * 3,
        eva02_tiny_patch14_224=[CLS] * 3,
        vit_small_patch16_dinov3=[REG4] * 3,  # rotary positions and registers
        beit_base_patch16_224=[CLS] * 3,
        vit_base_patch16_siglip_224=[PATCHES] * 3 + [pooled()],
        vit_pe_core_tiny_patch16_384=[CLS] * 3 + [pooled(("cls",))],
        # blocks that attend themselves
        vit_pwee_patch16_reg1_gap_256=[Place((4, 4), ("reg1",))] * 3,
    ),
    "dinov2": of_timm("vit_small_patch14_reg4_dinov2", [REG4] * 3, init_values=0.5, **TINY),
    "vit, wide": of_timm(
        "vit_tiny_patch16_224", [Place((2, 3), ("cls",))] * 2, (32, 48), img_size=(32, 48), depth=2
    ),
    "swin": Network(
        partial(small_swin, (36, 28)), swin((18, 14), (9, 7), pad_first=False), (36, 28)
    ),
    "swinv2": of_timm(
        "swinv2_tiny_window8_256",
        swin((16, 20), (8, 10), pad_first=False),
        (32, 40),
        img_size=(32, 40),
        **SWIN,
    ),
    "torchvision swin": Network(torchvision_swin, swin((18, 14), (9, 7)), (36, 28)),
    "transformers swin": of_transformers("Swin", swin((18, 18), (9, 9)), (36, 36)),
    "transformers swinv2": of_transformers("Swinv2", swin((18, 18), (9, 9)), (36, 36)),
    "transformers sam": of_transformers(
        "SamVision",
        sam(9),
        (36, 36),
        num_hidden_layers=3,
        num_attention_heads=2,
        image_size=36,
        global_attn_indexes=[1],
        output_channels=8,
        mlp_dim=32,
        **SAM,
    ),
    "sam": of_timm(
        "samvit_base_patch16",
        sam(10),
        (40, 40),
        img_size=40,
        embed_dim=24,
        depth=3,
        num_heads=2,
        global_attn_indexes=(1,),
        neck_chans=8,
        **SAM,
    ),
    "mobilevit": of_timm(
        "mobilevit_xxs",
        [same_places(10, 10)] * 2 + [same_places(6, 6)] * 4 + [same_places(4, 4)] * 3,
        (80, 80),
    ),
    "tiny_vit": of_timm(
        "tiny_vit_5m_224",
        [within((8, 8), 7)] * 2 + [within((4, 4), 14)] * 6 + [within((2, 2), 7)] * 2,
        (64, 64),
    ),
    "davit": of_timm("davit_tiny", davit(16, 8, 4, 4, 4, 2), (64, 64)),
    "gcvit": of_timm(
        "gcvit_xxtiny",
        [within((16, 16), 2)] * 2
        + [within((8, 8), 2)] * 2
        + [within((4, 4), 4)] * 6
        + [within((2, 2), 2)] * 2,
        (64, 64),
        img_size=64,
    ),
    "pvt": of_timm("pvt_v2_b0", pvt((16, 24), (8, 12), (4, 6), (2, 3)), (64, 96)),
    "cait": of_timm(
        "cait_xxs24_224",
        [Place((4, 6))] * 2 + [by_class((4, 6))] * 2,
        (32, 48),
        **{**CAIT, "img_size": (32, 48)},
    ),
    "xcit": of_timm("xcit_nano_12_p16_224", [CHANNELS] * 2 + [by_class((2, 2))], **XCIT),
    "pool after the mean": Network(
        partial(pool, AttentionPool2d, False), [Place((3, 5), ("mean",))], (24, 40)
    ),
    "rotary pool by class": Network(
        partial(pool, RotAttentionPool2d, True), [Place((3, 5), ("cls",))], (24, 40)
    ),
    "bottleneck": Network(bottleneck, [Place((3, 5))], (24, 40)),
}


def made(name):
    """Return the network of a name, with the same weights each time, and images for it."""
    torch.manual_seed(0)
    return NETWORKS[name].make(), images(*NETWORKS[name].side)


def hooks_of(model):
    return sum(len(m._forward_hooks) + len(m._forward_pre_hooks) for m in model.modules())


def check_closed(model):
    """Require that no recorder is left in a network."""
    assert hooks_of(model) == 0
    assert torch._C._len_torch_function_stack() == 0
    for module in model.modules():
        assert "_attend" not in vars(module)


def first(output):
    return output if isinstance(output, torch.Tensor) else output[0]


@torch.no_grad()
def recorded(model, x, parts="attn", layers=None, heads=None, **kwargs):
    """Return the maps; outputs must be bit-identical (1e-6 with torch's layer, which leaves its fast path)."""
    before = hooks_of(model)
    expected = first(model(x, **kwargs))
    with ea_vision.record_attention(model, layers, heads, parts) as maps:
        output = first(model(x, **kwargs))
    multi = any(type(module) is nn.MultiheadAttention for module in model.modules())
    limit = 1e-6 if multi else 0
    torch.testing.assert_close(output, expected, atol=limit, rtol=limit)
    assert hooks_of(model) == before
    return maps


def unfused(model, *args, **kwargs):
    """Run the network with its unfused attention; return all softmax results with three or more dimensions."""
    formed = []
    softmax = torch.Tensor.softmax

    def watched(self, *args, **kwargs):
        result = softmax(self, *args, **kwargs)
        if self.ndim > 2:
            formed.append(result.detach())
        return result

    def ask(_, args, kwargs):
        return args, {**kwargs, "need_weights": True, "average_attn_weights": False}

    if hasattr(model, "set_attn_implementation"):
        model.set_attn_implementation("eager")
    for module in model.modules():
        if hasattr(module, "fused_attn"):
            module.fused_attn = False
        if type(module).__name__ == "SamVisionSdpaAttention":  # chosen when it was made
            module.__class__ = type(module).__base__
        if isinstance(module, nn.MultiheadAttention):
            module.register_forward_pre_hook(ask, with_kwargs=True)
    with mock.patch.object(torch.Tensor, "softmax", watched), torch.enable_grad():
        model(*args, **kwargs)  # with gradients, which torch's fast path lacks
    return formed


def in_image(maps, place):
    """Return maps of windows (B * W, K, n, n) from cell to cell of the image, window by window: (B, K, N, N)."""
    maps = maps.unflatten(0, (-1, len(place.windows)))
    height, width = place.grid
    tokens = height * width
    image = torch.zeros(len(maps), maps.shape[2], tokens, tokens)
    for window, cells in enumerate(place.windows):
        inside = [index for index, cell in enumerate(cells) if cell]
        at = torch.tensor([cells[index][0] * width + cells[index][1] for index in inside])
        image[:, :, at[:, None], at] = maps[:, window][:, :, inside][..., inside]
    return image
