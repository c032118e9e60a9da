"""Names, weights, parameters, arithmetic and attention maps of networks.

    ea-vision models                                # our networks: name, input, weights, description
    ea-vision models 'ea_*' --weights               # by pattern; one row per file of weights, with its origin
    ea-vision models --sizes ea_aa_resnet50 resnet50 --csv sizes.csv      # parameters, GFLOPs, maps; timm's too
    ea-vision models --layers aa_resnet50           # every attention branch (the AA paper's table 9)

A pattern has *, ? or [...]; a plain word is a network's name or any part of one of our names. Weights from a hub are
timm's: the network starts with the outputs of timm's network and has not been fine-tuned.

The operations for one image are counted in three ways:

* GMACs: multiply-adds, each once.
* GFLOPs, the EA paper's: 2 for a multiply-add of a convolution or linear layer, 1 for one of the attention products
  (queries with keys, queries with positions, maps with values).
* profiler, TensorFlow's in the AA paper: 2 for a multiply-add of a convolution or linear layer and of the two relative
  position products, 6 for an element of the maps (sums, scale, softmax), and nothing for the products of queries with
  keys and of maps with values. We infer that the profiler leaves those out, because this reproduces the paper's table 9
  and its AA-MnasNets.

--layers lists the maps of an image in bfloat16 as dense attention keeps them (our kernels keep fewer), parameters with
the biases of the projections, and FLOPs in the profiler's counting. AA paper: https://arxiv.org/abs/1904.09925
"""

import argparse
import os
from collections import Counter
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from fnmatch import fnmatch
from functools import cache, partial
from pathlib import Path
from typing import Any

import timm
import torch
from torch import nn
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.flop_counter import FlopCounterMode

from ea_vision.base.errors import UsageError, near_matches
from ea_vision.base.files import atomic_write, check_output, csv_text
from ea_vision.base.networks import hub_source
from ea_vision.base.tables import markdown
from ea_vision.layers import AugmentedConv2d, MapsAttention
from ea_vision.models import get_network, list_networks
from ea_vision.ops import use_implementation
from ea_vision.recorder.loading import find_origin, input_size

BFLOAT16 = 2  # bytes of a number
MAP_OPERATIONS = 6  # the profiler's, for an element of the maps
BMM = torch.ops.aten.bmm


@dataclass(frozen=True)
class BranchCount:
    """An attention branch: all of an augmented convolution but its convolution, or a vision transformer's attention.

    layer: name of the module. num_heads: K. feat_size: (H, W) of the map, of a transformer's (1, tokens). evolves:
    whether it takes up the previous layer's maps. map_bytes: of K maps of N x N numbers in bfloat16, or what a window
    has of them. params: weights, of the evolution too. flops_profiler: in the AA paper's counting.
    """

    layer: str
    num_heads: int
    feat_size: tuple[int, int]
    evolves: bool
    map_bytes: int
    params: int
    flops_profiler: int


@dataclass(frozen=True)
class Counts:
    """params: of the network. macs: all multiply-adds. attention_macs: those of the attention products."""

    params: int
    macs: int
    attention_macs: int
    flops_profiler: int
    branches: tuple[BranchCount, ...]

    @property
    def flops_paper(self) -> int:
        """Return the operations in the EA paper's counting."""
        return 2 * self.macs - self.attention_macs


def count(model: nn.Module, input_size: tuple[int, int, int]) -> Counts:
    """Run the model on one image of (C, H, W), the size that it is built for, in readable torch, and count.

    On the meta device nothing is computed but shapes, and the counts are the same.

    Attention that is not ours has no branch here; its batched products count as attention products.
    Readable torch multiplies whole maps where a window would not: there the products are those of the window.
    """
    flops, tokens = _measure(model, input_size)
    whole = sum(flops["Global"].values())
    products = flops["Global"].get(BMM, 0)  # projections are baddbmm, linear layers mm or addmm
    profiler = whole - products
    missed = 0
    branches = []
    for name, layer in model.named_modules():
        path = f"{type(model).__name__}.{name}"
        if isinstance(layer, AugmentedConv2d):
            branch, by_hand, more = _count_convolution(name, layer, path, flops)
            missed += more
        elif isinstance(layer, MapsAttention):
            elements = layer.num_heads * tokens[name] ** 2
            by_hand = MAP_OPERATIONS * elements
            counted = sum(flops[path].values()) - flops[path].get(BMM, 0)
            size = (1, tokens[name])
            branch = _branch(name, layer, size, elements, count_weights(layer), counted + by_hand)
        else:
            continue
        profiler += by_hand
        branches.append(branch)
    macs = (whole + missed) // 2
    attention_macs = (products + missed) // 2
    return Counts(count_weights(model), macs, attention_macs, profiler, tuple(branches))


def _measure(model: nn.Module, input_size: tuple[int, int, int]) -> tuple[dict, dict[str, int]]:
    """Run a model on one image; return operations by module and kind, and the tokens of its layers over tokens."""
    tokens: dict[str, int] = {}
    hooks = []
    for name, layer in model.named_modules():
        if isinstance(layer, MapsAttention):
            note = partial(_note_tokens, tokens, name)
            hooks.append(layer.register_forward_pre_hook(note))
    image = torch.zeros(1, *input_size, device=next(model.parameters()).device)
    counter = FlopCounterMode(display=False)
    # Torch's fused attention on a CPU is no operation that the counter knows; the products of the plain form are.
    with use_implementation("reference"), sdpa_kernel(SDPBackend.MATH), torch.no_grad(), counter:
        model.eval()(image)
    for hook in hooks:
        hook.remove()
    return counter.get_flop_counts(), tokens  # Global: all modules


def _note_tokens(tokens: dict[str, int], name: str, layer: nn.Module, args: tuple) -> None:
    tokens[name] = args[0].shape[1]


def count_weights(module: nn.Module) -> int:
    """Return the number of a module's parameters."""
    return sum(parameter.numel() for parameter in module.parameters())


def _branch(
    name: str, layer: nn.Module, size: tuple[int, int], elements: int, params: int, flops: int
) -> BranchCount:
    evolves = layer.evolution is not None
    return BranchCount(name, layer.num_heads, size, evolves, BFLOAT16 * elements, params, flops)


def _count_convolution(
    name: str, layer: AugmentedConv2d, path: str, flops: dict
) -> tuple[BranchCount, int, int]:
    """Count an augmented convolution's attention branch.

    Returns:
        the branch; the profiler's operations that torch does not count; and the products of the attention that it
        counts too few, or (negative) too many of.
    """
    H, W = layer.feat_size
    elements = layer.map_elements(layer.feat_size)
    dense = flops[path].get(BMM, 0)
    counted = sum(flops[path].values()) - dense
    params = count_weights(layer)
    if layer.conv is not None:
        counted -= sum(flops[f"{path}.conv"].values())
        params -= layer.conv.weight.numel()
    positions = 0
    missed = 0
    if layer.height_rel is not None:
        positions = 2 * H * W * (len(layer.height_rel) + len(layer.width_rel)) * layer.dim_qk
        if layer.dim_head_qk == 1:  # torch multiplies without a counted product
            missed = 2 * H * W * (H + W) * layer.dim_qk
    if layer.local and layer.evolution is None and not layer.need_logits:  # the window alone
        missed = positions + 2 * elements * (layer.dim_head_qk + layer.dim_head_v) - dense
    by_hand = positions + MAP_OPERATIONS * elements
    branch = _branch(name, layer, layer.feat_size, elements, params, counted + by_hand)
    return branch, by_hand, missed


@cache
def count_network(name: str) -> tuple[tuple[int, int, int], Counts]:
    """Build a network, by a name or a path that `find_origin` knows, and count it.

    Returns:
        its input (C, H, W), and what was counted.

    Raises:
        UsageError: no such model, or a detector.
    """
    origin = find_origin(name)
    if origin.create is not timm.create_model:
        raise UsageError(f"a network that classifies is required, and {origin.label} is a detector")
    with torch.device("meta"):
        model = origin.build()
    size = model.default_cfg["input_size"]
    if origin.kwargs:
        size = (size[0], *input_size(model, {"input_size": size}))
    return size, count(model, size)


def names_of(words: Sequence[str]) -> list[str]:
    """Return the networks that patterns, parts of names, names or paths stand for; all of ours without any.

    Raises:
        UsageError: a word that fits none.
    """
    names: dict[str, None] = {}
    for word in words or ["*"]:
        found = [word]
        if not (timm.is_model(word) or hub_source(word)[0] or os.path.exists(word)):
            pattern = word if set(word) & set("*?[") else f"*{word}*"
            found = [name for name in list_networks() if fnmatch(name, pattern)]
        if not found:
            raise UsageError(
                f"no network fits {word!r}; {near_matches(word, list_networks(), 'networks')}"
            )
        names |= dict.fromkeys(found)
    return list(names)


def list_models(names: Sequence[str], weights: bool = False) -> list[dict[str, str]]:
    """Return a row for each network, or for each file of weights, with where it is from."""
    pretrained = [full.partition(".") for full in timm.list_pretrained()]
    rows = []
    for name in names:
        own = [tag for base, _, tag in pretrained if base == name]
        having = f"{own[0]} and {len(own) - 1} more" if len(own) > 1 else "".join(own)
        about = get_network(name).about if name in list_networks() else "of timm"
        for full in [f"{name}.{tag}" for tag in own] if weights else [name]:
            cfg = timm.get_pretrained_cfg(full)
            if weights:
                having = "comes with ea_vision" if cfg.file else f"hub: {cfg.hf_hub_id or cfg.url}"
            rows.append(
                {
                    "model": full,
                    "input": "{1}x{2}".format(*cfg.input_size),
                    "weights": having,
                    "what it is": about,
                }
            )
    return rows


def sizes_of(name: str) -> dict:
    """Return a row of --sizes; maps are layers x heads x (height x width) of each shape of map, in order."""
    size, counts = count_network(name)
    shapes = Counter((branch.num_heads, *branch.feat_size) for branch in counts.branches)
    numbers = {
        "params M": counts.params / 1e6,
        "GMACs": counts.macs / 1e9,
        "GFLOPs": counts.flops_paper / 1e9,
        "profiler": counts.flops_profiler / 1e9,
    }
    return {
        "model": name,
        "input": f"{size[1]}x{size[2]}",
        **{key: round(value, 4) for key, value in numbers.items()},
        "layers": len(counts.branches),
        "maps": " + ".join(f"{n} x {K} x ({H}x{W})" for (K, H, W), n in shapes.items()),
    }


def layers_of(name: str) -> list[dict]:
    """Return the rows of --layers: a network's attention branches, their maps in bytes of bfloat16."""
    return [
        {"model": name, **asdict(branch), "feat_size": "{}x{}".format(*branch.feat_size)}
        for branch in count_network(name)[1].branches
    ]


def table(rows: Sequence[dict], headings: dict[str, str] | None = None) -> str:
    """Return a Markdown table of some of the rows' columns, by their headings, or of all of them. Numbers have two
    decimals, ratios three; None becomes -."""

    def shown(key: str, value: Any) -> str:
        if value is None:
            return "-"
        if isinstance(value, float):
            return f"{value:.3f}" if key.endswith("ratio") else f"{value:.2f}"
        return str(value)

    headings = headings or {key: key for key in rows[0]}
    lines = [list(headings.values())]
    for row in rows:
        lines.append([shown(key, row[key]) for key in headings])
    return markdown(lines)


def main(argv: Sequence[str] | None = None) -> int:
    """Print what the arguments ask of the networks."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "models", nargs="*", metavar="NAME", help="names or patterns (default: all of ours)"
    )
    kind = parser.add_mutually_exclusive_group()
    kind.add_argument("--weights", action="store_true", help="a row for each file of weights")
    kind.add_argument(
        "--sizes", action="store_true", help="parameters, arithmetic and attention maps"
    )
    kind.add_argument("--layers", action="store_true", help="a row for each attention branch")
    parser.add_argument(
        "--csv",
        metavar="FILE",
        help="also write the rows to FILE ('-': to standard output instead of the table)",
    )
    args = parser.parse_args(argv)
    names = names_of(args.models)
    rows = []
    if args.layers:
        for name in names:
            rows += layers_of(name)
    elif args.sizes:
        rows = [sizes_of(name) for name in names]
    else:
        rows = list_models(names, args.weights)
    if not rows:
        raise UsageError(
            f"none of the {len(names)} networks has {'weights' if args.weights else 'our attention'}"
        )
    if args.csv == "-":
        print(csv_text(rows), end="")
        return 0
    print(table(rows))
    if args.csv:
        atomic_write(check_output(Path(args.csv)), csv_text(rows).encode())
        print(f"\nwritten: {args.csv}")
    return 0
