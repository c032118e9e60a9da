"""Speed and memory of networks in training and inference, in one run, on the device at hand, as ratios to a ResNet.

Measured are images per second of a training step (forward, backward, optimiser) and of inference, and the peak memory
of a training step. Rounds are interleaved, one step of each network in turn, and medians are given, so that what else
the machine does hits all alike. Weights are random; norms that start at zero are set to 0.2, so that every branch is
alive. A ratio is to timm's resnet of the same depth, of a vision transformer whose maps evolve to timm's plain one,
where that is measured too. Memory on a CPU is resident, of three training steps in a process of its own; on a GPU it is
what torch allocates, the network's weights and optimiser state included.
"""

import argparse
import ctypes
import os
import random
import re
import sys
import time
from collections.abc import Callable, Hashable, Sequence
from concurrent.futures import ProcessPoolExecutor
from datetime import datetime
from itertools import product
from multiprocessing import get_context
from pathlib import Path
from statistics import median

import psutil
import timm
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import ea_vision
from ea_vision.base.devices import choose_device
from ea_vision.base.errors import RunError, UsageError
from ea_vision.base.files import atomic_write, check_output, csv_text
from ea_vision.base.networks import DATA_KEYWORDS, create_classifier, lay_out
from ea_vision.base.provenance import hardware
from ea_vision.engine.evaluate import autocast
from ea_vision.engine.optimizer import check_optimizer_name
from ea_vision.recorder.loading import add_options, find_origin, positive
from ea_vision.sizes import names_of, table

EXAMPLES = """\
examples:
  ea-vision benchmark                                                  # the 50-layer networks
  ea-vision benchmark --models 'ea_*resnet50' resnet50 --csv speed.csv
  ea-vision benchmark --amp bfloat16 --channels-last --compile         # what a GPU is trained with
  EA_VISION_IMPLEMENTATION=reference ea-vision benchmark --models resnet50 ea_aa_resnet50 --repeats 15
"""
DEFAULT = ("resnet50", "aa_resnet50", "pa_aa_resnet50", "ea_aa_resnet50")
# Options of mallopt. Where times are measured, freed memory is kept: else each step gets its pages anew, zeroed.
TRIM, TOP_PAD, MMAP_THRESHOLD, MMAP_MAX = -1, -2, -3, -4
KEEP_MEMORY = {TOP_PAD: 10**9, MMAP_MAX: 0, TRIM: -1}  # -1: never returned, not from any size on
RETURN_MEMORY = {MMAP_THRESHOLD: 65536, TRIM: 65536}
MEASURED = {
    "train_images_per_s": "train img/s",
    "infer_images_per_s": "infer img/s",
    "memory_mib": "memory MiB",
}


def baseline_of(name: str) -> str | None:
    """Return timm's resnet of the same depth, of a vision transformer timm's plain one, or None."""
    if transformer := re.fullmatch(r"(?:[ep]a_)?((?:vit|deit)_.*)", name):
        return transformer[1]
    depth = re.search(r"net(\d+)", name)
    return f"resnet{depth[1]}" if depth else None


def interleaved(
    calls: dict[Hashable, Callable[[], object]],
    repeats: int,
    warm_up: int = 1,
    clock: Callable[[], float] = time.perf_counter,
) -> dict[Hashable, float]:
    """Return the median seconds of each call; a round has one of each, in any order; `warm_up` rounds do not count."""
    seconds = {key: [] for key in calls}
    shuffle = random.Random(
        0
    ).shuffle  # what one leaves in the caches shall not always meet the same next one
    turns = list(calls)
    for _ in range(warm_up + repeats):
        shuffle(turns)
        for key in turns:
            start = clock()
            calls[key]()
            seconds[key].append(clock() - start)
    return {key: median(values[warm_up:]) for key, values in seconds.items()}


class Steps:
    """Steps of training and of inference of a network on images (B, 3, H, W).

    Args:
        amp: none, bfloat16 or float16.
        opt: timm's name of the optimiser.
    """

    def __init__(self, model: nn.Module, images: Tensor, amp: str = "none", opt: str = "sgd"):
        self.model, self.images, self.amp = model, images, amp
        self.optimizer = timm.optim.create_optimizer_v2(model, opt=opt, lr=1e-3, momentum=0.9)
        self.scaler = torch.amp.GradScaler(images.device.type, enabled=amp == "float16")

    def train(self) -> Tensor:
        """Run forward, backward and update; return the loss."""
        self.model.train()
        self.optimizer.zero_grad()
        with autocast(self.amp, self.images.device):
            targets = torch.zeros(len(self.images), dtype=torch.int64, device=self.images.device)
            loss = F.cross_entropy(self.model(self.images).float(), targets)
        self.scaler.scale(loss).backward()
        self.scaler.step(self.optimizer)
        self.scaler.update()
        return loss.detach()

    def infer(self) -> Tensor:
        """Return the outputs in evaluation mode."""
        self.model.eval()
        with torch.inference_mode(), autocast(self.amp, self.images.device):
            return self.model(self.images)


def live_network(name: str, images: Tensor) -> nn.Module:
    """Return a network with random weights, always the same ones, none of whose branches is multiplied by zero.

    Raises:
        UsageError: unknown, or one that refuses these images.
    """
    torch.manual_seed(0)
    layout = (
        torch.channels_last
        if images.is_contiguous(memory_format=torch.channels_last)
        else torch.contiguous_format
    )
    try:
        origin = find_origin(name)
        kwargs = {key: value for key, value in origin.kwargs.items() if key not in DATA_KEYWORDS}
        model, _ = create_classifier(
            origin.name, kwargs, num_classes=1000, img_size=images.shape[-1]
        )
        model = lay_out(model.to(images.device), layout).train()
        for norm in model.modules():
            if (
                isinstance(norm, nn.modules.batchnorm._BatchNorm)
                and norm.affine
                and not norm.weight.any()
            ):
                nn.init.constant_(norm.weight, 0.2)
        with torch.no_grad():  # two passes make the statistics of BatchNorm
            model(images)
            model(images)
    except (ValueError, AssertionError, RuntimeError) as error:
        raise UsageError(
            f"{name} cannot run {len(images)} images of {images.shape[-1]} pixels: "
            f"{str(error) or type(error).__name__}"
        ) from error
    return model


def noise(args: argparse.Namespace, device: torch.device) -> Tensor:
    """Return the images of all networks, (B, 3, H, W)."""
    torch.manual_seed(0)
    images = torch.randn(args.batch_size, 3, args.img_size, args.img_size, device=device)
    return images.contiguous(
        memory_format=torch.channels_last if args.channels_last else torch.contiguous_format
    )


def set_malloc(options: dict[int, int]) -> None:
    """Set options of glibc's allocator, where it is the C library."""
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    for option, value in options.items() if mallopt else ():
        mallopt(option, value)


def peak_resident(name: str, args: argparse.Namespace) -> int:
    """Return the most bytes of main memory that three training steps take, in a process in which nothing else ran."""
    set_malloc(RETURN_MEMORY)
    torch.set_num_threads(args.threads)
    images = noise(args, torch.device("cpu"))
    before = psutil.Process().memory_info().rss
    steps = Steps(live_network(name, images), images, args.amp, args.opt)
    for _ in range(3):
        steps.train()
    status = Path("/proc/self/status").read_text(
        encoding="utf-8"
    )  # getrusage's maximum begins with the parent's
    return 1024 * int(re.search(r"^VmHWM:\s*(\d+) kB$", status, re.MULTILINE)[1]) - before


def peak_memory(
    steps: Steps, name: str, mode: str, before: int, args: argparse.Namespace
) -> float | None:
    """Return the peak of a training step in MiB, or None where it cannot be told.

    Args:
        before: bytes that were allocated on the GPU before the network was built.
    """
    if steps.images.is_cuda:
        steps.train()
        torch.cuda.reset_peak_memory_stats()
        steps.train()
        return (torch.cuda.max_memory_allocated() - before) / 2**20
    if mode == "compiled" or not Path("/proc/self/status").exists():
        return None
    with ProcessPoolExecutor(1, get_context("spawn")) as pool:
        return pool.submit(peak_resident, name, args).result() / 2**20


def measure(args: argparse.Namespace, device: torch.device) -> list[dict]:
    """Build and measure the networks; return a row for each network and mode.

    Raises:
        UsageError: a network that is asked for by name refuses the setting.
        RunError: a loss that is not finite.
    """
    images, steps, rows = noise(args, device), {}, {}
    for name, mode in product(names_of(args.models), ("eager", "compiled")[: 1 + args.compile]):
        print(name, mode, file=sys.stderr)
        before = torch.cuda.memory_allocated()
        try:
            model = live_network(name, images)
        except UsageError as error:
            if name in args.models:
                raise
            print(f"left out: {error}")
            continue
        of = Steps(
            torch.compile(model, dynamic=False) if mode == "compiled" else model,
            images,
            args.amp,
            args.opt,
        )
        steps[name, mode], rows[name, mode] = of, {"model": name, "mode": mode, "memory_mib": None}
        if not args.no_memory:
            rows[name, mode]["memory_mib"] = peak_memory(of, name, mode, before, args)

    def clock() -> float:
        if images.is_cuda:
            torch.cuda.synchronize()
        return time.process_time() if args.clock == "CPU" else time.perf_counter()

    for phase in ("train", "infer"):
        calls = {key: getattr(of, phase) for key, of in steps.items()}
        for key, seconds in interleaved(
            calls, args.repeats, 3 if images.is_cuda else 1, clock
        ).items():
            rows[key] |= {
                f"{phase}_ms": 1e3 * seconds,
                f"{phase}_images_per_s": len(images) / seconds,
            }
    for (name, mode), row in rows.items():
        if not steps[name, mode].train().isfinite():
            raise RunError(f"the loss of {name}, {mode}, is not finite: its times mean nothing")
        base = rows.get((baseline_of(name), mode), {})
        for key in MEASURED:
            row[f"{key}_ratio"] = row[key] / base[key] if row[key] and base.get(key) else None
    return list(rows.values())


def make_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        description=__doc__,
        epilog=EXAMPLES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    add = parser.add_argument
    add(
        "--models",
        nargs="+",
        default=DEFAULT,
        metavar="NAME",
        help="registered timm models, or patterns of ours, of "
        f"which those that refuse the images are left out (default: {' '.join(DEFAULT)})",
    )
    add_options(parser, "--device")
    add("--batch-size", type=positive, help="images (default: 8 on a CPU, 256 on CUDA)")
    add("--img-size", type=positive, default=224, help="side in pixels (default: %(default)s)")
    add(
        "--amp",
        choices=("none", "bfloat16", "float16"),
        default="none",
        help="precision of the forward pass (default: %(default)s, float32)",
    )
    add("--channels-last", action="store_true", help="images and weights channels-last in memory")
    add("--opt", default="sgd", metavar="NAME", help="timm's optimiser (default: %(default)s)")
    add("--threads", type=positive, default=2, help="threads of a CPU (default: %(default)s)")
    add(
        "--compile", action="store_true", help="measure each network compiled by torch.compile, too"
    )
    add(
        "--repeats",
        type=positive,
        default=7,
        help="rounds, of which the median is given (default: %(default)s)",
    )
    add(
        "--cpu-time",
        dest="clock",
        action="store_const",
        const="CPU",
        default="wall",
        help="time a CPU by the CPU "
        "time of all threads, which other work on the machine changes less; start with OMP_WAIT_POLICY=passive",
    )
    add("--no-memory", action="store_true", help="leave out the peak memory")
    add("--csv", type=Path, metavar="FILE", help="also write the figures to FILE")
    return parser


def main(argv: Sequence[str] | None = None) -> int:
    """Measure the networks that the arguments name, and print a table."""
    args = make_parser().parse_args(argv)
    device = choose_device(args.device)
    args.batch_size = args.batch_size or (256 if device.type == "cuda" else 8)
    names_of(args.models)
    check_optimizer_name(args.opt)
    if args.csv:
        check_output(args.csv)
    threads = torch.get_num_threads()
    torch.set_num_threads(args.threads)
    set_malloc(KEEP_MEMORY)
    under = {
        "hardware": hardware(device, 1),
        "date": datetime.now().astimezone().isoformat(timespec="minutes"),
        "ea_vision": ea_vision.__version__,
        "torch": str(torch.__version__),
        "timm": timm.__version__,
        "implementation": os.environ.get("EA_VISION_IMPLEMENTATION", "chosen"),
        **{
            name: getattr(args, name)
            for name in (
                "batch_size",
                "img_size",
                "amp",
                "opt",
                "channels_last",
                "repeats",
                "clock",
            )
        },
    }
    print("; ".join(f"{name} {value}" for name, value in under.items()), end="\n\n")
    rows = measure(args, device)
    torch.set_num_threads(threads)
    headings = {"model": "network", "mode": "mode"}
    for key, heading in MEASURED.items():
        headings |= {key: heading, f"{key}_ratio": "ratio"}
    print(table(rows, headings))
    if args.csv:
        atomic_write(args.csv, csv_text([row | under for row in rows]).encode())
    return 0
