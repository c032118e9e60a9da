"""Run all measurements that need a GPU, in twelve minutes: each part writes its rows when it ends.

    python -m experiments.gpu_day --output "$OUT"                 # on a GPU
    python -m experiments.gpu_day --output /tmp/day --dry-run     # tiny, on a CPU: do all parts run?
    python -m experiments.gpu_day --output "$OUT" --parts accuracy --cifar10 DIR

If a part fails or takes longer than its share of the time, parts.csv says so, and the next part begins. Compilation
takes most of the time, so the networks of the table are compiled in parallel, one per process, and timed one at a time.
"""

import argparse
import copy
import os
import subprocess
import sys
import threading
import time
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
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
from ea_vision.ops import evolving_attention, triton_attention, triton_tiles
from experiments.benchmark import EAGER, Case, Steps, interleaved, live_network

COMPILED = "default"
GRAPHS = "reduce-overhead"
TABLE = {  # (network, implementation) -> modes; CUDA graphs of all five would not fit into memory
    ("resnet50", "chosen"): (EAGER, COMPILED, GRAPHS),
    ("aa_resnet50", "chosen"): (EAGER, COMPILED),
    ("aa_resnet50", "sdpa"): (EAGER, COMPILED),
    ("pa_aa_resnet50", "chosen"): (EAGER, COMPILED),
    ("ea_aa_resnet50", "chosen"): (EAGER, COMPILED, GRAPHS),
}
CIFAR = "ea_conv_transformer_cifar"
CIFAR_BATCHES = (128, 512)
OPTIMIZERS = ("muon", "batched muon", "sgd")
TINY = {"widths": [8, 8, 16, 16], "depth": 1}
COMPILATION = 240  # seconds that the processes of the table wait for each other
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
KINDS = {  # kind -> substrings of kernel names; the first match counts
    "norms, sums, pooling, fused": ("triton_",),
    "convolutions": ("implicit", "fprop", "dgrad", "wgrad", "cudnn", "conv"),
    "products": ("nvjet", "gemm", "cublas", "cutlass", "splitk"),
    "copies": ("copy", "cat", "memcpy", "memset"),
    "optimiser": ("multi_tensor",),
}
# failed on an H200 on 2026-11-26, see kernels.md
FAILED_LAST_TIME = "heads or half_precision or 577 or chain or memory_errors"


@dataclass
class Day:
    """The settings of all parts: output folder, dry run or not, data, epochs."""

    output: Path
    dry: bool
    cifar10: Path | None = None
    epochs: int = 25

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
    """Run the operators' tests, beginning with those that failed last time; `-v` logs each test when it ends.

    Raises:
        RuntimeError: a test failed or did not end in time.
    """
    folders = ("tests/gpu", "tests/ops")
    chosen = {
        "failed last time": (60, FAILED_LAST_TIME),
        "the trainer": (150, "trainer"),
        "others": (200, f"not ({FAILED_LAST_TIME} or speed or trainer)"),
    }
    limit = ("-n", "10")
    if day.dry:
        chosen = {"collected": (80, "operators")}
        limit = ("--collect-only",)
    rows = []
    for name, (seconds, words) in chosen.items():
        start = time.monotonic()
        options = ("-v", "-p", "no:cacheprovider", "-k", words, *limit)
        try:
            code = day.command(seconds, "pytest", *folders, *options)
        except subprocess.TimeoutExpired:
            code = "out of time"
        rows.append({"tests": name, "exit_code": code, "seconds": time.monotonic() - start})
        day.save("tests", rows)
    for row in rows:
        check_exit(row["exit_code"], f"pytest of {row['tests']}")


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
    devices.reset_peak_memory(day.device)
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
    if name == "ea_aa_resnet50":
        mode = EAGER if day.dry else COMPILED
        with turns.gpu:
            day.save("profile-ea_aa_resnet50", profiled(day, steps[mode]))


def profiled(day: Day, steps: Steps) -> list[dict]:
    """Return milliseconds and calls of each kernel in a training step; on a CPU, of each operator."""
    activities = [ProfilerActivity.CPU]
    if not day.dry:
        activities.append(ProfilerActivity.CUDA)
    steps.train()
    with profile(activities=activities) as recorded:
        steps.train()
        devices.synchronize(day.device)
    rows = []
    for event in recorded.key_averages():
        milliseconds = (event.self_device_time_total or event.self_cpu_time_total) / 1e3
        row = {"kind": kind_of(event.key), "kernel": event.key[:100]}
        row |= {"calls": event.count, "ms": milliseconds}
        # count kernels only: operators and profiler ranges contain the same time again
        is_kernel = not event.self_cpu_time_total and not any(word in event.key for word in RANGES)
        if day.dry or is_kernel and milliseconds:
            rows.append(row)
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
    until = time.monotonic() + COMPILATION + 120
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


@contextmanager
def tiles_of(tile: triton_tiles.Tile) -> Iterator[None]:
    """Let all kernels use this tile."""
    with mock.patch.object(triton_attention, "default_tile", lambda *_: tile):
        yield


def layer_cases(day: Day, side: int) -> dict[str, Callable[[], None]]:
    """Return calls of EA's layer with several tiles, and of AA's layer with several implementations."""
    evolving = layer_inputs(day, side, evolves=True)
    plain = layer_inputs(day, side, evolves=False)
    by_reference = {"implementation": "reference", "need_logits": False}
    calls = {"AA by the reference": layer_call(plain, side, **by_reference)}
    if day.dry:
        return {"EA": layer_call(evolving, side), **calls}
    small = triton_tiles.Tile(16, 16, 8, 1)
    calls["EA"] = layer_call(evolving, side)
    calls["EA, tiles of 16x16"] = within(tiles_of, layer_call(evolving, side), small)
    by_triton = {"implementation": "triton", "need_logits": False}
    by_sdpa = {"implementation": "sdpa", "need_logits": False}
    calls["AA by triton"] = layer_call(plain, side, **by_triton)
    for backend in (
        SDPBackend.FLASH_ATTENTION,
        SDPBackend.EFFICIENT_ATTENTION,
        SDPBackend.CUDNN_ATTENTION,
    ):
        name = f"AA by sdpa, {backend.name}"
        calls[name] = within(sdpa_kernel, layer_call(plain, side, **by_sdpa), backend)
    return calls


def within(context: Callable, call: Callable[[], None], *arguments: Any) -> Callable[[], None]:
    """Return the call inside `with context(*arguments)`."""

    def inside():
        with context(*arguments):
            call()

    return inside


def layer_call(inputs: dict[str, torch.Tensor], side: int, **options) -> Callable[[], None]:
    """Return a call of a layer's forward and backward pass."""

    def call():
        out, _ = evolving_attention(**inputs, feat_size=(side, side), **options)
        torch.autograd.grad(out.float().sum(), list(inputs.values()), allow_unused=True)

    return call


def layers(day: Day) -> None:
    """Time one layer at 14x14 and 28x28: EA with several tiles; AA with Triton, each sdpa kernel and the reference."""
    rows = []
    for side in (3,) if day.dry else (14, 28):
        for name, call in layer_cases(day, side).items():
            row = {"side": side, "layer": name}
            try:
                row["ms"] = day.times({name: call}, repeats=20)[name]
            except RuntimeError as error:
                row["error"] = str(error)[:200]
            rows.append(row)
            day.save("layers", rows)


def accuracy(day: Day) -> None:
    """Train the CIFAR network by `cifar_long` in fewer epochs; write the seconds to 94, 95 and 96%.

    It uses the mode with the fastest step in the table, eager without a table.

    Raises:
        RuntimeError: the trainer failed.
    """
    if day.cifar10 is None:
        return
    mode = fastest_mode(day)
    compiled = () if mode == EAGER else ("--compile", "--compile-mode", mode)
    output = day.output / "cifar10"
    data = ("--dataset", "folder", "--data-dir", str(day.cifar10), "--output", str(output))
    recipe = ("--recipe", "cifar_long", "--model", CIFAR, "--epochs", str(day.epochs))
    how = ("--device", day.device.type, "--amp", "bfloat16", "--channels-last", "--workers", "0")
    if day.dry:
        recipe = ("--recipe", "fast", "--epochs", "1", "--model-kwargs", "widths=[8,8,16,16]")
        how = ("--device", "cpu", "--batch-size", "16")
    code = day.ea_vision(400, "train-cifar", *recipe, *data, *how, *compiled, "--tta", "six")
    check_exit(code, "the trainer")
    epochs = pd.read_csv(output / "metrics.csv")
    epochs["mode"] = mode
    day.save("accuracy-epochs", epochs.to_dict("records"))
    day.save("accuracy", seconds_to(epochs, (94, 95, 96)))


def fastest_mode(day: Day) -> str:
    """Return the mode with the fastest step (Muon, larger batch); eager without a table."""
    table = day.output / f"cifar-{CIFAR_BATCHES[-1]}.csv"
    if not table.exists():
        return EAGER
    rows = pd.read_csv(table)
    rows = rows[rows["optimizer"] == "batched muon"]
    return rows.loc[rows["ms"].idxmin(), "mode"]


def seconds_to(epochs: pd.DataFrame, goals: tuple[int, ...]) -> list[dict]:
    """Return the epochs and seconds after which a run first reached each top-1; None if it never did."""
    seconds = epochs["seconds"].cumsum()
    rows = []
    for goal in goals:
        reached = epochs.index[epochs["top1"] >= goal]
        row = {"top1": goal, "epochs": None, "seconds": None, "without_first_epoch": None}
        if len(reached):
            first = reached[0]
            row["epochs"] = int(epochs["epoch"][first])
            row["seconds"] = seconds[first]
            # the first epoch includes compilation, so the median of the others replaces it
            row["without_first_epoch"] = (
                seconds[first] - seconds[0] + epochs["seconds"][1:].median()
            )
        rows.append(row)
    return rows


PARTS = {part.__name__: part for part in (machine, table, layers, accuracy, tests)}


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
    parser.add_argument("--cifar10", type=Path, metavar="DIR", help="folder of CIFAR-10")
    parser.add_argument("--epochs", type=int, default=25, help="epochs on CIFAR-10")
    parser.add_argument("--parts", nargs="+", choices=PARTS, default=list(PARTS))
    args = parser.parse_args(argv)
    day = Day(args.output, args.dry_run, args.cifar10, args.epochs)
    rows = run_parts(day, tuple(PARTS[name] for name in args.parts))
    print(pd.DataFrame(rows).to_string(index=False))
    return 0 if all(row["result"] == "done" for row in rows) else 1


if __name__ == "__main__":
    sys.exit(main())
