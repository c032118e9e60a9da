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

from ea_vision.layers import AugmentedConv2d
from ea_vision.sizes import BFLOAT16, BMM, Counts, count_operations, position_operations, summarise

MAP_OPERATIONS = 6  # the profiler's, per element of the maps


@dataclass(frozen=True)
class PaperCounts:
    """Counts of a network, and its operations in the papers' counting.

    Attributes:
        counts: parameters, multiply-adds and branches.
        profiler: the AA paper's operations.
        by_branch: the AA paper's operations of each attention branch, by name of its layer.
    """

    counts: Counts
    profiler: int
    by_branch: dict[str, int]

    @property
    def paper(self) -> int:
        """Return the EA paper's operations."""
        return 2 * self.counts.macs - self.counts.attention_macs


def count_as_papers(model: nn.Module, input_size: tuple[int, int, int]) -> PaperCounts:
    """Count a model on one image of (C, H, W); see `ea_vision.sizes.count`."""
    operations = count_operations(model, input_size)
    counts = summarise(model, operations)
    total = _without_products(operations.modules["Global"])
    flops_of_branches = {}
    for branch in counts.branches:
        layer = model.get_submodule(branch.layer)
        path = f"{type(model).__name__}.{branch.layer}"
        added = MAP_OPERATIONS * branch.map_bytes // BFLOAT16
        projections = _without_products(operations.modules[path])
        if isinstance(layer, AugmentedConv2d):
            added += position_operations(layer)
            projections -= sum(operations.modules.get(f"{path}.conv", {}).values())
        total += added
        flops_of_branches[branch.layer] = projections + added
    return PaperCounts(counts, total, flops_of_branches)


def _without_products(operations: dict) -> int:
    """Return a module's operations without the attention products; projections are baddbmm, linear layers addmm."""
    return sum(operations.values()) - operations.get(BMM, 0)
