"""The preprocessing of Hugging Face's image processors, as timm's data configuration."""

import sys
from collections.abc import Mapping
from typing import Any

from PIL import Image
from torch import nn

from ea_vision.base.errors import UsageError


def processor_of(model: nn.Module) -> Any | None:
    """Return the image processor saved with the weights of a model of transformers, or None.

    It is looked up in the folder, or by the name on the hub, from which `from_pretrained` loaded the weights.
    """
    transformers = sys.modules.get("transformers")
    if transformers is None or not isinstance(model, transformers.PreTrainedModel):
        return None
    source = model.name_or_path
    if not source:  # a model that was built from a configuration
        return None
    try:
        return transformers.AutoImageProcessor.from_pretrained(source)
    except (OSError, ValueError, ImportError):  # none there, or no connection
        return None


def processor_config(processor: Any) -> dict[str, Any]:
    """Return an image processor's preprocessing: timm's mean, std, input_size, crop_pct, crop_mode and interpolation.

    Args:
        processor: an image processor, a processor of images and text (CLIP's), or its path or name on the hub.

    Raises:
        UsageError: there is no image processor, or it does not resize to one size.
    """
    if isinstance(processor, str):
        processor = _load(processor)
    processor = getattr(processor, "image_processor", processor)
    if not hasattr(processor, "image_mean"):
        raise UsageError(
            "processor must be an image processor of transformers, its path or its name, got "
            f"{type(processor).__name__}"
        )
    mean = [0.0] * 3
    std = [1.0] * 3
    if processor.do_normalize:
        mean = processor.image_mean
        std = processor.image_std
    factor = processor.rescale_factor if getattr(processor, "do_rescale", True) else 1.0
    largest = 255 * factor  # the value of white before it is normalised
    resampling = Image.Resampling(int(processor.resample))
    config = _sizes(processor)
    config["mean"] = tuple(value / largest for value in mean)
    config["std"] = tuple(value / largest for value in std)
    config["interpolation"] = resampling.name.lower()
    return config


def _load(source: str) -> Any:
    """Return the image processor at a path, or by a name on the hub."""
    try:
        import transformers
    except ImportError as error:
        raise UsageError(
            f"processor={source!r} needs transformers: pip install transformers"
        ) from error
    try:
        return transformers.AutoImageProcessor.from_pretrained(source)
    except (OSError, ValueError) as error:
        raise UsageError(f"there is no image processor at {source!r}: {error}") from error


def _sizes(processor: Any) -> dict[str, Any]:
    """Return input_size (3, H, W), crop_pct and crop_mode of an image processor."""
    size = _as_mapping(processor.size)
    edge = size.get("shortest_edge")
    resized = (edge or size.get("height"), edge or size.get("width"))
    if None in resized:
        raise UsageError(
            f"processor must resize to one size (height and width, or shortest_edge), got {dict(size)}"
        )
    cropped = resized
    crop_pct = getattr(processor, "crop_pct", None) or 1.0  # ConvNeXt's
    if getattr(processor, "do_center_crop", False):
        crop = _as_mapping(processor.crop_size)
        cropped = (crop["height"], crop["width"])
        crop_pct = cropped[0] / resized[0]
    mode = "center" if edge else "squash"
    return {"input_size": (3, *cropped), "crop_pct": crop_pct, "crop_mode": mode}


def _as_mapping(size: Any) -> Mapping[str, int]:
    """Return a processor's size as a mapping, without None values."""
    if isinstance(size, int):
        return {"height": size, "width": size}
    items = size.items() if hasattr(size, "items") else vars(size).items()
    return {name: value for name, value in items if value is not None}
