"""Peak memory of a training step, predicted by network, image size, batch and precision, and the largest batch for it.

The step (forward, backward) runs with 2 and with 3 images, and every tensor's size, birth and death are noted. Sizes
grow linearly with the batch, so the memory of any batch is known at every moment of the step, and its peak. Counted are
tensors, not what libraries take within an operation, nor what the allocator loses between blocks: see --measure. The
operations are those of the device at hand, uncompiled.
"""

from __future__ import annotations

import argparse
import math
import re
import weakref
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from timm.layers import Attention
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from ea_vision.base.errors import RunError, UsageError
from ea_vision.base.processes import choose_device
from ea_vision.base.units import memory_size
from ea_vision.detection.train import DetectionTrainer
from ea_vision.engine.evaluate import autocast
from ea_vision.engine.preflight import available_memory, loss_on_noise
from ea_vision.layers import AugmentedConv2d
from ea_vision.measure.branches import attention_watched
from ea_vision.measure.peak_memory import memory_in_own_process, memory_on_gpu
from ea_vision.measure.steps import Bench, Runner, Setting, add_setting, check_positive, refusals

EXAMPLES = """\
examples:
  ea-vision memory ea_aa_resnet50 --batch-size 64
  ea-vision memory ea_aa_resnet152 --amp bfloat16 --grad-checkpointing --budget 16GiB
  ea-vision memory aa_resnet50 --detector --img-size 640 --batch-size 1 --measure
  ea-vision memory resnet50 --batch-size 32 --measure                  # the prediction beside the truth
"""
UNITS = {f"{prefix}{i}b": (1024 if i else 1000) ** power for power, prefix in enumerate(("k", "m", "g", "t"), 1)
         for i in ("i", "")}
STATES = {"sgd": 1, "adamw": 2}  # numbers an optimiser keeps for each weight


def to_bytes(text: str) -> int:
    """16GiB, 500 MB -> bytes.

    Raises:
        UsageError: not a positive number with a unit.
    """
    match = re.fullmatch(r"\s*(\d+(?:\.\d*)?)\s*([kmgt]i?b)\s*", text.lower())
    if match is None or not float(match[1]):
        raise UsageError(f"--budget must be a positive number with a unit such as GiB or GB, got {text!r}")
    return int(float(match[1]) * UNITS[match[2]])


class Storages(TorchDispatchMode):
    """Notes every storage that an operation makes: birth and death in operations, bytes, whether it holds a map.

    Args:
        known: tensors that are there before.
        maps: shapes of attention maps; `map_shapes`.
    """

    def __init__(self, known: Sequence[torch.Tensor], maps: set[tuple[int, ...]]) -> None:
        super().__init__()
        self.time, self.rows, self.maps = 0, [], maps
        self.known = [tensor.untyped_storage() for tensor in known]  # held, so that nothing takes their ids
        self.row_of: dict[int, int | None] = {id(storage): None for storage in self.known}

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        outputs = func(*args, **(kwargs or {}))
        self.time += 1
        for tensor in tree_leaves(outputs):
            if isinstance(tensor, torch.Tensor):
                storage = tensor.untyped_storage()  # one Python object as long as the memory lives
                if id(storage) not in self.row_of:
                    self.row_of[id(storage)] = len(self.rows)
                    self.rows.append([self.time, math.inf, storage.nbytes(), tuple(tensor.shape) in self.maps])
                    weakref.finalize(storage, self._ends, id(storage)).atexit = False
        return outputs

    def _ends(self, key: int) -> None:
        self.rows[self.row_of.pop(key)][1] = self.time + 1


@dataclass
class Step:
    """The storages of a training step, one entry of each array for one: birth, death (operations), bytes, kinds."""

    birth: np.ndarray
    death: np.ndarray
    size: np.ndarray
    is_map: np.ndarray
    is_grad: np.ndarray
    is_kept: np.ndarray  # alive between forward and backward
    images: int  # bytes


def map_shapes(model: nn.Module, batch_size: int) -> set[tuple[int, ...]]:
    """Shapes that attention maps have in a network, ours or a vision transformer of timm's, and nothing else has."""
    shapes = set()
    for layer in model.modules():
        if isinstance(layer, AugmentedConv2d):
            N, widths = math.prod(layer.feat_size), (layer.dim_head_qk, layer.dim_head_v)
        elif isinstance(layer, Attention) and hasattr(model, "num_prefix_tokens") and hasattr(model, "patch_embed"):
            N, widths = model.num_prefix_tokens + model.patch_embed.num_patches, (layer.head_dim,)
        else:
            continue
        if N not in widths:  # queries and values look the same then
            shapes |= {(batch_size, layer.num_heads, N, N), (batch_size, N, N, layer.num_heads)}
    return shapes


def watch_step(model: nn.Module, batch_size: int, img_size: int, amp: str, device: torch.device,
               layout: torch.memory_format,
               loss_of: Callable[[nn.Module, torch.Tensor], torch.Tensor] = loss_on_noise) -> Step:
    """Run forward and backward of a training step and note its storages; the model is left without gradients.

    loss_of: of the model and images.
    """
    model.train()
    model.zero_grad()
    images = torch.randn(batch_size, 3, img_size, img_size, device=device).contiguous(memory_format=layout)
    maps = map_shapes(model, batch_size)

    def saw(layer, x, prev_logits, need_logits, logits) -> None:
        if logits is not None:
            storages.rows[storages.row_of[id(logits.untyped_storage())]][3] = True

    storages = Storages([*model.parameters(), *model.buffers(), images], maps)
    with storages, attention_watched(model, saw):
        with autocast(amp, device):
            loss = loss_of(model, images)
        between = storages.time
        loss.backward()
        del loss
    grads = {storages.row_of[id(p.grad.untyped_storage())] for p in model.parameters() if p.grad is not None}
    birth, death, size, is_map = (np.array(column) for column in zip(*storages.rows, strict=True))
    model.zero_grad()
    return Step(birth, death, size, is_map, np.isin(np.arange(len(size)), list(grads)),
                (birth <= between) & (death > between + 1), images.nbytes)


class Prediction:
    """Memory of a training step of a network by batch size, in bytes.

    Args:
        model: on its device.
        img_size: side in pixels.
        amp: none, bfloat16 or float16.
        opt: sgd (with momentum) or adamw.

    Raises:
        RunError: the network does not do the same operations with 2 and with 3 images.
    """

    def __init__(self, model: nn.Module, img_size: int, amp: str = "none", opt: str = "sgd",
                 layout: torch.memory_format = torch.contiguous_format) -> None:
        device = next(model.parameters()).device
        watch_step(model, 2, img_size, amp, device, layout)  # libraries choose and cache on the first one
        two, three = (watch_step(model, count, img_size, amp, device, layout) for count in (2, 3))
        if not np.array_equal(two.birth, three.birth):
            raise RunError(f"the network does other operations with 3 images than with 2: {len(three.birth)} and "
                           f"{len(two.birth)} storages")
        self.step = two
        self.slope = three.size - two.size  # bytes an image
        self.fixed = two.size - 2 * self.slope
        self.image = three.images - two.images
        self._note_weights(model, opt)

    def _note_weights(self, model: nn.Module, opt: str) -> None:
        self.weights = sum(t.nbytes for t in (*model.parameters(), *model.buffers()))
        self.state = STATES[opt] * sum(p.nbytes for p in model.parameters() if p.requires_grad)

    def _live(self, size: np.ndarray) -> np.ndarray:
        """Bytes at every moment of the step."""
        ends = np.minimum(self.step.death, self.step.birth.max() + 1).astype(int)
        change = np.zeros(ends.max() + 1)
        np.add.at(change, self.step.birth, size)
        np.add.at(change, ends, -size)
        return np.cumsum(change)

    def parts(self, batch_size: int) -> dict[str, float]:
        """Bytes at the peak, by what they are for; "peak" is their sum, "maps" are among the activations."""
        size, step = self.fixed + batch_size * self.slope, self.step
        moment = int(self._live(size).argmax())
        alive = (step.birth <= moment) & (step.death > moment)
        kept = alive & step.is_kept
        sums = {"weights and BatchNorm statistics": self.weights, "optimiser state": self.state,
                "images": batch_size * self.image, "gradients of weights": size[alive & step.is_grad].sum(),
                "activations kept for backward": size[kept & ~step.is_grad].sum(),
                "of the operation at the peak": size[alive & ~step.is_kept & ~step.is_grad].sum()}
        return {**{name: float(count) for name, count in sums.items()}, "peak": float(sum(sums.values())),
                "maps": float(size[kept & step.is_map].sum())}

    def peak(self, batch_size: int) -> float:
        return self.parts(batch_size)["peak"]

    def activations(self, batch_size: int) -> float:
        """Kept between forward and backward."""
        return float((self.fixed + batch_size * self.slope)[self.step.is_kept].sum())

    def map_sizes(self, batch_size: int) -> list[float]:
        """Return the bytes of each attention map that is kept between forward and backward."""
        return (self.fixed + batch_size * self.slope)[self.step.is_kept & self.step.is_map].tolist()

    def largest_batch(self, budget: float) -> int:
        """The largest batch whose peak is within `budget` bytes; 0 if there is none."""
        at_once = self.weights + self.state
        fixed, slope = self._live(self.fixed) + at_once, self._live(self.slope) + self.image
        return max(0, int(np.floor(((budget - fixed) / slope).min())))


class DetectorPrediction(Prediction):
    """The same for a detector, whose images each have one box in the trial.

    torchvision goes through the images one by one in places, so a larger batch has more operations: the step is watched
    with as many images as asked for and with one more. Other batches lie on the line through these two peaks.
    """

    def __init__(self, detector: nn.Module, img_size: int, batch_size: int, amp: str = "none", opt: str = "sgd",
                 layout: torch.memory_format = torch.contiguous_format) -> None:
        device = next(detector.parameters()).device
        self.batch_size = batch_size
        self._note_weights(detector, opt)
        watch_step(detector, batch_size, img_size, amp, device, layout, DetectionTrainer.loss_on_noise)
        peaks = []
        for count in (batch_size + 1, batch_size):
            self.step = watch_step(detector, count, img_size, amp, device, layout, DetectionTrainer.loss_on_noise)
            self.fixed, self.image = self.step.size, self.step.images / count
            peaks.append(self.parts(batch_size)["peak"] + (count - batch_size) * self.image)
        self.per_image = peaks[0] - peaks[1]

    @property
    def slope(self) -> np.ndarray:
        return np.zeros_like(self.fixed)

    def peak(self, batch_size: int) -> float:
        return self.parts(self.batch_size)["peak"] + (batch_size - self.batch_size) * self.per_image

    def map_sizes(self, batch_size: int) -> list[float]:
        return [size * batch_size / self.batch_size for size in super().map_sizes(self.batch_size)]

    def largest_batch(self, budget: float) -> int:
        return max(0, math.floor(self.batch_size + (budget - self.peak(self.batch_size)) / self.per_image))


def measured_peak(name: str, setting: Setting, grad_checkpointing: bool) -> int | None:
    """Bytes at the peak of real steps at the batch size asked for; None where it cannot be measured.

    Raises:
        UsageError: the batch does not fit into the GPU's memory.
        RunError: the process that measures has failed.
    """
    if choose_device(setting.device).type == "cpu":
        return memory_in_own_process(name, setting, grad_checkpointing)
    bench = Bench(setting)
    try:
        return memory_on_gpu(Runner(bench, setting.network(name, grad_checkpointing))) + bench.images.nbytes
    except torch.OutOfMemoryError as error:
        raise UsageError(f"--measure: a batch of {setting.batch_size} does not fit into the GPU's memory") from error


def default_budget(device: torch.device) -> int:
    """Bytes of a GPU, or of main memory that are free."""
    return torch.cuda.get_device_properties(device).total_memory if device.type == "cuda" else available_memory()


def report(prediction: Prediction, batch_size: int, measured: int | None, measured_how: str, budget: int) -> str:
    """The table of the parts, the peak predicted and (unless None) measured, and the largest batch."""
    parts = prediction.parts(batch_size)
    peak, maps = parts.pop("peak"), parts.pop("maps")
    lines = []
    for name, count in parts.items():
        lines.append(f"  {name:<34}{memory_size(count):>11}{count / peak:>7.1%}")
        if maps and name.startswith("activations"):
            lines.append(f"    {'attention maps among them':<32}{memory_size(maps):>11}{maps / peak:>7.1%}")
    lines.append(f"  {'peak, predicted':<34}{memory_size(peak):>11}")
    if measured is not None:
        lines.append(f"  {'peak, measured':<34}{memory_size(measured):>11}   {measured_how}; "
                     f"{peak / measured - 1:+.1%} predicted")
    one_image = prediction.map_sizes(1)
    largest = prediction.largest_batch(budget)
    return "\n".join([
        *lines,
        f"kept for backward: {memory_size(prediction.activations(batch_size))}, "
        f"{len(one_image)} attention maps, {memory_size(sum(one_image))} an image",
        f"largest batch within {memory_size(budget)}: "
        + (f"{largest}" if largest else f"none, one image needs {memory_size(prediction.peak(1))}")])


def make_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=__doc__, epilog=EXAMPLES,
                                     formatter_class=argparse.RawDescriptionHelpFormatter, allow_abbrev=False)
    parser.add_argument("model", metavar="MODEL", help="registered timm model")
    add_setting(parser, 32, "%(default)s")
    parser.add_argument("--opt", choices=tuple(STATES), default="sgd", help="optimiser; sgd is with momentum "
                        "(default: %(default)s)")
    parser.add_argument("--grad-checkpointing", action="store_true", help="keep the inputs of blocks alone, and "
                        "compute the rest again in backward")
    parser.add_argument("--detector", action="store_true", help="of a RetinaNet over the network, as "
                        "ea-vision train-detection makes it, with 90 classes and one object an image")
    parser.add_argument("--budget", metavar="SIZE", help="memory that the largest batch may take, as 16GiB or 16GB "
                        "(default: all of the GPU's, or the main memory that is free)")
    parser.add_argument("--measure", action="store_true", help="also measure the peak at --batch-size: allocated by "
                        "torch on CUDA, resident in a process of its own on a CPU")
    return parser


def main(argv: Sequence[str] | None = None) -> int:
    args = make_parser().parse_args(argv)
    check_positive(args, "img_size", "batch_size")
    setting, device = Setting.of(args), choose_device(args.device)
    budget = to_bytes(args.budget) if args.budget else default_budget(device)
    with setting.active():
        model = setting.network(args.model, args.grad_checkpointing)
        with refusals(args.model, "images", args.img_size):
            common = {"amp": args.amp, "opt": args.opt, "layout": setting.layout}
            prediction = DetectorPrediction(model, args.img_size, args.batch_size, **common) if args.detector else \
                Prediction(model, args.img_size, **common)
        del model
        measured = measured_peak(args.model, setting, args.grad_checkpointing) if args.measure else None
    print(f"{'detector over ' if args.detector else ''}{args.model}, batch {args.batch_size}, {args.img_size} pixels, "
          f"{setting.precision}, {args.opt}, "
          f"{'gradient checkpointing, ' if args.grad_checkpointing else ''}on {device.type}")
    how = "allocated on the GPU" if device.type == "cuda" else "resident, of a process of its own"
    print(report(prediction, args.batch_size, measured, how, budget))
    return 0
