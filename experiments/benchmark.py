"""Speed and memory of networks in training and inference, in one run on one device, with ratios to a ResNet.

The script measures images per second of a training step (forward, backward, optimiser) and of inference, and the peak
memory of a training step. Rounds are interleaved, one step of each network in turn, and the table shows medians, so
other work on the machine affects all networks alike. Weights are random; norms that start at zero are set to 0.2, so
that every branch computes. Ratios are to timm's ResNet of the same depth or, for an evolving vision transformer, to
timm's plain one, if that is measured too. On a CPU memory is the resident memory of three training steps in a separate
process; on a GPU it is what torch allocates, including weights and optimiser state.
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
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from datetime import datetime
from multiprocessing import get_context
from pathlib import Path
from statistics import median

import psutil
import timm
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import ea_vision
from ea_vision.base import devices
from ea_vision.base.devices import choose_device
from ea_vision.base.errors import CommandParser, RunError, UsageError, exit_code
from ea_vision.base.files import atomic_write, check_output, csv_text
from ea_vision.base.provenance import hardware
from ea_vision.base.tables import markdown
from ea_vision.engine.config import COMPILE_MODES
from ea_vision.engine.evaluate import autocast
from ea_vision.engine.optimizer import check_optimizer_name
from ea_vision.layers import attention_layers
from ea_vision.models.modes import lay_out
from ea_vision.ops import IMPLEMENTATIONS, use_implementation
from ea_vision.recorder.selection import add_options, positive
from ea_vision.sizes import names_of
from ea_vision.zoo.create import DATA_KEYWORDS, create, create_classifier
from ea_vision.zoo.source import source_of

EXAMPLES = """\
examples:
  python -m experiments.benchmark                                                  # the 50-layer networks
  python -m experiments.benchmark --models 'ea_*resnet50' resnet50 --csv speed.csv
  python -m experiments.benchmark --amp bfloat16 --channels-last --compile-mode default reduce-overhead
  python -m experiments.benchmark --models resnet50 aa_resnet50 --implementation chosen reference --repeats 15
"""
DEFAULT = ("resnet50", "aa_resnet50", "pa_aa_resnet50", "ea_aa_resnet50")
CHOSEN = "chosen"  # by the operator itself
EAGER = "eager"
STATUS = Path("/proc/self/status")
# Options of glibc's mallopt. While times are measured, freed memory is kept; else each step gets new, zeroed pages.
TRIM = -1
TOP_PAD = -2
MMAP_THRESHOLD = -3
MMAP_MAX = -4
KEEP_MEMORY = {TOP_PAD: 10**9, MMAP_MAX: 0, TRIM: -1}  # -1: never returned
RETURN_MEMORY = {MMAP_THRESHOLD: 65536, TRIM: 65536}
MEASURED = {
    "train_images_per_s": "train img/s",
    "infer_images_per_s": "infer img/s",
    "memory_mib": "memory MiB",
}


def baseline_of(name: str) -> str | None:
    """Return the name of timm's resnet of the same depth, or of timm's plain vision transformer, or None."""
    transformer = re.fullmatch(r"(?:[ep]a_)?((?:vit|deit)_.*)", name)
    if transformer:
        return transformer[1]
    depth = re.search(r"net(\d+)", name)
    return f"resnet{depth[1]}" if depth else None


def interleaved(
    calls: dict[Hashable, Callable[[], object]],
    repeats: int,
    warm_up: int = 1,
    clock: Callable[[], float] = time.perf_counter,
) -> dict[Hashable, float]:
    """Return the median seconds of each call.

    A round runs each call once, in random order, so that no call always runs after the same other one. The first
    `warm_up` rounds do not count.
    """
    seconds = {key: [] for key in calls}
    generator = random.Random(0)
    turns = list(calls)
    for _ in range(warm_up + repeats):
        generator.shuffle(turns)
        for key in turns:
            start = clock()
            calls[key]()
            seconds[key].append(clock() - start)
    return {key: median(values[warm_up:]) for key, values in seconds.items()}


@dataclass(frozen=True)
class Case:
    """A row of the table: a network, an implementation of attention, and eager or a mode of torch.compile."""

    name: str
    implementation: str = CHOSEN
    mode: str = EAGER

    def baseline(self) -> "Case":
        """Return the plain network, which has no attention of ea_vision, in the same mode."""
        return Case(baseline_of(self.name) or "", CHOSEN, self.mode)

    def forced(self) -> AbstractContextManager:
        """Force the implementation inside a `with` block."""
        if self.implementation == CHOSEN:
            return nullcontext()
        return use_implementation(self.implementation)


class Steps:
    """Steps of training and of inference of a network on images (B, 3, H, W).

    Args:
        amp: none, bfloat16 or float16.
        opt: timm's name of the optimiser.
        case: how it runs.
    """

    def __init__(
        self,
        model: nn.Module,
        images: Tensor,
        amp: str = "none",
        opt: str = "sgd",
        case: Case | None = None,
    ):
        self.case = case or Case(type(model).__name__)
        self.images = images
        self.amp = amp
        self.optimizer = timm.optim.create_optimizer_v2(model, opt=opt, lr=1e-3, momentum=0.9)
        self.scaler = torch.amp.GradScaler(images.device.type, enabled=amp == "float16")
        self.model = model
        if self.case.mode != EAGER:
            self.model = torch.compile(model, dynamic=False, mode=self.case.mode)

    def train(self) -> Tensor:
        """Run forward, backward and update; return the loss."""
        self.model.train()
        self.optimizer.zero_grad()
        if self.case.mode != EAGER:
            torch.compiler.cudagraph_mark_step_begin()
        device = self.images.device
        targets = torch.zeros(len(self.images), dtype=torch.int64, device=device)
        with self.case.forced():
            with autocast(self.amp, device):
                outputs = self.model(self.images)
                loss = F.cross_entropy(outputs.float(), targets)
            self.scaler.scale(loss).backward()
        self.scaler.step(self.optimizer)
        self.scaler.update()
        return loss.detach().clone()

    def infer(self) -> Tensor:
        """Return the outputs in evaluation mode."""
        self.model.eval()
        with self.case.forced(), torch.inference_mode(), autocast(self.amp, self.images.device):
            return self.model(self.images)

    def first_use(self) -> float:
        """Return the seconds of the first training step and inference, which compile."""
        start = time.perf_counter()
        self.train()
        self.infer()
        devices.synchronize(self.images.device)
        return time.perf_counter() - start


def live_network(name: str, images: Tensor) -> nn.Module:
    """Return a network with random weights (always the same ones) in which no branch is multiplied by zero.

    Raises:
        UsageError: the network is unknown or refuses these images.
    """
    source = source_of(name)
    source.check_kind()
    torch.manual_seed(0)
    is_channels_last = images.is_contiguous(memory_format=torch.channels_last)
    layout = torch.channels_last if is_channels_last else torch.contiguous_format
    try:
        kwargs = {key: value for key, value in source.kwargs.items() if key not in DATA_KEYWORDS}
        side = images.shape[-1]
        model, _ = create_classifier(source.name, kwargs, num_classes=1000, img_size=side)
        model = lay_out(model.to(images.device), layout).train()
        for norm in model.modules():
            is_affine = isinstance(norm, nn.modules.batchnorm._BatchNorm) and norm.affine
            if is_affine and not norm.weight.any():
                nn.init.constant_(norm.weight, 0.2)
        with torch.no_grad():  # two passes make the statistics of BatchNorm
            model(images)
            model(images)
    except (ValueError, AssertionError, RuntimeError) as error:
        message = str(error) or type(error).__name__
        raise UsageError(
            f"{name} cannot run {len(images)} images of {images.shape[-1]} pixels: {message}"
        ) from error
    return model


def noise(args: argparse.Namespace, device: torch.device) -> Tensor:
    """Return the images on which all networks run, (B, 3, H, W)."""
    torch.manual_seed(0)
    images = torch.randn(args.batch_size, 3, args.img_size, args.img_size, device=device)
    layout = torch.channels_last if args.channels_last else torch.contiguous_format
    return images.contiguous(memory_format=layout)


def set_malloc(options: dict[int, int]) -> None:
    """Set options of glibc's allocator, if glibc is the C library."""
    if not sys.platform.startswith("linux"):
        return
    library = ctypes.CDLL(None)
    if hasattr(library, "mallopt"):
        for option, value in options.items():
            library.mallopt(option, value)


def peak_of_process() -> int | None:
    """Return the peak of this process's main memory in bytes, or None if the system does not report it."""
    if STATUS.exists():
        # getrusage's maximum begins with the parent's
        peak = re.search(r"^VmHWM:\s*(\d+) kB$", STATUS.read_text(), re.MULTILINE)
        return 1024 * int(peak[1])
    return getattr(psutil.Process().memory_info(), "peak_wset", None)  # Windows


def peak_resident(name: str, args: argparse.Namespace) -> int | None:
    """Return the peak bytes of main memory of three training steps. Call this in a process that ran nothing else."""
    set_malloc(RETURN_MEMORY)
    torch.set_num_threads(args.threads)
    images = noise(args, torch.device("cpu"))
    before = psutil.Process().memory_info().rss
    steps = Steps(live_network(name, images), images, args.amp, args.opt)
    for _ in range(3):
        steps.train()
    peak = peak_of_process()
    return None if peak is None else peak - before


def reset_peak_memory(device: torch.device) -> None:
    """Reset the peak of a device's memory, if it keeps one."""
    functions = devices.functions_of(device)
    if hasattr(functions, "reset_peak_memory_stats"):
        functions.reset_peak_memory_stats(device)


def peak_memory(steps: Steps, before: int, args: argparse.Namespace) -> float | None:
    """Return the peak memory of a training step in MiB, or None if it is unknown.

    Args:
        before: bytes that were allocated on the device before the network was built.
    """
    device = steps.images.device
    if device.type != "cpu":
        steps.train()
        reset_peak_memory(device)
        steps.train()
        peak = devices.peak_memory(device)
        return None if peak is None else (peak - before) / 2**20
    if steps.case != Case(steps.case.name):
        return None
    with ProcessPoolExecutor(1, get_context("spawn")) as pool:
        peak = pool.submit(peak_resident, steps.case.name, args).result()
    return None if peak is None else peak / 2**20


def cases_of(args: argparse.Namespace) -> list[Case]:
    """Return the cases that the options name, each once; networks without attention of ea_vision have one
    implementation."""
    cases = []
    for name in names_of(args.models):
        implementations = args.implementation
        if implementations != [CHOSEN] and not has_attention(name):
            implementations = [CHOSEN]
        for implementation in implementations:
            for mode in (EAGER, *args.compile_mode):
                cases.append(Case(name, implementation, mode))
    return list(dict.fromkeys(cases))


def has_attention(name: str) -> bool:
    """Return whether a network has attention of ea_vision."""
    with torch.device("meta"):
        return bool(attention_layers(create(source_of(name), random=True)))


def built_steps(args: argparse.Namespace, images: Tensor) -> tuple[dict[Case, Steps], list[dict]]:
    """Build the networks and run each once; return their steps, and their rows without times of steps.

    Raises:
        UsageError: a network that is asked for by name refuses the setting.
    """
    steps = {}
    rows = []
    for case in cases_of(args):
        print(case.name, case.implementation, case.mode, file=sys.stderr)
        reset_peak_memory(images.device)
        before = devices.peak_memory(images.device) or 0  # what is allocated now
        try:
            model = live_network(case.name, images)
        except UsageError as error:
            if case.name in args.models:
                raise
            print(f"left out: {error}")
            continue
        case_steps = Steps(model, images, args.amp, args.opt, case)
        compiles = case.mode != EAGER
        row = {
            "model": case.name,
            "implementation": case.implementation,
            "mode": case.mode,
            "first_use_s": case_steps.first_use() if compiles else None,
            "memory_mib": None if args.no_memory else peak_memory(case_steps, before, args),
        }
        steps[case] = case_steps
        rows.append(row)
    return steps, rows


def measure(args: argparse.Namespace, device: torch.device) -> list[dict]:
    """Build and measure the networks; return one row per network, implementation and mode.

    Raises:
        UsageError: a network that is asked for by name refuses the setting.
        RunError: a loss that is not finite.
    """
    images = noise(args, device)
    steps, rows = built_steps(args, images)

    def clock() -> float:
        devices.synchronize(device)
        return time.process_time() if args.clock == "CPU" else time.perf_counter()

    warm_up = 1 if device.type == "cpu" else 3
    for phase in ("train", "infer"):
        calls = {case: getattr(of, phase) for case, of in steps.items()}
        seconds = interleaved(calls, args.repeats, warm_up, clock)
        for case, row in zip(steps, rows, strict=True):
            row[f"{phase}_ms"] = 1e3 * seconds[case]
            row[f"{phase}_images_per_s"] = len(images) / seconds[case]
    rows_by_case = dict(zip(steps, rows, strict=True))
    for case, row in rows_by_case.items():
        if not steps[case].train().isfinite():
            raise RunError(
                f"the loss of {case.name}, {case.mode}, is not finite: its times are meaningless"
            )
        base = rows_by_case.get(case.baseline(), {})
        for key in MEASURED:
            has_base = row[key] and base.get(key)
            row[f"{key}_ratio"] = row[key] / base[key] if has_base else None
    return rows


def _shown(column: str, value: str | float | None) -> str:
    """Return the text of a cell: ratios have three decimals, other numbers two; None becomes -."""
    if value is None:
        return "-"
    if isinstance(value, str):
        return value
    return f"{value:.3f}" if column.endswith("ratio") else f"{value:.2f}"


def make_parser() -> argparse.ArgumentParser:
    parser = CommandParser(description=__doc__, epilog=EXAMPLES, allow_abbrev=False)
    add = parser.add_argument
    add(
        "--models",
        nargs="+",
        default=DEFAULT,
        metavar="NAME",
        help="registered timm models, or patterns of our names; models that refuse the images are "
        f"left out (default: {' '.join(DEFAULT)})",
    )
    add_options(parser, "--device")
    add("--batch-size", type=positive, help="images per step (default: 8 on a CPU, 256 on CUDA)")
    add("--img-size", type=positive, default=224, help="side in pixels (default: %(default)s)")
    add(
        "--amp",
        choices=("none", "bfloat16", "float16"),
        default="none",
        help="precision of the forward pass (default: %(default)s, float32)",
    )
    add(
        "--channels-last",
        action="store_true",
        help="keep images and weights channels-last in memory",
    )
    add("--opt", default="sgd", metavar="NAME", help="timm's optimiser (default: %(default)s)")
    add("--threads", type=positive, default=2, help="CPU threads (default: %(default)s)")
    add(
        "--compile-mode",
        nargs="+",
        default=[],
        choices=COMPILE_MODES,
        metavar="MODE",
        help=f"also time torch.compile in each of these modes: {', '.join(COMPILE_MODES)}",
    )
    add(
        "--implementation",
        nargs="+",
        default=[CHOSEN],
        choices=(CHOSEN, *IMPLEMENTATIONS),
        metavar="NAME",
        help=f"implementations of attention, one row each: chosen (default), {', '.join(IMPLEMENTATIONS)}",
    )
    add(
        "--repeats",
        type=positive,
        default=7,
        help="rounds; the table shows their median (default: %(default)s)",
    )
    add(
        "--cpu-time",
        dest="clock",
        action="store_const",
        const="CPU",
        default="wall",
        help="measure CPU time of all threads, "
        "which other work on the machine affects less; start with OMP_WAIT_POLICY=passive",
    )
    add("--no-memory", action="store_true", help="do not measure peak memory")
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
    options = ("batch_size", "img_size", "amp", "opt", "channels_last", "repeats", "clock")
    under = {
        "hardware": hardware(device, 1),
        "date": datetime.now().astimezone().isoformat(timespec="minutes"),
        "ea_vision": ea_vision.__version__,
        "torch": str(torch.__version__),
        "timm": timm.__version__,
        "forced": os.environ.get("EA_VISION_IMPLEMENTATION", ""),
        **{name: getattr(args, name) for name in options},
    }
    settings = [f"{name} {value}" for name, value in under.items()]
    print("; ".join(settings), end="\n\n")
    rows = measure(args, device)
    torch.set_num_threads(threads)
    headings = {"model": "network", "implementation": "implementation", "mode": "mode"}
    if args.compile_mode:
        headings["first_use_s"] = "first use, s"
    for key, heading in MEASURED.items():
        headings |= {key: heading, f"{key}_ratio": "ratio"}
    lines = [list(headings.values())]
    for row in rows:
        lines.append([_shown(key, row[key]) for key in headings])
    print(markdown(lines))
    if args.csv:
        text = csv_text([row | under for row in rows])
        atomic_write(args.csv, text.encode())
    return 0


if __name__ == "__main__":
    sys.exit(exit_code(main))
