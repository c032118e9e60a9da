"""Everything to measure on a GPU, in twelve minutes: eight parts, each of which writes its rows as it ends.

    python -m experiments.gpu_day --output "$OUT"                 # on a GPU; --cifar10 DIR adds seconds to 94-96%
    python -m experiments.gpu_day --output /tmp/day --dry-run     # tiny, on a CPU: do all parts run?

A part that fails or takes longer than its share is a row of parts.csv, and the next one begins.
"""

import argparse
import os
import subprocess
import sys
import time
import traceback
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import pandas as pd
import timm
import torch
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.profiler import ProfilerActivity, profile

import ea_vision
from ea_vision.__main__ import main as ea_vision_main
from ea_vision.base import devices
from ea_vision.benchmark import Case, Steps, interleaved, live_network
from ea_vision.engine.muon import batch_muon
from ea_vision.ops import evolving_attention, triton_attention, triton_tiles

RESNETS = ("resnet50", "aa_resnet50", "pa_aa_resnet50", "ea_aa_resnet50")
CIFAR = "ea_conv_transformer_cifar"
TINY = {"widths": [8, 8, 16, 16], "depth": 1}
MODES = ("default", "reduce-overhead")
# failed on an H200 on 2026-11-26, see kernels.md
FAILED_LAST_TIME = "heads or half_precision or 577 or chain or memory_errors"


@dataclass
class Day:
    """Where the parts run, and where they write."""

    output: Path
    dry: bool
    cifar10: Path | None = None

    @property
    def device(self) -> torch.device:
        return torch.device("cpu" if self.dry else "cuda")

    def save(self, name: str, rows: list[dict]) -> None:
        pd.DataFrame(rows).to_csv(self.output / f"{name}.csv", index=False)

    def command(self, seconds: float, *argv: str, **environment: str) -> int:
        """Run `python -m ...` for at most so many seconds; its output goes to a log; return its exit code."""
        log = self.output / f"{argv[0]}-{time.monotonic_ns()}.log"
        with log.open("w") as file:
            process = subprocess.Popen(
                [sys.executable, "-m", *argv],
                stdout=file,
                stderr=subprocess.STDOUT,
                env={**os.environ, **environment},
            )
            try:
                return process.wait(seconds)
            except subprocess.TimeoutExpired:
                process.terminate()
                process.wait(20)
                raise

    def ea_vision(self, seconds: float, *argv: str) -> int:
        """Run a command of ea-vision, in a dry run in this process."""
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
        """Return the median milliseconds of calls in turns."""
        repeats = 1 if self.dry else repeats
        seconds = interleaved(calls, repeats, warm_up=1 if self.dry else 3, clock=self.clock)
        return {key: 1e3 * value for key, value in seconds.items()}


def check_exit(code: int | str, what: str) -> None:
    """Raise RuntimeError unless a command ended well; its rows are kept all the same."""
    if code != 0:
        raise RuntimeError(f"{what} ended with {code}")


def machine(day: Day) -> None:
    """Versions, and the rates of copying and of a large product in bfloat16."""
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
    day.save("1-machine", [row])


def tests(day: Day) -> None:
    """The tests of the operators, those that failed last time first."""
    rows = []
    folders = ("tests/gpu", "tests/ops")
    limit = ["--collect-only"] if day.dry else ["-n", "12"]
    speed = "speed or trainer"
    chosen = {
        "failed last time": FAILED_LAST_TIME,
        "others": f"not ({FAILED_LAST_TIME} or {speed})",
    }
    if day.dry:
        chosen = {"collected": "operators"}
    for name, words in chosen.items():
        start = time.monotonic()
        options = ("-q", "-p", "no:cacheprovider", "-k", words, *limit)
        code = day.command(80, "pytest", *folders, *options, EA_VISION_TILES="default")
        rows.append({"tests": name, "exit_code": code, "seconds": time.monotonic() - start})
        day.save("2-tests", rows)
    for row in rows:
        check_exit(row["exit_code"], f"pytest of {row['tests']}")


def benchmark(day: Day, name: str, seconds: float, models: tuple[str, ...], *options: str) -> None:
    """Run `ea-vision benchmark`; its rows are the file of that name."""
    size = ("--batch-size", "256", "--amp", "bfloat16", "--channels-last")
    if day.dry:
        models = ("resnet10t",)
        size = ("--batch-size", "2", "--img-size", "32", "--no-memory", "--repeats", "1")
    file = str(day.output / f"{name}.csv")
    command = ("benchmark", "--models", *models, *size, "--device", day.device.type)
    code = day.ea_vision(seconds, *command, *options, "--csv", file)
    check_exit(code, "ea-vision benchmark")


def compilation(day: Day) -> None:
    """Compile the ResNets in each mode, so that the table finds them in the caches."""
    modes = () if day.dry else ("--compile-mode", *MODES)
    benchmark(day, "3-compilation", 60, RESNETS, *modes, "--repeats", "1", "--no-memory")


def table(day: Day) -> None:
    """The rates: eager, compiled and with CUDA graphs; AA by each implementation."""
    modes = () if day.dry else ("--compile-mode", *MODES)
    benchmark(day, "4-table", 120, RESNETS, *modes)
    benchmark(day, "4-aa", 40, RESNETS[:2], "--implementation", "chosen", "sdpa", *modes)


def profiled(day: Day) -> None:
    """A profile of one compiled training step of EA-50: milliseconds and calls of each kernel."""
    name = "resnet10t" if day.dry else "ea_aa_resnet50"
    images = day.images(256, 32 if day.dry else 224)
    amp = "none" if day.dry else "bfloat16"
    mode = "eager" if day.dry else "default"
    steps = Steps(live_network(name, images), images, amp, case=Case(name, mode=mode))
    for _ in range(1 if day.dry else 5):
        steps.train()
    activities = [ProfilerActivity.CPU]
    if not day.dry:
        activities.append(ProfilerActivity.CUDA)
    with profile(activities=activities) as recorded:
        steps.train()
        devices.synchronize(day.device)
    rows = [
        {
            "kernel": event.key,
            "calls": event.count,
            "device_ms": event.self_device_time_total / 1e3,
            "host_ms": event.self_cpu_time_total / 1e3,
        }
        for event in recorded.key_averages()
    ]
    day.save("5-profile", rows)


def layer_inputs(day: Day, side: int, evolves: bool) -> dict[str, torch.Tensor]:
    """Return the tensors of a layer of EA-50, or of AA-50, that learn."""
    B, K, D, E = (1, 2, 4, 4) if day.dry else (64, 8, 20, 4)
    N = side * side
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


def layer_call(inputs: dict[str, torch.Tensor], side: int, backend=None, **options) -> Callable:
    """Return a call of a layer's forward and backward pass."""

    def call():
        context = sdpa_kernel(backend) if backend else torch.enable_grad()
        with context:
            out, _ = evolving_attention(**inputs, feat_size=(side, side), **options)
            torch.autograd.grad(out.float().sum(), list(inputs.values()), allow_unused=True)

    return call


def layers(day: Day) -> None:
    """One layer at 14x14 and 28x28: tiles of EA; AA by Triton, by each of sdpa's kernels, and the reference."""
    rows = []
    for side in (3,) if day.dry else (14, 28):
        evolving = layer_inputs(day, side, evolves=True)
        plain = layer_inputs(day, side, evolves=False)
        calls = {"EA": layer_call(evolving, side)}
        if not day.dry:
            calls["AA by triton"] = layer_call(
                plain, side, implementation="triton", need_logits=False
            )
            for backend in (SDPBackend.FLASH_ATTENTION, SDPBackend.CUDNN_ATTENTION):
                name = f"AA by sdpa, {backend.name}"
                calls[name] = layer_call(
                    plain, side, backend, implementation="sdpa", need_logits=False
                )
        calls["AA by the reference"] = layer_call(
            plain, side, implementation="reference", need_logits=False
        )
        for name, call in calls.items():
            try:
                milliseconds = day.times({name: call}, repeats=20)[name]
                rows.append({"side": side, "layer": name, "ms": milliseconds})
            except RuntimeError as error:
                rows.append({"side": side, "layer": name, "error": str(error)[:200]})
            day.save("6-layers", rows)
        if not day.dry:
            rows += small_tiles(day, side, evolving)
            day.save("6-layers", rows)


def small_tiles(day: Day, side: int, inputs: dict[str, torch.Tensor]) -> list[dict]:
    """Time EA with tiles of 16x16, one stage and no limit of registers."""
    default = triton_attention.default_tile
    triton_attention.default_tile = lambda *_: triton_tiles.Tile(16, 16, 8, 1)
    try:
        milliseconds = day.times({"EA": layer_call(inputs, side)}, repeats=20)["EA"]
    finally:
        triton_attention.default_tile = default
    return [{"side": side, "layer": "EA, tiles of 16x16", "ms": milliseconds}]


def cifar_steps(day: Day) -> None:
    """Steps of the CIFAR network at batch 128 and 512: modes of compilation, and optimisers."""
    rows = []
    for batch in (128, 512):
        images = day.images(batch, 32)
        steps = {}
        for mode in ("eager",) if day.dry else ("eager", *MODES):
            for optimizer in ("muon", "batched muon", "sgd"):
                model = day.network(CIFAR, qk_norm=True)
                amp = "none" if day.dry else "bfloat16"
                name = optimizer.split(" ")[-1]
                made = Steps(model, images, amp, name, Case(CIFAR, mode=mode))
                if optimizer == "batched muon":
                    batch_muon(made.optimizer)
                steps[mode, optimizer] = made
        milliseconds = day.times({key: of.train for key, of in steps.items()}, repeats=12)
        for (mode, optimizer), value in milliseconds.items():
            rows.append({"batch": batch, "mode": mode, "optimizer": optimizer, "ms": value})
        day.save("7-cifar-steps", rows)


def trainer(day: Day) -> None:
    """The trainer, compiled with CUDA graphs, killed and resumed; with CIFAR-10 the seconds to 94, 95 and 96%."""
    run = day.output / "run"
    data = ("--dataset", "digits")
    how = ("--device", day.device.type, "--channels-last", "--output", str(run))
    if day.dry:
        size = ("--model-kwargs", "widths=[8,8,16,16]", "depth=1", "--epochs", "1")
        code = day.ea_vision(60, "train-cifar", *data, *how, *size)
        day.save("8-trainer", [{"run": "one epoch", "exit_code": code}])
        check_exit(code, "the trainer")
        return
    fast = ("--amp", "bfloat16", "--compile", "--compile-mode", "reduce-overhead")
    rows = []
    command = ("train-cifar", *data, *how, *fast, "--epochs", "6", "--checkpoint-steps", "2")
    for name, seconds in (("stopped by SIGTERM", 25), ("resumed", 60)):
        try:
            code = day.ea_vision(seconds, *command)
        except subprocess.TimeoutExpired:
            code = "SIGTERM"
        rows.append({"run": name, "exit_code": code})
        day.save("8-trainer", rows)
    check_exit(code, "the resumed run")
    if day.cifar10 is not None:
        day.save("8-seconds-to-accuracy", seconds_to_accuracy(day, fast))


def seconds_to_accuracy(day: Day, fast: tuple[str, ...]) -> list[dict]:
    """Train on CIFAR-10 by `fast`; return the seconds after which it first had 94, 95 and 96%."""
    output = day.output / "cifar10"
    data = ("--dataset", "cifar10", "--data-dir", str(day.cifar10), "--output", str(output))
    day.ea_vision(300, "train-cifar", "--recipe", "fast", *data, *fast)
    epochs = pd.read_csv(output / "metrics.csv")
    seconds = epochs["seconds"].cumsum()
    rows = []
    for accuracy in (94, 95, 96):
        reached = seconds[epochs["top1"] >= accuracy]
        rows.append({"top1": accuracy, "seconds": None if reached.empty else reached.iloc[0]})
    return rows


PARTS = (machine, tests, compilation, table, profiled, layers, cifar_steps, trainer)


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
    parser.add_argument("--parts", type=int, nargs="+", default=range(1, len(PARTS) + 1))
    args = parser.parse_args(argv)
    day = Day(args.output, args.dry_run, args.cifar10)
    rows = run_parts(day, tuple(PARTS[number - 1] for number in args.parts))
    print(pd.DataFrame(rows).to_string(index=False))
    return 0 if all(row["result"] == "done" for row in rows) else 1


if __name__ == "__main__":
    sys.exit(main())
