"""Find where the queries and keys of an attention map lie in the image.

Most transformers need no word of their own: of T tokens those that a parameter names (class token, registers) come
first, the others are the patches, row by row. Layers that attend inside windows, or among channels, are in a table at
the end, by the name of their class.

Shape letters: B images, K heads, H x W a layer's grid, N = H*W, P prefix tokens, W windows of n tokens each.
"""

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from timm.layers import to_2tuple
from timm.models.swin_transformer import window_partition
from torch import Tensor, nn

from ea_vision.recorder.interception import Hooks

Size = tuple[int, int]
PREFIX_PARAMETERS = {
    "cls_token": "cls",
    "class_token": "cls",
    "class_embedding": "cls",
    "dist_token": "dist",
    "distillation_token": "dist",
    "reg_token": "reg",
    "register_tokens": "reg",
}


@dataclass(frozen=True)
class Windows:
    """Groups of tokens that attend among themselves.

    tokens: (W, n) of the grid, row-major; -1 is padding. regions: (W, n), numbers of the parts of a window that see one
    another (a shifted window at the border holds up to four parts of the image).
    """

    tokens: Tensor
    regions: Tensor

    def dense(self, maps: Tensor, count: int) -> Tensor:
        """Put maps (B, W, K, n, n) in the image's coordinates: (B, K, N, N), 0 outside of a query's window."""
        B, _, K = maps.shape[:3]
        tokens = self.tokens.to(maps.device)
        image = maps.new_zeros(
            B, K, count + 1, count + 1
        )  # padding is token N, counted from the end
        image[:, :, tokens[:, :, None], tokens[:, None, :]] = maps.transpose(1, 2)
        return image[:, :, :count, :count]

    def row(self, maps: Tensor, count: int, token: int) -> Tensor:
        """Return `dense(maps, count)[:, :, token]`, (B, K, N), without the rest."""
        window, place = (self.tokens == token).nonzero()[0].tolist()
        image = maps.new_zeros(maps.shape[0], maps.shape[2], count + 1)
        image[:, :, self.tokens[window].to(maps.device)] = maps[:, window, :, place]
        return image[:, :, :count]

    def sees(self, count: int) -> Tensor:
        """Return (N, N), True where the query of a row sees a key."""
        same = self.regions[:, :, None] == self.regions[:, None, :]
        return self.dense(same[None, :, None], count)[0, 0]


@dataclass(frozen=True)
class Layout:
    """Where queries and keys lie.

    feat_size: (H, W) of the queries' grid; of a layer that only prefix tokens ask, of the keys'.
    key_size: (H, W) of the keys' grid; None: as the queries'.
    prefix_names: of the tokens before the grid.
    query_names: of queries that are no tokens (pooling by learned ones); (): the queries are tokens.
    window: (height, width) of the pixels around a query that it sees; None: all.
    windows: groups of tokens that see one another; None: every query sees all keys.
    channels: rows and columns are channels of a head, and have no place in the image.
    """

    feat_size: Size = (0, 0)
    key_size: Size | None = None
    prefix_names: tuple[str, ...] = ()
    query_names: tuple[str, ...] = ()
    window: Size | None = None
    windows: Windows | None = None
    channels: bool = False


def image_seen(model: nn.Module, hooks: Hooks) -> list[torch.Size]:
    """Return a list that holds, once the network looks at an image, its shape (B, C, H, W): its stem's input, or its
    own."""
    seen: list[torch.Size] = []

    def look(_, args: tuple, kwargs: dict) -> None:
        values = (*args, *(value for name, value in kwargs.items() if "mask" not in name))
        shapes = [
            x.shape for x in values if isinstance(x, Tensor) and x.ndim == 4 and x.shape[1] <= 4
        ]
        seen[:] = shapes[:1] or seen

    stem = next(
        (
            module
            for name, module in model.named_modules()
            if ".evolution." not in name
            and isinstance(module, nn.Conv2d)
            and module.in_channels <= 4
        ),
        model,
    )
    for module in dict.fromkeys((model, stem)):
        hooks.add(module.register_forward_pre_hook, look)
    return seen


def learned_queries(model: nn.Module, name: str) -> tuple[str, ...]:
    """Return names for the queries that a layer, or what it is a part of, has learned ("pool", or "pool1", "pool2"):
    timm's AttentionPoolLatent, SigLIP's head in transformers; () of layers whose queries are tokens."""
    for owner in _owners(model, name):
        queries = getattr(owner, "latent", getattr(owner, "probe", None))
        if isinstance(queries, nn.Parameter) and not (name and owner is model):
            count = queries.shape[-2]
            return (
                ("pool",) if count == 1 else tuple(f"pool{number + 1}" for number in range(count))
            )
    return ()


def prefix_names(model: nn.Module) -> tuple[str, ...]:
    """Return the tokens before a vision transformer's patches, in order: "cls", "dist" (distillation), "reg1", "reg2".

    () of networks that have none.
    """
    counts = {
        PREFIX_PARAMETERS[name]: parameter.shape[-2] if parameter.ndim > 1 else 1
        for path, parameter in model.named_parameters()
        if (name := path.rpartition(".")[2]) in PREFIX_PARAMETERS and parameter.numel()
    }
    names = [kind for kind in ("cls", "dist") if kind in counts]
    known = getattr(
        model, "num_prefix_tokens", len(names) + counts.get("reg", 0)
    )  # timm's word, where there is one
    return (*names[:known], *(f"reg{number + 1}" for number in range(known - len(names))))


def grid_of(tokens: int, image: Size) -> Size | None:
    """Return (H, W) of as many tokens, one for each s x s pixels of the image, rounded down or up; None: no such s."""
    for stride in range(1, max(image) + 1):
        for rounded in (math.floor, math.ceil):
            H, W = (max(1, rounded(side / stride)) for side in image)
            if H * W == tokens:
                return H, W
    return None


def token_layout(
    shape: torch.Size,
    image: torch.Size | None,
    names: tuple[str, ...],
    taken: torch.Size,
    query_names: tuple[str, ...],
) -> Layout:
    """Return where the rows and columns of maps (B, K, queries, keys) lie, prefix tokens first.

    Args:
        image: (B, C, H, W); None: there is none, and the tokens are a sequence.
        names: of the prefix tokens that the network has; a layer may leave them out, among keys or queries.
        taken: shape of what the layer takes; the grid, where that is (B, C, H, W) or (B, H, W, C).
        query_names: of learned queries.

    Raises:
        ValueError: numbers of tokens that are no grid over the image.
    """
    queries, keys = shape[-2:]
    whole = image is None or shape[0] == image[0]  # no windows as a part of the batch
    for grid in (
        (taken[2:], taken[1:3]) if whole and len(taken) == 4 and taken[0] == shape[0] else ()
    ):
        if math.prod(grid) == queries == keys:
            return Layout(tuple(grid))
    if image is None:
        return Layout((1, queries), (1, keys))
    for prefix in (len(names), 0) if whole else ():
        key_size = feat_size = grid_of(keys - prefix, image[2:])
        if not query_names and queries not in (keys, prefix):
            feat_size = grid_of(queries - prefix, image[2:])
        if key_size and feat_size:
            return Layout(feat_size, key_size, names[:prefix], query_names)
    raise ValueError(
        f"must attend over {len(names)} prefix tokens and a grid of patches of {image[0]} images of "
        f"{image[2]}x{image[3]} pixels to have a map, got maps of shape {list(shape)}"
    )


# ---- layers that attend inside windows, or among channels ------------------------------------------------------------


def _grouped(
    block: nn.Module, x: Tensor, size: Any = None, *_, first: int = 1, pad_first: bool = True, **__
) -> Layout:
    """Lay out a grid in the windows of a block: it is shifted up and to the left (cyclically), where the block says so,
    and padded below and at the right; SAM's window_size is 0 where there are none.

    The grid is `size`, where a block is told it (transformers' Swin), else the input's sides from dimension `first` on.
    A side that one window covers does not shift. pad_first: whether the grid is padded before it is shifted.
    """
    grid = tuple(size) if isinstance(size, (tuple, list)) else tuple(x.shape[first : first + 2])
    if not block.window_size:
        return Layout(grid)
    window, shift = (
        to_2tuple(value) for value in (block.window_size, getattr(block, "shift_size", 0))
    )
    down, right = (
        0 if width >= side else by for width, side, by in zip(window, grid, shift, strict=True)
    )

    def pad(tokens: Tensor) -> Tensor:
        return nn.functional.pad(
            tokens, (0, -grid[1] % window[1], 0, -grid[0] % window[0]), value=-1
        )

    tokens = torch.arange(math.prod(grid)).view(grid)
    tokens = (
        pad(tokens).roll((-down, -right), (0, 1))
        if pad_first
        else pad(tokens.roll((-down, -right), (0, 1)))
    )
    H, W = tokens.shape
    regions = 2 * (torch.arange(H) >= H - down)[:, None] + (torch.arange(W) >= W - right)
    cells = window_partition(torch.stack([tokens, regions], -1)[None], tuple(window)).flatten(1, 2)
    return Layout(grid, windows=Windows(*cells.unbind(-1)))


def _mobilevit(block: nn.Module, x: Tensor) -> Layout:
    """Let a pixel see those at its own place in all patches. The grid is that of whole patches, the resized one."""
    (h, w), (H, W) = block.patch_size, x.shape[-2:]
    rows, cols = math.ceil(H / h), math.ceil(W / w)
    tokens = (
        torch.arange(rows * h * cols * w)
        .view(rows, h, cols, w)
        .permute(1, 3, 0, 2)
        .reshape(h * w, -1)
    )
    return Layout((rows * h, cols * w), windows=Windows(tokens, torch.zeros_like(tokens)))


def _pool2d(pool: nn.Module, x: Tensor, *_, **__) -> Layout:
    """Put the pixels' mean, or a class token, before them."""
    return Layout(
        tuple(x.shape[-2:]),
        prefix_names=("mean" if getattr(pool, "cls_token", None) is None else "cls",),
    )


SPECIAL: dict[
    str, Callable[..., Layout]
] = {  # by the layer's class, or that of the block around it
    "timm.models.swin_transformer.SwinTransformerBlock": partial(_grouped, pad_first=False),
    "timm.models.swin_transformer_v2.SwinTransformerV2Block": partial(_grouped, pad_first=False),
    "torchvision.models.swin_transformer.ShiftedWindowAttention": _grouped,
    "transformers.models.swin.modeling_swin.SwinLayer": _grouped,
    "transformers.models.swinv2.modeling_swinv2.Swinv2Layer": _grouped,
    "timm.models.vision_transformer_sam.Block": _grouped,
    "transformers.models.sam.modeling_sam.SamVisionLayer": _grouped,
    "timm.models.gcvit.GlobalContextVitBlock": _grouped,
    "timm.models.tiny_vit.TinyVitBlock": _grouped,
    "timm.models.davit.SpatialBlock": partial(_grouped, first=2),
    "timm.models.mobilevit.MobileVitBlock": _mobilevit,
    **dict.fromkeys(
        (
            "timm.layers.attention_pool2d.AttentionPool2d",
            "timm.layers.attention_pool2d.RotAttentionPool2d",
        ),
        _pool2d,
    ),
    **dict.fromkeys(
        (
            "timm.models.xcit.XCA",
            "timm.models.edgenext.CrossCovarianceAttn",
            "timm.models.davit.ChannelAttention",
            "timm.models.davit.ChannelAttentionV2",
        ),
        lambda *_: Layout(channels=True),
    ),
}


def _owners(model: nn.Module, name: str) -> Iterator[nn.Module]:
    """Yield the module of a name, then the modules around it, the network last."""
    parts = name.split(".")
    for depth in range(len(parts), -1, -1):
        yield model.get_submodule(".".join(parts[:depth]))


def layout_finder(
    model: nn.Module, name: str, image: list[torch.Size], hooks: Hooks
) -> Callable[[Tensor], Layout]:
    """Return a function from maps to a layer's layout: that of its windows or channels, which the input of the layer or
    of a block around it tells, or that of tokens over the image. `image`: see `image_seen`."""
    known = (
        (module, SPECIAL[path])
        for module in _owners(model, name)
        for cls in type(module).__mro__
        if (path := f"{cls.__module__}.{cls.__name__}") in SPECIAL
    )
    owner, read = next(known, (model.get_submodule(name), None))
    names, learned, found = prefix_names(model), learned_queries(model, name), []

    def look(module: nn.Module, args: tuple, kwargs: dict) -> None:
        found[:] = [
            read(module, *args, **kwargs)
            if read
            else next((x.shape for x in args if isinstance(x, Tensor)), ())
        ]

    hooks.add(owner.register_forward_pre_hook, look)
    return lambda maps: (
        found[0]
        if read
        else token_layout(maps.shape, image[0] if image else None, names, found[0], learned)
    )
