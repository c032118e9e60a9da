"""Search block designs and widths that meet the published sizes of the PA paper's CIFAR networks.

    python experiments/width_search.py experiments/results/widths/misses.csv         # 1 minute on a core

Published: 5.36 M parameters and 1.11 G operations for the CNN, 4.92 M and 1.05 G for the Conv-Transformer (1.14 G with
evolving maps), with 12 blocks in 4 stages, 64 filters first and the hidden size doubled at each halving of the side.
Parameters and operations are counted by formula, for every combination of the readings below. For each the widths with
the least largest relative miss of the four figures are sought: multiples of 16 up to 512 in any order ("any"), those
that rise or stay from stage to stage ("rising"), and those that double, from 32 to 96 in stage 1 ("doubled"). The file
has our network, ours with the widths that the paper names, and the ten best readings of each kind. What the evolution
adds, 0.09 G, is not searched: at 8x8 and below no reading of the paper's text costs so much.

* ff: the feed-forward part's layers, as multiples of the width: ours 1/2-1; others have "W1 four times W0 and W2".
* dense: how a block reads the earlier ones: all concatenated and projected (ours), the sum of them, or the two newest.
* attention: inner width of queries, keys and values: the block's (ours) or its half.
* branch: what the convolution beside attention reads: the whole width (ours) or its half.
* hidden: width of the 3x3 convolutions: the block's (ours) or, between 1x1 convolutions, its half.
* counting: operations for a multiply-add.
"""
import argparse
import itertools
import sys
from collections.abc import Iterator
from pathlib import Path

import numpy as np

from ea_vision.base.errors import exit_code
from ea_vision.base.files import atomic_write, create, csv_text

TARGETS = (("cnn", "params", 5.36e6), ("cnn", "operations", 1.11e9), ("attention", "params", 4.92e6),
           ("attention", "operations", 1.05e9))
FF = {"1/2-1": (0.5, 1), "1/4-1": (0.25, 1), "4-1": (4, 1), "1/4-1-1/4-1": (0.25, 1, 0.25, 1),
      "1/8-1/2-1/8-1": (0.125, 0.5, 0.125, 1), "1/2-2-1/2-1": (0.5, 2, 0.5, 1), "none": ()}
READINGS = {"ff": tuple(FF), "dense": ("concatenated", "sum", "two newest"), "attention": ("full", "half"),
            "branch": ("full", "half"), "hidden": ("full", "half"), "counting": (2, 1)}
OURS = {"ff": "1/2-1", "dense": "concatenated", "attention": "full", "branch": "full", "hidden": "full", "counting": 2}
SIDES, DEPTH, HEADS, CLASSES = (32, 16, 8, 4), 3, 4, 10


class Cost:
    """Parameters and multiply-adds, of convolutions and of attention's products, as arrays over widths."""

    def __init__(self):
        self.params, self.macs, self.products = 0.0, 0.0, 0.0

    def conv(self, cin, cout, kernel, side, norm=True):
        self.params = self.params + cin * cout * kernel ** 2 + 2 * cout * norm
        self.macs = self.macs + cin * cout * kernel ** 2 * side ** 2


def block(cost: Cost, width, side: int, attends: bool, reading: dict) -> None:
    """Add a block of this width on maps of side x side."""
    if attends:
        inner = width * (1 if reading["attention"] == "full" else 0.5)
        cost.conv(width * (1 if reading["branch"] == "full" else 0.5), width / 2, 3, side, norm=False)
        cost.conv(width, 3 * inner, 1, side, norm=False)
        cost.conv(inner, width / 2, 1, side, norm=False)
        cost.params = cost.params + 3 * inner + width / 2 + 2 * width + 2 * (2 * side - 1) * inner / HEADS
        cost.products = cost.products + 2 * side ** 4 * inner + 2 * side ** 2 * (2 * side - 1) * inner
    elif reading["hidden"] == "half":
        for cin, cout, kernel in ((1, 0.5, 1), (0.5, 0.5, 3), (0.5, 1, 1)):
            cost.conv(cin * width, cout * width, kernel, side)
    else:
        cost.conv(width, width, 3, side)
    last = 1
    for size in FF[reading["ff"]]:
        cost.conv(last * width, size * width, 1, side)
        last = size


def network(widths, attention: bool, reading: dict) -> tuple:
    """Return the parameters and operations of a network; widths: four numbers or arrays."""
    cost = Cost()
    cost.conv(3, widths[0], 3, SIDES[0])
    before = widths[0]
    for stage, (width, side) in enumerate(zip(widths, SIDES, strict=True)):
        changed = Cost()
        changed.conv(before, width, 1, side)
        cost.params = cost.params + np.where(before == width, 0, changed.params)
        cost.macs = cost.macs + np.where(before == width, 0, changed.macs)
        for j in range(DEPTH):
            read = {"concatenated": j + 1, "sum": 1, "two newest": min(j + 1, 2)}[reading["dense"]]
            if read > 1:
                cost.conv(read * width, width, 1, side)
            block(cost, width, side, attention and stage >= 2, reading)
        before = width
    return cost.params + before * CLASSES + CLASSES, reading["counting"] * cost.macs + cost.products


def misses(widths, reading: dict) -> list:
    """Return the relative misses of TARGETS."""
    made = {name: dict(zip(("params", "operations"), network(widths, name == "attention", reading), strict=True))
            for name in ("cnn", "attention")}
    return [made[name][what] / target - 1 for name, what, target in TARGETS]


def rows(step: int = 16) -> Iterator[dict]:
    """Yield the best widths of each kind, by reading."""
    grid = np.stack(np.meshgrid(*[np.arange(2 * step, 513, step)] * 3, indexing="ij")).reshape(3, -1).astype(float)
    free = np.stack([np.full(grid.shape[1], 64.0), *grid])
    doubled = np.arange(32.0, 97.0, 4) * np.array([[1], [2], [4], [8]])
    for kind, widths in (("any", free), ("rising", free[:, (np.diff(free, axis=0) >= 0).all(0)]), ("doubled", doubled)):
        for values in itertools.product(*READINGS.values()):
            reading = dict(zip(READINGS, values, strict=True))
            found = np.stack([np.broadcast_to(miss, widths.shape[1:]) for miss in misses(widths, reading)])
            best = int(np.abs(found).max(0).argmin())
            yield row(kind, [int(width) for width in widths[:, best]], reading)


def row(kind: str, widths: list[int], reading: dict) -> dict:
    """Return a row of the table."""
    figures = {}
    for name in ("cnn", "attention"):
        params, operations = network([float(width) for width in widths], name == "attention", reading)
        figures |= {f"{name}_params_m": f"{params / 1e6:.3f}", f"{name}_operations_g": f"{operations / 1e9:.3f}"}
    worst = max(abs(float(miss)) for miss in misses([float(width) for width in widths], reading))
    return {"kind": kind, "widths": " ".join(map(str, widths)), **reading, **figures,
            "largest_miss_percent": f"{100 * worst:.1f}"}


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("file", type=Path, help="CSV to write")
    file = parser.parse_args(argv).file
    searched = sorted(rows(), key=lambda found: float(found["largest_miss_percent"]))
    shown = [row("ours", [64, 128, 256, 256], OURS), row("named by the paper", [64, 128, 256, 512], OURS)]
    for kind in ("any", "rising", "doubled"):
        shown += [found for found in searched if found["kind"] == kind][:10]
    create(file.parent)
    atomic_write(file, csv_text(shown).encode())
    for line in shown:
        print(" ".join(map(str, line.values())))
    print(f"{len(searched) // 3} readings; written: {file}")
    return 0


if __name__ == "__main__":
    sys.exit(exit_code(main))
