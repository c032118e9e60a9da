"""Names, weights, parameters, arithmetic and attention maps of networks.

    ea-vision models                                # our networks: name, input, weights, what each is
    ea-vision models 'ea_*' --weights               # by pattern; a row for each file of weights, and where it is from
    ea-vision models --sizes ea_aa_resnet50 resnet50 --csv sizes.csv      # parameters, GFLOPs, maps; timm's too
    ea-vision models --layers aa_resnet50           # every attention branch (the AA paper's table 9)

A pattern has *, ? or [...]; a plain word is a network's name, or fits wherever it stands in a name of ours. Weights
from a hub are timm's: the network begins with the outputs of timm's own and has not been fine-tuned.

For one image, the same operations are counted in three ways:

* GMACs: multiply-adds, each once.
* GFLOPs, the EA paper's: 2 for a multiply-add of a convolution or linear layer, 1 for one of the attention products
  (queries with keys, queries with positions, maps with values).
* profiler, TensorFlow's in the AA paper: 2 for a multiply-add of a convolution or linear layer and of the two relative
  position products, 6 for an element of the maps (sums, scale, softmax), and nothing for the products of queries with
  keys and of maps with values. That the profiler leaves those out is inferred: so counted, the paper's table 9 and its
  AA-MnasNets come out as printed.

--layers: the maps of an image in bfloat16 as dense attention keeps them (this project's kernels keep fewer), parameters
with the biases of the projections, FLOPs in the profiler's counting. AA paper: https://arxiv.org/abs/1904.09925
"""

import argparse
import os
from collections import Counter
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from fnmatch import fnmatch
from functools import cache
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
    # Torch's fused attention on a CPU is no operation that the counter knows; the products of the plain form are.
    tokens: dict[str, int] = {}

    def note_tokens(name: str):
        def note(layer: nn.Module, args: tuple) -> None:
            tokens[name] = args[0].shape[1]

        return note

    hooks = [
        layer.register_forward_pre_hook(note_tokens(name))
        for name, layer in model.named_modules()
        if isinstance(layer, MapsAttention)
    ]
    with (
        use_implementation("reference"),
        sdpa_kernel(SDPBackend.MATH),
        torch.no_grad(),
        FlopCounterMode(display=False) as counter,
    ):
        model.eval()(torch.zeros(1, *input_size, device=next(model.parameters()).device))
    for hook in hooks:
        hook.remove()
    flops = counter.get_flop_counts()  # by module and operation; Global: all
    bmm = torch.ops.aten.bmm  # projections are baddbmm, linear layers mm or addmm
    whole, products = counter.get_total_flops(), flops["Global"].get(bmm, 0)
    profiler, missed, branches = whole - products, 0, []
    for name, layer in model.named_modules():
        if not isinstance(layer, (AugmentedConv2d, MapsAttention)):
            continue
        path = f"{type(model).__name__}.{name}"
        dense, params, by_hand = (
            flops[path].get(bmm, 0),
            sum(p.numel() for p in layer.parameters()),
            0,
        )
        counted = sum(flops[path].values()) - dense
        if isinstance(layer, MapsAttention):
            feat_size = (1, tokens[name])
            elements = layer.num_heads * feat_size[1] ** 2
        else:
            feat_size, (H, W) = layer.feat_size, layer.feat_size
            elements = layer.map_elements(feat_size)
            if layer.height_rel is not None:
                by_hand = 2 * H * W * (len(layer.height_rel) + len(layer.width_rel)) * layer.dim_qk
            if (
                layer.local and layer.evolution is None and not layer.need_logits
            ):  # nobody wants the whole map
                missed += by_hand + 2 * elements * (layer.dim_head_qk + layer.dim_head_v) - dense
            elif (
                layer.height_rel is not None and layer.dim_head_qk == 1
            ):  # torch multiplies without a counted product
                missed += 2 * H * W * (H + W) * layer.dim_qk
            if layer.conv is not None:
                counted -= sum(flops[f"{path}.conv"].values())
                params -= layer.conv.weight.numel()
        by_hand += 6 * elements
        profiler += by_hand
        branches.append(
            BranchCount(
                name,
                layer.num_heads,
                feat_size,
                layer.evolution is not None,
                BFLOAT16 * elements,
                params,
                counted + by_hand,
            )
        )
    return Counts(
        sum(p.numel() for p in model.parameters()),
        (whole + missed) // 2,
        (products + missed) // 2,
        profiler,
        tuple(branches),
    )


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
    pretrained, rows = [full.partition(".") for full in timm.list_pretrained()], []
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
        return (
            f"{value:.{3 if key.endswith('ratio') else 2}f}"
            if isinstance(value, float)
            else str(value)
        )

    headings = headings or {key: key for key in rows[0]}
    return markdown(
        [list(headings.values()), *([shown(key, row[key]) for key in headings] for row in rows)]
    )


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
    if args.layers:
        rows = [row for name in names for row in layers_of(name)]
    else:
        rows = (
            [sizes_of(name) for name in names] if args.sizes else list_models(names, args.weights)
        )
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
