"""Count the operations of a network for one image as the papers do.

* The EA paper: 2 for a multiply-add of a convolution or linear layer, 1 for one of the attention products (queries with
  keys, queries with positions, maps with values).
* The AA paper, TensorFlow's profiler: 2 for a multiply-add of a convolution or linear layer and of the two relative
  position products, 6 for an element of the maps (sums, scale, softmax), and nothing for the products of queries with
  keys and of maps with values. We infer that the profiler leaves those out, because this reproduces the paper's table 9
  and its AA-MnasNets: https://arxiv.org/abs/1904.09925
"""

from dataclasses import dataclass

from torch import nn

from ea_vision.layers import AugmentedConv2d, MapsAttention
from ea_vision.sizes import BMM, Counts, count, position_operations

BFLOAT16 = 2  # bytes of a number
MAP_OPERATIONS = 6  # the profiler's, per element of the maps


@dataclass(frozen=True)
class BranchCount:
    """An attention branch: an augmented convolution without its convolution, or a vision transformer's attention.

    Attributes:
        layer: name of the module.
        evolves: whether it uses the previous layer's maps.
        map_bytes: of K maps of N x N numbers in bfloat16, or of the part of them in a window.
        params: weights, including the evolution's.
        flops: the AA paper's operations.
    """

    layer: str
    evolves: bool
    map_bytes: int
    params: int
    flops: int


@dataclass(frozen=True)
class PaperCounts:
    """Counts of a network, and its operations in the papers' counting.

    Attributes:
        counts: parameters and multiply-adds.
        profiler: the AA paper's operations.
        branches: the attention branches, in order.
    """

    counts: Counts
    profiler: int
    branches: tuple[BranchCount, ...]

    @property
    def paper(self) -> int:
        """Return the EA paper's operations."""
        return 2 * self.counts.macs - self.counts.attention_macs


def count_as_papers(model: nn.Module, input_size: tuple[int, int, int]) -> PaperCounts:
    """Count a model on one image of (C, H, W); see `ea_vision.sizes.count`."""
    counts = count(model, input_size)
    total = _without_products(counts.operations["Global"])
    branches = []
    for name, (K, H, W) in counts.maps.items():
        layer: AugmentedConv2d | MapsAttention = model.get_submodule(name)
        path = f"{type(model).__name__}.{name}"
        params = sum(parameter.numel() for parameter in layer.parameters())
        projections = _without_products(counts.operations[path])
        elements = K * (H * W) ** 2
        positions = 0
        if isinstance(layer, AugmentedConv2d):
            elements = layer.map_elements((H, W))
            positions = position_operations(layer)
            projections -= sum(counts.operations.get(f"{path}.conv", {}).values())
            if layer.conv is not None:
                params -= layer.conv.weight.numel()
        added = MAP_OPERATIONS * elements + positions
        total += added
        evolves = layer.evolution is not None
        branches.append(
            BranchCount(name, evolves, BFLOAT16 * elements, params, projections + added)
        )
    return PaperCounts(counts, total, tuple(branches))


def _without_products(operations: dict) -> int:
    """Return a module's operations without the attention products; projections are baddbmm, linear layers addmm."""
    return sum(operations.values()) - operations.get(BMM, 0)
