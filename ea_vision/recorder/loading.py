"""Load models for the probe and the figures, and read the options that their commands share."""

import argparse
import logging
import os
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from pathlib import Path
from typing import Any

import numpy as np
import timm
import torch
from PIL import Image
from timm.data import ImageNetInfo
from timm.models import is_model, is_model_pretrained, list_pretrained
from torch import Tensor, nn

from ea_vision.base import devices
from ea_vision.base.errors import UsageError
from ea_vision.base.networks import (
    check_model_name,
    hub_source,
    load_state,
    load_weights,
    pretrained_model,
    read_made_with,
    read_metadata,
)
from ea_vision.data.image_files import MAX_PIXELS, BrokenImage
from ea_vision.data.image_names import displayable
from ea_vision.deployment.files import SUFFIXES, ExportedNetwork
from ea_vision.deployment.fold import input_channels
from ea_vision.detection.model import Detector, create_detector
from ea_vision.detection.predict import detect
from ea_vision.detection.transforms import Fitted
from ea_vision.engine import checkpoint, run_folder
from ea_vision.ops import Size
from ea_vision.recorder.inputs import in_unit_range
from ea_vision.recorder.maps import Query
from ea_vision.recorder.recording import AttentionLayer, recordable_layers, unwrap
from ea_vision.zoo.preparation import (
    Preparation,
    Processed,
    built_size,
    changed,
    preparation_of,
    preparation_of_run,
)

log = logging.getLogger(__name__)

# names as in `recorder.recording.prefix_names`
TOKEN = r"cls|dist|mean|pool|(?:reg|pool)[1-9]\d*"
NUMBER = "[0-9]{1,9}"
ROUNDING = 1e-3  # of values that a processor normalised, in 0..1
FINDS_OBJECTS = (
    "a network that classifies images is required, but {} detects objects (use ea-vision predict)"
)
WEIGHTS_HELP = (
    "NAME of a timm model (pretrained where it has weights, else random), RUN folder or a checkpoint in one, a file "
    "of weights, hf-hub:OWNER/NAME or local-dir:FOLDER"
)


@dataclass
class LoadedModel:
    """A network in evaluation mode, and the preparation of its images.

    label: short, for titles. epoch: of the checkpoint, if it is one.
    trained: whether the weights are trained, not random. weights: their name, if they have one.
    classes: names of the classes, if known.
    """

    model: nn.Module
    label: str
    preparation: Preparation | Processed
    epoch: int | None = None
    trained: bool = True
    weights: str = ""
    classes: Sequence[str] | None = None

    @property
    def img_size(self) -> Size:
        """(height, width) of the input in pixels."""
        return self.preparation.size

    @property
    def device(self) -> torch.device:
        """The network's device; an exported network runs on the CPU."""
        weights = list(self.model.parameters())
        return weights[0].device if weights else torch.device("cpu")

    def input_of(self, image: Image.Image | Tensor | Mapping) -> Tensor:
        """Return the network's input (3, H, W), normalised: of a PIL image by the network's preparation; a tensor is
        not resized.

        Args:
            image: as `ea_vision.recorder.inputs.as_image` returns it. A tensor has (3, H, W) or (1, 3, H, W): uint8;
                floating point in 0..1; or normalised by the network's mean and std. An image processor's mapping with
                "pixel_values" is normalised, too.

        Raises:
            UsageError: a tensor has another shape or range, or an image is too narrow.
        """
        if isinstance(image, Image.Image):
            try:
                return self.preparation(image)
            except BrokenImage as error:
                raise UsageError(f"an image {error}") from error
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

    def check_channels(self, refusal: RuntimeError) -> None:
        """Raise UsageError if a forward's error says that the network takes images of another number of channels."""
        if "channels" not in str(refusal):  # as a convolution says it
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


@dataclass
class DetectorModel(LoadedModel):
    """A detector. Its images are fitted into a square and padded at the right and below; it normalises them itself.

    category_ids: ids of the classes in COCO's results.
    """

    category_ids: Sequence[int] = ()

    def detect(
        self, images: Sequence[Image.Image], batch_size: int = 8
    ) -> Iterator[dict[str, Tensor]]:
        """Find objects in RGB images of any size, in their order; see `ea_vision.detection.predict.detect`."""
        return detect(self.model, images, batch_size)


@dataclass
class Origin:
    """How to build a network, and where its weights are.

    name, kwargs: arguments of `create`. create: timm's create_model, or create_detector. weights: a file, or None for
    the pretrained weights of the name. label: for titles. options, about: of a run, if it is one.
    """

    name: str
    label: str
    kwargs: dict = field(default_factory=dict)
    create: Callable[..., nn.Module] = timm.create_model
    weights: Path | None = None
    options: Mapping[str, Any] = field(default_factory=dict)
    about: Mapping[str, Any] = field(default_factory=dict)

    def check_classifies(self) -> None:
        """Raise UsageError for a detector: a network that classifies is required."""
        if self.create is not timm.create_model:
            raise UsageError(FINDS_OBJECTS.format(self.label))

    def build(self, seed: int = 0) -> nn.Module:
        """Return the network with random weights from a seed; torch's generator is not changed.

        Raises:
            UsageError: the network does not accept its keywords.
        """
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(seed)
            try:
                return self.create(self.name, **self.kwargs)
            except (ValueError, TypeError, RuntimeError) as error:
                raise UsageError(f"model {self.name} cannot be created: {error}") from error


def find_origin(target: str, **kwargs: Any) -> Origin:
    """Return how to build the network of a name, a run folder, a file, hf-hub:OWNER/NAME or local-dir:FOLDER.

    Args:
        kwargs: further keywords of a model that is given by its name.

    Raises:
        UsageError: there is no such model, run or file, or a file does not name its network.
    """
    if not target:  # a shell's variable without a value, not the working directory
        raise UsageError("a model's name, a run folder or a file is required, got an empty text")
    path = Path(target)
    if not os.path.exists(path):
        check_model_name(target, "or run folder ")
        source, place = hub_source(target)
        label = f"{source}:{Path(place).name}" if source == "local-dir" else target
        return Origin(target, label, kwargs)
    if path.is_file():
        folder = run_folder.run_of_file(path)
        if folder is None:
            return _origin_of_file(path)
    else:
        folder = path.parent if path.name == run_folder.SNAPSHOTS else path
        if not (folder / run_folder.CONFIG).is_file() and (path / "config.json").is_file():
            return find_origin(f"local-dir:{target}", **kwargs)
    options, about = run_folder.read_config(folder)
    label = f"{options['model']}, {folder.resolve().name}"
    weights = folder / run_folder.WEIGHTS if path.is_dir() else path
    return Origin(
        options["model"], label, about["model_kwargs"], _create_of(about), weights, options, about
    )


def _create_of(about: Mapping[str, Any]) -> Callable[..., nn.Module]:
    """Return the function that builds the network of a run or of a weights file: detectors have category ids."""
    return create_detector if "category_ids" in about else timm.create_model


def _origin_of_file(path: Path) -> Origin:
    """Return the origin of a weights file outside of a run folder, by its metadata or by its name.

    Raises:
        UsageError: neither names a network.
    """
    if path.suffix.lower() != ".safetensors":
        raise UsageError(
            f"a file of weights must be a .safetensors file or lie in a run folder, beside its "
            f"{run_folder.CONFIG}, got {path}"
        )
    about = read_made_with(path)
    if about is not None:
        name = about["model"]
        label = f"{name}, {path.stem}"
        kwargs = about["model_kwargs"]
        return Origin(name, label, kwargs, _create_of(about), path, about=about)
    if is_model(path.stem):  # such as the weights that come with the package
        kwargs = {"pretrained_cfg_overlay": {"file": str(path)}}
        return Origin(path.stem, path.stem, kwargs)
    raise UsageError(
        f"{path} does not name its network, and is not in a run folder: "
        f"load it by timm.create_model(NAME, checkpoint_path={str(path)!r})"
    )


def load_model(
    target: str,
    *,
    random: bool = False,
    img_size: Size | None = None,
    seed: int = 0,
    device: str | torch.device = "cpu",
    **kwargs: Any,
) -> LoadedModel:
    """Load a model by its name, from a run folder, a checkpoint in one, a weights or exported file, or from a hub.

    Args:
        target: a registered name, a path, hf-hub:OWNER/NAME or local-dir:FOLDER.
        random: whether to use random weights even if there are trained ones.
        img_size: (height, width) of the input in pixels; default: the model's own.
        seed: of random weights.
        **kwargs: further keywords of a model given by its name.

    Raises:
        UsageError: there is no such model or run, weights cannot be read or do not fit, or the model cannot take images
            of this size.
    """
    path = Path(target)
    if os.path.isfile(path) and path.suffix.lower() in SUFFIXES:
        loaded = _load_exported(path)
    else:
        origin = find_origin(target, **kwargs)
        if origin.weights is None:
            loaded = _load_by_name(origin, random, seed)
        else:
            loaded = _load_from_file(origin, path, random, seed)
    _set_size(loaded, img_size or loaded.img_size)
    loaded.model.eval().to(device)
    return loaded


def _load_exported(path: Path) -> LoadedModel:
    """Load an ONNX or torch.export file."""
    network = ExportedNetwork(path)
    about = network.about
    preparation = Preparation(
        **{field.name: getattr(about, field.name) for field in fields(Preparation)}
    )
    return LoadedModel(network, about.name, preparation, classes=about.classes)


def _load_by_name(origin: Origin, random: bool, seed: int) -> LoadedModel:
    """Load a model with the pretrained weights of its name, or with random ones if there are none."""
    source, _ = hub_source(origin.name)
    has_weights = bool(source) or is_model_pretrained(origin.name)
    if origin.kwargs.get("fusion") == "add":  # begins with the weights of the plain network
        has_weights = has_weights or bool(list_pretrained(f"{origin.name}.*"))
    trained = has_weights and not random
    if trained:
        origin.create = pretrained_model
    model = origin.build(seed)
    label = origin.label if trained else f"{origin.label} (untrained)"
    loaded = as_loaded(model, label, trained)
    if trained:
        loaded.weights = model.pretrained_cfg.get("tag") or ""
    return loaded


def _load_from_file(origin: Origin, path: Path, random: bool, seed: int) -> LoadedModel:
    """Load a network with the weights of a run or a file, and with the preprocessing of its evaluation."""
    model = origin.build(seed)
    label = f"{origin.label} (untrained)" if random else origin.label
    epoch = None
    if not random:
        if origin.options and not origin.weights.exists():
            raise UsageError(
                f"run {path} has no {origin.weights.name} yet: it appears with the first evaluated epoch"
            )
        epoch = _load_file(model, origin.weights)
        if epoch is not None:
            label += f", epoch {epoch}"
        elif path == origin.weights and origin.options:
            label += f", {path.stem}"
    about = origin.about
    if origin.create is create_detector:
        return DetectorModel(
            model,
            label,
            Fitted((model.img_size, model.img_size)),
            epoch=epoch,
            trained=not random,
            classes=about["classes"],
            category_ids=about["category_ids"],
        )
    loaded = as_loaded(model, label, not random)
    loaded.epoch = epoch
    loaded.classes = about.get("classes")
    own = loaded.preparation
    statistics = {key: tuple(about.get(key, getattr(own, key))) for key in ("mean", "std")}
    of_run = preparation_of_run(origin.options, **statistics)
    loaded.preparation = of_run or replace(own, **statistics)
    return loaded


def as_loaded(model: nn.Module, label: str, trained: bool = True, **images) -> LoadedModel:
    """Return a network with its preparation. images: processor, mean, std; see `preparation_of`."""
    preparation = preparation_of(model, label=label, **images)
    classes = known_classes(model)
    return LoadedModel(model, displayable(label), preparation, trained=trained, classes=classes)


def as_model(model: nn.Module | LoadedModel | str | Path, **images) -> LoadedModel:
    """Return a model with its preprocessing. `model`: a timm model, a name, a run folder or a checkpoint.

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


def _set_size(loaded: LoadedModel, img_size: Size) -> None:
    """Set the size of a model's images, (H, W).

    Raises:
        UsageError: it cannot take such images.
    """
    own = built_size(loaded.model) or loaded.img_size
    wanted = f"{img_size[0]}x{img_size[1]} pixels"
    if img_size != own and isinstance(loaded.model, (ExportedNetwork, Detector)):
        raise UsageError(f"{loaded.label} takes images of {own[0]}x{own[1]} pixels, got {wanted}")
    # timm's transformers resample their positions
    if img_size != own and hasattr(loaded.model, "set_input_size"):
        try:
            loaded.model.set_input_size(img_size=img_size)
        except (ValueError, AssertionError, RuntimeError) as error:
            raise UsageError(f"{loaded.label} cannot take images of {wanted}: {error}") from error
    if img_size != loaded.img_size:
        loaded.preparation = replace(loaded.preparation, size=img_size)


def check_classifies(model: LoadedModel) -> None:
    """Raise UsageError for a detector: a network that classifies whole images is required."""
    if isinstance(model, DetectorModel):
        raise UsageError(FINDS_OBJECTS.format(model.label))


def known_classes(model: nn.Module) -> list[str] | None:
    """Return the class names of a network's weights, or ImageNet's for 1000 classes; None if they are not known."""
    config = getattr(model, "pretrained_cfg", None) or {}
    if config.get("label_names"):
        return list(config["label_names"])
    if config.get("num_classes") == getattr(model, "num_classes", 0) == 1000:
        descriptions = ImageNetInfo().label_descriptions()
        return [description.split(",")[0] for description in descriptions]
    return None


def _load_file(model: nn.Module, path: Path) -> int | None:
    """Load a checkpoint or a weights file; return its epoch, or None if the file does not state it."""
    if path.suffix.lower() == ".safetensors":
        load_weights(model, path)
        epoch = read_metadata(path).get("epoch")
        return int(epoch) if epoch else None
    state = checkpoint.read_checkpoint(path)
    load_state(model, state["ema"] or state["model"], str(path))
    return state["progress"].get("epoch")


def numbered(names: Sequence[str]) -> list[str]:
    """Return the names; equal ones get numbers."""
    labels = []
    for place, name in enumerate(names):
        number = names[:place].count(name) + 1
        labels.append(f"{name} [{number}]" if names.count(name) > 1 else name)
    return labels


def parse_targets(text: str) -> list[str]:
    """Return the targets of `load_model` that commas separate. If the whole text names a file or folder, such as a
    sweep's run `model=a,seed=0`, it is one target."""
    return [text] if os.path.exists(text) else text.split(",")


def parse_layers(text: str, model: LoadedModel) -> list[AttentionLayer]:
    """Return the layers that a text names: `all` (except pooling), numbers, ranges and module names, with commas.

    Raises:
        UsageError: a layer does not exist, or the model has no attention.
    """
    available = recordable_layers(model.model)
    if not available:
        raise UsageError(f"{model.label} has no attention layer that can be recorded")
    if text == "all":
        return [layer for layer in available if not layer.pools]
    by_key = {str(layer.number): layer for layer in available}
    by_key |= {layer.name: layer for layer in available}
    chosen = []
    for item in text.split(","):
        ends = re.fullmatch(f"({NUMBER})-({NUMBER})", item)
        numbers = range(int(ends[1]), int(ends[2]) + 1) if ends else ()
        for key in map(str, numbers or [item]):  # up to the first that does not exist
            if key not in by_key:
                having = ", ".join(map(str, available))
                raise UsageError(f"{model.label} has no attention layer {key!r}; it has {having}")
            chosen.append(by_key[key])
    return chosen


def parse_queries(
    texts: Sequence[str], img_size: Size, default: Sequence[tuple[float, float]] = ()
) -> list[Query]:
    """Return points from `y,x` texts, and names of tokens unchanged; without texts the default, in shares of the sides.

    Raises:
        UsageError: a text is neither y,x nor such a name, or a point lies outside the image.
    """
    H, W = img_size
    if not texts:
        return [(int(H * y), int(W * x)) for y, x in default]
    points = []
    for text in texts:
        found = re.fullmatch(f"({NUMBER}), ?({NUMBER})|{TOKEN}", text)
        if not found:
            raise UsageError(
                "a query must be y,x in pixels, or a token before a transformer's patches (cls, dist, "
                f"reg1, ...), got {text!r}"
            )
        if not found[1]:
            points.append(text)
            continue
        y = int(found[1])
        x = int(found[2])
        if y >= H or x >= W:
            raise UsageError(f"query y,x must lie within {H}x{W} pixels, got {text!r}")
        points.append((y, x))
    return points


def image_size(text: str) -> Size:
    """Parse N or H,W for argparse; return (H, W): both positive, their product at most MAX_PIXELS."""
    sides = re.fullmatch(f"({NUMBER})(?:,({NUMBER}))?", text)
    H = int(sides[1]) if sides else 0
    W = int(sides[2] or sides[1]) if sides else 0
    if not 0 < H * W <= MAX_PIXELS:
        raise argparse.ArgumentTypeError(
            "must be N or H,W in pixels, at most "
            f"{MAX_PIXELS / 1e6:g} million together, got {text[:40]!r}"
        )
    return H, W


def add_options(parser: argparse.ArgumentParser, *names: str) -> None:
    """Add options that several commands have."""
    options = {
        "--random": dict(
            action="store_true", help="use random weights even where trained ones exist"
        ),
        "--img-size": dict(
            type=image_size,
            metavar="N|H,W",
            help="size of the input in pixels (default: the model's)",
        ),
        "--device": dict(default="auto", help=f"{devices.HELP} (default: %(default)s)"),
    }
    for name in names:
        parser.add_argument(name, **options[name])


def positive(text: str) -> int:
    """Return a positive whole number below a billion, for argparse."""
    if not re.fullmatch(NUMBER, text) or not int(text):
        raise argparse.ArgumentTypeError(
            f"a positive whole number below a billion required, got {text[:40]!r}"
        )
    return int(text)
