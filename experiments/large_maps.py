"""Measure the cost of attention as images, and so its maps, grow: by part of a layer, and in whole networks.

    OMP_NUM_THREADS=1 python -m experiments.large_maps parts experiments/results/large-maps-parts.csv
    OMP_WAIT_POLICY=passive python -m experiments.large_maps networks experiments/results/large-maps.csv

parts: one layer of ea_aa_resnet50 (8 heads, 20 wide, values 3 wide, one image, float32, one thread) in the C kernel.
A part's time is the layer's time with the part minus the time without it (medians of processor time). The file also
has minimum times, from this script at commit 7bb541b.

networks: seconds of processor time per image, in inference and in a training step, medians of interleaved rounds. The
peak is the largest resident memory of a separate process during training steps, minus its memory before the network was
created. malloc keeps freed memory while times are measured (otherwise each page is cleared again) and returns it while
the peak is measured.
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

HEADS = 8
DIM_QK = 20
DIM_V = 3
KEEP = {
    "MALLOC_TOP_PAD_": "1000000000",
    "MALLOC_MMAP_MAX_": "0",
    "MALLOC_TRIM_THRESHOLD_": "20000000000",
}
RETURN = {"MALLOC_MMAP_THRESHOLD_": "65536", "MALLOC_TRIM_THRESHOLD_": "65536"}
LADDER = (  # each entry adds one part to the previous one
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
    """Return a function that measures milliseconds of a layer, forward and backward."""
    N = side**2

    def new(*shape: int) -> torch.Tensor:
        return torch.randn(shape).requires_grad_()

    x = {
        "q": new(1, N, HEADS, dim).transpose(1, 2),
        "k": new(1, N, HEADS, dim).transpose(1, 2),
        "v": new(1, N, HEADS, DIM_V).transpose(1, 2),
    }
    if relative:
        x["height_rel"] = new(2 * side - 1, dim)
        x["width_rel"] = new(2 * side - 1, dim)
    if prev:
        x["prev_logits"] = new(1, HEADS, N, N)
    if conv:
        x["weight"] = new(HEADS, HEADS, 3, 3)
        x["bias"] = new(HEADS)

    def measure() -> tuple[float, float]:
        start = time.process_time()
        outputs = evolving_attention(**x, feat_size=(side, side), need_logits=logits)
        forward = time.process_time() - start
        outputs = [y for y in outputs if y is not None]
        gradients = [torch.ones_like(y) for y in outputs]
        start = time.process_time()
        torch.autograd.grad(outputs, list(x.values()), gradients)
        backward = time.process_time() - start
        return 1000 * forward, 1000 * backward

    return measure


def parts(repeats: int) -> pd.DataFrame:
    """Return the milliseconds of each part at four sizes of the map."""
    torch.set_num_threads(1)
    rows = []
    for side in (14, 20, 28, 50):
        layers = {part: layer(side, **options) for part, options in LADDER}
        times: list[tuple[str, float, float]] = []
        for number in range(repeats + 1):
            for part, measure in layers.items():
                forward, backward = measure()
                if number > 0:  # the first round warms up
                    times.append((part, forward, backward))
        medians = (
            pd.DataFrame(times, columns=["part", "forward", "backward"]).groupby("part").median()
        )
        for way in ("forward", "backward"):
            before = 0.0
            for part in layers:
                after = medians.loc[part, way]
                rows.append({"pixels": side**2, "pass": way, "part": part, "ms": after - before})
                before = after
    return pd.DataFrame(rows)


NETWORKS = {
    "resnet50": ("resnet50", {}),
    "aa": ("aa_resnet50", {}),
    "pa": ("pa_aa_resnet50", {}),
    "ea": ("ea_aa_resnet50", {}),
    "ea, map_reduction=32": ("ea_aa_resnet50", {"map_reduction": 32}),
    "ea, attn_stages=(4,)": ("ea_aa_resnet50", {"attn_stages": (4,)}),
    "aa, window=7": ("aa_resnet50", {"window": 7}),
    "retinanet, resnet50": ("resnet50", None),
    "retinanet, ea": ("ea_aa_resnet50", None),
}


def create(name: str, size: int) -> tuple[torch.nn.Module, Callable[[torch.Tensor], torch.Tensor]]:
    """Return a network and a function of images that computes its loss, or its output in evaluation mode."""
    model, options = NETWORKS[name]
    if options is None:
        from ea_vision.detection.model import create_detector

        detector = create_detector(model, img_size=size)
        boxes = {"boxes": torch.tensor([[10.0, 20.0, 200.0, 180.0]]), "labels": torch.tensor([1])}

        def detect(images: torch.Tensor):
            if detector.training:
                return sum(detector([*images], [boxes] * len(images)).values())
            return detector([*images])

        return detector, detect
    if model != "resnet50":
        options = {"img_size": size, **options}
    network = timm.create_model(model, **options)
    return network, lambda x: network(x).square().mean()


def step(network: torch.nn.Module, loss: Callable, images: torch.Tensor, train: bool) -> float:
    """Return the seconds of processor time per image."""
    network.train(train)
    start = time.process_time()
    if train:
        loss(images).backward()
    else:
        with torch.no_grad():
            loss(images)
    seconds = time.process_time() - start
    network.zero_grad(set_to_none=True)
    return seconds / len(images)


def resident(field: str) -> float:
    """Return resident memory in MiB: VmRSS is the current value, VmHWM the peak (getrusage's peak would include the
    parent's)."""
    status = Path("/proc/self/status").read_text()
    kilobytes = re.search(rf"^{field}:\s*(\d+) kB$", status, re.MULTILINE)[1]
    return int(kilobytes) / 1024


def peak(name: str, size: int, batch: int, threads: int) -> float:
    """Return the MiB that training steps need, in a separate process."""
    torch.set_num_threads(threads)
    before = resident("VmRSS")
    network, loss = create(name, size)
    for _ in range(2):
        step(network, loss, torch.randn(batch, 3, size, size), True)
    return resident("VmHWM") - before


def networks(sizes: list[int], names: list[str], batch: int, rounds: int) -> pd.DataFrame:
    """Return seconds per image, and peak memory, of networks by image size."""
    rows = []
    for size in sizes:
        seconds = seconds_of(size, names, batch, rounds)
        for variable in KEEP:
            os.environ.pop(variable, None)
        os.environ.update(RETURN)
        threads = torch.get_num_threads()
        with multiprocessing.get_context("spawn").Pool(1, maxtasksperchild=1) as pool:
            peaks = pool.starmap(
                peak, [(name, size, batch, threads) for name in names], chunksize=1
            )
        for name, most in zip(names, peaks, strict=True):
            rows.append(
                {
                    "size": size,
                    "network": name,
                    "inference, s": statistics.median(seconds[name, False]),
                    "training, s": statistics.median(seconds[name, True]),
                    "peak, MiB": most,
                }
            )
            print(rows[-1], flush=True)
    return pd.DataFrame(rows)


def seconds_of(
    size: int, names: list[str], batch: int, rounds: int
) -> dict[tuple[str, bool], list[float]]:
    """Return seconds per image by (network, training or not), one value per interleaved round."""
    created = {name: create(name, size) for name in names}
    images = torch.randn(batch, 3, size, size)
    seconds: dict[tuple[str, bool], list[float]] = {}
    for number in range(rounds + 1):
        for name, (network, loss) in created.items():
            for train in (False, True):
                each = step(network, loss, images, train)
                if number > 0:  # the first round warms up
                    seconds.setdefault((name, train), []).append(each)
    return seconds


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
        again = [sys.executable, "-m", "experiments.large_maps", *sys.argv[1:]]
        os.execve(sys.executable, again, os.environ | KEEP)
    torch.manual_seed(0)
    if args.what == "parts":
        table = parts(args.repeats)
    else:
        table = networks(args.sizes, args.networks, args.batch_size, args.repeats)
    table.round(3).to_csv(args.csv, index=False)
    print(table.round(3).to_string(index=False))


if __name__ == "__main__":
    main()
