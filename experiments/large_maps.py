"""Measure what attention costs as images, and so its maps, grow: by part of a layer, and in whole networks.

    OMP_NUM_THREADS=1 python -m experiments.large_maps parts experiments/results/large-maps-parts.csv
    OMP_WAIT_POLICY=passive python -m experiments.large_maps networks experiments/results/large-maps.csv

parts: one layer of ea_aa_resnet50 (8 heads, 20 wide, values 3 wide, one image, float32, one thread) in the C kernel.
A part is what the layer takes with it less what it takes without it, the median of repeats in processor time. The least
times that the file has, too, are by this script at commit 7bb541b.

networks: seconds of processor time an image, inference and training step, medians of interleaved rounds; peak: what a
process of its own had resident at most in training steps, less what it had before the network was made. malloc keeps
freed memory while times are taken (else each page is cleared again) and returns it where the peak is.
"""

import argparse
import multiprocessing
import os
import re
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pandas as pd
import timm
import torch

import ea_vision  # noqa: F401  (registers the networks)
from ea_vision.ops import evolving_attention

HEADS, DIM_QK, DIM_V = 8, 20, 3
KEEP = {
    "MALLOC_TOP_PAD_": "1000000000",
    "MALLOC_MMAP_MAX_": "0",
    "MALLOC_TRIM_THRESHOLD_": "20000000000",
}
RETURN = {"MALLOC_MMAP_THRESHOLD_": "65536", "MALLOC_TRIM_THRESHOLD_": "65536"}
LADDER = (  # each adds a part to the one before
    ("softmax, values", {"dim": 4}),
    ("products of q and k", {}),
    ("position", {"relative": True}),
    ("maps handed on", {"relative": True, "logits": True}),
    ("previous maps", {"relative": True, "logits": True, "prev": True}),
    ("convolution", {"relative": True, "logits": True, "prev": True, "conv": True}),
)


def layer(
    side: int,
    dim: int = DIM_QK,
    relative: bool = False,
    logits: bool = False,
    prev: bool = False,
    conv: bool = False,
) -> Callable[[], tuple[float, float]]:
    """Return what measures milliseconds of a layer, forward and backward."""
    N = side**2

    def new(*shape: int) -> torch.Tensor:
        return torch.randn(shape).requires_grad_()

    x = {
        name: new(1, N, HEADS, width).transpose(1, 2)
        for name, width in (("q", dim), ("k", dim), ("v", DIM_V))
    }
    if relative:
        x |= {"height_rel": new(2 * side - 1, dim), "width_rel": new(2 * side - 1, dim)}
    if prev:
        x["prev_logits"] = new(1, HEADS, N, N)
    if conv:
        x |= {"weight": new(HEADS, HEADS, 3, 3), "bias": new(HEADS)}

    def measured() -> tuple[float, float]:
        begun = time.process_time()
        made = [
            y
            for y in evolving_attention(**x, feat_size=(side, side), need_logits=logits)
            if y is not None
        ]
        middle = time.process_time()
        gradients = [torch.ones_like(y) for y in made]
        again = time.process_time()
        torch.autograd.grad(made, list(x.values()), gradients)
        return 1000 * (middle - begun), 1000 * (time.process_time() - again)

    return measured


def parts(repeats: int) -> pd.DataFrame:
    """Return the milliseconds of each part at four sizes of the map."""
    torch.set_num_threads(1)
    rows = []
    for side in (14, 20, 28, 50):
        measured = [layer(side, **options) for _, options in LADDER]
        rounds = [[each() for each in measured] for _ in range(repeats + 1)][1:]
        for way, name in enumerate(("forward", "backward")):
            taken = [statistics.median(run[i][way] for run in rounds) for i in range(len(LADDER))]
            rows += [
                {"pixels": side**2, "pass": name, "part": part, "ms": after - before}
                for (part, _), before, after in zip(LADDER, [0, *taken], taken, strict=False)
            ]
    return pd.DataFrame(rows)


NETWORKS = {
    "resnet50": ("resnet50", {}),
    "aa": ("aa_resnet50", {}),
    "pa": ("pa_aa_resnet50", {}),
    "ea": ("ea_aa_resnet50", {}),
    "ea, map_reduction=32": ("ea_aa_resnet50", {"map_reduction": 32}),
    "ea, attn_stages=(4,)": ("ea_aa_resnet50", {"attn_stages": (4,)}),
    "aa, fusion=add": ("aa_resnet50", {"fusion": "add"}),
    "ea, fusion=add": ("ea_aa_resnet50", {"fusion": "add"}),
    "aa, window=7": ("aa_resnet50", {"window": 7}),
    "retinanet, resnet50": ("resnet50", None),
    "retinanet, ea": ("ea_aa_resnet50", None),
}


def create(name: str, size: int) -> tuple[torch.nn.Module, Callable[[torch.Tensor], torch.Tensor]]:
    """Return a network and what makes a loss of it, or its result in evaluation, from images."""
    model, options = NETWORKS[name]
    if options is None:
        from ea_vision.detection.model import create_detector

        detector = create_detector(model, img_size=size)
        boxes = {"boxes": torch.tensor([[10.0, 20.0, 200.0, 180.0]]), "labels": torch.tensor([1])}
        return (
            detector,
            lambda x: (
                sum(detector([*x], [boxes] * len(x)).values())
                if detector.training
                else detector([*x])
            ),
        )
    network = timm.create_model(
        model, **({} if model == "resnet50" else {"img_size": size, **options})
    )
    return network, lambda x: network(x).square().mean()


def step(network: torch.nn.Module, loss: Callable, images: torch.Tensor, train: bool) -> float:
    """Return the seconds of processor time that an image takes."""
    network.train(train)
    begun = time.process_time()
    if train:
        loss(images).backward()
    else:
        with torch.no_grad():
            loss(images)
    taken = time.process_time() - begun
    network.zero_grad(set_to_none=True)
    return taken / len(images)


def resident(field: str) -> float:
    """Return MiB: VmRSS, what is resident now, or VmHWM, at most so far (getrusage's begins with the parent's)."""
    return (
        int(
            re.search(
                rf"^{field}:\s*(\d+) kB$", Path("/proc/self/status").read_text(), re.MULTILINE
            )[1]
        )
        / 1024
    )


def peak(name: str, size: int, batch: int, threads: int) -> float:
    """Return the MiB that training steps take, in a process of its own."""
    torch.set_num_threads(threads)
    before = resident("VmRSS")
    network, loss = create(name, size)
    for _ in range(2):
        step(network, loss, torch.randn(batch, 3, size, size), True)
    return resident("VmHWM") - before


def networks(sizes: list[int], names: list[str], batch: int, rounds: int) -> pd.DataFrame:
    """Return seconds an image, and peak memory, of networks by image size."""
    rows = []
    for size in sizes:
        made = {name: create(name, size) for name in names}
        images = torch.randn(batch, 3, size, size)
        taken: dict[tuple[str, bool], list[float]] = {}
        for number in range(rounds + 1):
            for name, (network, loss) in made.items():
                for train in (False, True):
                    seconds = step(network, loss, images, train)
                    if number:  # the first warms up
                        taken.setdefault((name, train), []).append(seconds)
        for variable in KEEP:
            os.environ.pop(variable, None)
        os.environ.update(RETURN)
        with multiprocessing.get_context("spawn").Pool(1, maxtasksperchild=1) as pool:
            peaks = pool.starmap(
                peak, [(name, size, batch, torch.get_num_threads()) for name in names], chunksize=1
            )
        for name, most in zip(names, peaks, strict=True):
            rows.append(
                {
                    "size": size,
                    "network": name,
                    "inference, s": statistics.median(taken[name, False]),
                    "training, s": statistics.median(taken[name, True]),
                    "peak, MiB": most,
                }
            )
            print(rows[-1], flush=True)
    return pd.DataFrame(rows)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("what", choices=("parts", "networks"))
    parser.add_argument("csv", type=Path)
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--sizes", type=int, nargs="+", default=[224, 320, 448, 640])
    parser.add_argument(
        "--networks", nargs="+", choices=NETWORKS, default=["resnet50", "aa", "pa", "ea"]
    )
    parser.add_argument("--batch-size", type=int, default=2)
    args = parser.parse_args()
    if os.environ.get("MALLOC_TOP_PAD_") is None:
        os.execve(
            sys.executable,
            [sys.executable, "-m", "experiments.large_maps", *sys.argv[1:]],
            os.environ | KEEP,
        )
    torch.manual_seed(0)
    table = (
        parts(args.repeats)
        if args.what == "parts"
        else networks(args.sizes, args.networks, args.batch_size, args.repeats)
    )
    table.round(3).to_csv(args.csv, index=False)
    print(table.round(3).to_string(index=False))


if __name__ == "__main__":
    main()
