"""Time and memory of recording attention maps beside the plain forward.

    python -m ea_vision.measure.recording_cost
    python -m ea_vision.measure.recording_cost vit_base_patch16_224 swin_tiny_patch4_window7_224 --layers 12

A row a network: seconds of a forward of one image, plain and recorded (medians), the tensors alive at once at most, and
what the maps take that are kept. Random weights, evaluation mode, float32.
"""
from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
import timm
import torch
from torch import nn

from ea_vision.base.errors import UsageError, exit_code
from ea_vision.base.networks import check_model_name
from ea_vision.measure.memory import Storages
from ea_vision.measure.peak_memory import MIB
from ea_vision.measure.steps import interleaved
from ea_vision.recorder.recording import attention_layers, record_attention

MODELS = ("vit_small_patch16_224", "deit_small_distilled_patch16_224", "swin_tiny_patch4_window7_224", "pvt_v2_b0",
          "mobilevit_s", "ea_vit_tiny_patch16_224", "ea_aa_resnet34")


@dataclass(frozen=True)
class Cost:
    """seconds of a forward, its peak of tensors in bytes beside weights and input, and bytes of the maps kept."""

    seconds: float
    recorded_seconds: float
    peak: int
    recorded_peak: int
    kept: int


def peak_of(run: Callable[[], object], known: Sequence[torch.Tensor]) -> int:
    """Return the most bytes of tensors that are alive at once, beside those that are there before."""
    with Storages(known, set()) as storages:
        held = run()
    events = sorted([(birth, size) for birth, _, size, _ in storages.rows]
                    + [(death, -size) for _, death, size, _ in storages.rows if death != float("inf")])
    del held
    return int(np.cumsum([size for _, size in events]).max())


def measure(model: nn.Module, images: torch.Tensor, layers: Sequence[int] | None = None, repeats: int = 5) -> Cost:
    """Measure forwards of `images` (B, 3, H, W), plain and recorded.

    Args:
        layers: numbers; None is all.
        repeats: forwards of each kind, in turns, after one that does not count.
    """
    def recorded():
        with record_attention(model, layers) as maps:
            output = model(images)
        return output, maps

    model.eval()
    runs = {"plain": lambda: model(images), "recorded": recorded}
    with torch.no_grad():
        seconds = interleaved(runs, repeats, warm_up=1)
        kept = sum(maps.nbytes for layer in recorded()[1].values() for maps in layer._parts.values())
        peaks = [peak_of(run, [*model.parameters(), *model.buffers(), images]) for run in runs.values()]
    return Cost(*seconds.values(), *peaks, kept)


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("models", nargs="*", default=MODELS, metavar="MODEL", help="timm's names, ours among them")
    parser.add_argument("--layers", metavar="1,2", help="attention layers to record (default: all)")
    parser.add_argument("--repeats", type=int, default=5, help="forwards (default: %(default)s)")
    args = parser.parse_args(argv)
    if args.repeats < 1:
        raise UsageError(f"--repeats must be at least 1, got {args.repeats}")
    for name in args.models:
        check_model_name(name)
    print("| network | pixels | layers | plain, s | recorded, s | ratio | peak, MiB | recorded, MiB | kept, MiB |\n"
          "| --- | --- | --- | --- | --- | --- | --- | --- | --- |")
    for name in args.models:
        torch.manual_seed(0)
        model = timm.create_model(name)
        size = timm.data.resolve_model_data_config(model)["input_size"]
        layers = [int(n) for n in args.layers.split(",")] if args.layers else None
        cost = measure(model, torch.rand(1, *size), layers, args.repeats)
        print(f"| {name} | {size[1]} | {len(layers or attention_layers(model))} | {cost.seconds:.3f} | "
              f"{cost.recorded_seconds:.3f} | {cost.recorded_seconds / cost.seconds:.2f} | {cost.peak / MIB:.1f} | "
              f"{cost.recorded_peak / MIB:.1f} | {cost.kept / MIB:.1f} |", flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(exit_code(main))
