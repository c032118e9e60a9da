"""How an image becomes a network's input: the same for evaluation, predict, the probe, figures, the page and exports.

Files are decoded by `ea_vision.data.decoding.decode_image` to 8-bit RGB: alpha is dropped, grey is repeated, 16 bits
keep their upper 8, EXIF's orientation is ignored. Then a `Preparation` scales, crops and normalises. A model of Hugging
Face's has a `Processed` instead, which calls its image processor.
"""

import logging
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import timm
import torch
from PIL import Image
from torch import Tensor, nn

from ea_vision.base.errors import UsageError, as_usage_error, extra_required
from ea_vision.data.augment import normalize
from ea_vision.data.scaling import Scaling, Size
from ea_vision.models.inputs import built_size

log = logging.getLogger(__name__)
PHOTO_SIDE = 512  # pixels of an image that is shown beside its maps
SOLID_SIDE = 224  # pixels of the images of one colour on which a processor is measured
COLOURS = ("black", "red", "lime", "blue")
# of trainers, about the images to evaluate on
OPTIONS = ("img_size", "eval_img_size", "eval_resize", "interpolation")
Statistics = Sequence[float] | None


@dataclass(frozen=True)
class Preparation(Scaling):
    """Scale, crop and normalise an image. std: per channel, of images in 0..1; see `Scaling`."""

    std: tuple[float, ...] = (1.0, 1.0, 1.0)

    def __call__(self, image: Image.Image) -> Tensor:
        """Return the network's input, float32 (3, H, W), of an RGB image.

        Raises:
            BrokenImage: see `Scaling.pixels`.
        """
        return self.normalize(self.pixels(image).permute(2, 0, 1))

    def normalize(self, images: Tensor) -> Tensor:
        """Return images (..., 3, H, W), uint8 or floating point in 0..1, as the network takes them."""
        levels = images * 255 if images.is_floating_point() else images
        mean = torch.tensor(self.mean, device=images.device)
        std = torch.tensor(self.std, device=images.device)
        return normalize(levels, mean, std)

    def unnormalize(self, x: Tensor) -> Tensor:
        """Return the images in 0..1 of inputs (..., 3, H, W)."""
        mean = x.new_tensor(self.mean).view(3, 1, 1)
        std = x.new_tensor(self.std).view(3, 1, 1)
        return x * std + mean

    def photo(self, image: Image.Image) -> np.ndarray | None:
        """Return (height, width, 3) uint8: the input's part of an image at the image's own resolution, but at most
        PHOTO_SIDE pixels along the longer side. None if that is no finer than the input."""
        H, W = self.size
        shrinks = min(image.height / H, image.width / W) * self.crop_pct
        finer = min(shrinks, PHOTO_SIDE / max(self.size))
        if finer <= 1:
            return None
        return replace(self, size=(round(H * finer), round(W * finer))).pixels(image).numpy()


class Processed:
    """The image processor of a model of transformers. It is called; what a colour becomes (MobileViT takes blue first)
    is measured on images of one colour.

    Args:
        processor: an image processor, one of images and text (CLIP's), its path or its name on the hub.
        mean, std: per channel, of images in 0..1; they replace the processor's.

    Attributes:
        size: (H, W) of the input that it makes of a square image.

    Raises:
        UsageError: there is no image processor, or it does not make one image of three channels.
    """

    def __init__(self, processor: Any, mean: Statistics = None, std: Statistics = None):
        self.processor = _image_processor(processor)
        square = (SOLID_SIDE, SOLID_SIDE)
        solid = [self._pixel_values(Image.new("RGB", square, colour)) for colour in COLOURS]
        self.size = tuple(solid[0].shape[1:])
        black, *primaries = (x.flatten(1) for x in solid)  # (3, H W) each
        changes = torch.stack(primaries, dim=1) - black[:, None]  # (3, 3, H W)
        place = changes.abs().sum((0, 1)).argmax()  # not of padding
        colours = changes[..., place]  # a column per colour
        white = colours.sum(1)
        self._mixing = colours / white[:, None]
        own_mean = -black[:, place] / white
        self._own = Preparation(self.size, mean=own_mean.tolist(), std=(1 / white).tolist())
        self._other = changed(self._own, mean=mean, std=std)

    def __call__(self, image: Image.Image) -> Tensor:
        """Return the network's input, float32 (3, H, W), of an RGB image."""
        x = self._pixel_values(image)
        return x if self._other is self._own else self._other.normalize(self._own.unnormalize(x))

    def _pixel_values(self, image: Image.Image) -> Tensor:
        """Return (3, H, W), as the processor makes it."""
        name = type(self.processor).__name__
        # errors of many kinds: what some processors need is no image alone
        with as_usage_error(f"processor {name} must take an image alone", Exception):
            values = self.processor(image, return_tensors="pt").get("pixel_values")
        shape = tuple(getattr(values, "shape", ()))
        if len(shape) < 4 or shape[-3] != 3 or math.prod(shape[:-3]) != 1:
            raise UsageError(
                f"processor must make one image of three channels, {name} makes pixel_values of {shape}"
            )
        return values.reshape(shape[-3:]).float()

    def normalize(self, images: Tensor) -> Tensor:
        """Return images (..., 3, H, W), uint8 or floating point in 0..1, as the network takes them."""
        levels = images if images.is_floating_point() else images / 255
        return self._other.normalize(_mixed(self._mixing, levels))

    def unnormalize(self, x: Tensor) -> Tensor:
        """Return the images in 0..1 of inputs (..., 3, H, W)."""
        # not inverse: some processors make all colours grey
        return _mixed(torch.linalg.pinv(self._mixing), self._other.unnormalize(x))

    def keeps(self, size: Size) -> bool:
        """Return False: images are always processed."""
        return False

    def pixels(self, image: Image.Image) -> Tensor:
        """Return the input in 0..1, float32 (H, W, 3)."""
        return self.unnormalize(self(image)).permute(1, 2, 0)

    def photo(self, image: Image.Image) -> None:
        """Return None: what is shown is what the network saw."""


def _mixed(mixing: Tensor, images: Tensor) -> Tensor:
    """Mix the channels of images (..., 3, H, W) by a matrix (3, 3)."""
    return torch.einsum("oc,...chw->...ohw", mixing.to(images), images)


def _image_processor(processor: Any) -> Any:
    """Return an image processor of transformers: itself, that of a processor of images and text, or the one at a path
    or of a name on the hub."""
    refused = as_usage_error(f"there is no image processor at {processor!r}", (OSError, ValueError))
    with refused, extra_required(f"processor={processor!r}", "transformers"):
        import transformers

        if isinstance(processor, str):
            processor = transformers.AutoImageProcessor.from_pretrained(processor)
    processor = getattr(processor, "image_processor", processor)
    if not isinstance(processor, transformers.ImageProcessingMixin):
        raise UsageError(
            "processor must be an image processor of transformers, its path or its name, got "
            f"{type(processor).__name__}"
        )
    return processor


def _saved_processor(model: nn.Module) -> Any | None:
    """Return the image processor in the folder, or of the name on the hub, from which `from_pretrained` loaded the
    weights of a model of transformers, or None."""
    config = getattr(model, "config", None)
    source = getattr(config, "name_or_path", "")  # "": a model that was built from a configuration
    try:
        from transformers import AutoImageProcessor

        return AutoImageProcessor.from_pretrained(source) if source else None
    except (OSError, ValueError, ImportError):  # none there, or no connection
        return None


def preparation_of(
    model: nn.Module,
    processor: Any = None,
    mean: Statistics = None,
    std: Statistics = None,
    label: str = "",
) -> Preparation | Processed:
    """Return the preparation of a network's images: of an image processor, by default the one saved with the weights of
    a model of transformers; else of the network's timm configuration. The log says when mean and std are guessed.

    Args:
        processor: see `Processed`.
        mean, std: three numbers each, for images in 0..1; they take precedence.
        label: of the network, for the log.

    Raises:
        UsageError: the processor makes no image of three channels, or mean or std is not three numbers.
    """
    if processor is None:
        processor = _saved_processor(model)
    if processor is not None:
        return Processed(processor, mean, std)
    config = timm.data.resolve_model_data_config(model)
    size = built_size(model) or config["input_size"][1:]
    if (mean is None or std is None) and not getattr(model, "pretrained_cfg", None):
        log.warning(
            "%s does not say how its images are normalised: ImageNet's mean and std are used "
            "(mean=, std= or processor= sets others), at %dx%d pixels (set model.img_size to change this)",
            label or type(model).__name__,
            *size,
        )
    scaling = {name: config[name] for name in ("crop_pct", "crop_mode", "interpolation")}
    preparation = Preparation(tuple(size), **scaling)
    preparation = changed(preparation, mean=config["mean"], std=config["std"])
    return changed(preparation, mean=mean, std=std)


def changed(
    preparation: Preparation | Processed,
    processor: Any = None,
    mean: Statistics = None,
    std: Statistics = None,
) -> Preparation | Processed:
    """Return the preparation of a processor instead, if one is given, and with another mean or std.

    Raises:
        UsageError: see `preparation_of`.
    """
    if processor is mean is std is None:
        return preparation
    if processor is None and isinstance(preparation, Processed):
        processor = preparation.processor
    if processor is not None:
        return Processed(processor, mean, std)
    statistics = {"mean": mean, "std": std}
    statistics = {
        name: channel_statistics(name, values)
        for name, values in statistics.items()
        if values is not None
    }
    return replace(preparation, **statistics)


def preparation_of_run(options: Mapping[str, Any], **statistics) -> Preparation | None:
    """Return the preparation of the images on which a trainer evaluates, from its OPTIONS; None if they are of neither
    train-imagenet nor train-cifar. statistics: mean and std."""
    if "eval_resize" in options:
        side = options["eval_img_size"] or options["img_size"]
        interpolation = options["interpolation"]
        return Preparation.cropped(side, options["eval_resize"], interpolation, **statistics)
    if "img_size" in options and "anchors" not in options:
        return Preparation.filled(options["img_size"], **statistics)
    return None


# ---- mean, standard deviation, range ---------------------------------------------------------------------------------


def channel_statistics(name: str, values: Any) -> tuple[float, ...]:
    """Return the mean or standard deviation of images' three channels as floats. A single value is that of each
    channel, as in timm.

    Args:
        name: "mean" or "std".

    Raises:
        UsageError: it is not one or three finite numbers, or one of "std" is not above 0.
    """
    try:
        numbers = () if isinstance(values, (str, Mapping)) else tuple(map(float, values))
    except (TypeError, ValueError):
        numbers = ()
    if len(numbers) == 1:
        numbers *= 3
    usable = len(numbers) == 3 and all(map(math.isfinite, numbers))
    above = ""
    if name == "std":
        above = ", above 0"
        usable = usable and min(numbers) > 0
    if not usable:
        raise UsageError(f"{name} must be three numbers, one per channel{above}, got {values!r}")
    return numbers


def image_statistics(model: nn.Module) -> tuple[tuple[float, ...], tuple[float, ...]]:
    """Return mean and std, per channel, of images in 0..1 that the model's configuration asks for."""
    data_config = timm.data.resolve_model_data_config(model)
    return data_config["mean"], data_config["std"]


def set_image_statistics(model: nn.Module, about: Mapping[str, Any]) -> None:
    """Set mean and std of images in 0..1 in a model's configuration to those of a run.

    about: section of the run, with mean and std per channel; without them the configuration does not change.
    """
    if "mean" in about:
        statistics = {"mean": tuple(about["mean"]), "std": tuple(about["std"])}
        model.pretrained_cfg = {**model.pretrained_cfg, **statistics}


def in_unit_range(values: Tensor, rounding: float = 0.0) -> Tensor:
    """Return uint8 or floating-point values as float32 in 0..1; floating-point ones may exceed it by `rounding`."""
    if values.dtype == torch.uint8:
        return values / 255
    low, high = (end.item() for end in values.cpu().double().aminmax())
    if values.is_floating_point() and -rounding <= low and high <= 1 + rounding:
        return values.float().clamp(0, 1)
    raise UsageError(
        "an image's values must be uint8, or floating point and lie in 0..1; a tensor may be normalised by the "
        f"model's mean and std, got {values.dtype} from {low:g} to {high:g}"
    )
