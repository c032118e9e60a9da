"""Record attention maps of any transformer, and of convolutional networks with attention.

    with ea_vision.record_attention(model, layers=[16, 17], parts=("attn", "logits")) as maps:
        model(images)
    maps[16].attn       # (B, K, N, N), rows are queries, columns keys, both row-major over maps[16].feat_size

Recording only watches: functions that form maps run unchanged, also fused attention, and outputs stay the same bit for
bit (except the last bits of nn.MultiheadAttention's, whose fast path is not used).

`ea_vision.recorder.maps` has the maps, `.layouts` their places in the image, `.interception` the watched functions.
Shape letters: B batch, K heads, H x W the attention map, N = H*W its pixels, T tokens (N and a class token, ...).
"""

import re
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import chain
from numbers import Number
from typing import Any

import torch
from torch import Tensor, nn

from ea_vision.layers import AugmentedConv2d, MapsAttention
from ea_vision.layers.inspect_attention import calls_attention, heads_of, prefix_names
from ea_vision.layers.recomputing import recomputes
from ea_vision.models.modes import unwrap
from ea_vision.recorder.interception import Hooks, Take, compiled_code_runs_eagerly, intercepted
from ea_vision.recorder.layouts import Layout, Sight, image_seen, layout_finder, learned_queries
from ea_vision.recorder.maps import PARTS, AttentionMaps, LayerMaps

__all__ = [
    "PARTS",
    "AttentionLayer",
    "AttentionMaps",
    "LayerMaps",
    "prefix_names",
    "record_attention",
    "recordable_layers",
]

OURS = (AugmentedConv2d, MapsAttention)
ALONE = (*OURS, nn.MultiheadAttention)  # layers that attend, whatever modules they contain
# names of modules that have heads, but do not attend
POSITIONS = re.compile(r"^(?!.*Att).*(Pos|Bias|Rope|Rotary)")


@dataclass(frozen=True)
class AttentionLayer:
    """A layer that can be recorded.

    number: counted from 1 over all attention layers of the network, in forward order.
    name: of the module.
    num_heads: K; 1 if the module does not state it.
    parts: those of PARTS that the layer has, and those that its evolution adds.
    pools: whether its queries are learned, not tokens.
    """

    number: int
    name: str
    num_heads: int
    parts: tuple[str, ...]
    pools: bool = False

    def __str__(self) -> str:
        return f"{self.number} ({self.name})"


@dataclass
class _Watch:
    """Collect the chosen parts and heads of one layer when they are formed.

    heads: None: all. parts: the chosen parts that the layer has. find: a function from maps to their layout. sight:
    what the forward reveals about its images. ran: whether a forward of the layer has begun. records: whether a forward
    that counts is running. current: its maps, once formed. formed: the maps of a differential layer that are formed so
    far. mixed: the maps by which values are averaged, if one of our mechanisms mixes them after the softmax. They are
    not computed again, since the mechanism may have running statistics.
    """

    layer: AttentionLayer
    module: nn.Module
    heads: tuple[int, ...] | None
    parts: set[str]
    maps: AttentionMaps
    find: Callable[[Tensor], Layout]
    sight: Sight
    ran: bool = False
    records: bool = False
    current: LayerMaps | None = None
    formed: tuple[Tensor, ...] = ()
    mixed: Tensor | None = None

    def begin(self, *_) -> None:
        """Begin a forward of the layer; a recomputation in the backward pass (checkpointing) is not recorded."""
        self.ran = True
        self.records = not recomputes()
        self.current = None
        self.formed = ()
        self.mixed = None

    def place(self, maps: Tensor, layout: Layout | None = None) -> Layout:
        """Set the layout of maps (B, K, queries, keys), found if None. From now on the layer counts as recorded."""
        try:
            layout = layout or self.find(maps)
        except ValueError as error:
            raise ValueError(
                f"attention layer {self.layer} {error}; choose other layers to record without it"
            ) from error
        heads = self.heads
        if heads is None:
            heads = tuple(range(maps.shape[1]))
        _check_heads(self.layer, heads, maps.shape[1])
        self.current = LayerMaps(self.layer.number, self.layer.name, heads, layout)
        self.maps._begin(self.current)
        return layout

    def save(self, part: str, maps: Tensor) -> None:
        """Keep the chosen heads of maps (B, all heads, T, T), or in windows (B, W, all heads, n, n)."""
        if part in self.parts and self.current is not None:
            maps = maps.detach()
            if self.heads is None:
                maps = maps.clone()
            else:
                maps = maps[..., list(self.heads), :, :]
            self.current.save(part, maps)

    def take(self, attn: Tensor) -> None:
        """Save a map that a function formed, (B, K, T, T) or (B*K, T, T); the batch may contain windows."""
        if not self.records:
            return
        if "first_attn" in self.layer.parts:
            self._take_differential(attn)
            return
        if self.current is not None:
            raise ValueError(
                f"attention layer {self.layer} must form one map in a forward, and forms several"
            )
        K = heads_of(self.module) or attn.shape[-3]
        if attn.ndim == 3 and attn.shape[0] % K == 0:
            attn = attn.unflatten(0, (-1, K))
        # groups of one query (Llama's)
        elif attn.ndim == 4 and attn.shape[1] < K == attn.shape[1] * attn.shape[2]:
            attn = attn.flatten(1, 2).unsqueeze(2)
        if attn.ndim != 4 or attn.shape[1] != K:
            raise ValueError(
                f"attention layer {self.layer} must form maps of (images, {K} heads, queries, keys), got "
                f"{list(attn.shape)}"
            )
        windows = self.place(attn).windows
        if windows is not None:
            attn = attn.unflatten(0, (-1, len(windows.tokens)))
        self.save("attn", attn)

    def _take_differential(self, attn: Tensor) -> None:
        """Save two maps (B, K, T, T), formed one by one or as (B, 2 K, T, T), and the difference used as weights."""
        if attn.shape[1] == self.layer.num_heads:
            self.formed += (attn,)
        else:
            self.formed += attn.unflatten(1, (-1, 2)).unbind(2)
        if len(self.formed) < 2:
            return
        first, second = self.formed
        share = self.module._compute_lambda().to(first)
        self.place(first)
        self.save("attn", first - share * second)
        self.save("first_attn", first)
        self.save("second_attn", second)

    @torch.no_grad()
    def take_ours(
        self, _, args: tuple, kwargs: dict, results: tuple[Tensor, Tensor | None]
    ) -> None:
        """Save the parts of a layer of ours after its `_attend`.

        The layer keeps its fast path, which returns the logits or None. Parts that only a slow path would form, and all
        maps of a window, are computed here from queries, keys and the previous logits.
        """
        if not self.records:
            return
        q, k, _, prev_logits, feat_size, bias, _ = args
        _, logits = results
        module = self.module
        evolution = module.evolution
        layout = None
        if isinstance(module, AugmentedConv2d):
            layout = Layout(feat_size, window=module.window, image=self.sight.size())
        else:
            feat_size = (1, q.shape[2])  # tokens have no positions in their logits

        def own_logits() -> Tensor:
            products = module.logits_of(q, k, feat_size)
            return products if bias is None else products + bias

        if logits is None:
            logits = own_logits()
        self.place(logits, layout)
        if "attn" in self.parts:
            attn = self.mixed
            if attn is None:
                attn = module.attention_of(logits, feat_size)
            if module.head_window > 1:  # (B, K, N, head_window * N)
                attn_by_head = attn.unflatten(-1, (module.head_window, -1))
                attn = attn_by_head.sum(-2)
            self.save("attn", attn)
        self.save("logits", logits)
        if evolution is None:
            self.save("self_logits", logits)
            return
        added = self.parts & {*evolution.part_names}
        if added or "self_logits" in self.parts:
            self_logits = own_logits()
            self.save("self_logits", self_logits)
        if added:
            previous = self_logits if prev_logits is None else prev_logits
            for part, maps in module.parts_of(self_logits, previous, logits).items():
                self.save(part, maps)
        if evolution.reads_previous:
            self.save("prev_logits", prev_logits)

    def take_mixed(self, _, args: tuple, kwargs: dict) -> None:
        """Keep the maps by which a layer of ours averages its values: the input of its dropout."""
        self.mixed = args[0].detach()

    def follow(self, hooks: Hooks, running: list[Take]) -> None:
        """Hook the layer: our layers after `_attend`; others through the softmax calls made while they run."""
        module = self.module
        hooks.add(module.register_forward_pre_hook, self.begin)
        if isinstance(module, OURS):
            evolution = module.evolution
            hooks.after(module, "_attend", self.take_ours)
            if evolution is not None and evolution.mixes_attn:
                hooks.add(module.attn_drop.register_forward_pre_hook, self.take_mixed)
            mixes_maps = evolution is not None and not evolution.mixes_output
            if isinstance(module, AugmentedConv2d) or mixes_maps:
                # a hook asks the layer for its logits
                hooks.add(module.register_forward_hook, lambda *_: None)
            return
        hooks.add(module.register_forward_pre_hook, lambda *_: running.append(self.take))
        hooks.add(module.register_forward_hook, lambda *_: running.pop(), always_call=True)
        if "mixed_attn" in self.layer.parts:
            hooks.add(module.proj_w.register_forward_hook, self.take_talked)

    def take_talked(self, _, args: tuple, kwargs: dict, output: Tensor) -> None:
        """Save the probabilities (B, T, T, K) that timm's CaiT has mixed once more."""
        self.save("mixed_attn", output.permute(0, 3, 1, 2))


def _parts_of(module: nn.Module) -> tuple[str, ...]:
    """Return the parts of an attention layer that can be recorded."""
    if isinstance(module, OURS):
        if module.head_window > 1:
            return ("attn",)
        parts = ["attn", "logits", "self_logits"]
        if module.evolution is not None:
            parts += module.evolution.part_names
            if module.evolution.reads_previous:
                parts.append("prev_logits")
        return tuple(parts)
    if hasattr(module, "lambda_init"):  # timm's DiffAttention: a difference of two maps, by heads
        return ("attn", "first_attn", "second_attn")
    mixers = [getattr(module, name, None) for name in ("proj_l", "proj_w")]
    talks = all(isinstance(mixer, nn.Linear) for mixer in mixers)
    return ("attn", "mixed_attn") if talks else ("attn",)


def _is_attention(module: nn.Module) -> bool:
    """Return whether a module states its number of heads, or calls torch's attention. Excluded: differential attention
    other than timm's, pooling of other packages, and deformable attention, which samples points and forms no map."""
    if isinstance(module, ALONE):
        return True
    if heads_of(module) is None and not calls_attention(module):
        return False
    if hasattr(module, "sampling_offsets"):
        return False
    name = type(module).__name__
    if "AttentionPool" in name and not type(module).__module__.startswith("timm.layers."):
        return False
    if hasattr(module, "lambda_init") and name != "DiffAttention":
        return False
    return not POSITIONS.search(name)


def _find(model: nn.Module) -> dict[AttentionLayer, nn.Module]:
    """Return the innermost modules that attend, in the network's order."""
    attending: dict[AttentionLayer, nn.Module] = {}
    for name, module in model.named_modules():
        if not _is_attention(module):
            continue
        _, *inner = module.modules()
        if not isinstance(module, ALONE) and any(map(_is_attention, inner)):
            continue
        layer = AttentionLayer(
            number=len(attending) + 1,
            name=name.replace("_orig_mod.", ""),
            num_heads=heads_of(module) or 1,
            parts=_parts_of(module),
            pools=bool(learned_queries(model, name)),
        )
        attending[layer] = module
    return attending


def recordable_layers(model: nn.Module) -> list[AttentionLayer]:
    """Return the layers that can be recorded, in the papers' numbering."""
    return list(_find(unwrap(model)))


def _check(wanted: Sequence, available: Collection, refusal: str) -> None:
    """Raise ValueError unless everything that was asked for is available, and it is something. The refusal ends in what
    is not."""
    unknown = [item for item in wanted if item not in available]
    if unknown or not wanted:
        raise ValueError(f"{refusal}; got {unknown or 'none'}")


def _check_heads(layer: AttentionLayer, heads: Sequence[int], count: int) -> None:
    _check(heads, range(count), f"heads of layer {layer} are 0 to {count - 1}")


def _as_tuple(value: Any) -> tuple | None:
    """Return a tuple of one value (parts="attn", layers=2) or several."""
    if value is None:
        return None
    return (value,) if isinstance(value, (Number, str)) else tuple(value)


@contextmanager
def record_attention(
    model: nn.Module,
    layers: int | str | Sequence[int | str] | None = None,
    heads: int | Sequence[int] | None = None,
    parts: str | Sequence[str] = ("attn",),
) -> Iterator[AttentionMaps]:
    """Record attention maps of forwards inside the `with` block. The maps of the last forward are kept; if it runs a
    layer several times (shared blocks), those of the last run, which a warning says once per layer.

    Works in training and evaluation, under autocast, gradient checkpointing (a recomputation is not recorded) and
    DistributedDataParallel. Only forwards of the thread that entered the block are recorded; other threads may use, and
    record, the same model meanwhile. Compiled code runs eagerly inside the block, in the whole process. Only the chosen
    layers, heads and parts take memory; maps in windows (Swin's) are stored as windows until they are read. Leaving the
    block restores the model; the maps stay.

    Args:
        model: any network whose attention goes through softmax, scaled_dot_product_attention or nn.MultiheadAttention:
            ours, timm's, torchvision's, transformers'; DistributedDataParallel and torch.compile may wrap it.
        layers: numbers counted from 1, or module names, one or several; None: all.
        heads: counted from 0, one or several; None: all.
        parts: one or several of "attn" and, for our layers, "logits", "self_logits", "conv_logits", "prev_logits"; see
            `LayerMaps`. A layer without evolution has no conv_logits and no prev_logits, and its self_logits are its
            logits.

    Yields:
        AttentionMaps: `maps[16]` or `maps["layer3.0.conv2"]` is a `LayerMaps`.

    Raises:
        ValueError: a part, layer or head does not exist, or the model has no attention layers; during a forward, a
            layer's maps are not of tokens over the image.
        RuntimeError: the block ended and none of the chosen layers had formed a map; or it ended before a block that
            was entered after it, or in another thread.
    """
    if not isinstance(model, nn.Module):
        raise ValueError(
            f"a network is required, such as ea_vision.load('ea_conv_transformer_cifar'), got {model!r}"
        )
    model = unwrap(model)
    layers, heads, parts = map(_as_tuple, (layers, heads, parts))
    modules = _find(model)
    if not modules:
        raise ValueError(
            f"{type(model).__name__} has no attention layer that can be recorded: AugmentedConv2d, "
            "nn.MultiheadAttention or a module that states its number of heads is required (a TorchScript model hides "
            "its layers: record the model it was made from)"
        )
    keys = list(chain.from_iterable((layer.number, layer.name) for layer in modules))
    layers = keys if layers is None else layers
    _check(layers, keys, f"attention layers of this model are {', '.join(map(str, modules))}")
    selected = [layer for layer in modules if layer.number in layers or layer.name in layers]
    listed = "; ".join(f"{layer} has {', '.join(layer.parts)}" for layer in selected)
    recordable = list(chain.from_iterable(layer.parts for layer in selected))
    _check(parts, recordable, f"parts of the chosen layers: {listed}")
    for layer in selected:
        # others are checked by their maps
        if heads is not None and heads_of(modules[layer]) is not None:
            _check_heads(layer, heads, layer.num_heads)
    maps = AttentionMaps()
    watches = []
    with Hooks() as hooks:
        hooks.enter_context(compiled_code_runs_eagerly())
        recorder = hooks.enter_context(intercepted())
        sight = image_seen(model, hooks)
        recorder.note_move = sight.note_move
        hooks.add(model.register_forward_pre_hook, maps._call_begins)
        hooks.add(model.register_forward_hook, maps._call_ends, always_call=True)
        for layer in selected:
            find = layout_finder(model, layer.name, sight, hooks)
            kept = {*parts}.intersection(layer.parts)
            watches.append(_Watch(layer, modules[layer], heads, kept, maps, find, sight))
            watches[-1].follow(hooks, recorder.running)
        yield maps
    if maps:
        return
    names = ", ".join(map(str, selected))
    if any(watch.ran for watch in watches):
        raise RuntimeError(
            f"attention layer {names} ran, and no map went through softmax, "
            "scaled_dot_product_attention or nn.MultiheadAttention"
        )
    raise RuntimeError(
        f"no forward ran attention layer {names} while it was recorded, in this thread"
    )
