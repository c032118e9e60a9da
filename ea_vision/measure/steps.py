"""Steps of training and of inference, which speed and memory measure, and fair times of them."""

from __future__ import annotations

import argparse
import random
import time
from collections.abc import Callable, Hashable, Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, fields
from functools import partial
from statistics import median

import timm.optim
import torch
from torch import Tensor, nn

from ea_vision.base.errors import RunError, UsageError
from ea_vision.base.networks import check_model_name, create_by_keywords, create_classifier, lay_out
from ea_vision.base.processes import choose_device
from ea_vision.detection.model import create_detector
from ea_vision.detection.train import DetectionTrainer
from ea_vision.engine.evaluate import autocast
from ea_vision.engine.preflight import loss_on_noise
from ea_vision.ops import IMPLEMENTATIONS, use_implementation


@dataclass(frozen=True)
class Setting:
    """Settings of all networks of a comparison.

    device: cpu, cuda, or auto, which is cuda if there is one. img_size: side in pixels. amp: none, bfloat16 or float16.
    opt: timm's name of the optimiser. implementation: of the attention; None: chosen by device. threads: of a CPU;
    None: torch's own choice. detector: the networks are backbones of detectors, with their options' defaults and 90
    classes.
    """

    batch_size: int
    img_size: int
    device: str = "auto"
    amp: str = "none"
    channels_last: bool = False
    implementation: str | None = None
    threads: int | None = None
    flush_denormal: bool = False
    opt: str = "sgd"
    detector: bool = False

    @classmethod
    def of(cls, args: argparse.Namespace) -> Setting:
        """Make one from the options of `add_setting`, --threads and --flush-denormal."""
        return cls(**{field.name: getattr(args, field.name) for field in fields(cls) if hasattr(args, field.name)})

    @property
    def layout(self) -> torch.memory_format:
        return torch.channels_last if self.channels_last else torch.contiguous_format

    @property
    def precision(self) -> str:
        return "float32" if self.amp == "none" else self.amp

    @property
    def loss_of(self) -> Callable[[nn.Module, Tensor], Tensor]:
        """The loss of a training step, of a network and images."""
        return DetectionTrainer.loss_on_noise if self.detector else loss_on_noise

    @contextmanager
    def active(self) -> Iterator[None]:
        """Threads, subnormal numbers and implementation as the setting has them, in the `with` block.

        Raises:
            UsageError: the CPU cannot take subnormal numbers for zero.
        """
        on_cpu, threads = choose_device(self.device).type == "cpu", torch.get_num_threads()
        if on_cpu and self.flush_denormal and not torch.set_flush_denormal(True):
            raise UsageError("--flush-denormal: this CPU cannot")
        if on_cpu and self.threads:
            torch.set_num_threads(self.threads)
        try:
            with nullcontext() if self.implementation is None else use_implementation(self.implementation):
                yield
        finally:
            torch.set_num_threads(threads)
            if on_cpu and self.flush_denormal:
                torch.set_flush_denormal(False)

    def network(self, name: str, grad_checkpointing: bool = False) -> nn.Module:
        """A network with random weights, always the same ones, where the setting has it.

        Raises:
            UsageError: unknown, refuses the size, or has no checkpointing.
        """
        torch.manual_seed(0)
        if self.detector:
            check_model_name(name)
            model, _ = create_by_keywords(partial(create_detector, name), name, {
                "num_classes": 90, "img_size": self.img_size, "grad_checkpointing": grad_checkpointing}, frozenset())
            return lay_out(model.to(choose_device(self.device)), self.layout)
        model, _ = create_classifier(name, {}, num_classes=1000, img_size=self.img_size)
        if grad_checkpointing:
            try:
                model.set_grad_checkpointing(True)
            except (AttributeError, AssertionError) as error:
                raise UsageError(f"{name} has no gradient checkpointing") from error
        return lay_out(model.to(choose_device(self.device)), self.layout)


def add_setting(parser: argparse.ArgumentParser, batch_size: int | None, batch_size_help: str) -> None:
    """The options from which a Setting is made."""
    parser.add_argument("--device", choices=("auto", "cpu", "cuda"), default="auto", help="auto: cuda if there is one "
                        "(default: %(default)s)")
    parser.add_argument("--batch-size", type=int, default=batch_size, help=f"images (default: {batch_size_help})")
    parser.add_argument("--img-size", type=int, default=224, help="side in pixels (default: %(default)s)")
    parser.add_argument("--amp", choices=("none", "bfloat16", "float16"), default="none", help="precision of the "
                        "forward pass (default: %(default)s, float32)")
    parser.add_argument("--channels-last", action="store_true", help="images and weights channels-last in memory")
    parser.add_argument("--implementation", choices=IMPLEMENTATIONS, help="of the attention (default: by device)")


def check_positive(args: argparse.Namespace, *names: str) -> None:
    """Raise UsageError unless these options are 1 or more."""
    for name in names:
        if getattr(args, name) < 1:
            raise UsageError(f"--{name.replace('_', '-')} must be 1 or more, got {getattr(args, name)}")


@contextmanager
def refusals(name: str, images: str, img_size: int) -> Iterator[None]:
    """Turn errors of a network at images that it cannot take into UsageErrors."""
    try:
        yield
    except RunError:
        raise
    except (ValueError, AssertionError, RuntimeError) as error:
        raise UsageError(f"{name} cannot run {images} of {img_size} pixels: "
                         f"{str(error) or type(error).__name__}") from error


def interleaved(calls: dict[Hashable, Callable[[], object]], repeats: int, warm_up: int,
                synchronize: Callable[[], None] = lambda: None,
                clock: Callable[[], float] = time.perf_counter) -> dict[Hashable, float]:
    """Median seconds of each call, one of each in a round and in any order; `warm_up` rounds are not counted."""
    seconds = {key: [] for key in calls}
    shuffle = random.Random(0).shuffle  # what one leaves in the caches shall not always meet the same next one
    turns = list(calls.items())
    for repeat in range(-warm_up, repeats):
        shuffle(turns)
        for key, call in turns:
            synchronize()
            start = clock()
            call()
            synchronize()
            if repeat >= 0:
                seconds[key].append(clock() - start)
    return {key: median(values) for key, values in seconds.items()}


class Bench:
    """Gives every network of a comparison the same images and turns at the clock.

    Args:
        setting: how they run.
        repeats: turns of each, of which the median counts.
        cpu_time: on a CPU: take the process's CPU time, of all threads together, for the time.
    """

    def __init__(self, setting: Setting, repeats: int = 1, cpu_time: bool = False) -> None:
        self.setting, self.repeats, self.device = setting, repeats, choose_device(setting.device)
        self.clock = time.process_time if cpu_time else time.perf_counter
        torch.manual_seed(0)
        images = torch.randn(setting.batch_size, 3, setting.img_size, setting.img_size)
        self.images = images.to(self.device).contiguous(memory_format=setting.layout)

    def autocast(self) -> torch.autocast:
        return autocast(self.setting.amp, self.device)

    def medians(self, calls: dict[Hashable, Callable[[], object]]) -> dict[Hashable, float]:
        """Median seconds of each call."""
        if self.device.type == "cuda":
            return interleaved(calls, self.repeats, 3, torch.cuda.synchronize)  # the first steps choose algorithms
        return interleaved(calls, self.repeats, 1, clock=self.clock)

    def bandwidth(self) -> tuple[float, int]:
        """Bytes per second, read and written, of a copy, and the bytes copied."""
        source = torch.ones((2**30 if self.device.type == "cuda" else 2**28) // 4, device=self.device)
        target = torch.empty_like(source)
        return 2 * source.nbytes / self.medians({"copy": lambda: target.copy_(source)})["copy"], source.nbytes

    def live_network(self, name: str) -> nn.Module:
        """A network in training mode, none of whose branches is multiplied by zero.

        Raises:
            UsageError: unknown, or one that refuses this size, precision or implementation.
        """
        model = self.setting.network(name).train()
        with torch.no_grad():
            for norm in model.modules():
                if isinstance(norm, nn.modules.batchnorm._BatchNorm) and norm.affine and not norm.weight.any():
                    norm.weight.fill_(0.2)
            with refusals(name, f"{self.setting.batch_size} images", self.setting.img_size), self.autocast():
                model(self.images)
                model(self.images)
        return model


class Runner:
    """A network with its optimiser: steps of training and of inference."""

    def __init__(self, bench: Bench, model: nn.Module, compiled: bool = False) -> None:
        self.bench, self.model = bench, model
        self.net = torch.compile(model, dynamic=False) if compiled else model
        self.optimizer = timm.optim.create_optimizer_v2(model, opt=bench.setting.opt, lr=1e-3, momentum=0.9)
        self.scaler = torch.amp.GradScaler(bench.device.type, enabled=bench.setting.amp == "float16")

    def train(self) -> Tensor:
        """Forward, backward and update; the loss."""
        self.model.train()
        self.optimizer.zero_grad()
        with self.bench.autocast():
            loss = self.bench.setting.loss_of(self.net, self.bench.images)
        self.scaler.scale(loss).backward()
        self.scaler.step(self.optimizer)
        self.scaler.update()
        return loss.detach()

    def infer(self) -> Tensor:
        """Forward in evaluation mode; (B, 1000)."""
        self.model.eval()
        with torch.inference_mode(), self.bench.autocast():
            return self.net(self.bench.images)
