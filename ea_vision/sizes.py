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
from __future__ import annotations

import argparse
from collections import Counter
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from fnmatch import fnmatch
from functools import cache
from itertools import groupby
from pathlib import Path
from typing import Any

import timm
import torch
from torch import nn
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.flop_counter import FlopCounterMode

from ea_vision.base.errors import UsageError, near_matches
from ea_vision.base.files import atomic_write, check_output, csv_text
from ea_vision.base.networks import check_model_name
from ea_vision.base.tables import markdown
from ea_vision.layers import AugmentedConv2d, TokenAttention
from ea_vision.models import get_network, list_networks
from ea_vision.ops import use_implementation

BFLOAT16 = 2  # bytes of a number


@dataclass(frozen=True)
class BranchCount:
    """An attention branch: all of an augmented convolution but its convolution, or a vision transformer's attention.

    layer: name of the module. num_heads: K. feat_size: (H, W) of the map, of a transformer's (1, tokens). evolves:
    whether it takes up the previous layer's maps. map_elements: pairs of a query and a key that it sees, of all heads.
    params: weights, of the evolution too. flops_profiler: in the AA paper's counting.
    """

    layer: str
    num_heads: int
    feat_size: tuple[int, int]
    evolves: bool
    map_elements: int
    params: int
    flops_profiler: int

    @property
    def map_bytes(self) -> int:
        """K maps of N x N numbers in bfloat16, or what a window has of them."""
        return BFLOAT16 * self.map_elements


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
        """In the EA paper's counting."""
        return 2 * self.macs - self.attention_macs


def training_map_bytes(branches: Sequence[BranchCount]) -> int:
    """Return the bytes of all maps, which dense attention keeps until the backward pass."""
    return sum(branch.map_bytes for branch in branches)


def inference_map_bytes(branches: Sequence[BranchCount]) -> int:
    """Return the bytes of the maps that dense attention needs at once, a layer's and the previous one's."""
    return max((branch.map_bytes * (1 + branch.evolves) for branch in branches), default=0)


def count(model: nn.Module, input_size: tuple[int, int, int]) -> Counts:
    """Run the model on one image of (C, H, W), the size that it is built for, in readable torch, and count.

    On the meta device nothing is computed but shapes, and the counts are the same.

    Attention that is not ours has no branch here; its batched products count as attention products.
    Readable torch multiplies whole maps where a window would not: there the products are those of the window.
    """
    # Torch's fused attention on a CPU is no operation that the counter knows; the products of the plain form are.
    with (use_implementation("reference"), sdpa_kernel(SDPBackend.MATH), torch.no_grad(),
          FlopCounterMode(display=False) as counter):
        model.eval()(torch.zeros(1, *input_size, device=next(model.parameters()).device))
    flops = counter.get_flop_counts()  # by module and operation; Global: all
    bmm = torch.ops.aten.bmm  # projections are baddbmm, linear layers mm or addmm
    total, products = counter.get_total_flops(), flops["Global"].get(bmm, 0)
    branches, by_hand = [], 0
    for name, layer in model.named_modules():
        if isinstance(layer, TokenAttention):
            T, path = model.num_prefix_tokens + model.patch_embed.num_patches, f"{type(model).__name__}.{name}"
            elements = layer.num_heads * T ** 2
            counted = sum(flops[path].values()) - flops[path].get(bmm, 0)
            branches.append(BranchCount(name, layer.num_heads, (1, T), layer.evolution is not None, elements,
                                        sum(p.numel() for p in layer.parameters()), counted + 6 * elements))
            by_hand += 6 * elements
        if not isinstance(layer, AugmentedConv2d):
            continue
        H, W = layer.feat_size
        elements = layer.map_elements(layer.feat_size)
        positions = 0
        if layer.height_rel is not None:
            positions = 2 * H * W * (len(layer.height_rel) + len(layer.width_rel)) * layer.dim_qk
        by_formula = positions + 6 * elements
        path = f"{type(model).__name__}.{name}"
        dense = flops[path].get(bmm, 0)
        if layer.local and layer.evolution is None and not layer.need_logits:  # nobody wants the whole map
            seen = positions + 2 * elements * (layer.dim_head_qk + layer.dim_head_v)
            total, products = total + seen - dense, products + seen - dense
        elif layer.height_rel is not None and layer.dim_head_qk == 1:  # torch multiplies without a counted product
            missed = 2 * H * W * (H + W) * layer.dim_qk
            total, products = total + missed, products + missed
        counted = sum(flops[path].values()) - dense
        params = sum(p.numel() for p in layer.parameters())
        if layer.conv is not None:
            counted -= sum(flops[f"{path}.conv"].values())
            params -= layer.conv.weight.numel()
        branches.append(BranchCount(name, layer.num_heads, layer.feat_size, layer.evolution is not None, elements,
                                    params, counted + by_formula))
        by_hand += by_formula
    return Counts(sum(p.numel() for p in model.parameters()), total // 2, products // 2,
                  total - products + by_hand, tuple(branches))


@cache
def count_network(name: str) -> tuple[tuple[int, int, int], Counts]:
    """Build a network registered with timm and count it: return its input (C, H, W), and what was counted.

    Raises:
        UsageError: no model of that name.
    """
    check_model_name(name)
    with torch.device("meta"):
        model = timm.create_model(name)
    size = model.default_cfg["input_size"]
    return size, count(model, size)


def names_of(words: Sequence[str]) -> list[str]:
    """Return the networks that patterns, parts of names or names stand for; all of ours without any.

    Raises:
        UsageError: a word that fits none.
    """
    names: dict[str, None] = {}
    for word in words or ["*"]:
        pattern = word if set(word) & set("*?[") else f"*{word}*"
        found = [word] if timm.is_model(word) else [name for name in list_networks() if fnmatch(name, pattern)]
        if not found:
            raise UsageError(f"no network fits {word!r}; {near_matches(word, list_networks(), 'networks')}")
        names |= dict.fromkeys(found)
    return list(names)


def list_models(names: Sequence[str], weights: bool = False) -> list[dict[str, str]]:
    """Return a row for each network, or for each file of weights, with where it is from.

    Raises:
        UsageError: none of the networks has weights.
    """
    tags: dict[str, list[str]] = {}
    for name in timm.list_pretrained():
        base, _, tag = name.partition(".")
        tags.setdefault(base, []).append(tag)
    rows = []
    for name in names:
        about = get_network(name).about if name in list_networks() else "of timm"
        for tag in tags.get(name, []) if weights else [""]:
            cfg = timm.get_pretrained_cfg(f"{name}.{tag}" if tag else name)
            first, *more = tags.get(name, [""])
            having = f"{first} and {len(more)} more" if more else first
            if tag:
                having = "comes with ea_vision" if cfg.file else f"hub: {cfg.hf_hub_id or cfg.url}"
            rows.append({"model": f"{name}.{tag}" if tag else name, "input": "{1}x{2}".format(*cfg.input_size),
                         "weights": having, "what it is": about})
    if not rows:
        raise UsageError(f"none of the {len(names)} networks has weights")
    return rows


def sizes_of(name: str) -> dict[str, Any]:
    """Return a row of --sizes; maps are layers x heads x (height x width) of each shape of map, in order."""
    size, counts = count_network(name)
    shapes = Counter((branch.num_heads, *branch.feat_size) for branch in counts.branches)
    return {"model": name, "input": f"{size[1]}x{size[2]}", "params M": round(counts.params / 1e6, 4),
            "GMACs": round(counts.macs / 1e9, 4), "GFLOPs": round(counts.flops_paper / 1e9, 4),
            "profiler": round(counts.flops_profiler / 1e9, 4), "layers": len(counts.branches),
            "maps": " + ".join(f"{n} x {K} x ({H}x{W})" for (K, H, W), n in shapes.items())}


def layers_table(branches: Sequence[BranchCount]) -> str:
    """Return a Markdown table of attention branches, equal neighbours in one row, and what they need together."""
    lines: list[Sequence[str]] = [("layers", "first", "maps", "maps KiB", "params", "MFLOPs", "evolve")]
    for _, group in groupby(branches, lambda b: (b.num_heads, b.feat_size, b.params, b.flops_profiler, b.evolves)):
        same = list(group)
        first, (H, W) = same[0], same[0].feat_size
        lines.append((str(len(same)), first.layer, f"{first.num_heads} x ({H}x{W})", f"{first.map_bytes / 1024:.2f}",
                      f"{first.params:,}", f"{first.flops_profiler / 1e6:.1f}", "yes" if first.evolves else ""))
    return (f"{markdown(lines)}\nmaps: {training_map_bytes(branches) / 2**20:.2f} MiB in training, "
            f"{inference_map_bytes(branches) / 1024:.2f} KiB in inference; "
            f"{sum(branch.params for branch in branches):,} parameters; "
            f"{sum(branch.flops_profiler for branch in branches) / 1e6:.1f} MFLOPs")


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("models", nargs="*", metavar="NAME", help="names or patterns (default: all of ours)")
    kind = parser.add_mutually_exclusive_group()
    kind.add_argument("--weights", action="store_true", help="a row for each file of weights")
    kind.add_argument("--sizes", action="store_true", help="parameters, arithmetic and attention maps")
    kind.add_argument("--layers", action="store_true", help="a table of each network's attention branches")
    parser.add_argument("--csv", metavar="FILE", help="also write the rows to FILE ('-': to standard output instead of "
                        "the table)")
    args = parser.parse_args(argv)
    names = names_of(args.models)
    if args.layers:
        branches = {name: found for name in names if (found := count_network(name)[1].branches)}
        if not branches:
            raise UsageError(f"--layers needs a network with this package's attention, got {', '.join(names)}")
        rows = [{"model": name, **asdict(branch), "feat_size": "x".join(map(str, branch.feat_size)),
                 "map_bytes": branch.map_bytes} for name, found in branches.items() for branch in found]
        text = "\n\n".join(f"{name}\n{layers_table(found)}" for name, found in branches.items())
    else:
        rows = [sizes_of(name) for name in names] if args.sizes else list_models(names, args.weights)
        text = markdown([list(rows[0]), *([f"{x:.2f}" if isinstance(x, float) else str(x) for x in row.values()]
                                          for row in rows)])
    if args.csv == "-":
        print(csv_text(rows), end="")
        return 0
    if args.csv:
        atomic_write(check_output(Path(args.csv)), csv_text(rows).encode())
    print(text)
    return 0
