"""Arithmetic, parameters and map memory of a network and of each of its attention branches, for one image.

Three countings of the same operations:

* multiply-adds, each once.
* the EA paper's GFLOPs: 2 for a multiply-add of a convolution or linear layer, 1 for one of the attention products
  (queries with keys, queries with positions, maps with values).
* TensorFlow's profiler's, in the AA paper: 2 for a multiply-add of a convolution or linear layer and of the two
  relative position products, 6 for an element of the maps (sums, scale, softmax), and nothing for the products of
  queries with keys and of maps with values. That the profiler leaves those out is inferred: so counted, the paper's
  table 9 and its AA-MnasNets come out as printed.

Paper: AA, `Attention Augmented Convolutional Networks` - https://arxiv.org/abs/1904.09925
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import nn
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.flop_counter import FlopCounterMode

from ea_vision.layers import AugmentedConv2d, TokenAttention
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
