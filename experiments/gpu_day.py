"""Run all measurements that need a GPU, in twelve minutes: each part writes its rows when it ends.

    python -m experiments.gpu_day --output "$OUT"                 # on a GPU
    python -m experiments.gpu_day --output /tmp/day --dry-run     # tiny, on a CPU: do all parts run?
    python -m experiments.gpu_day --output "$OUT" --parts accuracy --cifar100 DIR

The parts, most needed first: the machine, tests/gpu (150 s), one layer by every way to compute it
and the kernels of maps_on_gpu (60 s), the table of training steps with a profile of EA-50 (240 s), and with the rest of
the time CIFAR-100, whose weights are kept every ten epochs.

If a part fails or takes longer than its share of the time, parts.csv says so, and the next part begins. Compilation
takes most of the time, so the networks of the table are compiled in parallel, one per process, and timed one at a time.
"""

import argparse
import copy
import math
import os
import re
import subprocess
import sys
import tempfile
import threading
import time
import traceback
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from multiprocessing import get_context
from pathlib import Path
from statistics import median
from typing import Any
from unittest import mock

import pandas as pd
import timm
import torch
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.profiler import ProfilerActivity, profile

import ea_vision
from ea_vision.__main__ import main as ea_vision_main
from ea_vision.base import devices
from ea_vision.engine.muon import batch_muon
from ea_vision.ops import evolving_attention
from experiments.benchmark import EAGER, Case, Steps, interleaved, live_network
from experiments.maps_on_gpu import emulate, launch

COMPILED = "default"
GRAPHS = "reduce-overhead"
TABLE = {  # (network, implementation) -> modes; CUDA graphs of all five would not fit into memory
    ("resnet50", "chosen"): (EAGER, COMPILED, GRAPHS),
    ("aa_resnet50", "chosen"): (EAGER, COMPILED),
    ("aa_resnet50", "sdpa"): (COMPILED,),
    ("pa_aa_resnet50", "chosen"): (EAGER, COMPILED),
    ("ea_aa_resnet50", "chosen"): (EAGER, COMPILED, GRAPHS),
    ("ea_aa_resnet50", "reference"): (COMPILED,),
}
CIFAR = "ea_conv_transformer_cifar"
CIFAR_BATCHES = (128, 512)
OPTIMIZERS = ("muon", "batched muon", "sgd")
TINY = {"widths": [8, 8, 16, 16], "depth": 1}
SECONDS = 720  # of the whole day
TESTING = 150  # seconds
LAYERS = 60  # seconds, after which no other way is begun
COMPILATION = 150  # seconds that the processes of the table wait for each other
TIMING = 90  # seconds, after that
ROUNDS = 6
STEPS = 3  # consecutive steps of one network
# prefixes of profiler ranges, which are not kernels
RANGES = ("CompiledFxGraph", "Optimizer.", "Torch-Compiled")
ATTENTION = (  # names of our kernels
    "evolve",
    "row_products",
    "logits_backward",
    "weight_backward",
    "queries_backward",
    "keys_backward",
)
MOVES = ("copy_", "cat", "add", "add_", "mm", "addmm", "bmm")
KINDS = {  # kind -> substrings of kernel names; the first match counts
    "norms, sums, pooling, fused": ("triton_",),
    "convolutions": ("implicit", "fprop", "dgrad", "wgrad", "cudnn", "conv"),
    "products": ("nvjet", "gemm", "cublas", "cutlass", "splitk"),
    "copies": ("copy", "cat", "memcpy", "memset"),
    "optimiser": ("multi_tensor",),
}


@dataclass
class Day:
    """The settings of all parts: output folder, dry run or not, data, epochs, and when the day ends.

    Attributes:
        ends: of `time.monotonic`.
    """

    output: Path
    dry: bool
    cifar100: Path | None = None
    epochs: int = 84
    ends: float = math.inf

    @property
    def device(self) -> torch.device:
        return torch.device("cpu" if self.dry else "cuda")

    def save(self, name: str, rows: list[dict]) -> None:
        pd.DataFrame(rows).to_csv(self.output / f"{name}.csv", index=False)

    def command(self, seconds: float, *argv: str) -> int:
        """Run `python -m ...` with a time limit and its output in a log file; return its exit code."""
        log = self.output / f"{argv[0]}-{time.monotonic_ns()}.log"
        with log.open("w") as file:
            process = subprocess.Popen(
                [sys.executable, "-m", *argv], stdout=file, stderr=subprocess.STDOUT
            )
            try:
                return process.wait(seconds)
            except subprocess.TimeoutExpired:
                process.terminate()  # a trainer keeps a checkpoint
                try:
                    process.wait(20)
                except subprocess.TimeoutExpired:
                    process.kill()
                    process.wait()
                raise

    def ea_vision(self, seconds: float, *argv: str) -> int:
        """Run a command of ea-vision; in a dry run, run it in this process."""
        if not self.dry:
            return self.command(seconds, "ea_vision", *argv)
        before = sys.argv
        try:
            return ea_vision_main(list(argv))
        finally:
            sys.argv = before

    def network(self, name: str, **keywords) -> torch.nn.Module:
        if self.dry and name == CIFAR:
            keywords = TINY | keywords
        model = timm.create_model(name, **keywords)
        return model.to(self.device, memory_format=torch.channels_last).train()

    def images(self, batch: int, side: int) -> torch.Tensor:
        batch = 2 if self.dry else batch
        images = torch.randn(batch, 3, side, side, device=self.device)
        return images.contiguous(memory_format=torch.channels_last)

    def clock(self) -> float:
        devices.synchronize(self.device)
        return time.perf_counter()

    def times(self, calls: dict, repeats: int) -> dict:
        """Return the median milliseconds of each call, measured in interleaved rounds."""
        repeats = 1 if self.dry else repeats
        seconds = interleaved(calls, repeats, warm_up=1 if self.dry else 3, clock=self.clock)
        return {key: 1e3 * value for key, value in seconds.items()}


def check_exit(code: int | str, what: str) -> None:
    """Raise RuntimeError if a command failed; rows that it wrote are kept."""
    if code != 0:
        raise RuntimeError(f"{what} ended with {code}")


def machine(day: Day) -> None:
    """Write versions, and the rates of a copy and of a large matrix product in bfloat16."""
    side = 64 if day.dry else 8192
    a = torch.randn(side, side, device=day.device, dtype=torch.bfloat16)
    b = torch.empty_like(a)
    times = day.times({"copy": lambda: b.copy_(a), "product": lambda: a @ a}, repeats=20)
    row = {
        "device": devices.device_name(day.device),
        "torch": str(torch.__version__),
        "timm": timm.__version__,
        "ea_vision": ea_vision.__version__,
        "copy_gb_per_s": 2 * a.nbytes / times["copy"] / 1e6,
        "product_tflops": 2 * side**3 / times["product"] / 1e9,
    }
    day.save("machine", [row])


def tests(day: Day) -> None:
    """Run tests/gpu and write each test that ended, with its outcome.

    Raises:
        RuntimeError: a test failed, or not all ended in time.
    """
    options = ["-v", "-n", "12", "--dist", "worksteal", "-k", "not speed"]
    if day.dry:
        options = ["--collect-only", "-k", "operators"]
    command = ["pytest", "tests/gpu", "-p", "no:cacheprovider", *options]
    code = "no end in time"
    try:
        code = day.command(TESTING, *command)
    except subprocess.TimeoutExpired:
        pass  # the log has what ended
    log = max(day.output.glob("pytest-*.log"), key=lambda path: path.stat().st_mtime)
    ended = re.findall(r"(PASSED|FAILED|ERROR|SKIPPED) (tests/\S.*)", log.read_text())
    rows = [{"test": name, "outcome": outcome.lower()} for outcome, name in ended]
    day.save("tests", [*rows, {"test": "all", "outcome": f"exit code {code}"}])
    check_exit(code, "pytest")


@dataclass
class Turns:
    """Lets processes share a GPU: they wait until all have compiled, and are then timed one at a time.

    ready: a Barrier (of threading or multiprocessing). gpu: a Lock.
    """

    ready: Any
    gpu: Any
    waited: bool = False

    def wait(self) -> None:
        """Wait for the other processes, at most COMPILATION seconds."""
        self.waited = True
        try:
            self.ready.wait(COMPILATION)
        except threading.BrokenBarrierError:
            pass

    def times(self, day: Day, steps: dict[str, Callable[[], Any]]) -> dict[str, float]:
        """Return the median milliseconds per step of each entry; other processes may be timed between the rounds."""
        seconds = {name: [] for name in steps}
        for _ in range(1 if day.dry else ROUNDS):
            for name, step in steps.items():
                with self.gpu:
                    step()  # refill the caches after another process's turn
                    start = day.clock()
                    for _ in range(STEPS):
                        step()
                    seconds[name].append((day.clock() - start) / STEPS)
        return {name: 1e3 * median(values) for name, values in seconds.items()}


def peak_gib(day: Day, steps: Steps, before: int) -> float | None:
    """Return a training step's peak allocated memory minus `before` bytes, in GiB.

    None on a CPU and with CUDA graphs, whose replay allocates nothing.
    """
    if day.dry or steps.case.mode == GRAPHS:
        return None
    steps.train()
    torch.cuda.reset_peak_memory_stats(day.device)
    steps.train()
    return (devices.peak_memory(day.device) - before) / 2**30


def seconds_of(day: Day, call: Callable[[], Any]) -> float:
    """Return the seconds of one call."""
    start = day.clock()
    call()
    return day.clock() - start


def time_network(day: Day, turns: Turns, name: str, implementation: str) -> None:
    """Compile a ResNet in its modes; time training and inference steps; for EA-50 profile one training step."""
    batch, side = (2, 32) if day.dry else (256, 224)
    images = day.images(batch, side)
    amp = "none" if day.dry else "bfloat16"
    modes = (EAGER,) if day.dry else TABLE[name, implementation]
    network = "resnet10t" if day.dry else name
    rows = {}
    steps = {}
    for mode in modes:
        row = {"network": name, "implementation": implementation, "mode": mode}
        rows[mode] = row
        before = 0 if day.dry else torch.cuda.memory_allocated()
        made = Steps(
            live_network(network, images), images, amp, case=Case(network, implementation, mode)
        )
        try:
            row["first_step_s"] = seconds_of(day, made.train)
            row["peak_gib"] = peak_gib(day, made, before)
            steps[mode] = made
        except Exception as error:  # kept, so that the other modes are timed
            row["error"] = f"{type(error).__name__}: {error}"[:500]
    turns.wait()
    trained = turns.times(day, {mode: of.train for mode, of in steps.items()})
    inferred = turns.times(day, {EAGER: steps[EAGER].infer})
    for mode, row in rows.items():
        row["train_ms"] = trained.get(mode)
        row["infer_ms"] = inferred.get(mode)
    day.save(f"table-{name}-{implementation}", list(rows.values()))
    if (name, implementation) == ("ea_aa_resnet50", "chosen"):
        mode = EAGER if day.dry else COMPILED
        with turns.gpu:
            day.save("profile-ea_aa_resnet50", profiled(day, steps[mode]))
            if EAGER in steps:
                day.save("elements-ea_aa_resnet50", moved(day, steps[EAGER]))


def recorded_step(day: Day, steps: Steps, **options: bool) -> profile:
    """Return the profile of a training step; options: further ones of torch's profiler."""
    activities = [ProfilerActivity.CPU]
    if not day.dry:
        activities.append(ProfilerActivity.CUDA)
    with profile(activities=activities, **options) as recorded:
        steps.train()
        devices.synchronize(day.device)
    return recorded


def profiled(day: Day, steps: Steps) -> list[dict]:
    """Return milliseconds and calls of each kernel in a training step; on a CPU, of each operator."""
    steps.train()
    rows = []
    for event in recorded_step(day, steps).key_averages():
        milliseconds = (event.self_device_time_total or event.self_cpu_time_total) / 1e3
        row = {"kind": kind_of(event.key), "kernel": event.key[:100]}
        row |= {"calls": event.count, "ms": milliseconds}
        # count kernels only: operators and profiler ranges contain the same time again
        is_kernel = not event.self_cpu_time_total and not any(word in event.key for word in RANGES)
        if day.dry or is_kernel and milliseconds:
            rows.append(row)
    return rows


def moved(day: Day, steps: Steps) -> list[dict]:
    """Return calls, milliseconds and input elements of operators of a step that copy, join, add or multiply."""

    def elements(shapes: list) -> int:
        if all(isinstance(entry, int) for entry in shapes):
            return math.prod(shapes) if shapes else 0
        return sum(elements(entry) for entry in shapes if isinstance(entry, list))

    rows = []
    step = recorded_step(day, steps, record_shapes=True)
    for event in step.key_averages(group_by_input_shape=True):
        if event.key.removeprefix("aten::") in MOVES:
            milliseconds = (event.self_device_time_total or event.self_cpu_time_total) / 1e3
            row = {"operator": event.key, "calls": event.count, "ms": milliseconds}
            shapes = [list(shape) for shape in event.input_shapes]
            rows.append(row | {"elements": event.count * elements(shapes)})
    return rows


def kind_of(kernel: str) -> str:
    """Return what a kernel computes, read from its name."""
    if kernel in ATTENTION:
        return "attention"
    for kind, words in KINDS.items():
        if any(word in kernel.lower() for word in words):
            return kind
    return "others"


def time_cifar(day: Day, turns: Turns, batch: int) -> None:
    """Time training steps of the CIFAR network in each mode with each optimiser; profile one of them."""
    images = day.images(batch, 32)
    amp = "none" if day.dry else "bfloat16"
    steps = {}
    first = {}
    errors = []
    for mode in (EAGER,) if day.dry else (EAGER, COMPILED, GRAPHS):
        model = day.network(CIFAR, qk_norm=True)
        made = Steps(model, images, amp, "sgd", Case(CIFAR, mode=mode))
        try:
            first[mode] = seconds_of(day, made.train)
        except Exception as error:  # kept, so that the other modes are timed
            errors.append({"batch": batch, "mode": mode, "error": str(error)[:500]})
            continue
        for optimizer in OPTIMIZERS:
            other = copy.copy(made)
            other.optimizer = Steps(model, images, amp, optimizer.split(" ")[-1]).optimizer
            if optimizer == "batched muon":
                batch_muon(other.optimizer)
            other.train()
            steps[mode, optimizer] = other
    turns.wait()
    times = turns.times(day, {key: of.train for key, of in steps.items()})
    rows = [
        {
            "batch": batch,
            "mode": mode,
            "optimizer": optimizer,
            "ms": ms,
            "first_step_s": first[mode],
        }
        for (mode, optimizer), ms in times.items()
    ]
    day.save(f"cifar-{batch}", rows + errors)
    with turns.gpu:
        for mode in first:
            day.save(f"profile-cifar-{batch}-{mode}", profiled(day, steps[mode, "batched muon"]))


def worker(job: Callable, day: Day, turns: Turns, *what: Any) -> None:
    """Run a job in this process; if it raises, write the traceback to a file."""
    try:
        job(day, turns, *what)
    except BaseException:
        if not turns.waited:
            turns.wait()  # the other processes wait for this one
        words = "-".join(str(word) for word in what)
        (day.output / f"{job.__name__}-{words}.error").write_text(traceback.format_exc())
        raise


def table(day: Day) -> None:
    """Write the rates of ResNets and the CIFAR network: eager, compiled and with CUDA graphs."""
    jobs = [(time_network, *case) for case in TABLE]
    jobs += [(time_cifar, batch) for batch in CIFAR_BATCHES]
    if day.dry:
        turns = Turns(threading.Barrier(1), threading.Lock())
        for job, *what in jobs:
            worker(job, day, turns, *what)
    else:
        table_by_processes(day, jobs)
    for name in ("table", "cifar"):
        files = sorted(day.output.glob(f"{name}-*.csv"))
        rows = pd.concat([pd.read_csv(file) for file in files])
        if name == "table":
            rows = with_ratios(rows)
        day.save(name, rows.to_dict("records"))


def table_by_processes(day: Day, jobs: list[tuple]) -> None:
    """Run each job in a separate process."""
    context = get_context("spawn")
    turns = Turns(context.Barrier(len(jobs)), context.Lock())
    settings = {"TORCHINDUCTOR_COMPILE_THREADS": "3"}
    processes = [
        context.Process(target=worker, args=(job[0], day, turns, *job[1:])) for job in jobs
    ]
    with mock.patch.dict(os.environ, settings):
        for process in processes:
            process.start()
    until = time.monotonic() + COMPILATION + TIMING
    for process in processes:
        process.join(max(0.0, until - time.monotonic()))
        if process.is_alive():
            process.kill()
    failed = [job[1:] for job, process in zip(jobs, processes, strict=True) if process.exitcode]
    if failed:
        # the other jobs' rows are complete
        print(f"ended with an error: {failed}", file=sys.stderr)


def with_ratios(rows: pd.DataFrame) -> pd.DataFrame:
    """Return the rows with the ratios of their rates and memory to those of resnet50 in the same mode."""
    base = rows[rows["network"] == "resnet50"].set_index("mode")
    rows = rows.copy()
    for column in ("train_ms", "infer_ms"):
        of_resnet = rows["mode"].map(base[column])
        rows[column.replace("_ms", "_rate_ratio")] = of_resnet / rows[column]
    rows["memory_ratio"] = rows["peak_gib"].astype(float) / rows["mode"].map(base["peak_gib"])
    return rows


def layer_inputs(day: Day, side: int, evolves: bool) -> dict[str, torch.Tensor]:
    """Return tensors with gradients in the sizes of a layer of EA-50 (evolves=True) or AA-50."""
    N = side * side
    K = 2 if day.dry else 8
    B = 1 if day.dry else 256 * 196 // N
    D = 20
    E = 4
    dtype = torch.float32 if day.dry else torch.bfloat16
    made = {
        "q": torch.randn(B, K, N, D),
        "k": torch.randn(B, K, N, D),
        "v": torch.randn(B, K, N, E),
        "height_rel": torch.randn(2 * side - 1, D),
        "width_rel": torch.randn(2 * side - 1, D),
    }
    if evolves:
        made["prev_logits"] = torch.randn(B, K, N, N)
        made["weight"] = torch.randn(K, K, 3, 3)
        made["bias"] = torch.randn(K)
    halves = ("q", "k", "v", "prev_logits")
    return {
        name: x.to(day.device, dtype if name in halves else None).requires_grad_()
        for name, x in made.items()
    }


def layer_cases(day: Day, side: int) -> dict[str, Callable[[], None]]:
    """Return calls of EA's and AA's layer, forward and backward, with each implementation."""
    evolving = layer_inputs(day, side, evolves=True)
    plain = layer_inputs(day, side, evolves=False)
    calls = {}
    for name, inputs, need_logits in (("EA", evolving, True), ("AA", plain, False)):
        options = {"need_logits": need_logits}
        ways = {"the reference": {"implementation": "reference"}}
        if not day.dry:
            ways["triton"] = {"implementation": "triton"}
        for way, more in ways.items():
            calls[f"{name} by {way}"] = layer_call(inputs, side, **options, **more)
        compiler = "eager" if day.dry else "inductor"
        compiled = layer_call(inputs, side, compiler, **options, implementation="reference")
        calls[f"{name} by the reference, compiled"] = compiled
    if not day.dry:
        by_sdpa = layer_call(plain, side, need_logits=False, implementation="sdpa")
        for backend in (SDPBackend.FLASH_ATTENTION, SDPBackend.CUDNN_ATTENTION):
            calls[f"AA by sdpa, {backend.name}"] = within(sdpa_kernel, by_sdpa, backend)
    return calls


def within(context: Callable, call: Callable[[], None], *arguments: Any) -> Callable[[], None]:
    """Return the call inside `with context(*arguments)`."""

    def inside():
        with context(*arguments):
            call()

    return inside


def layer_call(
    inputs: dict[str, torch.Tensor], side: int, compiler: str = "", **options
) -> Callable[[], None]:
    """Return a call of a layer's forward and backward pass, compiled if a compiler is named."""

    def forward(tensors: dict[str, torch.Tensor]) -> torch.Tensor:
        return evolving_attention(**tensors, feat_size=(side, side), **options)[0]

    if compiler:
        forward = torch.compile(forward, backend=compiler)

    def call():
        out = forward(inputs)
        torch.autograd.grad(out.float().sum(), list(inputs.values()), allow_unused=True)

    return call


def layers(day: Day) -> None:
    """Time one layer at 14x14, 7x7 and 28x28 by every way; then check and time the kernels of maps_on_gpu."""
    ends = min(day.ends, time.monotonic() + LAYERS)
    rows = []
    for side in (3,) if day.dry else (14, 7, 28):
        for name, call in layer_cases(day, side).items():
            row = {"side": side, "layer": name}
            if time.monotonic() > ends:
                row["error"] = "no time was left"
            else:
                try:
                    row["ms"] = day.times({name: call}, repeats=20)[name]
                except RuntimeError as error:
                    row["error"] = str(error)[:200]
            rows.append(row)
            day.save("layers", rows)
    fused_kernels(day)


def fused_kernels(day: Day) -> None:
    """Write the errors of the kernels of maps_on_gpu, and their times beside those of the operator."""
    mistakes = []
    times = []
    with tempfile.TemporaryDirectory() as folder:
        load = partial(emulate.build, folder=Path(folder)) if day.dry else launch.load
        for variant in emulate.VARIANTS[-2:-1] if day.dry else emulate.VARIANTS:
            kernels = emulate.load_all(load, variant)
            layer = emulate.Layer(kernels, variant, device=day.device.type)
            for name, (error, bound) in emulate.errors(layer).items():
                row = {"layer": str(variant), "output": name, "error": error, "beside": bound}
                mistakes.append(row)
            day.save("fused-errors", mistakes)
            images = 1 if day.dry else 256 * 196 // variant.side**2
            layer = emulate.Layer(kernels, variant, images, day.device.type)
            calls = {"fused": layer.step, "fused, forward": layer.forward}
            calls["chosen"] = layer.operator()
            for way, ms in day.times(calls, repeats=20).items():
                times.append({"layer": str(variant), "way": way, "ms": ms})
            day.save("fused-times", times)


def accuracy(day: Day) -> None:
    """Train the CIFAR network on CIFAR-100 by `cifar_long` until the day ends; keep the weights every ten epochs.

    It uses the mode with the fastest step in the table, eager without a table.

    Raises:
        RuntimeError: the trainer failed.
        subprocess.TimeoutExpired: the day ended before; the epochs' rows and the kept weights stay.
    """
    if day.cifar100 is None:
        return
    mode = fastest_mode(day)
    compiled = () if mode == EAGER else ("--compile", "--compile-mode", mode)
    output = day.output / "cifar100"
    data = ("--dataset", "folder", "--data-dir", str(day.cifar100), "--output", str(output))
    recipe = ("--recipe", "cifar_long", "--model", CIFAR, "--epochs", str(day.epochs))
    how = ("--device", day.device.type, "--amp", "bfloat16", "--channels-last", "--workers", "0")
    if day.dry:
        recipe = ("--recipe", "fast", "--epochs", "1", "--model-kwargs", "widths=[8,8,16,16]")
        how = ("--device", "cpu", "--batch-size", "16")
    command = ["train-cifar", *recipe, *data, *how, *compiled, "--snapshot-epochs", "10"]
    try:
        check_exit(day.ea_vision(day.ends - time.monotonic(), *command), "the trainer")
    finally:
        if (output / "metrics.csv").exists():
            epochs = pd.read_csv(output / "metrics.csv").assign(mode=mode)
            day.save("accuracy-epochs", epochs.to_dict("records"))


def fastest_mode(day: Day) -> str:
    """Return the mode with the fastest step (Muon, larger batch); eager without a table."""
    table = day.output / f"cifar-{CIFAR_BATCHES[-1]}.csv"
    if not table.exists():
        return EAGER
    rows = pd.read_csv(table)
    rows = rows[rows["optimizer"] == "batched muon"]
    return rows.loc[rows["ms"].idxmin(), "mode"]


PARTS = {part.__name__: part for part in (machine, tests, layers, table, accuracy)}


def run_parts(day: Day, parts: tuple[Callable[[Day], None], ...]) -> list[dict]:
    """Run the parts one after another; return and keep one row per part."""
    day.output.mkdir(parents=True, exist_ok=True)
    rows = []
    for part in parts:
        start = time.monotonic()
        row = {"part": part.__name__, "result": "done"}
        print(part.__name__, file=sys.stderr, flush=True)
        try:
            part(day)
        except (Exception, SystemExit) as error:  # kept, so that the next part runs
            row["result"] = f"{type(error).__name__}: {error}"
            (day.output / f"{part.__name__}.error").write_text(traceback.format_exc())
        row["seconds"] = round(time.monotonic() - start, 1)
        rows.append(row)
        day.save("parts", rows)
    return rows


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--output", type=Path, default=Path("gpu-day"))
    parser.add_argument("--dry-run", action="store_true", help="tiny sizes on a CPU")
    parser.add_argument("--cifar100", type=Path, metavar="DIR", help="folder of CIFAR-100")
    parser.add_argument("--epochs", type=int, default=84, help="epochs on CIFAR-100")
    parser.add_argument("--parts", nargs="+", choices=PARTS, default=list(PARTS))
    args = parser.parse_args(argv)
    ends = math.inf if args.dry_run else time.monotonic() + SECONDS
    day = Day(args.output, args.dry_run, args.cifar100, args.epochs, ends)
    rows = run_parts(day, tuple(PARTS[name] for name in args.parts))
    print(pd.DataFrame(rows).to_string(index=False))
    return 0 if all(row["result"] == "done" for row in rows) else 1


if __name__ == "__main__":
    sys.exit(main())
