"""Measure the memory that windows save in a layer on 28 x 28 pixels, forward and backward, beside global attention.

    OMP_NUM_THREADS=1 python experiments/window_memory.py experiments/results/window-memory.csv

Counted is the most memory in MiB that tensors take at once, beside weights, gradients and input; float32. "With
logits": the layer hands them on, as in a chain of maps, so that the C kernel keeps a map.
"""
import argparse
from contextlib import nullcontext
from pathlib import Path

import torch

from ea_vision.base.files import atomic_write, csv_text
from ea_vision.layers import AugmentedConv2d
from ea_vision.measure.recording_cost import peak_of
from ea_vision.ops import use_implementation

SIDE, CHANNELS = 28, 128
KINDS = {  # the implementation, whether logits are handed on, the layer's window
    "global, readable torch, with logits": ("reference", True, None),
    "global, C kernel, with logits": ("cpu", True, None),
    "global, C kernel": ("cpu", False, None),
    "window 7": (None, False, 7),
}


def peak(implementation: str | None, logits: bool, window: int | None, batch_size: int) -> float:
    """Return the MiB that a step takes."""
    layer = AugmentedConv2d(CHANNELS, CHANNELS, dim_qk=160, dim_v=8, feat_size=(SIDE, SIDE), window=window)
    images = torch.randn(batch_size, CHANNELS, SIDE, SIDE)

    def step() -> None:
        layer(images, need_logits=logits)[0].sum().backward()

    with use_implementation(implementation) if implementation else nullcontext():
        step()  # makes the gradients, which an optimiser keeps
        known = [images, *layer.buffers(), *(tensor for p in layer.parameters() for tensor in (p, p.grad))]
        return peak_of(step, known) / 2**20


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("csv", type=Path)
    args = parser.parse_args()
    torch.manual_seed(0)
    rows = [{"batch": batch, **{kind: round(peak(*how, batch), 1) for kind, how in KINDS.items()}}
            for batch in (1, 2, 8)]
    atomic_write(args.csv, csv_text(rows).encode())
    print(args.csv.read_text(), end="")


if __name__ == "__main__":
    main()
