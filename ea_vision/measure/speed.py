"""Speed and memory of networks in training and inference, in one run, on the device at hand, as ratios to a ResNet.

Measured are images per second of a training step (forward, backward, SGD step) and of inference, the peak memory of a
training step, and the time of an attention branch beside the floor that memory bandwidth sets. Repeats are interleaved,
one step of each network in turn, and medians are given, so that what else the machine does hits all alike. Weights are
random; BatchNorm statistics come from two training passes, and norms that start at zero are set to 0.2, so that every
branch is alive. A ratio is to timm's resnet of the same depth, where that is measured too.
"""

from __future__ import annotations

import argparse
import csv
import io
import json
import logging
import os
import platform
import random
import re
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Callable, Hashable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import asdict, dataclass, fields
from datetime import datetime
from pathlib import Path
from statistics import median

import timm
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import ea_vision
from ea_vision.base.errors import RunError, UsageError
from ea_vision.base.figures import figure_bytes
from ea_vision.base.files import atomic_write, create
from ea_vision.base.networks import check_model_name, create_classifier
from ea_vision.base.processes import choose_device
from ea_vision.base.provenance import hardware
from ea_vision.engine.evaluate import autocast
from ea_vision.layers import AugmentedConv2d
from ea_vision.ops import IMPLEMENTATIONS, use_implementation

EXAMPLES = """\
examples:
  python -m ea_vision.benchmark                                                  # the 50-layer networks
  python -m ea_vision.benchmark --models all --csv speed.csv --plot speed.png
  python -m ea_vision.benchmark --amp bfloat16 --channels-last --compile         # what a GPU is trained with
  python -m ea_vision.benchmark --models resnet50 ea_aa_resnet50 --implementation reference --repeats 15
"""
DEFAULT = ("resnet50", "aa_resnet50", "pa_aa_resnet50", "ea_aa_resnet50")
ALL = (*(f"{family}resnet{depth}" for depth in (34, 50, 101, 152) for family in ("", "aa_", "pa_aa_", "ea_aa_")),
       "botnet50ts_256", "halonet50ts", "lambda_resnet50ts")
# glibc hands freed blocks back to the system, and each new one is zeroed page by page: on some machines more work than
# the arithmetic, and not the same every time.
KEEP_MEMORY = {"MALLOC_TOP_PAD_": "1000000000", "MALLOC_MMAP_MAX_": "0", "MALLOC_TRIM_THRESHOLD_": "20000000000"}
# What a process that measures memory gets: malloc would otherwise hold half as much again in gaps between blocks.
RETURN_MEMORY = {"MALLOC_MMAP_THRESHOLD_": "65536", "MALLOC_TRIM_THRESHOLD_": "65536"}
MIB = 2**20


@dataclass
class Row:
    """A line of the CSV: a network, or the mean attention branch of one of its stages."""

    model: str
    mode: str  # eager or compiled
    part: str  # "network", or what size the branch's output and map have
    layers: int | None = None  # attention layers in the part
    train_ms: float | None = None  # a step of a network; forward and backward of one branch
    infer_ms: float | None = None
    train_images_per_s: float | None = None
    infer_images_per_s: float | None = None
    train_ratio: float | None = None  # of images per second to the resnet's
    infer_ratio: float | None = None
    memory_mib: float | None = None  # peak of a training step
    memory_ratio: float | None = None
    train_attention_ms: float | None = None  # of a branch, without its pooling and projections
    infer_attention_ms: float | None = None
    train_floor_ms: float | None = None  # bytes that the attention must move / bandwidth
    infer_floor_ms: float | None = None


def baseline_of(name: str) -> str | None:
    """timm's resnet of the same depth: ea_aa_resnet50, halonet50ts -> resnet50."""
    depth = re.search(r"net(\d+)", name)
    return f"resnet{depth[1]}" if depth else None


def interleaved(calls: dict[Hashable, Callable[[], object]], repeats: int, warm_up: int,
                synchronize: Callable[[], None] = lambda: None) -> dict[Hashable, float]:
    """Median seconds of each call, one of each in a round and in any order; `warm_up` rounds are not counted."""
    seconds = {key: [] for key in calls}
    shuffle = random.Random(0).shuffle  # what one leaves in the caches shall not always meet the same next one
    turns = list(calls.items())
    for repeat in range(-warm_up, repeats):
        shuffle(turns)
        for key, call in turns:
            synchronize()
            start = time.perf_counter()
            call()
            synchronize()
            if repeat >= 0:
                seconds[key].append(time.perf_counter() - start)
    return {key: median(values) for key, values in seconds.items()}


class Bench:
    """What all networks are given: device, images, precision, repeats."""

    def __init__(self, args: argparse.Namespace, device: torch.device) -> None:
        self.args, self.device = args, device
        self.layout = torch.channels_last if args.channels_last else torch.contiguous_format
        torch.manual_seed(0)
        shape = (args.batch_size, 3, args.img_size, args.img_size)
        self.images = torch.randn(shape).to(device).contiguous(memory_format=self.layout)
        self.targets = torch.zeros(args.batch_size, dtype=torch.int64, device=device)
        self.synchronize = torch.cuda.synchronize if device.type == "cuda" else lambda: None
        self.warm_up = 3 if device.type == "cuda" else 1  # the first steps on a GPU choose algorithms

    def medians(self, calls: dict) -> dict:
        return interleaved(calls, self.args.repeats, self.warm_up, self.synchronize)

    def bandwidth(self) -> tuple[float, int]:
        """Bytes per second, read and written, of a copy, and the bytes copied."""
        source = torch.ones((2**30 if self.device.type == "cuda" else 2**28) // 4, device=self.device)
        target = torch.empty_like(source)
        size = source.numel() * source.element_size()
        seconds = self.medians({"copy": lambda: target.copy_(source)})["copy"]
        return 2 * size / seconds, size

    def build(self, name: str) -> nn.Module:
        """A network whose branches are alive.

        Raises:
            UsageError: unknown, or one that refuses this size, precision or implementation.
        """
        torch.manual_seed(0)
        model, _ = create_classifier(name, {}, num_classes=1000, img_size=self.args.img_size)
        model = model.to(self.device, memory_format=self.layout).train()
        with torch.no_grad():
            for norm in model.modules():
                if isinstance(norm, nn.modules.batchnorm._BatchNorm) and norm.affine and not norm.weight.any():
                    norm.weight.fill_(0.2)
            try:
                with autocast(self.args.amp, self.device):
                    model(self.images)
                    model(self.images)
            except (ValueError, AssertionError, RuntimeError) as error:
                raise UsageError(f"{name} cannot run {self.args.batch_size} images of {self.args.img_size} pixels: "
                                 f"{str(error) or type(error).__name__}") from error
        return model


class Runner:
    """A network with its optimiser: steps of training and of inference."""

    def __init__(self, bench: Bench, model: nn.Module, compiled: bool = False) -> None:
        self.bench, self.model = bench, model
        self.net = torch.compile(model, dynamic=False) if compiled else model
        self.optimizer = torch.optim.SGD(model.parameters(), lr=1e-3, momentum=0.9)
        self.scaler = torch.amp.GradScaler(bench.device.type, enabled=bench.args.amp == "float16")

    def train(self) -> Tensor:
        self.model.train()
        self.optimizer.zero_grad()
        with autocast(self.bench.args.amp, self.bench.device):
            loss = F.cross_entropy(self.net(self.bench.images).float(), self.bench.targets)
        self.scaler.scale(loss).backward()
        self.scaler.step(self.optimizer)
        self.scaler.update()
        return loss.detach()

    def infer(self) -> Tensor:
        self.model.eval()
        with torch.inference_mode(), autocast(self.bench.args.amp, self.bench.device):
            return self.net(self.bench.images)


@dataclass
class Branch:
    """An attention layer, and what the network hands to its `attend`."""

    layer: AugmentedConv2d
    x: Tensor
    prev_logits: Tensor | None
    need_logits: bool

    def __post_init__(self) -> None:
        layer = self.layer
        with torch.no_grad():
            q, k, v, feat_size = layer.split_heads(self.x)
        self.mixed = v.new_zeros(v.shape[0], layer.dim_v, *feat_size).contiguous(  # as it enters the projection
            memory_format=torch.channels_last if not self.x.is_contiguous() else torch.contiguous_format)
        stride = layer.conv.stride[0]
        height, width = (-(-side // stride) for side in self.x.shape[2:])
        self.stage = f"{height}x{width}, maps {feat_size[0]}x{feat_size[1]}"
        maps = q.shape[0] * q.shape[1] * q.shape[2] ** 2 * q.element_size()
        inputs = sum(t.numel() * t.element_size() for t in (q, k, v)) + (maps if self.prev_logits is not None else 0)
        outputs = v.numel() * v.element_size() + (maps if self.need_logits else 0)
        self.infer_bytes = inputs + outputs
        self.train_bytes = self.infer_bytes + 2 * inputs + outputs  # backward: inputs again, gradients of all

    def kind(self) -> tuple:
        """Layers of the same kind do the same work."""
        layer = self.layer
        return (self.stage, tuple(self.x.shape), type(layer.evolution), self.need_logits, layer.dim_qk, layer.dim_v)

    def whole(self, x: Tensor, prev_logits: Tensor | None, mixed: Tensor) -> list[Tensor]:
        out, logits = self.layer.attend(x, prev_logits, self.need_logits)
        return [out, logits] if self.need_logits else [out]

    def rest(self, x: Tensor, prev_logits: Tensor | None, mixed: Tensor) -> list[Tensor]:
        """All of the branch but its attention."""
        return [*self.layer.split_heads(x)[:3], self.layer.proj(mixed)]


@contextmanager
def attention_watched(model: nn.Module, saw: Callable[..., None]) -> Iterator[None]:
    """Call `saw(layer, x, prev_logits, need_logits, logits)` after each attention branch in the `with` block.

    Not by hooks: a layer that has one must make its maps.
    """
    layers = [layer for layer in model.modules() if isinstance(layer, AugmentedConv2d)]

    def watch(layer: AugmentedConv2d) -> None:
        def attend(x, prev_logits, need_logits=True):
            out, logits = AugmentedConv2d.attend(layer, x, prev_logits, need_logits)
            saw(layer, x, prev_logits, need_logits, logits)
            return out, logits

        layer.attend = attend

    try:
        for layer in layers:
            watch(layer)
        yield
    finally:
        for layer in layers:
            del layer.attend


def branches_of(bench: Bench, model: nn.Module) -> tuple[dict[tuple, Branch], Counter]:
    """An attention layer of each kind, with what it is given, and how many there are of it."""
    first: dict[tuple, Branch] = {}
    counts: Counter = Counter()

    def saw(layer, x, prev_logits, need_logits, logits) -> None:
        branch = Branch(layer, x, prev_logits, need_logits)
        counts[branch.kind()] += 1
        first.setdefault(branch.kind(), branch)

    with torch.no_grad(), autocast(bench.args.amp, bench.device), attention_watched(model, saw):
        model.eval()(bench.images)
    return first, counts


def measure_branches(bench: Bench, name: str, model: nn.Module, compiled: bool, bandwidth: float) -> list[Row]:
    """Time an attention branch of each kind on what the network gives it; a row for each stage."""
    first, counts = branches_of(bench, model)
    calls = {}
    for kind, branch in first.items():
        for what in ("whole", "rest"):
            function = getattr(branch, what)
            function = torch.compile(function, dynamic=False) if compiled else function
            given = [branch.x, branch.prev_logits, branch.mixed]
            leaves = [None if tensor is None else tensor.detach().requires_grad_() for tensor in given]
            wanted = [*(leaf for leaf in leaves if leaf is not None),
                      *(p for p in branch.layer.parameters() if p.requires_grad)]

            def infer(function=function, given=given):
                with torch.inference_mode(), autocast(bench.args.amp, bench.device):
                    return function(*given)

            with torch.no_grad(), autocast(bench.args.amp, bench.device):
                grads = [torch.ones_like(tensor) for tensor in getattr(branch, what)(*given)]

            def train(function=function, leaves=leaves, wanted=wanted, grads=grads):
                with autocast(bench.args.amp, bench.device):
                    outputs = function(*leaves)
                torch.autograd.grad(outputs, wanted, grads, allow_unused=True)

            calls[kind, "infer", what], calls[kind, "train", what] = infer, train
    seconds = bench.medians(calls)
    rows = []
    for stage in dict.fromkeys(branch.stage for branch in first.values()):
        kinds = [kind for kind, branch in first.items() if branch.stage == stage]
        layers = sum(counts[kind] for kind in kinds)

        def mean(of: Callable[[tuple], float], kinds=kinds, layers=layers) -> float:
            return 1e3 * sum(counts[kind] * of(kind) for kind in kinds) / layers

        row = Row(name, "compiled" if compiled else "eager", f"branch at {stage}", layers)
        for phase in ("train", "infer"):
            setattr(row, f"{phase}_ms", mean(lambda kind, p=phase: seconds[kind, p, "whole"]))
            setattr(row, f"{phase}_attention_ms",
                    mean(lambda kind, p=phase: seconds[kind, p, "whole"] - seconds[kind, p, "rest"]))
            setattr(row, f"{phase}_floor_ms",
                    mean(lambda kind, p=phase: getattr(first[kind], f"{p}_bytes") / bandwidth))
        rows.append(row)
    return rows


def resident(field: str) -> int:
    """Bytes of this process in main memory: VmRSS now, VmHWM at most so far.

    Not getrusage's maximum: after a fork that begins with the parent's.
    """
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith(f"{field}:"):
            return int(line.split()[1]) * 1024
    raise OSError(f"/proc/self/status has no {field}")


def memory_of_this_process(bench: Bench, build: Callable[[], nn.Module]) -> int:
    """Peak resident bytes of three training steps on a CPU, less what was there before the network was made."""
    before = resident("VmRSS")
    runner = Runner(bench, build().to(memory_format=bench.layout))
    for _ in range(3):
        runner.train()
    return resident("VmHWM") - before


def memory_in_own_process(arguments: Sequence[str], system_malloc: bool = False) -> int | None:
    """The number that `python -m ARGUMENTS` prints, without this process's malloc settings; None where /proc is not.

    Raises:
        RunError: it failed.
    """
    if not Path("/proc/self/status").exists():
        return None
    environment = {key: value for key, value in os.environ.items() if key not in KEEP_MEMORY}
    done = subprocess.run([sys.executable, "-m", *arguments], stdout=subprocess.PIPE, text=True,
                          env={**environment, **({} if system_malloc else RETURN_MEMORY)})
    if done.returncode:
        raise RunError(f"the process that measures memory ended with code {done.returncode}: {' '.join(arguments)}")
    return json.loads(done.stdout.splitlines()[-1])


def memory_on_gpu(runner: Runner) -> int:
    """Peak allocated bytes of a training step: the network's weights and optimiser state included, others' not."""
    for _ in range(2):
        runner.train()
    runner.optimizer.zero_grad()
    own = [*runner.model.parameters(), *runner.model.buffers(),
           *(t for state in runner.optimizer.state.values() for t in state.values() if torch.is_tensor(t))]
    before = torch.cuda.memory_allocated() - sum(t.numel() * t.element_size() for t in own)
    torch.cuda.reset_peak_memory_stats()
    runner.train()
    runner.optimizer.zero_grad()
    return torch.cuda.max_memory_allocated() - before


def measure(args: argparse.Namespace, device: torch.device, names: Sequence[str], optional: Sequence[str],
            argv: Sequence[str], note: Callable[[str], None]) -> list[Row]:
    """Build and measure all networks; those in `optional` may refuse the image size.

    Raises:
        UsageError: a network refuses what it is given.
        RunError: a loss that is not finite.
    """
    bench = Bench(args, device)
    bandwidth, copied = bench.bandwidth()
    note(f"memory bandwidth {bandwidth / 1e9:.1f} GB/s: a copy of {copied / MIB:.0f} MiB, read and written")
    modes = ("eager", "compiled") if args.compile else ("eager",)
    runners: dict[tuple[str, str], Runner] = {}
    for number, name in enumerate(names, 1):
        print(f"{name} ({number} of {len(names)})", file=sys.stderr)
        try:
            model = bench.build(name)
        except UsageError as error:
            if name not in optional:
                raise
            note(f"left out: {error}")
            continue
        for mode in modes:
            runners[name, mode] = Runner(bench, model, compiled=mode == "compiled")
    rows = {key: Row(*key, "network", sum(isinstance(m, AugmentedConv2d) for m in runner.model.modules()))
            for key, runner in runners.items()}
    for phase in ("infer", "train"):
        print("inference" if phase == "infer" else "training", file=sys.stderr)
        for key, seconds in bench.medians({key: getattr(r, phase) for key, r in runners.items()}).items():
            setattr(rows[key], f"{phase}_ms", 1e3 * seconds)
            setattr(rows[key], f"{phase}_images_per_s", args.batch_size / seconds)
    for (name, mode), runner in runners.items():
        if not runner.train().isfinite():
            raise RunError(f"the loss of {name}, {mode}, is not finite: its times mean nothing")
        runner.optimizer.zero_grad()
    if not args.no_memory:
        print("memory", file=sys.stderr)
        for key, runner in runners.items():
            if device.type == "cuda":
                found = memory_on_gpu(runner)
            else:
                found = None if key[1] == "compiled" else memory_in_own_process(
                    ["ea_vision", "benchmark", *argv, "--memory-of", key[0]], args.system_malloc)
            rows[key].memory_mib = None if found is None else found / MIB
    for (name, mode), row in rows.items():
        if (base := rows.get((baseline_of(name), mode))) is not None:
            for ratio, of in (("train_ratio", "train_images_per_s"), ("infer_ratio", "infer_images_per_s"),
                              ("memory_ratio", "memory_mib")):
                if getattr(row, of) and getattr(base, of):
                    setattr(row, ratio, getattr(row, of) / getattr(base, of))
    print("attention branches", file=sys.stderr)
    branches = [row for (name, mode), runner in runners.items()
                for row in measure_branches(bench, name, runner.model, mode == "compiled", bandwidth)]
    return [*rows.values(), *branches]


def _aligned(lines: list[list[str]]) -> str:
    """The first two columns to the left, numbers to the right."""
    widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
    return "\n".join("  ".join(cell.ljust(width) if index < 2 else cell.rjust(width)
                               for index, (cell, width) in enumerate(zip(line, widths, strict=True))).rstrip()
                     for line in lines)


def _cell(value: float | None, digits: int) -> str:
    return "-" if value is None else f"{value:.{digits}f}"


def to_tables(rows: Sequence[Row]) -> str:
    """A table of the networks and, where there are any, one of their attention branches."""
    networks = [["network", "mode", "training images/s", "ratio", "inference images/s", "ratio", "memory MiB", "ratio"]]
    branches = [["attention branch", "mode", "layers", "inference ms", "attention", "floor", "training ms",
                 "attention", "floor"]]
    for row in rows:
        if row.part == "network":
            networks.append([row.model, row.mode, _cell(row.train_images_per_s, 2), _cell(row.train_ratio, 3),
                             _cell(row.infer_images_per_s, 2), _cell(row.infer_ratio, 3), _cell(row.memory_mib, 0),
                             _cell(row.memory_ratio, 3)])
        else:
            times = (row.infer_ms, row.infer_attention_ms, row.infer_floor_ms, row.train_ms, row.train_attention_ms,
                     row.train_floor_ms)
            branches.append([f"{row.model}, {row.part}", row.mode, str(row.layers), *(_cell(t, 3) for t in times)])
    text = _aligned(networks)
    if len(branches) > 1:
        text += ("\n\n" + _aligned(branches) + "\nmean of a stage's layers; attention: the branch without its pooling "
                 "and projections; floor: queries, keys, values,\nresult, previous and own logits (where needed), each "
                 "once over main memory; training: forward and backward")
    return text


def to_csv(rows: Sequence[Row], setting: dict[str, object]) -> str:
    """Comma-separated values: the fields of `Row`, and the setting, the same on every line."""
    text = io.StringIO()
    writer = csv.DictWriter(text, [*(f.name for f in fields(Row)), *setting], lineterminator="\n")
    writer.writeheader()
    for row in rows:
        values = {key: round(value, 4) if isinstance(value, float) else value for key, value in asdict(row).items()}
        writer.writerow({**values, **setting})
    return text.getvalue()


def draw(rows: Sequence[Row], title: str) -> bytes:
    """PNG: bars of training and inference speed and of memory, the ratio beside each."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    rows = [row for row in rows if row.part == "network"]
    names, modes = (list(dict.fromkeys(getattr(row, of) for row in rows)) for of in ("model", "mode"))
    looks = {"eager": {"color": "#0072B2"}, "compiled": {"color": "#E69F00", "hatch": "//", "edgecolor": "white"}}
    panels = [("train_images_per_s", "train_ratio", "training, images/s"),
              ("infer_images_per_s", "infer_ratio", "inference, images/s"),
              ("memory_mib", "memory_ratio", "peak memory of training, MiB")]
    panels = [panel for panel in panels if any(getattr(row, panel[0]) is not None for row in rows)]
    figure = Figure(figsize=(2.2 + 3.6 * len(panels), 1.7 + 0.34 * len(rows)), layout="constrained")
    FigureCanvasAgg(figure)
    thickness = 0.8 / len(modes)
    for axes, (value, ratio, label) in zip(figure.subplots(1, len(panels), sharey=True, squeeze=False)[0], panels,
                                           strict=True):
        for row in rows:
            if getattr(row, value) is None:
                continue
            mode = modes.index(row.mode)
            place = names.index(row.model) + (mode - (len(modes) - 1) / 2) * thickness
            bars = axes.barh(place, getattr(row, value), 0.92 * thickness, label=row.mode, **looks[row.mode])
            axes.bar_label(bars, [_cell(getattr(row, ratio), 2) if getattr(row, ratio) else ""], padding=3, fontsize=8)
        axes.set(xlabel=label, yticks=range(len(names)), yticklabels=names)
        axes.margins(x=0.14)
        axes.spines[["top", "right"]].set_visible(False)
        axes.grid(axis="x", alpha=0.3)
        axes.set_axisbelow(True)
    axes.set_ylim(len(names) - 0.5, -0.5)
    if len(modes) > 1:
        handles, labels = axes.get_legend_handles_labels()
        unique = dict(zip(labels, handles, strict=True))
        figure.legend(unique.values(), unique.keys(), loc="outside lower right", ncols=2, frameon=False)
    if any(row.train_ratio for row in rows):
        title += "; beside each bar: ratio to timm's resnet of the same depth"
    figure.suptitle(title, fontsize=9)
    return figure_bytes(figure)


def make_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=__doc__, epilog=EXAMPLES,
                                     formatter_class=argparse.RawDescriptionHelpFormatter, allow_abbrev=False)
    parser.add_argument("--models", nargs="+", default=DEFAULT, metavar="NAME", help="registered timm models; all: "
                        "resnet, aa, pa and ea of every depth, and timm's botnet50ts, halonet50ts and "
                        f"lambda_resnet50ts where they take the image size (default: {' '.join(DEFAULT)})")
    parser.add_argument("--device", choices=("auto", "cpu", "cuda"), default="auto", help="auto: cuda if there is one "
                        "(default: %(default)s)")
    parser.add_argument("--batch-size", type=int, help="images (default: 8 on a CPU, 256 on CUDA)")
    parser.add_argument("--img-size", type=int, default=224, help="side in pixels (default: %(default)s)")
    parser.add_argument("--threads", type=int, default=2, help="threads of a CPU (default: %(default)s)")
    parser.add_argument("--amp", choices=("none", "bfloat16", "float16"), default="none", help="precision of the "
                        "forward pass (default: %(default)s, float32)")
    parser.add_argument("--channels-last", action="store_true", help="images and weights channels-last in memory")
    parser.add_argument("--compile", action="store_true", help="measure each network compiled by torch.compile, too")
    parser.add_argument("--repeats", type=int, default=7, help="steps of each network, of which the median is given "
                        "(default: %(default)s)")
    parser.add_argument("--implementation", choices=IMPLEMENTATIONS, help="of the attention (default: by device)")
    parser.add_argument("--flush-denormal", action="store_true", help="take subnormal numbers for zero on a CPU")
    parser.add_argument("--system-malloc", action="store_true", help="on a CPU with glibc: leave its malloc as it is "
                        "(default: start again with settings that keep freed memory, for all networks alike; where "
                        "memory is measured, with settings that return it)")
    parser.add_argument("--no-memory", action="store_true", help="leave out the peak memory (on a CPU it takes a "
                        "process for each network)")
    parser.add_argument("--csv", metavar="FILE", help="also write the figures to FILE")
    parser.add_argument("--plot", metavar="FILE.png", help="also draw them as bars")
    parser.add_argument("--memory-of", metavar="NAME", help=argparse.SUPPRESS)
    return parser


def main(argv: Sequence[str] | None = None) -> int:
    args = make_parser().parse_args(argv)
    device = choose_device(args.device)
    if args.batch_size is None:
        args.batch_size = 256 if device.type == "cuda" else 8
    for name in ("batch_size", "img_size", "threads", "repeats"):
        if getattr(args, name) < 1:
            raise UsageError(f"--{name.replace('_', '-')} must be 1 or more, got {getattr(args, name)}")
    if args.plot and not args.plot.endswith(".png"):
        raise UsageError(f"--plot must end in .png, got {args.plot!r}")
    names = list(dict.fromkeys(n for name in args.models for n in (ALL if name == "all" else [name])))
    for name in names:
        check_model_name(name)
    for path in filter(None, (args.csv, args.plot)):
        create(Path(path).parent)
    keeps = device.type == "cpu" and platform.libc_ver()[0] == "glibc" and not (args.system_malloc or args.memory_of)
    if keeps and argv is None and any(os.environ.get(key) != value for key, value in KEEP_MEMORY.items()):
        # malloc reads them when a process starts
        os.execve(sys.executable, [sys.executable, *sys.orig_argv[1:]], {**os.environ, **KEEP_MEMORY})
    if device.type == "cpu":
        if args.flush_denormal and not torch.set_flush_denormal(True):
            raise UsageError("--flush-denormal: this CPU cannot")
        torch.set_num_threads(args.threads)

    with ExitStack() as stack:
        if args.implementation:
            stack.enter_context(use_implementation(args.implementation))
        if args.memory_of:
            print(memory_of_this_process(Bench(args, device), lambda: create_classifier(
                args.memory_of, {}, num_classes=1000, img_size=args.img_size)[0]))
            return 0
        if args.compile:  # beyond the default of 8 networks and modes, torch goes on uncompiled
            stack.enter_context(torch._dynamo.config.patch(recompile_limit=1000, accumulated_recompile_limit=10000))
        chosen = logging.StreamHandler(sys.stdout)  # which implementation, and why
        logger = logging.getLogger("ea_vision.ops")
        logger.addHandler(chosen)
        stack.callback(logger.removeHandler, chosen)
        stack.callback(logger.setLevel, logger.level)
        logger.setLevel(logging.INFO)

        setting = {
            "hardware": hardware(device, 1), "date": datetime.now().astimezone().isoformat(timespec="minutes"),
            "ea_vision": ea_vision.__version__, "torch": str(torch.__version__), "timm": timm.__version__,
            "batch_size": args.batch_size, "img_size": args.img_size,
            "precision": "float32" if args.amp == "none" else args.amp,
            "layout": "channels-last" if args.channels_last else "contiguous", "repeats": args.repeats,
            "implementation": args.implementation or "chosen", "flush_denormal": args.flush_denormal,
            "malloc": "keeps memory" if all(os.environ.get(k) == v for k, v in KEEP_MEMORY.items()) else "system's",
        }
        versions = ", ".join(f"{name} {setting[name]}" for name in ("ea_vision", "torch", "timm"))
        shown = (f"batch {args.batch_size}, {args.img_size} pixels, {setting['precision']}, {setting['layout']}"
                 + (", subnormals flushed" if args.flush_denormal else ""))
        print(f"{setting['hardware']}; {versions}; {setting['date']}")
        print(f"{shown}; medians of {args.repeats} interleaved repeats")
        if setting["malloc"] == "keeps memory":
            print("malloc keeps freed memory: started with " + " ".join(f"{k}={v}" for k, v in KEEP_MEMORY.items()))
        elif device.type == "cpu":
            print("malloc: the system's, whose page faults are in the times")
        if not args.no_memory:
            print("memory: " + (
                "peak that torch allocates on the GPU in a training step, the network's weights and optimiser state "
                "included" if device.type == "cuda" else
                "peak resident memory of three training steps in a process of its own (eager), less what it holds\n"
                "        before the network is made; malloc "
                + ("is the system's" if args.system_malloc else "returns what is freed")))
        command = list(sys.argv[1:] if argv is None else argv)
        optional = () if "all" not in args.models else [name for name in ALL if name not in args.models]
        rows = measure(args, device, names, optional, command, note=print)
    print(f"\n{to_tables(rows)}")
    if args.csv:
        atomic_write(Path(args.csv), to_csv(rows, setting).encode())
    if args.plot:
        atomic_write(Path(args.plot), draw(rows, f"{setting['hardware']}; {versions}\n{shown}"))
    return 0
