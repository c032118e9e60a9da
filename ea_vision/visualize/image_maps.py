"""Networks and their recordings: an image as a network saw it, with the maps of its layers."""

from collections.abc import Mapping, Sequence
from contextlib import nullcontext
from pathlib import Path

import numpy as np
import torch
from PIL import Image
from torch import Tensor, nn
from torchvision.transforms.v2.functional import crop

import ea_vision
from ea_vision.base.errors import UsageError
from ea_vision.models.modes import evaluating
from ea_vision.ops import Size
from ea_vision.recorder.quantities import own_alone
from ea_vision.recorder.recording import AttentionLayer, AttentionMaps, LayerMaps
from ea_vision.recorder.selection import numbered
from ea_vision.visualize.tiles import OWN_ALONE, Recording
from ea_vision.zoo.inputs import ImageSource, as_image
from ea_vision.zoo.loaded import LoadedModel, as_model

AnyImage = ImageSource | Tensor  # see `ea_vision.zoo.loaded.LoadedModel.input_of`


def title_of(model: LoadedModel) -> str:
    """Name a model in a title, with its weights."""
    if model.weights in model.label:
        return model.label
    return f"{model.label}, weights {model.weights}"


def as_models(models, **images) -> list[LoadedModel]:
    """Load one model, several, or a mapping from labels to models; return a list of models with unique labels.
    **images: see `as_model`."""
    if isinstance(models, Mapping):
        loaded = [as_model(model, **images) for model in models.values()]
        labels = list(models)
    else:
        is_one = isinstance(models, (str, Path, nn.Module, LoadedModel))
        image_list = [models] if is_one else models
        loaded = [as_model(model, **images) for model in image_list]
        labels = numbered([model.label for model in loaded])
    for model, label in zip(loaded, labels, strict=True):
        model.label = label
    return loaded


def as_images(images: AnyImage | Sequence[AnyImage]) -> list[AnyImage]:
    """Return a list of one image or several.

    Raises:
        UsageError: the list is empty.
    """
    image_list = list(images) if isinstance(images, (list, tuple)) else [images]
    if not image_list:
        raise UsageError("at least one image required, got none")
    return image_list


def as_batch(model: LoadedModel, images: Sequence[AnyImage]) -> Tensor:
    """Return the network's input for these images, (B, 3, H, W); see `LoadedModel.batch_of`."""
    return model.batch_of([model.input_of(as_image(image)) for image in images])


def record(
    model: LoadedModel,
    image: AnyImage,
    layers: Sequence[AttentionLayer],
    parts: Sequence[str] = ("attn",),
) -> Recording:
    """Run a network on an image, in evaluation mode; see `AnyImage`.

    It does not use torch.inference_mode: tensors that a network caches in a forward (ConViT its distances) must stay
    usable in training.

    Args:
        layers: to record; may be empty.
        parts: some of `ea_vision.recorder.recording.PARTS`; those that none of the layers has are left out.

    Raises:
        UsageError: none of the layers has any of the parts, or the network refuses the input's size or channels.
    """
    image = as_image(image)
    x = model.input_of(image)
    batch = model.batch_of([x])
    watch = nullcontext(AttentionMaps())
    if layers:
        available = set().union(*(layer.parts for layer in layers))
        present = [part for part in parts if part in available] or parts
        numbers = [layer.number for layer in layers]
        watch = ea_vision.record_attention(model.model, numbers, parts=present)
    try:
        with evaluating(model.model), torch.no_grad(), watch as maps:
            output = model.model(batch)
    except (ValueError, AssertionError) as error:
        raise UsageError(f"{model.label} on a {x.shape[1]}x{x.shape[2]} input: {error}") from error
    except RuntimeError as error:
        model.check_channels(error)
        raise
    size = tuple(x.shape[1:])
    covered = [layer.layout.covered for layer in maps.values() if layer.layout.covered]
    shown = covered[0] if covered else size
    photo = model.preparation.photo(image) if isinstance(image, Image.Image) else None
    if photo is not None and shown != size:
        photo = _part_of_photo(photo, size, shown)
    return Recording(model, crop(model.shown(x), 0, 0, *shown), maps, photo, output, batch)


def _part_of_photo(photo: np.ndarray, size: Size, shown: Size) -> np.ndarray:
    """Crop a photo (height, width, 3) from the top left, as cropping an input of `size` to `shown` would; where `shown`
    is larger than `size`, pad it with black."""
    height = round(shown[0] * photo.shape[0] / size[0])
    width = round(shown[1] * photo.shape[1] / size[1])
    channels_first = torch.from_numpy(photo).movedim(2, 0)
    return crop(channels_first, 0, 0, height, width).movedim(0, 2).numpy()


def add_own_alone(recording: Recording) -> None:
    """Add the part OWN_ALONE to the maps of evolving layers: their attention without the previous map; see
    `ea_vision.recorder.quantities.own_alone`. The recording must have all parts and all heads."""
    for layer in recording.maps.values():
        module = recording.model.model.get_submodule(layer.name)
        with evaluating(module):
            alone = own_alone(layer, module)
        if alone is not None:
            layer.save(OWN_ALONE, alone)


def before_shares(model: nn.Module, name: str) -> dict[str, float]:
    """Return the weights of the recorded parts in the input of a layer's convolution; {} if it convolves no maps."""
    evolution = getattr(model.get_submodule(name), "evolution", None)
    return evolution.before_shares() if evolution else {}


def _sum(*terms: tuple[float, str]) -> str:
    """Write a weighted sum, without terms of weight 0; a weight of 1 is not written."""
    written = []
    for weight, term in terms:
        if weight == 1:
            written.append(term)
        elif weight != 0:
            factor = f"({term})" if " + " in term and not term.startswith("relu") else term
            written.append(f"{weight:.2g} {factor}")
    return " + ".join(written) or "0"


def equation(model: nn.Module, layers: Sequence[AttentionLayer | LayerMaps]) -> str:
    """Write the equation of the first layer that convolves previous maps, with its gates (learnable ones: their mean);
    "" if there is no such layer."""
    convolving = [layer for layer in layers if before_shares(model, layer.name)]
    if not convolving:
        return ""
    first = convolving[0]
    shares = before_shares(model, first.name)
    gates = model.get_submodule(first.name).evolution.gates()
    mean = {}
    for name, gate in gates.items():
        values = torch.as_tensor(gate).detach().float()
        mean[name] = values.mean().item()
    previous = (shares.get("prev_logits", 0.0), "previous")
    self_term = (shares.get("self_logits", 0.0), "own")
    mixed = _sum(previous, self_term)
    convolved = f"relu(conv({mixed}))"
    if "self_logits" in shares:
        share = mean.get("beta", 1.0)
        rest = mixed
    else:
        share = mean.get("alpha", 1.0)
        rest = "own"
    logits = _sum((share, convolved), (1 - share, rest))
    learned = any(isinstance(gate, Tensor) for gate in gates.values())
    whose = f"layer {first.number}" if learned else "a layer"
    return f"{whose}: logits = {logits}, attention = softmax(logits)"
