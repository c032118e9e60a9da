"""The attention branches of a network: what each is given, its time, and the floor that memory bandwidth sets."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from ea_vision.layers import AugmentedConv2d, TokenAttention, attention_layers
from ea_vision.measure.speed_report import Row
from ea_vision.measure.steps import Bench


@contextmanager
def attention_watched(model: nn.Module, saw: Callable[..., None]) -> Iterator[None]:
    """Call `saw(layer, x, prev_logits, need_logits, logits)` after each attention branch in the `with` block.

    Not by hooks: a layer that has one must make its maps.
    """
    layers = attention_layers(model)

    def watch(layer: AugmentedConv2d | TokenAttention) -> None:
        def attend(x, prev_logits=None, need_logits=True):
            out, logits = AugmentedConv2d.attend(layer, x, prev_logits, need_logits)
            saw(layer, x, prev_logits, need_logits, logits)
            return out, logits

        def forward(x, prev_logits=None, *rest):
            out, logits = TokenAttention.forward(layer, x, prev_logits, *rest)
            saw(layer, x, prev_logits, layer.need_logits, logits)
            return out, logits

        if isinstance(layer, TokenAttention):
            layer.forward = forward
        else:
            layer.attend = attend

    try:
        for layer in layers:
            watch(layer)
        yield
    finally:
        for layer in layers:
            delattr(layer, "forward" if isinstance(layer, TokenAttention) else "attend")


@dataclass
class Branch:
    """An attention layer, and what the network hands to it: x is (B, C, H, W), or of a transformer (B, T, C)."""

    layer: AugmentedConv2d | TokenAttention
    x: Tensor
    prev_logits: Tensor | None
    need_logits: bool

    def __post_init__(self) -> None:
        layer = self.layer
        with torch.no_grad():
            q, k, v, feat_size = self.heads(self.x)
        if isinstance(layer, TokenAttention):
            self.mixed = torch.zeros_like(self.x, dtype=v.dtype)  # as it enters the projection
            self.stage = f"{feat_size[1]} tokens"
            self.widths = (q.shape[-1], v.shape[-1])
        else:
            self.mixed = v.new_zeros(v.shape[0], layer.dim_v, *feat_size).contiguous(
                memory_format=torch.channels_last if not self.x.is_contiguous() else torch.contiguous_format)
            height, width = (-(-side // layer.stride) for side in self.x.shape[2:])
            self.stage = f"{height}x{width}, maps {feat_size[0]}x{feat_size[1]}"
            self.widths = (layer.dim_qk, layer.dim_v)
        maps = q.shape[0] * q.shape[1] * q.shape[2] ** 2 * q.element_size()
        inputs = q.nbytes + k.nbytes + v.nbytes + (maps if self.prev_logits is not None else 0)
        outputs = v.nbytes + (maps if self.need_logits else 0)
        self.infer_bytes = inputs + outputs
        self.train_bytes = self.infer_bytes + 2 * inputs + outputs  # backward: inputs again, gradients of all

    def heads(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor, tuple[int, int]]:
        """q, k, v of all heads and (H, W) of the map, of a transformer (1, T)."""
        layer = self.layer
        return layer.heads_of(layer.qkv(x)) if isinstance(layer, TokenAttention) else layer.split_heads(x)

    def kind(self) -> tuple:
        """Layers of the same kind do the same work."""
        return (self.stage, tuple(self.x.shape), type(self.layer.evolution), self.need_logits, *self.widths)

    def whole(self, x: Tensor, prev_logits: Tensor | None, mixed: Tensor) -> list[Tensor]:
        if isinstance(self.layer, TokenAttention):
            out, logits = self.layer(x, prev_logits)
        else:
            out, logits = self.layer.attend(x, prev_logits, self.need_logits)
        return [out, logits] if self.need_logits else [out]

    def rest(self, x: Tensor, prev_logits: Tensor | None, mixed: Tensor) -> list[Tensor]:
        """All of the branch but its attention."""
        return [*self.heads(x)[:3], self.layer.proj(mixed)]

    def calls(self, bench: Bench, what: str, compiled: bool) -> dict[str, Callable[[], object]]:
        """Inference and training (forward and backward) of `what`, whole or rest."""
        eager = getattr(self, what)
        function = torch.compile(eager, dynamic=False) if compiled else eager
        given = [self.x, self.prev_logits, self.mixed]
        leaves = [None if tensor is None else tensor.detach().requires_grad_() for tensor in given]
        wanted = [leaf for leaf in leaves if leaf is not None]
        wanted += [p for p in self.layer.parameters() if p.requires_grad]
        with torch.no_grad(), bench.autocast():
            grads = [torch.ones_like(tensor) for tensor in eager(*given)]

        def infer():
            with torch.inference_mode(), bench.autocast():
                return function(*given)

        def train():
            with bench.autocast():
                outputs = function(*leaves)
            torch.autograd.grad(outputs, wanted, grads, allow_unused=True)

        return {"infer": infer, "train": train}


def branches_of(bench: Bench, model: nn.Module) -> tuple[dict[tuple, Branch], Counter]:
    """An attention layer of ours of each kind, with what it is given, and how many there are of it."""
    first: dict[tuple, Branch] = {}
    counts: Counter = Counter()

    def saw(layer, x, prev_logits, need_logits, logits) -> None:
        branch = Branch(layer, x, prev_logits, need_logits)
        counts[branch.kind()] += 1
        first.setdefault(branch.kind(), branch)

    with torch.no_grad(), bench.autocast(), attention_watched(model, saw):
        model.eval()(bench.images)
    return first, counts


def time_branches(bench: Bench, name: str, model: nn.Module, compiled: bool, bandwidth: float) -> list[Row]:
    """Time an attention branch of each kind on what the network gives it; a row for each stage.

    Args:
        bandwidth: bytes per second of main memory.
    """
    first, counts = branches_of(bench, model)
    seconds = bench.medians({(kind, phase, what): call for kind, branch in first.items() for what in ("whole", "rest")
                             for phase, call in branch.calls(bench, what, compiled).items()})
    rows = []
    for stage in dict.fromkeys(branch.stage for branch in first.values()):
        kinds = [kind for kind, branch in first.items() if branch.stage == stage]
        layers = sum(counts[kind] for kind in kinds)

        def mean(of: Callable[[tuple], float], kinds=kinds, layers=layers) -> float:
            return 1e3 * sum(counts[kind] * of(kind) for kind in kinds) / layers

        row = Row(name, "compiled" if compiled else "eager", f"branch at {stage}", layers)
        for phase in ("train", "infer"):
            setattr(row, f"{phase}_ms", mean(lambda kind, p=phase: seconds[kind, p, "whole"]))
            setattr(row, f"{phase}_attention_ms",
                    mean(lambda kind, p=phase: seconds[kind, p, "whole"] - seconds[kind, p, "rest"]))
            setattr(row, f"{phase}_floor_ms",
                    mean(lambda kind, p=phase: getattr(first[kind], f"{p}_bytes") / bandwidth))
        rows.append(row)
    return rows
