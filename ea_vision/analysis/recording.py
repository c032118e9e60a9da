"""Recording attention maps from any of the networks, and from timm's vision transformers and BoTNets.

    with ea_vision.record_attention(model, layers=[16, 17], parts=("attn", "logits")) as maps:
        model(images)
    maps[16].attn       # (B, K, N, N), rows are queries, columns keys, both row-major over maps[16].feat_size

Forward hooks only watch, so recording changes no output bit of our networks. timm's fused attention never forms the
maps: while recording it is switched to its plain path, which may differ in the last bits.

Shape letters: B batch, K heads, H x W the attention map, N = H*W its pixels, T tokens (N and a class token, ...).
"""
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch
from timm.layers.bottleneck_attn import BottleneckAttn
from torch import Tensor, nn

from ea_vision.base.errors import UsageError
from ea_vision.base.files import write_npz
from ea_vision.layers import AugmentedConv2d, TokenAttention

__all__ = ["PARTS", "AttentionLayer", "AttentionMaps", "LayerMaps", "attention_layers", "prefix_names",
           "record_attention"]

PARTS = ("attn", "logits", "self_logits", "conv_logits", "prev_logits")


@dataclass(frozen=True)
class AttentionLayer:
    """A layer that can be recorded.

    number: counted from 1 over all attention layers of the network, in forward order.
    name: of the module.
    num_heads: K.
    parts: those of PARTS that the layer has, and those that its evolution adds.
    """

    number: int
    name: str
    num_heads: int
    parts: tuple[str, ...]


@dataclass
class LayerMaps:
    """What one layer did in the last forward. A part that was not asked for, or that the layer lacks, is None.

    number, name: the layer's, as in `AttentionLayer`.
    heads: which heads the tensors hold, counted from 0; the K below.
    feat_size: (H, W) of the map.
    num_prefix_tokens: tokens before the map's pixels (a ViT's class token); our networks have none.
    prefix_names: what they are, as `prefix_names` calls them.
    window: (height, width) of what a query sees of the map around it; None: all of it.
    attn: (B, K, N, N), the probabilities, before dropout; rows are queries and sum to 1. Of a window over heads the sum
        over the heads that were seen.
    logits: (B, K, N, N), what entered the softmax, also outside of a window of pixels, which hides that from it. A
        layer with a window over heads has none.
    self_logits: (B, K, N, N), this layer's dot products and position terms.
    conv_logits: (B, K, N, N), the evolution's convolution (EA: of the mixed maps, PA: of prev_logits), after its ReLU.
    prev_logits: (B, K, N, N), the previous layer's logits, as mixed in.
    more: (B, K, N, N) each, by name: what an evolution from outside this package adds.
    """

    number: int
    name: str
    heads: tuple[int, ...]
    feat_size: tuple[int, int] = (0, 0)
    num_prefix_tokens: int = 0
    prefix_names: tuple[str, ...] = ()
    window: tuple[int, int] | None = None
    attn: Tensor | None = None
    logits: Tensor | None = None
    self_logits: Tensor | None = None
    conv_logits: Tensor | None = None
    prev_logits: Tensor | None = None
    more: dict[str, Tensor] = field(default_factory=dict)

    def recorded(self) -> tuple[str, ...]:
        """The parts that there are."""
        return (*(part for part in PARTS if getattr(self, part) is not None), *self.more)

    def __getitem__(self, part: str) -> Tensor:
        """The tensor of a part, which must have been recorded."""
        tensor = getattr(self, part) if part in PARTS else self.more.get(part)
        if tensor is None:
            raise KeyError(f"layer {self.number} ({self.name}) has recorded {', '.join(self.recorded())}; got {part!r}")
        return tensor

    def __repr__(self) -> str:
        parts = self.recorded()
        shape = f" of {'x'.join(map(str, self[parts[0]].shape))}" if parts else ""
        return (f"layer {self.number} ({self.name}), map {'x'.join(map(str, self.feat_size))}, heads "
                f"{', '.join(map(str, self.heads))}: {', '.join(parts) or 'nothing'}{shape}")

    def num_keys(self) -> np.ndarray:
        """(H, W): how many keys the query at a pixel of the map sees. One over it is uniform attention."""
        sides = []
        for length, window in zip(self.feat_size, self.window or (2 * max(self.feat_size) + 1,) * 2, strict=True):
            place = np.arange(length)
            sides.append(np.minimum(place + window // 2, length - 1) - np.maximum(place - window // 2, 0) + 1)
        return np.outer(*sides) + self.num_prefix_tokens

    def spatial(self, part: str = "attn") -> Tensor:
        """A part from pixel to pixel, without prefix tokens: (B, K, H, W, H, W), query row and column first."""
        H, W = self.feat_size
        first = self.num_prefix_tokens
        maps = self[part][:, :, first:, first:]
        return maps.reshape(*maps.shape[:2], H, W, H, W)

    def _columns(self, query: tuple[int, int] | str | None) -> dict[str, np.ndarray]:
        """Those of `AttentionMaps.to_dataframe`."""
        parts = {part: self[part].float().cpu().numpy() for part in self.recorded()}
        if query is not None:
            chosen = self.token(query)
            parts = {part: maps[:, :, chosen:chosen + 1] for part, maps in parts.items()}
        B, K, queries, T = next(iter(parts.values())).shape
        image, head, asked, key = (index.reshape(-1) for index in np.indices((B, K, queries, T)))
        asked = asked if query is None else np.full_like(asked, chosen)
        columns = {"image": image, "layer": np.full_like(image, self.number), "head": np.array(self.heads)[head],
                   "query": asked, "key": key}
        for name, token in ("query", asked), ("key", key):
            pixel = token - self.num_prefix_tokens
            columns[f"{name}_row"] = np.where(pixel < 0, -1, pixel // self.feat_size[1])
            columns[f"{name}_col"] = np.where(pixel < 0, -1, pixel % self.feat_size[1])
        return {**columns, **{part: maps.reshape(-1) for part, maps in parts.items()}}

    def token(self, query: tuple[int, int] | str) -> int:
        """The row of a query: (row, column) of the map, or a prefix token by name, such as "cls".

        Raises:
            UsageError: this layer has no such token.
        """
        if not isinstance(query, str):
            return self.num_prefix_tokens + query[0] * self.feat_size[1] + query[1]
        if query not in self.prefix_names:
            raise UsageError(f"query {query} must be a token before the patches of layer {self.number} ({self.name}), "
                             f"which has {', '.join(self.prefix_names) or 'none'}")
        return self.prefix_names.index(query)

    def of_query(self, query: tuple[int, int] | str, part: str = "attn") -> tuple[Tensor, Tensor]:
        """A part's row of one query (see `token`): towards the prefix tokens (B, K, P), and towards the map's pixels
        (B, K, H, W)."""
        row = self[part][:, :, self.token(query)]
        return row[..., :self.num_prefix_tokens], row[..., self.num_prefix_tokens:].unflatten(-1, self.feat_size)


class AttentionMaps(Mapping[int, LayerMaps]):
    """The recorded layers by number; `maps["layer3.0.conv2"]` finds one by its module's name."""

    def __init__(self) -> None:
        self._layers: dict[int, LayerMaps] = {}

    def __getitem__(self, key: int | str) -> LayerMaps:
        for layer in self._layers.values():
            if key == layer.number or key == layer.name:
                return layer
        recorded = ", ".join(f"{layer.number} ({layer.name})" for layer in self.values())
        raise KeyError(f"recorded layers are {recorded or 'none yet'}; got {key!r}")

    def __contains__(self, key: object) -> bool:
        return any(key == layer.number or key == layer.name for layer in self._layers.values())

    def __iter__(self) -> Iterator[int]:
        return iter(sorted(self._layers))

    def __len__(self) -> int:
        return len(self._layers)

    def __repr__(self) -> str:
        return "\n".join([f"attention maps of {len(self)} layers", *(f"  {layer!r}" for layer in self.values())])

    def arrays(self) -> dict[str, np.ndarray]:
        """The maps by layer and part, float32 (B, K, N, N) under "layer2.attn", and beside them "layer2.name",
        "layer2.heads", "layer2.feat_size" (H, W), "layer2.num_prefix_tokens" and "layer2.prefix_names"."""
        arrays = {}
        for layer in self.values():
            about = {name: np.array(getattr(layer, name))
                     for name in ("name", "heads", "feat_size", "num_prefix_tokens", "prefix_names")}
            maps = {part: layer[part].float().cpu().numpy() for part in layer.recorded()}
            arrays.update({f"layer{layer.number}.{name}": value for name, value in {**about, **maps}.items()})
        return arrays

    def to_npz(self, path: str | Path) -> None:
        """Write `arrays` into a file that np.load reads.

        Raises:
            RunError: it cannot be written.
        """
        write_npz(Path(path), self.arrays())

    def to_dataframe(self, query: tuple[int, int] | str | None = None) -> Any:
        """A pandas.DataFrame: a row for each image, layer, head, query and key, a column a part.

        The columns before the parts: image, layer, head, query and key (numbers of tokens, those before a transformer's
        patches first), and query_row, query_col, key_row, key_col of the map, -1 for a token that is no pixel of it.

        Args:
            query: of one query only, (row, column) of the map or a token by name; None: of all, which is N rows times
                the number of keys for each head.

        Raises:
            UsageError: pandas is not installed, or a layer without this query.
        """
        try:
            import pandas
        except ImportError as error:
            raise UsageError("to_dataframe needs pandas, which is not installed: pip install pandas") from error
        return pandas.concat([pandas.DataFrame(layer._columns(query)) for layer in self.values()], ignore_index=True)

    def _begin(self, layer: LayerMaps) -> None:
        """A layer's forward begins. Its second one belongs to the next forward of the network: drop the last one's."""
        if layer.number in self._layers:
            self._layers.clear()
        self._layers[layer.number] = layer


class _Watch:
    """Collects the chosen parts and heads of one layer, as its hooks deliver them."""

    def __init__(self, layer: AttentionLayer, heads: tuple[int, ...], parts: tuple[str, ...], maps: AttentionMaps,
                 window: tuple[int, int] | None = None):
        self.layer, self.heads, self.parts, self.maps, self.window = layer, heads, parts, maps, window
        self.current: LayerMaps | None = None

    def begin(self, *_) -> None:
        """The layer's forward begins; a recomputation in the backward pass (gradient checkpointing) is not one."""
        if torch._C._current_graph_task_id() != -1:
            self.current = None
            return
        self.current = LayerMaps(self.layer.number, self.layer.name, self.heads, window=self.window)
        self.maps._begin(self.current)

    def place(self, feat_size: tuple[int, int], names: tuple[str, ...] = ()) -> None:
        """names: of the prefix tokens."""
        if self.current is not None:
            self.current.feat_size, self.current.prefix_names = feat_size, names
            self.current.num_prefix_tokens = len(names)

    def wants(self, *parts: str) -> bool:
        return self.current is not None and any(part in self.parts for part in parts)

    def save(self, part: str, maps: Tensor) -> None:
        """maps: (B, all heads, N, N)."""
        if self.wants(part):
            maps = maps.detach()
            whole = len(self.heads) == maps.shape[1]
            maps = maps.clone() if whole else maps[:, list(self.heads)]
            if part in PARTS:
                setattr(self.current, part, maps)
            else:
                self.current.more[part] = maps


def _watch_layer(
        module: AugmentedConv2d | TokenAttention, watch: _Watch, model: nn.Module,
) -> list[Callable[[], None]]:
    """The layer goes on by its fast path, which hands out the logits (and so their softmax); the parts that only a slow
    one would have are computed again from the projection and the previous logits, as are all parts of a window."""
    projected: dict[str, Tensor] = {}
    tokens = _Tokens(model, watch.layer) if isinstance(module, TokenAttention) else None

    @torch.no_grad()
    def on_output(_, args, kwargs, output) -> None:
        q, k, _, feat_size = module.heads_of(projected.pop("qkv"))
        logits = module.logits_of(q, k, feat_size) if output[1] is None else output[1].detach()
        watch.place(*((feat_size,) if tokens is None else tokens.place(logits)))
        if watch.wants("attn"):
            attn = module.attention_of(logits, feat_size)  # (B, K, N, head_window * N)
            watch.save("attn", attn.unflatten(-1, (module.head_window, -1)).sum(-2) if module.head_window > 1 else attn)
        if module.head_window > 1:
            return
        watch.save("logits", logits)
        if module.evolution is None:
            watch.save("self_logits", logits)
            return
        prev_logits = kwargs["prev_logits"] if "prev_logits" in kwargs else args[1]
        watch.save("prev_logits", prev_logits)
        if watch.wants("self_logits", *module.evolution.part_names):
            self_logits = module.logits_of(q, k, feat_size)
            watch.save("self_logits", self_logits)
            if watch.wants(*module.evolution.part_names):
                for part, maps in module.evolution.parts(self_logits, prev_logits, logits).items():
                    watch.save(part, maps)

    handles = [
        module.register_forward_pre_hook(watch.begin),
        module.qkv.register_forward_hook(lambda _, args, output: projected.update(qkv=output.detach())),
        module.register_forward_hook(on_output, with_kwargs=True),
        *([] if tokens is None else [tokens.handle]),
    ]
    return [handle.remove for handle in handles]


class _Tokens:
    """Where the patches of a vision transformer lie among its tokens."""

    def __init__(self, model: nn.Module, layer: AttentionLayer) -> None:
        self.layer, self.names, self.grid = layer, prefix_names(model), (0, 0)

        def on_patch_embed(patch_embed, args) -> None:
            self.grid = tuple(patch_embed.dynamic_feat_size(tuple(args[0].shape[-2:])))

        self.handle = model.patch_embed.register_forward_pre_hook(on_patch_embed)

    def place(self, maps: Tensor) -> tuple[tuple[int, int], tuple[str, ...]]:
        """Of maps (B, K, T, T): (H, W) of the patches, and the names of the tokens before them."""
        (H, W), prefix = self.grid, len(self.names)
        if maps.ndim != 4 or maps.shape[2] != maps.shape[3] or maps.shape[3] != prefix + H * W:
            raise ValueError(
                f"attention layer {self.layer.number} ({self.layer.name}) must attend over {prefix} prefix tokens "
                f"and the {H}x{W} patches to have a map, got maps of shape {list(maps.shape)}")
        return (H, W), self.names


def _watch_token_attention(module: nn.Module, watch: _Watch, model: nn.Module) -> list[Callable[[], None]]:
    """timm's attention over a vision transformer's tokens, its fused path off."""
    tokens = _Tokens(model, watch.layer)

    def on_attn(_, args) -> None:
        watch.place(*tokens.place(args[0]))
        watch.save("attn", args[0])

    fused = module.fused_attn
    module.fused_attn = False
    handles = [
        tokens.handle,
        module.register_forward_pre_hook(watch.begin),
        module.attn_drop.register_forward_pre_hook(on_attn),
    ]
    return [*(handle.remove for handle in handles), lambda: setattr(module, "fused_attn", fused)]


def _watch_bottleneck(module: BottleneckAttn, watch: _Watch, model: nn.Module) -> list[Callable[[], None]]:
    """timm's BottleneckAttn keeps its maps to itself: they are computed again from its projection and positions."""
    projected: list[Tensor] = []

    def on_positions(_, args, output) -> None:
        q, qkv = args[0].detach(), projected.pop()  # (B*K, N, D), (B, C, H, W)
        if not watch.wants("attn", "logits", "self_logits"):
            return
        K, N = module.num_heads, q.shape[1]
        k = qkv.split([module.dim_out_qk, module.dim_out_qk, module.dim_out_v], dim=1)[1]
        products = q @ k.reshape(q.shape[0], module.dim_head_qk, N)
        output = output.detach()
        logits = (products + output) * module.scale if module.scale_pos_embed else products * module.scale + output
        logits = logits.reshape(-1, K, N, N)
        watch.place((module.pos_embed.height, module.pos_embed.width))
        watch.save("self_logits", logits)
        watch.save("logits", logits)
        watch.save("attn", logits.softmax(dim=-1))

    handles = [
        module.register_forward_pre_hook(watch.begin),
        module.qkv.register_forward_hook(lambda _, args, output: projected.append(output.detach())),
        module.pos_embed.register_forward_hook(on_positions),
    ]
    return [handle.remove for handle in handles]


def _parts_of(name: str, module: nn.Module, model: nn.Module) -> tuple[str, ...]:
    """The parts that can be recorded of a module; () if it is no attention layer that we know."""
    over_tokens = hasattr(model, "num_prefix_tokens") and hasattr(
        getattr(model, "patch_embed", None), "dynamic_feat_size")
    if isinstance(module, AugmentedConv2d) or over_tokens and isinstance(module, TokenAttention):
        if module.head_window > 1:
            return PARTS[:1]
        return PARTS[:3] if module.evolution is None else (*PARTS[:3], *module.evolution.part_names, "prev_logits")
    if isinstance(module, BottleneckAttn):
        return PARTS[:3]
    if over_tokens and name.startswith("blocks.") and _has_token_maps(module):
        return PARTS[:1]
    return ()


def _has_token_maps(module: nn.Module) -> bool:
    """Whether it is one of timm's attentions (ViT's, EVA's, BEiT's, ...), or a block that attends itself, whose
    probabilities enter `attn_drop` with `fused_attn` off. Those of differential attention are a difference of two."""
    return (isinstance(getattr(module, "attn_drop", None), nn.Dropout) and hasattr(module, "num_heads")
            and hasattr(module, "fused_attn") and not hasattr(module, "lambda_init"))


def _unwrap(model: nn.Module) -> nn.Module:
    """The network inside DistributedDataParallel and torch.compile, in any order."""
    while True:
        if isinstance(model, nn.parallel.DistributedDataParallel):
            model = model.module
        elif hasattr(model, "_orig_mod"):
            model = model._orig_mod
        else:
            return model


def _find(model: nn.Module) -> list[tuple[AttentionLayer, nn.Module]]:
    found = []
    for name, module in model.named_modules():
        parts = _parts_of(name.replace("_orig_mod.", ""), module, model)
        if parts:
            layer = AttentionLayer(len(found) + 1, name.replace("_orig_mod.", ""), module.num_heads, parts)
            found.append((layer, module))
    return found


def prefix_names(model: nn.Module) -> tuple[str, ...]:
    """The tokens before a vision transformer's patches, in order: "cls", "dist" (distillation), "reg1", "reg2", ...

    () of networks that have none.
    """
    model = _unwrap(model)
    count = getattr(model, "num_prefix_tokens", 0)
    names = [name for name in ("cls", "dist") if getattr(model, f"{name}_token", None) is not None][:count]
    return (*names, *(f"reg{number}" for number in range(1, count - len(names) + 1)))


def attention_layers(model: nn.Module) -> list[AttentionLayer]:
    """The layers that can be recorded, in the papers' numbering."""
    return [layer for layer, _ in _find(_unwrap(model))]


def _choose(
        model: nn.Module,
        layers: Sequence[int | str] | None,
        heads: Sequence[int] | None,
        parts: Sequence[str],
) -> list[tuple[AttentionLayer, nn.Module]]:
    """The layers asked for; see `record_attention` for the errors."""
    found = _find(model)
    known = tuple(dict.fromkeys([*PARTS, *(part for layer, _ in found for part in layer.parts)]))
    if not parts or not set(parts) <= set(known):
        raise ValueError(f"parts must be some of {', '.join(known)}, got {tuple(parts)}")
    if not found:
        raise ValueError(
            f"{type(model).__name__} has no attention layer that can be recorded: AugmentedConv2d, a ViT's attention "
            "or BottleneckAttn required (a TorchScript model hides its layers: record the model it was made from)")
    chosen = found
    if layers is not None:
        available = ", ".join(f"{layer.number} ({layer.name})" for layer, _ in found)
        by_key = {key: entry for entry in found for key in (entry[0].number, entry[0].name)}
        missing = [key for key in layers if key not in by_key]
        if missing or not layers:
            raise ValueError(f"attention layers of this model are {available}; got {missing or 'none'}")
        wanted = {by_key[key][0].number for key in layers}
        chosen = [entry for entry in found if entry[0].number in wanted]
    for layer, _ in chosen:
        outside = [head for head in heads or () if not 0 <= head < layer.num_heads]
        if outside or (heads is not None and not heads):
            raise ValueError(
                f"heads of layer {layer.number} ({layer.name}) are 0 to {layer.num_heads - 1}; got {outside or 'none'}")
    for part in parts:
        if not any(part in layer.parts for layer, _ in chosen):
            raise ValueError(
                f"none of the chosen layers has {part!r}: "
                + "; ".join(f"{layer.number} ({layer.name}) has {', '.join(layer.parts)}" for layer, _ in chosen))
    return chosen


@contextmanager
def record_attention(
        model: nn.Module,
        layers: Sequence[int | str] | None = None,
        heads: Sequence[int] | None = None,
        parts: Sequence[str] = ("attn",),
) -> Iterator[AttentionMaps]:
    """Record attention maps of the forwards made inside the `with` block; of several, the last one's are kept.

    Works in training and evaluation, under autocast, gradient checkpointing (a recomputation is not recorded) and
    DistributedDataParallel. Compiled code runs eagerly inside the block, in the whole process. Only the chosen layers,
    heads and parts take memory. Leaving the block restores the model; the maps stay.

    Args:
        model: one of ours, or a timm network with a vision transformer's attention or BottleneckAttn;
            DistributedDataParallel and torch.compile may wrap it.
        layers: numbers counted from 1, or module names; None is all.
        heads: counted from 0; None is all.
        parts: some of "attn", "logits", "self_logits", "conv_logits", "prev_logits"; see `LayerMaps`. A layer without
            evolution has neither conv_logits nor prev_logits, and its self_logits are its logits.

    Yields:
        AttentionMaps: `maps[16]` or `maps["layer3.0.conv2"]` is a `LayerMaps`.

    Raises:
        ValueError: a part, layer or head that there is not, or a model without attention layers.
        RuntimeError: the block ended and none of the chosen layers had run.
    """
    model = _unwrap(model)
    parts = tuple(parts)
    chosen = _choose(model, layers, heads, parts)
    maps = AttentionMaps()
    with ExitStack() as stack:
        stack.enter_context(torch.compiler.set_stance("force_eager"))
        for layer, module in chosen:
            watch = _Watch(layer, tuple(range(layer.num_heads)) if heads is None else tuple(heads), parts, maps,
                           module.window if isinstance(module, AugmentedConv2d) else None)
            if isinstance(module, (AugmentedConv2d, TokenAttention)):
                undo = _watch_layer(module, watch, model)
            elif isinstance(module, BottleneckAttn):
                undo = _watch_bottleneck(module, watch, model)
            else:
                undo = _watch_token_attention(module, watch, model)
            for function in undo:
                stack.callback(function)
        yield maps
    if not maps:
        names = ", ".join(f"{layer.number} ({layer.name})" for layer, _ in chosen)
        raise RuntimeError(f"no forward ran attention layer {names} while it was recorded")
