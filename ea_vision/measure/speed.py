"""Speed and memory of networks in training and inference, in one run, on the device at hand, as ratios to a ResNet.

Measured are images per second of a training step (forward, backward, optimiser) and of inference, the peak memory of a
training step, and the time of an attention branch beside the floor that memory bandwidth sets. Repeats are interleaved,
one step of each network in turn, and medians are given, so that what else the machine does hits all alike. Weights are
random; BatchNorm statistics come from two training passes, and norms that start at zero are set to 0.2, so that every
branch is alive. A ratio is to timm's resnet of the same depth, of a vision transformer whose maps evolve to timm's
plain one, where that is measured too.

`benchmark --loaders` measures what reads images instead (`--loaders --help`).
"""

from __future__ import annotations

import argparse
import logging
import os
import platform
import sys
from collections.abc import Sequence
from contextlib import ExitStack
from datetime import datetime
from pathlib import Path

import timm
import torch
from timm.models import get_pretrained_cfg

import ea_vision
from ea_vision.base.errors import RunError, UsageError
from ea_vision.base.files import atomic_write, check_output
from ea_vision.base.networks import check_model_name
from ea_vision.base.processes import choose_device
from ea_vision.base.provenance import hardware
from ea_vision.base.tables import add_wide, shown
from ea_vision.engine.optimizer import check_optimizer_name
from ea_vision.layers import attention_layers
from ea_vision.measure.branches import time_branches
from ea_vision.measure.peak_memory import KEEP_MEMORY, MIB, memory_in_own_process, memory_on_gpu
from ea_vision.measure.runtimes import RUNTIMES, compare_runtimes, parse_runtimes, to_table
from ea_vision.measure.speed_report import Row, add_ratios, baseline_of, to_csv, to_tables
from ea_vision.measure.steps import Bench, Runner, Setting, add_setting, check_positive
from ea_vision.models import list_networks, published_names

EXAMPLES = """\
examples:
  ea-vision benchmark                                                  # the 50-layer networks
  ea-vision benchmark --models all --csv speed.csv
  ea-vision benchmark --amp bfloat16 --channels-last --compile         # what a GPU is trained with
  ea-vision benchmark --runtime eager,compiled,onnx --models resnet50 ea_aa_resnet50
  ea-vision benchmark --models resnet50 ea_aa_resnet50 --implementation reference --repeats 15
"""
DEFAULT = ("resnet50", "aa_resnet50", "pa_aa_resnet50", "ea_aa_resnet50")
OTHERS = ("botnet50ts_256", "halonet50ts", "lambda_resnet50ts")  # timm's networks that attend by other means


def all_networks(img_size: int) -> list[str]:
    """Return the networks of `all`: ours, those that papers compare them with, OTHERS; near this image size."""
    ours = list_networks()
    names = dict.fromkeys([*published_names(), *ours, *filter(None, map(baseline_of, ours)), *OTHERS])
    sides = {name: get_pretrained_cfg(name).input_size[-1] for name in names}
    return [name for name in names if img_size < 3 * sides[name] and sides[name] < 3 * img_size]


def networks_asked_for(models: Sequence[str], img_size: int) -> tuple[list[str], set[str]]:
    """The networks of --models, each once, and those among them that come from `all` and may refuse the image size.

    Raises:
        UsageError: unknown.
    """
    names = list(dict.fromkeys(n for name in models for n in (all_networks(img_size) if name == "all" else [name])))
    for name in names:
        check_model_name(name)
    return names, set(names) - set(models)


def build_networks(bench: Bench, names: Sequence[str], optional: set[str],
                   modes: Sequence[str]) -> dict[tuple[str, str], Runner]:
    """The networks by name and mode; those in `optional` that refuse the setting are left out, with a line.

    Raises:
        UsageError: another one refuses it.
    """
    runners = {}
    for number, name in enumerate(names, 1):
        print(f"{name} ({number} of {len(names)})", file=sys.stderr)
        try:
            model = bench.live_network(name)
        except UsageError as error:
            if name not in optional:
                raise
            print(f"left out: {error}")
            continue
        runners |= {(name, mode): Runner(bench, model, compiled=mode == "compiled") for mode in modes}
    return runners


def add_speed(bench: Bench, runners: dict[tuple[str, str], Runner], rows: dict[tuple[str, str], Row]) -> None:
    """Time the networks.

    Raises:
        RunError: a loss that is not finite.
    """
    for phase in ("infer", "train"):
        print("inference" if phase == "infer" else "training", file=sys.stderr)
        for key, seconds in bench.medians({key: getattr(r, phase) for key, r in runners.items()}).items():
            setattr(rows[key], f"{phase}_ms", 1e3 * seconds)
            setattr(rows[key], f"{phase}_images_per_s", bench.setting.batch_size / seconds)
    for (name, mode), runner in runners.items():
        if not runner.train().isfinite():
            raise RunError(f"the loss of {name}, {mode}, is not finite: its times mean nothing")
        runner.optimizer.zero_grad()


def add_memory(bench: Bench, runners: dict[tuple[str, str], Runner], rows: dict[tuple[str, str], Row],
               system_malloc: bool) -> None:
    """Measure peak memory; on a CPU that of the networks uncompiled alone."""
    print("memory", file=sys.stderr)
    for (name, mode), runner in runners.items():
        found = None
        if bench.device.type == "cuda":
            found = memory_on_gpu(runner)
        elif mode == "eager":
            found = memory_in_own_process(name, bench.setting, system_malloc=system_malloc)
        rows[name, mode].memory_mib = None if found is None else found / MIB


def compare_networks(args: argparse.Namespace, setting: Setting, names: Sequence[str], optional: set[str]) -> list[Row]:
    """Build and measure all networks; those in `optional` may refuse the setting.

    Raises:
        UsageError: a network refuses what it is given.
        RunError: a loss that is not finite.
    """
    bench = Bench(setting, args.repeats, args.cpu_time)
    bandwidth, copied = bench.bandwidth()
    print(f"memory bandwidth {bandwidth / 1e9:.1f} GB/s: a copy of {copied / MIB:.0f} MiB, read and written")
    runners = build_networks(bench, names, optional, ("eager", "compiled") if args.compile else ("eager",))
    rows = {key: Row(*key, "network", len(attention_layers(runner.model)))
            for key, runner in runners.items()}
    add_speed(bench, runners, rows)
    if not args.no_memory:
        add_memory(bench, runners, rows, args.system_malloc)
    add_ratios(rows)
    print("attention branches", file=sys.stderr)
    branches = [row for (name, mode), runner in runners.items()
                for row in time_branches(bench, name, runner.model, mode == "compiled", bandwidth)]
    return [*rows.values(), *branches]


def make_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=__doc__, epilog=EXAMPLES,
                                     formatter_class=argparse.RawDescriptionHelpFormatter, allow_abbrev=False)
    parser.add_argument("--models", nargs="+", default=DEFAULT, metavar="NAME", help="registered timm models; all: "
                        f"ours, the plain ones that papers compare them with, and {', '.join(OTHERS)}, as far as they "
                        f"are made for about this image size (default: {' '.join(DEFAULT)})")
    add_setting(parser, None, "8 on a CPU, 256 on CUDA")
    parser.add_argument("--opt", default="sgd", metavar="NAME", help="optimiser of the training step, timm's, "
                        "lookahead_NAME too (default: %(default)s)")
    parser.add_argument("--threads", type=int, default=2, help="threads of a CPU (default: %(default)s)")
    parser.add_argument("--compile", action="store_true", help="measure each network compiled by torch.compile, too")
    parser.add_argument("--runtime", metavar="LIST", help="measure inference of deployed networks instead: of "
                        f"{','.join(RUNTIMES)}, separated by commas, on a CPU")
    parser.add_argument("--repeats", type=int, default=7, help="steps of each network, of which the median is given "
                        "(default: %(default)s)")
    parser.add_argument("--flush-denormal", action="store_true", help="take subnormal numbers for zero on a CPU")
    parser.add_argument("--system-malloc", action="store_true", help="on a CPU with glibc: leave its malloc as it is "
                        "(default: start again with settings that keep freed memory, for all networks alike; where "
                        "memory is measured, with settings that return it)")
    parser.add_argument("--cpu-time", action="store_true", help="on a CPU: time by the CPU time of all threads, which "
                        "other work on the machine changes less; start with OMP_WAIT_POLICY=passive, else a thread "
                        "that waits for the others works")
    parser.add_argument("--no-memory", action="store_true", help="leave out the peak memory (on a CPU it takes a "
                        "process for each network)")
    add_wide(parser)
    parser.add_argument("--csv", metavar="FILE", help="also write the figures to FILE")
    return parser


def _keeps_memory() -> bool:
    return all(os.environ.get(key) == value for key, value in KEEP_MEMORY.items())


def conditions(args: argparse.Namespace, setting: Setting) -> dict[str, object]:
    """Return the conditions of the measurement: the last columns of the CSV."""
    return {
        "hardware": hardware(choose_device(setting.device), 1),
        "date": datetime.now().astimezone().isoformat(timespec="minutes"),
        "ea_vision": ea_vision.__version__, "torch": str(torch.__version__), "timm": timm.__version__,
        "batch_size": setting.batch_size, "img_size": setting.img_size, "precision": setting.precision,
        "optimizer": setting.opt,
        "layout": "channels-last" if setting.channels_last else "contiguous", "repeats": args.repeats,
        "implementation": setting.implementation or "chosen", "flush_denormal": setting.flush_denormal,
        "malloc": "keeps memory" if _keeps_memory() else "system's", "clock": "CPU" if args.cpu_time else "wall",
    }


def describe(under: dict[str, object]) -> list[str]:
    """Two lines of the conditions: hardware and versions; what is run."""
    versions = ", ".join(f"{name} {under[name]}" for name in ("ea_vision", "torch", "timm"))
    return [f"{under['hardware']}; {versions}",
            f"batch {under['batch_size']}, {under['img_size']} pixels, {under['precision']}, {under['layout']}, "
            + under["optimizer"] + (", subnormals flushed" if under["flush_denormal"] else "")]


def print_conditions(args: argparse.Namespace, under: dict[str, object], on_cpu: bool) -> None:
    machine, run = describe(under)
    print(f"{machine}; {under['date']}\n{run}; medians of {args.repeats} interleaved repeats")
    if under["malloc"] == "keeps memory":
        print("malloc keeps freed memory: started with " + " ".join(f"{k}={v}" for k, v in KEEP_MEMORY.items()))
    elif on_cpu:
        print("malloc: the system's, whose page faults are in the times")
    if args.cpu_time:
        print("times: CPU time of all threads together")
    if args.no_memory:
        return
    if on_cpu:
        malloc = "is the system's" if args.system_malloc else "returns what is freed"
        print("memory: peak resident memory of three training steps in a process of its own (eager), less what it "
              f"holds\n        before the network is made; malloc {malloc}")
    else:
        print("memory: peak that torch allocates on the GPU in a training step, the network's weights and optimiser "
              "state included")


def main(argv: Sequence[str] | None = None) -> int:
    args = make_parser().parse_args(argv)
    on_cpu = choose_device(args.device).type == "cpu"
    if args.batch_size is None:
        args.batch_size = 8 if on_cpu else 256
    check_positive(args, "batch_size", "img_size", "threads", "repeats")
    if args.cpu_time and not on_cpu:
        raise UsageError(f"--cpu-time times a CPU, got --device {args.device}")
    check_optimizer_name(args.opt)
    runtimes = parse_runtimes(args.runtime, args) if args.runtime else []
    names, optional = networks_asked_for(args.models, args.img_size)
    if args.csv:
        check_output(Path(args.csv))
    if on_cpu and argv is None and platform.libc_ver()[0] == "glibc" and not (args.system_malloc or _keeps_memory()):
        # malloc reads them when a process starts
        os.execve(sys.executable, [sys.executable, *sys.orig_argv[1:]], {**os.environ, **KEEP_MEMORY})
    setting = Setting.of(args)
    with setting.active(), ExitStack() as stack:
        printer, logger = logging.StreamHandler(sys.stdout), logging.getLogger("ea_vision.ops")
        logger.addHandler(printer)  # which implementation of the attention is taken, and why
        stack.callback(logger.removeHandler, printer)
        stack.callback(logger.setLevel, logger.level)
        logger.setLevel(logging.INFO)
        if args.compile:  # beyond the default of 8 networks and modes, torch goes on uncompiled
            stack.enter_context(torch._dynamo.config.patch(recompile_limit=1000, accumulated_recompile_limit=10000))
        under = conditions(args, setting)
        if runtimes:
            print("\n".join(describe(under)) + f"; medians of {args.repeats} interleaved repeats\n")
            print(to_table(compare_runtimes(Bench(setting, args.repeats, args.cpu_time), names, runtimes)))
            return 0
        print_conditions(args, under, on_cpu)
        rows = compare_networks(args, setting, names, optional)
    print(f"\n{shown(to_tables(rows), args.wide)}")
    if args.csv:
        atomic_write(Path(args.csv), to_csv(rows, under).encode())
    return 0
