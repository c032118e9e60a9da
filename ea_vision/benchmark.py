"""Speed and memory of networks in training and inference, in one run, on the device at hand, as ratios to a ResNet.

Measured are images per second of a training step (forward, backward, optimiser) and of inference, and the peak memory
of a training step. Rounds are interleaved, one step of each network in turn, and medians are given, so that what else
the machine does hits all alike. Weights are random; norms that start at zero are set to 0.2, so that every branch is
alive. A ratio is to timm's resnet of the same depth, of a vision transformer whose maps evolve to timm's plain one,
where that is measured too. Memory on a CPU is resident, of three training steps in a process of its own; on a GPU it is
what torch allocates, the network's weights and optimiser state included.
"""
from __future__ import annotations

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
from multiprocessing import get_context
from pathlib import Path
from statistics import median
from typing import Any

import psutil
import timm
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import ea_vision
from ea_vision.base.errors import RunError, UsageError
from ea_vision.base.files import atomic_write, check_output, csv_text
from ea_vision.base.networks import create_classifier, lay_out
from ea_vision.base.processes import choose_device
from ea_vision.base.provenance import hardware
from ea_vision.engine.evaluate import autocast
from ea_vision.engine.optimizer import check_optimizer_name
from ea_vision.recorder.loading import add_options, positive
from ea_vision.sizes import names_of, table

EXAMPLES = """\
examples:
  ea-vision benchmark                                                  # the 50-layer networks
  ea-vision benchmark --models 'ea_*resnet50' resnet50 --csv speed.csv
  ea-vision benchmark --amp bfloat16 --channels-last --compile         # what a GPU is trained with
  EA_VISION_IMPLEMENTATION=reference ea-vision benchmark --models resnet50 ea_aa_resnet50 --repeats 15
"""
DEFAULT = ("resnet50", "aa_resnet50", "pa_aa_resnet50", "ea_aa_resnet50")
RETURN_MEMORY = {"MALLOC_MMAP_THRESHOLD_": "65536", "MALLOC_TRIM_THRESHOLD_": "65536"}  # where memory is measured
MEASURED = {"train_images_per_s": "train img/s", "infer_images_per_s": "infer img/s", "memory_mib": "memory MiB"}


def baseline_of(name: str) -> str | None:
    """Return timm's resnet of the same depth, of a vision transformer timm's plain one, or None."""
    transformer = re.fullmatch(r"(?:[ep]a_)?((?:vit|deit)_.*)", name)
    depth = re.search(r"net(\d+)", name)
    return transformer[1] if transformer else f"resnet{depth[1]}" if depth else None


def interleaved(calls: dict[Hashable, Callable[[], object]], repeats: int, warm_up: int = 1,
                clock: Callable[[], float] = time.perf_counter) -> dict[Hashable, float]:
    """Return the median seconds of each call; a round has one of each, in any order; `warm_up` rounds do not count."""
    seconds = {key: [] for key in calls}
    shuffle = random.Random(0).shuffle  # what one leaves in the caches shall not always meet the same next one
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
        compiled: by torch.compile.
    """

    def __init__(self, model: nn.Module, images: Tensor, amp: str = "none", opt: str = "sgd",
                 compiled: bool = False) -> None:
        self.model, self.images, self.amp = model, images, amp
        self.net = torch.compile(model, dynamic=False) if compiled else model
        self.optimizer = timm.optim.create_optimizer_v2(model, opt=opt, lr=1e-3, momentum=0.9)
        self.scaler = torch.amp.GradScaler(images.device.type, enabled=amp == "float16")

    def train(self) -> Tensor:
        """Run forward, backward and update; return the loss."""
        self.model.train()
        self.optimizer.zero_grad()
        with autocast(self.amp, self.images.device):
            targets = torch.zeros(len(self.images), dtype=torch.int64, device=self.images.device)
            loss = F.cross_entropy(self.net(self.images).float(), targets)
        self.scaler.scale(loss).backward()
        self.scaler.step(self.optimizer)
        self.scaler.update()
        return loss.detach()

    def infer(self) -> Tensor:
        """Return the outputs in evaluation mode."""
        self.model.eval()
        with torch.inference_mode(), autocast(self.amp, self.images.device):
            return self.net(self.images)

    def peak_on_gpu(self) -> int:
        """Return the most bytes that a training step allocates, its weights and optimiser state included."""
        self.optimizer.zero_grad()
        own = [*self.model.parameters(), *self.model.buffers(),
               *(t for state in self.optimizer.state.values() for t in state.values() if torch.is_tensor(t))]
        before = torch.cuda.memory_allocated() - sum(t.nbytes for t in own)
        torch.cuda.reset_peak_memory_stats()
        self.train()
        return torch.cuda.max_memory_allocated() - before


def live_network(name: str, images: Tensor) -> nn.Module:
    """Return a network with random weights, always the same ones, none of whose branches is multiplied by zero.

    Raises:
        UsageError: unknown, or one that refuses these images.
    """
    torch.manual_seed(0)
    layout = torch.channels_last if images.is_contiguous(memory_format=torch.channels_last) else torch.contiguous_format
    try:
        model = create_classifier(name, {}, num_classes=1000, img_size=images.shape[-1])[0]
        model = lay_out(model.to(images.device), layout).train()
        for norm in model.modules():
            if isinstance(norm, nn.modules.batchnorm._BatchNorm) and norm.affine and not norm.weight.any():
                nn.init.constant_(norm.weight, 0.2)
        with torch.no_grad():  # two passes make the statistics of BatchNorm
            model(images)
            model(images)
    except RunError:
        raise
    except (ValueError, AssertionError, RuntimeError) as error:
        raise UsageError(f"{name} cannot run {len(images)} images of {images.shape[-1]} pixels: "
                         f"{str(error) or type(error).__name__}") from error
    return model


def noise(args: argparse.Namespace, device: torch.device) -> Tensor:
    """Return the images of all networks, (B, 3, H, W)."""
    torch.manual_seed(0)
    images = torch.randn(args.batch_size, 3, args.img_size, args.img_size, device=device)
    return images.contiguous(memory_format=torch.channels_last if args.channels_last else torch.contiguous_format)


def peak_resident(name: str, args: argparse.Namespace) -> int:
    """Return the most bytes of main memory that three training steps take, in a process in which nothing else ran."""
    torch.set_num_threads(args.threads)
    images = noise(args, torch.device("cpu"))
    before = psutil.Process().memory_info().rss
    steps = Steps(live_network(name, images), images, args.amp, args.opt)
    for _ in range(3):
        steps.train()
    status = Path("/proc/self/status").read_text()  # getrusage's maximum begins with the parent's
    return 1024 * int(re.search(r"^VmHWM:\s*(\d+) kB$", status, re.MULTILINE)[1]) - before


def peak_on_cpu(name: str, args: argparse.Namespace) -> int | None:
    """Return `peak_resident` of a process of its own, or None where there is no /proc to read it from."""
    if not Path("/proc/self/status").exists():
        return None
    os.environ.update(RETURN_MEMORY)  # read by the C library as a process begins
    try:
        with ProcessPoolExecutor(1, get_context("spawn")) as pool:
            return pool.submit(peak_resident, name, args).result()
    finally:
        for key in RETURN_MEMORY:
            del os.environ[key]


def keep_freed_memory() -> None:
    """Tell glibc to keep freed memory: else each step gets its pages anew from the system, zeroed one by one."""
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    for option, value in ((-2, 10**9), (-4, 0), (-1, 2 * 10**9)) if mallopt else ():  # top pad, mmap's most, trim
        mallopt(option, value)


def measure(args: argparse.Namespace, device: torch.device) -> list[dict[str, Any]]:
    """Build and measure the networks; return a row for each network and mode.

    Raises:
        UsageError: a network that is asked for by name refuses the setting.
        RunError: a loss that is not finite.
    """
    images, on_gpu = noise(args, device), device.type == "cuda"
    steps: dict[tuple[str, str], Steps] = {}
    for name in names_of(args.models):
        print(name, file=sys.stderr)
        try:
            model = live_network(name, images)
        except UsageError as error:
            if name in args.models:
                raise
            print(f"left out: {error}")
            continue
        for mode in ("eager", "compiled")[:1 + args.compile]:
            steps[name, mode] = Steps(model, images, args.amp, args.opt, mode == "compiled")
    rows = {(name, mode): {"model": name, "mode": mode} for name, mode in steps}

    def clock() -> float:
        if on_gpu:
            torch.cuda.synchronize()
        return time.process_time() if args.clock == "CPU" else time.perf_counter()

    for phase in ("train", "infer"):
        calls = {key: getattr(of, phase) for key, of in steps.items()}
        for key, seconds in interleaved(calls, args.repeats, 3 if on_gpu else 1, clock).items():
            rows[key] |= {f"{phase}_ms": 1e3 * seconds, f"{phase}_images_per_s": len(images) / seconds}
    for (name, mode), of in steps.items():
        if not of.train().isfinite():
            raise RunError(f"the loss of {name}, {mode}, is not finite: its times mean nothing")
        peak = None
        if not args.no_memory and (on_gpu or mode == "eager"):
            peak = of.peak_on_gpu() if on_gpu else peak_on_cpu(name, args)
        of.optimizer.zero_grad()
        rows[name, mode]["memory_mib"] = peak and peak / 2**20
    for (name, mode), row in rows.items():
        base = rows.get((baseline_of(name), mode), {})
        for key in MEASURED:
            row[f"{key}_ratio"] = row[key] / base[key] if row[key] and base.get(key) else None
    return list(rows.values())


def make_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=__doc__, epilog=EXAMPLES,
                                     formatter_class=argparse.RawDescriptionHelpFormatter, allow_abbrev=False)
    add = parser.add_argument
    add("--models", nargs="+", default=DEFAULT, metavar="NAME", help="registered timm models, or patterns of ours, of "
        f"which those that refuse the images are left out (default: {' '.join(DEFAULT)})")
    add_options(parser, "--device")
    add("--batch-size", type=positive, help="images (default: 8 on a CPU, 256 on CUDA)")
    add("--img-size", type=positive, default=224, help="side in pixels (default: %(default)s)")
    add("--amp", choices=("none", "bfloat16", "float16"), default="none", help="precision of the forward pass "
        "(default: %(default)s, float32)")
    add("--channels-last", action="store_true", help="images and weights channels-last in memory")
    add("--opt", default="sgd", metavar="NAME", help="timm's optimiser (default: %(default)s)")
    add("--threads", type=positive, default=2, help="threads of a CPU (default: %(default)s)")
    add("--compile", action="store_true", help="measure each network compiled by torch.compile, too")
    add("--repeats", type=positive, default=7, help="rounds, of which the median is given (default: %(default)s)")
    add("--cpu-time", dest="clock", action="store_const", const="CPU", default="wall", help="time a CPU by the CPU "
        "time of all threads, which other work on the machine changes less; start with OMP_WAIT_POLICY=passive")
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
    if device.type == "cpu":
        torch.set_num_threads(args.threads)
    keep_freed_memory()
    under = {"hardware": hardware(device, 1), "date": datetime.now().astimezone().isoformat(timespec="minutes"),
             "ea_vision": ea_vision.__version__, "torch": str(torch.__version__), "timm": timm.__version__,
             "implementation": os.environ.get("EA_VISION_IMPLEMENTATION", "chosen"),
             **{name: getattr(args, name) for name in ("batch_size", "img_size", "amp", "opt", "channels_last",
                                                       "repeats", "clock")}}
    print("; ".join(f"{name} {value}" for name, value in under.items()), end="\n\n")
    try:
        rows = measure(args, device)
    finally:
        torch.set_num_threads(threads)
    headings = {"model": "network", "mode": "mode"}
    for key, heading in MEASURED.items():
        headings |= {key: heading, f"{key}_ratio": "ratio"}
    print(table([{key: f"{value:.3f}" if key.endswith("_ratio") and value is not None else value
                  for key, value in row.items()} for row in rows], headings))
    if args.csv:
        atomic_write(args.csv, csv_text([row | under for row in rows]).encode())
    return 0
