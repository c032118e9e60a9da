"""Networks with the preparation of their images: `load` and `load_model` by a target, `as_model` also by a network."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import torch
from PIL import Image
from timm.data import ImageNetInfo
from timm.layers import to_2tuple
from torch import Tensor, nn

from ea_vision.base.errors import UsageError, as_usage_error
from ea_vision.data.decoding import BrokenImage
from ea_vision.data.image_names import displayable
from ea_vision.models.inputs import built_size, input_channels
from ea_vision.models.modes import unwrap
from ea_vision.ops import Size
from ea_vision.zoo.create import (
    Kind,
    kind_of,
    load_network,
    register_kind,
    timm_model,
    transformers_model,
)
from ea_vision.zoo.inputs import ImageSource, as_image
from ea_vision.zoo.preparation import (
    Preparation,
    Processed,
    changed,
    in_unit_range,
    preparation_of,
    preparation_of_run,
    set_image_statistics,
)
from ea_vision.zoo.source import CLASSIFICATION, TRANSFORMERS, Source, source_of

ROUNDING = 1e-3  # of values that a processor normalised, in 0..1


@dataclass
class LoadedModel:
    """A network in evaluation mode, and the preparation of its images.

    Attributes:
        label: short, for titles.
        epoch: of the checkpoint, if it is one.
        trained: whether the weights are trained, not random.
        weights: their name, if they have one.
        classes: names of the classes, if known.
        classifies: whether it classifies whole images; a detector does not.
    """

    model: nn.Module
    label: str
    preparation: Preparation | Processed
    epoch: int | None = None
    trained: bool = True
    weights: str = ""
    classes: Sequence[str] | None = None
    classifies: ClassVar[bool] = True

    @property
    def img_size(self) -> Size:
        """(height, width) of the input in pixels."""
        return self.preparation.size

    @property
    def num_classes(self) -> int:
        """The number of classes; 0 without a classifier, whatever the shape of the output."""
        model = self.model
        *_, last = model.modules()
        if hasattr(model, "get_classifier"):
            last = model.get_classifier()
        if isinstance(last, nn.Identity):
            return 0
        if isinstance(getattr(model, "num_classes", None), int):
            return model.num_classes
        if hasattr(model, "config"):  # transformers'
            is_classifier = "ForImageClassification" in type(model).__name__
            return model.config.num_labels if is_classifier else 0
        if isinstance(last, (nn.Softmax, nn.LogSoftmax, nn.Flatten, nn.Dropout)):
            linear = [module for module in model.modules() if isinstance(module, nn.Linear)]
            last = linear[-1] if linear else last
        return getattr(last, "out_features", 0)

    @property
    def device(self) -> torch.device:
        """The network's device; an exported network runs on the CPU."""
        weights = list(self.model.parameters())
        return weights[0].device if weights else torch.device("cpu")

    def input_of(self, image: Image.Image | Tensor | Mapping) -> Tensor:
        """Return the network's input (3, H, W), normalised: of a PIL image by the network's preparation; a tensor is
        not resized.

        Args:
            image: as `ea_vision.zoo.inputs.as_image` returns it. A tensor has (3, H, W) or (1, 3, H, W): uint8;
                floating point in 0..1; or normalised by the network's mean and std. An image processor's mapping with
                "pixel_values" is normalised, too.

        Raises:
            UsageError: a tensor has another shape or range, or an image is too narrow.
        """
        if isinstance(image, Image.Image):
            with as_usage_error("an image cannot be prepared", BrokenImage):
                return self.preparation(image)
        normalised = isinstance(image, Mapping)
        if normalised:
            image = _pixel_values(image)
        image = image.detach()
        if image.ndim == 4 and image.shape[0] == 1:
            image = image[0]
        if image.ndim != 3 or image.shape[0] != 3 or not image.numel():
            raise UsageError(
                "an image must be a path, a PIL image, an array (H, W, 3) or a tensor (3, H, W), got "
                f"{tuple(image.shape)}"
            )
        if image.is_floating_point():
            x = image.float()
            shown = self.preparation.unnormalize(x)
            low, high = shown.aminmax()
            fits = -ROUNDING <= low and high <= 1 + ROUNDING
            if normalised or (fits and not (image.min() >= 0 and image.max() <= 1)):
                in_unit_range(shown, ROUNDING)
                return x
        return self.preparation.normalize(in_unit_range(image))

    def classify(self, x: Tensor) -> Tensor:
        """Return logits (B, classes) of a batch from `batch_of`.

        Raises:
            UsageError: the network has no classifier.
        """
        check_classifies(self)
        output = self.model(x)
        return getattr(output, "logits", output)  # transformers' models return several

    def likeliest(self, shares: Tensor, top: int) -> list[dict]:
        """Return the `top` classes of an image with the probabilities `shares` (classes,), the likeliest first."""
        values, indices = shares.topk(min(top, len(shares)))
        classes = []
        for value, index in zip(values.tolist(), indices.tolist(), strict=True):
            name = self.classes[index] if self.classes else f"class {index}"
            classes.append({"name": name, "index": index, "probability": round(value, 6)})
        return classes

    def shown(self, x: Tensor) -> Tensor:
        """Return the image in 0..1 of an input (3, H, W)."""
        return self.preparation.unnormalize(x).clamp(0, 1)

    def batch_of(self, inputs: Sequence[Tensor]) -> Tensor:
        """Return the network's batch (B, 3, H, W) from results of `input_of`, with the device and dtype of its weights.

        Raises:
            UsageError: the inputs have different sizes.
        """
        sizes = {f"{image.shape[1]}x{image.shape[2]}" for image in inputs}
        if len(sizes) > 1:
            raise UsageError(
                f"images that run together must have one size, got {' and '.join(sorted(sizes))}"
            )
        batch = torch.stack(list(inputs)).to(self.device)
        weights = [weight for weight in self.model.parameters() if weight.is_floating_point()]
        return batch.to(weights[0].dtype) if weights else batch

    def check_channels(self, refusal: RuntimeError | None = None) -> None:
        """Raise UsageError if the network takes images of another number of channels than 3.

        refusal: error of a forward that did not work; one without the word channels has another reason.
        """
        if refusal is not None and "channels" not in str(refusal):  # as a convolution says it
            return
        if not any(isinstance(module, nn.Conv2d) for module in self.model.modules()):
            return
        channels = input_channels(self.model)
        if channels != 3:
            raise UsageError(
                f"a network is required that takes images with 3 channels, and {self.label} takes {channels} "
                "(ea_vision.record_attention takes any)"
            ) from refusal


def _pixel_values(image: Mapping) -> Tensor:
    """Return the pixel_values of an image processor's mapping."""
    if "pixel_values" not in image:
        raise UsageError(
            f"an image processor's pixel_values are required, got {', '.join(map(str, image)) or 'nothing'}"
        )
    values = image["pixel_values"]
    return values if isinstance(values, Tensor) else torch.from_numpy(np.array(values))


def load(target: str, **kwargs: Any) -> nn.Module:
    """Load a network with its keywords and its weights, in evaluation mode.

    Args:
        target: the name of a model that has pretrained weights, a run folder, a file of weights or a checkpoint in a
            run folder, an exported file, a folder of `save_pretrained`, "hf-hub:OWNER/NAME" or "local-dir:FOLDER".
        **kwargs: `device`, `img_size` (a side or (height, width) in pixels); further keywords of a model given by its
            name.

    Raises:
        UsageError: no such model, run or file, no weights, or weights that do not fit.
    """
    loaded = load_model(str(target), **kwargs)
    if not loaded.trained:
        raise UsageError(
            f"there are no pretrained weights of {target}: timm.create_model({str(target)!r}) has random ones"
        )
    return loaded.model


def preprocess(
    model: nn.Module | str | Path,
    image: ImageSource,
    processor: Any = None,
    mean: Sequence[float] | None = None,
    std: Sequence[float] | None = None,
) -> Tensor:
    """Return a network's input (1, 3, H, W) for an image: that of its evaluation, predict, the probe and the figures.

    Args:
        model: a network of timm's, torchvision's or transformers'; or a target as `load` takes it.
        image: a file, a PIL image or an array (H, W, 3).
        processor: an image processor of transformers, its path or name; default: the one saved with the weights.
        mean, std: three numbers each, for images in 0..1; default: the network's.

    Raises:
        UsageError: no such model, no image, or a network or processor for other than one image of three channels.
    """
    loaded = as_model(model, processor=processor, mean=mean, std=std)
    loaded.check_channels()
    return loaded.input_of(as_image(image))[None]


def load_model(
    target: str,
    *,
    random: bool = False,
    img_size: int | Size | None = None,
    seed: int = 0,
    device: str | torch.device = "cpu",
    **kwargs: Any,
) -> LoadedModel:
    """Load a network and the preparation of its images.

    Args:
        target: see `ea_vision.zoo.source.source_of`.
        random: whether to use random weights even if there are trained ones.
        img_size: side or (height, width) of the input in pixels; default: the model's own.
        seed: of random weights.
        **kwargs: further keywords of a model given by its name.

    Raises:
        UsageError: there is no such model or run, weights cannot be read or do not fit, or the model cannot take images
            of this size.
    """
    source = source_of(target, **kwargs)
    kind = kind_of(source)
    model, epoch = load_network(source, random=random, seed=seed)
    trained = source.has_weights and not random
    loaded = kind.prepared(model, source, trained)
    loaded.epoch = epoch
    if not trained:
        loaded.label += " (untrained)"
    elif epoch is not None:
        loaded.label += f", epoch {epoch}"
    elif source.run is not None and not source.is_run:
        loaded.label += f", {source.weights.stem}"
    _set_size(loaded, to_2tuple(img_size or loaded.img_size), kind.fixed_size)
    model.to(device)
    return loaded


def as_model(model: nn.Module | LoadedModel | str | Path, **images) -> LoadedModel:
    """Return a model with its preparation. `model`: a timm model, or a target of `source_of`.

    **images: processor, mean, std, see `ea_vision.zoo.preparation.preparation_of`.
    """
    if isinstance(model, nn.Module):
        model = unwrap(model)
        config = getattr(model, "pretrained_cfg", None) or {}
        evolved_from = getattr(model, "_model_args", {}).get("base")
        label = evolved_from or config.get("architecture") or type(model).__name__
        return as_loaded(model, label, **images)
    is_name = isinstance(model, (str, Path))
    loaded = load_model(str(model)) if is_name else replace(model)
    loaded.preparation = changed(loaded.preparation, **images)
    return loaded


def as_loaded(model: nn.Module, label: str, trained: bool = True, **images) -> LoadedModel:
    """Return a network with its preparation. images: processor, mean, std; see `preparation_of`."""
    preparation = preparation_of(model, label=label, **images)
    classes = known_classes(model)
    return LoadedModel(model, displayable(label), preparation, trained=trained, classes=classes)


def _classifier(model: nn.Module, source: Source, trained: bool) -> LoadedModel:
    """Return a classifier with the preparation of its run's evaluation, or of its own configuration."""
    set_image_statistics(model, source.note)
    loaded = as_loaded(model, source.label, trained)
    if source.pretrained and trained:
        loaded.weights = model.pretrained_cfg.get("tag") or ""
    if source.note:
        loaded.classes = source.note.get("classes")
    preparation = loaded.preparation
    run_preparation = preparation_of_run(source.options, mean=preparation.mean, std=preparation.std)
    loaded.preparation = run_preparation or preparation
    return loaded


def _transformer(model: nn.Module, source: Source, trained: bool) -> LoadedModel:
    """Return a model of transformers with the image processor that was saved beside its weights."""
    loaded = as_loaded(model, source.label, trained)
    if type(model).__name__.endswith("ForImageClassification"):
        labels = model.config.id2label
        loaded.classes = [labels[index] for index in sorted(labels)]
    return loaded


def _set_size(loaded: LoadedModel, img_size: Size, fixed: bool) -> None:
    """Set the size of a model's images, (H, W), unless it is fixed.

    Raises:
        UsageError: it cannot take such images.
    """
    native_size = built_size(loaded.model) or loaded.img_size
    is_processed = isinstance(loaded.preparation, Processed)
    pixels = f"{img_size[0]}x{img_size[1]} pixels"
    if img_size != native_size and fixed or img_size != loaded.img_size and is_processed:
        raise UsageError(
            f"{loaded.label} takes images of {native_size[0]}x{native_size[1]} pixels, got {pixels}"
        )
    # timm's transformers resample their positions
    if img_size != native_size and hasattr(loaded.model, "set_input_size"):
        with as_usage_error(f"{loaded.label} cannot take images of {pixels}"):
            loaded.model.set_input_size(img_size=img_size)
    if img_size != loaded.img_size:
        loaded.preparation = replace(loaded.preparation, size=img_size)


def check_classifies(model: LoadedModel, without_classes: bool = False) -> None:
    """Raise UsageError for a detector, and unless `without_classes` for a network without a classifier."""
    reason = ""
    if not model.classifies:
        reason = "detects objects (use ea-vision predict)"
    elif not without_classes and not model.num_classes:
        reason = "has no classifier"
    if reason:
        raise UsageError(
            f"a network that classifies images is required, but {model.label} {reason}"
        )


def known_classes(model: nn.Module) -> list[str] | None:
    """Return the class names of a network's weights, or ImageNet's for 1000 classes; None if they are not known."""
    config = getattr(model, "pretrained_cfg", None) or {}
    if config.get("label_names"):
        return list(config["label_names"])
    if config.get("num_classes") == getattr(model, "num_classes", 0) == 1000:
        descriptions = ImageNetInfo().label_descriptions()
        return [description.split(",")[0] for description in descriptions]
    return None


register_kind(CLASSIFICATION, Kind(timm_model, _classifier))
register_kind(TRANSFORMERS, Kind(transformers_model, _transformer))
