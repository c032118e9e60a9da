"""Accuracy of a model: each image counted exactly once, on any number of processes."""

import math
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, closing, nullcontext
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ea_vision.base.devices import sum_type
from ea_vision.base.errors import RunError, UsageError
from ea_vision.base.processes import World
from ea_vision.data.batches import Batch, Loader
from ea_vision.engine.config import TrainConfig

# Views of an image whose logits are averaged: test-time augmentation.
#     mirror  the image and its mirror image, half each
#     six     these two, with half of the weight; both shifted by one pixel up and left, and both shifted by one pixel
#             down and right, with a quarter each. Borders are reflected (Keller Jordan's airbench,
#             https://arxiv.org/abs/2404.00498, section 3.5)
VIEWS = ("none", "mirror", "six")
MOST_WITHOUT_TOP5 = 5  # classes: the likeliest five are all of them


def logits_by_views(model: Callable[[Tensor], Tensor], images: Tensor, kind: str) -> Tensor:
    """Return the weighted mean of the logits of the VIEWS of images (B, C, H, W), float32 (B, classes)."""
    if kind == "none":
        return model(images).float()
    views = [(1.0, images)]
    if kind == "six":
        padded = F.pad(images, (1, 1, 1, 1), mode="reflect")
        views = [(0.5, images), (0.25, padded[..., :-2, :-2]), (0.25, padded[..., 2:, 2:])]
    logits = 0.0
    for weight, view in views:
        for side in (view, view.flip(-1)):
            logits = logits + weight / 2 * model(side).float()
    return logits


def autocast(amp: str, device: torch.device) -> AbstractContextManager:
    """Return the autocast context of an --amp choice: none, bfloat16 or float16.

    Raises:
        UsageError: the device has no autocast.
    """
    if amp == "none":
        return nullcontext()
    if not torch.amp.is_autocast_available(device.type):
        raise UsageError(f"--amp {amp} needs a device with autocast, got {device.type}: --amp none")
    return torch.autocast(device.type, dtype=getattr(torch, amp))


def percents(figures: Mapping[str, float]) -> str:
    """Write measures in percent, without those that are nan, for the terminal."""
    return "  ".join(
        f"{name} {value:.2f}%" for name, value in figures.items() if not math.isnan(value)
    )


def json_numbers(figures: Mapping[str, float]) -> dict[str, float | None]:
    """Return rounded measures for JSON, which has no nan: a measure without an object or a meaning becomes None."""
    return {name: None if math.isnan(value) else round(value, 4) for name, value in figures.items()}


class NonFiniteLoss(RunError):
    """A loss, a weight or a buffer is no longer a finite number."""


@dataclass
class Evaluation:
    """Result over all images.

    Attributes:
        images: their number.
        top1, top5: in percent; top5 is nan if there are at most MOST_WITHOUT_TOP5 classes.
        loss: mean cross-entropy.
        confusion: [i, j]: number of images of class i predicted as class j.
        sample: the first images of this process, at most 32.
        tta: the VIEWS whose logits were averaged.
    """

    images: int
    top1: float
    top5: float
    loss: float
    confusion: Tensor
    sample: Tensor
    tta: str = "none"

    def figures(self) -> dict[str, float]:
        """Return the measures of metrics.csv, in percent."""
        return {"top1": self.top1, "top5": self.top5}

    def numbers(self) -> dict:
        """Return the entries of evaluation.json."""
        return {
            "images": self.images,
            **json_numbers(self.figures()),
            "loss": round(self.loss, 6),
            "tta": self.tta,
        }

    def rows(self, classes: list[str]) -> list[dict]:
        """Return the rows of per_class.csv; classes: their names."""
        others = self.confusion.clone().fill_diagonal_(0)
        rows = []
        for index, name in enumerate(classes):
            images = self.confusion[index].sum()
            wrong = others[index]
            row = {
                "class": name,
                "images": int(images),
                "top1": f"{100 * self.confusion[index, index] / images:.2f}",
                "most_confused_with": classes[wrong.argmax()] if wrong.any() else "",
                "confused_images": int(wrong.max()),
                "tta": self.tta,
            }
            rows.append(row)
        return rows

    def line(self) -> str:
        """Return the figures for the terminal."""
        views = "" if self.tta == "none" else f", views: {self.tta}"
        return f"{percents(self.figures())}  loss {self.loss:.4f}  {self.images} images{views}"


def no_stop() -> None:
    """Do nothing between the batches of an evaluation."""


def batches_for(model: nn.Module, loader: Loader, between: Callable[[], None]) -> Iterator[Batch]:
    """Yield the batches of a loader that have images, with the model in eval mode, in which it is left.

    The loader gives every process the same number of batches, of which some may be empty; `between` is called before
    each, by all processes together. The caller closes the generator, so that an error ends the loader's pass at once.
    """
    model.eval()
    with closing(loader.batches()) as batches:
        for batch in batches:
            between()
            if len(batch.images):
                yield batch


@torch.no_grad()  # not inference_mode: a tensor that a layer caches here must stay usable in training
def evaluate(
    model: nn.Module,
    loader: Loader,
    num_classes: int,
    world: World,
    config: TrainConfig | None = None,
    *,
    between: Callable[[], None] = no_stop,
    tta: str = "none",
) -> Evaluation:
    """Evaluate over `batches_for` the model, of which each process sees its own share.

    `tta`: the VIEWS whose logits are averaged. `config` sets precision and memory format; None: float32 in the images'
    own format.

    Raises:
        NonFiniteLoss: on every process, if the loss is NaN or infinite: such logits have no meaningful order.
        RunError: no image could be read.
    """
    config = config or TrainConfig()
    sample = torch.empty(0)
    dtype = sum_type(world.device)
    confusion = torch.zeros(num_classes * num_classes, dtype=dtype, device=world.device)
    totals = torch.zeros(2, dtype=dtype, device=world.device)  # in the top 5, loss
    with closing(batches_for(model, loader, between)) as batches:
        for images, targets, _ in batches:
            if not len(sample):
                sample = images[:32].clone()
            if config.channels_last:
                images = images.contiguous(memory_format=torch.channels_last)
            with autocast(config.amp, world.device):
                logits = logits_by_views(model, images, tta)
            top = logits.topk(min(5, num_classes), dim=1).indices
            cells = targets * num_classes + top[:, 0]
            confusion.index_add_(0, cells, torch.ones_like(targets, dtype=dtype))
            hits = (top == targets[:, None]).sum()
            totals += torch.stack([hits, F.cross_entropy(logits, targets, reduction="sum")])
    in_top5, loss = world.sum(totals).tolist()
    confusion = world.sum(confusion).cpu().double().view(num_classes, num_classes)
    count = int(confusion.sum())
    if not count:
        raise RunError("none of the images to evaluate on can be read")
    if not math.isfinite(loss):
        raise NonFiniteLoss(f"the loss of the evaluation on {count} images is {loss / count}")
    right = confusion.diagonal().sum().item()
    top5 = math.nan if num_classes <= MOST_WITHOUT_TOP5 else 100 * in_top5 / count
    return Evaluation(count, 100 * right / count, top5, loss / count, confusion, sample, tta)
