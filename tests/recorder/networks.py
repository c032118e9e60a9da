"""Small networks of every architecture whose maps are recorded, where their layers look, and their own attention.

Shape letters: B images, K heads, W windows of n cells each, H x W a layer's grid.
"""

from collections.abc import Callable
from contextlib import ExitStack
from functools import partial
from itertools import product
from typing import NamedTuple

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
from tests.models.zoo import TINY, images

NAME, KWARGS = "ea_conv_transformer_cifar", dict(num_classes=3, img_size=16, widths=[8, 8, 16, 16])
SWIN = dict(
    patch_size=2, window_size=4, embed_dim=12, depths=(2, 2), num_heads=(2, 3), num_classes=3
)
CAIT = dict(img_size=32, patch_size=8, embed_dim=24, depth=2, num_heads=3)
LIMIT = 1e-5


def photo(size=(80, 60)):
    return Image.fromarray(
        np.random.default_rng(0).integers(0, 256, (size[1], size[0], 3), dtype=np.uint8)
    )


def lively(model):
    """Weights large enough that maps are far from uniform, in evaluation mode."""
    generator = torch.Generator().manual_seed(2)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.ndim > 1:
                noise = torch.randn(parameter.shape, generator=generator)
                parameter.copy_(noise * parameter[0].numel() ** -0.5 * 1.5)
    return model.eval()


def gap(a, b):
    """Return the largest difference of two tensors."""
    return (a - b).abs().max()


def timms(name, **options):
    if not timm.is_model(name):
        pytest.skip("this timm lacks it")
    return lively(timm.create_model(name, **{"num_classes": 3, **options}))


def tiny(name=NAME, seed=0, **options):
    """A convolutional network of ours: maps of 4x4 and 2x2, two chains of three layers."""
    torch.manual_seed(seed)
    return timm.create_model(name, **{**KWARGS, **options}).eval()


def write_run(folder):
    """Write a run folder of it: checkpoints of epochs 1 and 2, snapshots of 2 and 4, each of its epoch's seed."""
    folder.mkdir(parents=True)
    run_folder.write_config(
        folder,
        {"model": NAME, "dataset": "digits"},
        {
            "model_kwargs": KWARGS,
            "classes": ["ant", "bee", "cow"],
            "mean": [0.5] * 3,
            "std": [0.2] * 3,
        },
    )
    run_folder.write_weights(folder, tiny().state_dict())
    for epoch, file in (2, "last.ckpt"), (1, "best.ckpt"):
        held = {
            "model": tiny(seed=epoch).state_dict(),
            "ema": None,
            "progress": {"epoch": epoch, "updates": epoch},
        }
        atomic_write(folder / file, checkpoint.encode(held))
    for epoch in (2, 4):
        run_folder.write_snapshot(folder, tiny(seed=epoch).state_dict(), epoch)
    return folder


def torchvision_vit(num_layers=2, **kwargs):
    return lively(
        torchvision.models.VisionTransformer(
            image_size=32,
            patch_size=8,
            num_layers=num_layers,
            num_heads=3,
            hidden_dim=24,
            mlp_dim=32,
            num_classes=5,
            **kwargs,
        )
    )


def torchvision_swin():
    """The second version: its layers are the first's with other logits."""
    return lively(
        swin_transformer.SwinTransformer(
            patch_size=[2, 2],
            embed_dim=12,
            depths=[2, 2],
            num_heads=[2, 3],
            window_size=[4, 4],
            num_classes=3,
            block=swin_transformer.SwinTransformerBlockV2,
            downsample_layer=swin_transformer.PatchMergingV2,
        )
    )


def transformers_model(name, **kwargs):
    transformers = pytest.importorskip("transformers", reason="transformers is not installed")
    options = {
        "num_hidden_layers": 2,
        "num_attention_heads": 3,
        "intermediate_size": 32,
        "image_size": 32,
        "patch_size": 8,
        "hidden_size": 24,
    }
    if name.startswith("Swin"):
        options = {
            "image_size": 36,
            "patch_size": 2,
            "embed_dim": 12,
            "depths": [2, 2],
            "num_heads": [2, 3],
            "window_size": 4,
        }
    return lively(
        getattr(transformers, f"{name}Model")(
            getattr(transformers, f"{name}Config")(**options | kwargs)
        )
    )


def pool(kind, class_token):
    size = {"feat_size" if kind is AttentionPool2d else "ref_feat_size": (3, 5)}
    return lively(
        nn.Sequential(
            nn.Conv2d(3, 16, 8, 8), kind(16, num_heads=2, class_token=class_token, **size)
        )
    )


def bottleneck():
    return lively(
        nn.Sequential(nn.Conv2d(3, 8, 8, 8), BottleneckAttn(8, 8, feat_size=(3, 5), num_heads=2))
    )


def windows_of(grid, side, shift, pad_first):
    """Return the cells (row, column) of each window, row by row, None for padding: shifted up and to the left, padded
    below and at the right."""
    (H, W), found = grid, []
    for top in range(0, H, side):
        for left in range(0, W, side):
            cells = []
            for y, x in product(range(top, top + side), range(left, left + side)):
                height, width = (-(-H // side) * side, -(-W // side) * side) if pad_first else grid
                if y < height and x < width:
                    y, x = (y + shift) % height, (x + shift) % width
                cells.append((y, x) if y < H and x < W else None)
            found.append(cells)
    return found


class Place(NamedTuple):
    """Where a layer's queries and keys lie.

    names: of prefix tokens. keys: the keys' grid where it is another. windows: their cells, see `windows_of`.
    queries: names of queries that are no pixels; alone: what a layer says that has no others.
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
    """MobileViT: a cell sees those at its own place in all patches of 2x2."""
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
PATCHES, CLS, DIST = (Place((4, 4), names) for names in ((), ("cls",), ("cls", "dist")))
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
    """How a network is made, the size of its images, and where its layers look."""

    make: Callable[[], nn.Module]
    places: list[Place]
    side: tuple[int, int] = (32, 32)


def table(make, *rows):
    """Return networks of images of 32x32 by name, of rows (name, options, places)."""
    return {name: Network(partial(make, name, **options), places) for name, options, places in rows}


NETWORKS = {
    "torchvision vit": Network(torchvision_vit, [CLS] * 2),
    **table(
        transformers_model,
        ("DeiT", {}, [DIST] * 2),
        ("Dinov2WithRegisters", dict(num_register_tokens=2), [REG2] * 2),
        ("DINOv3ViT", dict(num_register_tokens=2), [REG2] * 2),
        ("CLIPVision", {}, [CLS] * 2),
        ("SiglipVision", {}, [PATCHES] * 2 + [pooled()]),
    ),
    "transformers, wide": Network(
        lambda: transformers_model("ViT", image_size=(16, 40)),
        [Place((2, 5), ("cls",))] * 2,
        (16, 40),
    ),
    **table(
        partial(timms, **TINY),
        ("deit_tiny_distilled_patch16_224", {}, [DIST] * 3),
        ("vit_small_patch14_reg4_dinov2", dict(init_values=0.5), [REG4] * 3),
        ("eva02_tiny_patch14_224", {}, [CLS] * 3),
        ("vit_small_patch16_dinov3", {}, [REG4] * 3),  # rotary positions and registers
        ("beit_base_patch16_224", {}, [CLS] * 3),
        ("vit_base_patch16_siglip_224", {}, [PATCHES] * 3 + [pooled()]),
        ("vit_pe_core_tiny_patch16_384", {}, [CLS] * 3 + [pooled(("cls",))]),
        ("vit_pwee_patch16_reg1_gap_256", {}, [Place((4, 4), ("reg1",))] * 3),
    ),  # blocks that attend themselves
    "vit, wide": Network(
        lambda: timms("vit_tiny_patch16_224", img_size=(32, 48), depth=2),
        [Place((2, 3), ("cls",))] * 2,
        (32, 48),
    ),
    "swin": Network(
        lambda: timms("swin_tiny_patch4_window7_224", **SWIN, img_size=(36, 28)),
        swin((18, 14), (9, 7), pad_first=False),
        (36, 28),
    ),
    "swinv2": Network(
        lambda: timms("swinv2_tiny_window8_256", **SWIN, img_size=(32, 40)),
        swin((16, 20), (8, 10), pad_first=False),
        (32, 40),
    ),
    "torchvision swin": Network(torchvision_swin, swin((18, 14), (9, 7)), (36, 28)),
    "transformers swin": Network(
        lambda: transformers_model("Swin"), swin((18, 18), (9, 9)), (36, 36)
    ),
    "transformers swinv2": Network(
        lambda: transformers_model("Swinv2"), swin((18, 18), (9, 9)), (36, 36)
    ),
    "transformers sam": Network(
        lambda: transformers_model(
            "SamVision",
            num_hidden_layers=3,
            num_attention_heads=2,
            image_size=36,
            patch_size=4,
            window_size=4,
            global_attn_indexes=[1],
            output_channels=8,
            mlp_dim=32,
        ),
        sam(9),
        (36, 36),
    ),
    "sam": Network(
        lambda: timms(
            "samvit_base_patch16",
            patch_size=4,
            embed_dim=24,
            depth=3,
            num_heads=2,
            window_size=4,
            global_attn_indexes=(1,),
            neck_chans=8,
            img_size=40,
        ),
        sam(10),
        (40, 40),
    ),
    "mobilevit": Network(
        lambda: timms("mobilevit_xxs"),
        [same_places(10, 10)] * 2 + [same_places(6, 6)] * 4 + [same_places(4, 4)] * 3,
        (80, 80),
    ),
    "tiny_vit": Network(
        lambda: timms("tiny_vit_5m_224"),
        [within((8, 8), 7)] * 2 + [within((4, 4), 14)] * 6 + [within((2, 2), 7)] * 2,
        (64, 64),
    ),
    "davit": Network(
        lambda: timms("davit_tiny"),
        davit(16, 8, 4, 4, 4, 2),
        (64, 64),
    ),
    "gcvit": Network(
        lambda: timms("gcvit_xxtiny", img_size=64),
        [within((16, 16), 2)] * 2
        + [within((8, 8), 2)] * 2
        + [within((4, 4), 4)] * 6
        + [within((2, 2), 2)] * 2,
        (64, 64),
    ),
    "pvt": Network(
        lambda: timms("pvt_v2_b0"),
        pvt((16, 24), (8, 12), (4, 6), (2, 3)),
        (64, 96),
    ),
    "cait": Network(
        lambda: timms("cait_xxs24_224", **{**CAIT, "img_size": (32, 48)}),
        [Place((4, 6))] * 2 + [by_class((4, 6))] * 2,
        (32, 48),
    ),
    "xcit": Network(
        lambda: timms(
            "xcit_nano_12_p16_224",
            img_size=32,
            embed_dim=24,
            depth=2,
            num_heads=3,
            cls_attn_layers=1,
        ),
        [CHANNELS] * 2 + [by_class((2, 2))],
    ),
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


@torch.no_grad()
def recorded(model, x, parts="attn", layers=None, heads=None, **kwargs):
    """Return the maps; outputs are bit-identical, to 1e-6 with nn.MultiheadAttention, whose fast path is left."""

    def first(output):
        return output if isinstance(output, torch.Tensor) else output[0]

    before, expected = hooks_of(model), first(model(x, **kwargs))
    with ea_vision.record_attention(model, layers, heads, parts) as maps:
        output = first(model(x, **kwargs))
    multi = any(isinstance(module, nn.MultiheadAttention) for module in model.modules())
    torch.testing.assert_close(output, expected, atol=1e-6 * multi, rtol=1e-6 * multi)
    assert hooks_of(model) == before
    return maps


@torch.no_grad()
def unfused(model, *args, **kwargs):
    """Return what a network's own unfused attention forms in a forward: its softmaxes of three dimensions or more."""
    formed, softmax = [], torch.Tensor.softmax

    def watched(self, *args, **kwargs):
        result = softmax(self, *args, **kwargs)
        if self.ndim > 2:
            formed.append(result)
        return result

    def ask(_, args, kwargs):
        return args, {**kwargs, "need_weights": True, "average_attn_weights": False}

    if hasattr(model, "set_attn_implementation"):
        model.set_attn_implementation("eager")
    with pytest.MonkeyPatch.context() as patch, ExitStack() as stack:
        patch.setattr(torch.Tensor, "softmax", watched)
        fast = torch.backends.mha.get_fastpath_enabled()
        torch.backends.mha.set_fastpath_enabled(False)
        stack.callback(torch.backends.mha.set_fastpath_enabled, fast)
        for module in model.modules():
            if hasattr(module, "fused_attn"):
                module.fused_attn = False
            if type(module).__name__ == "SamVisionSdpaAttention":  # chosen when it was made
                module.__class__ = type(module).__base__
            if isinstance(module, nn.MultiheadAttention):
                stack.callback(module.register_forward_pre_hook(ask, with_kwargs=True).remove)
        model(*args, **kwargs)
    return formed


def in_image(maps, place):
    """Return maps of windows (B * W, K, n, n) from cell to cell of the image, window by window: (B, K, N, N)."""
    maps, (H, W) = maps.unflatten(0, (-1, len(place.windows))), place.grid
    image = torch.zeros(len(maps), maps.shape[2], H * W, H * W)
    for window, cells in enumerate(place.windows):
        inside = [i for i, cell in enumerate(cells) if cell]
        at = torch.tensor([cells[i][0] * W + cells[i][1] for i in inside])
        image[:, :, at[:, None], at] = maps[:, window][:, :, inside][..., inside]
    return image
