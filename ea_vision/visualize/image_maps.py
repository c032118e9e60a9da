"""An image as a network saw it, with the maps of its layers: what every figure is drawn from."""

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

import ea_vision
from ea_vision.base.errors import UsageError
from ea_vision.recorder.inputs import ImageSource, as_image, as_input
from ea_vision.recorder.loading import LoadedModel, as_loaded, load_model, set_preprocessing
from ea_vision.recorder.quantities import own_alone
from ea_vision.recorder.recording import AttentionLayer, AttentionMaps

MEAN = "mean"  # of heads
ALL = "all"  # the mean of all queries
OWN_ALONE = "attn_own_alone"  # the part of `add_own_alone`
# (y, x) in pixels of the input, a token before a transformer's patches (cls, reg1, ...), or ALL
Query = tuple[int, int] | str
Head = int | str  # a number, or MEAN
AnyImage = ImageSource | Tensor  # see `ea_vision.recorder.inputs.as_input`


def of_head(maps: Tensor, head: Head) -> Tensor:
    """Return one head of (K, ...), or the mean of all."""
    return maps.mean(0) if head == MEAN else maps[head]


@dataclass
class Recording:
    """An image as a network saw it, and the maps of its layers.

    image: (3, H, W) in 0..1. img_size: (H, W). aspect: H over W. extent: where `Axes.imshow` draws what covers it.
    photo: (height, width, 3) uint8, the same part of the image at its own resolution; None where there is only `image`.
    output: what the network gave.
    """

    model: LoadedModel
    image: Tensor
    maps: AttentionMaps
    photo: np.ndarray | None = None
    output: Any = None

    img_size = property(lambda self: tuple(self.image.shape[1:]))
    aspect = property(lambda self: self.img_size[0] / self.img_size[1])
    extent = property(lambda self: (0, self.img_size[1], self.img_size[0], 0))

    def pixels(self) -> np.ndarray:
        """Return the photo, or where there is none (the network sees no less) the image: (height, width, 3) in 0..1."""
        if self.photo is not None:
            return self.photo / 255
        return self.image.permute(1, 2, 0).cpu().numpy()

    def cell(self, layer: int, query: Query) -> Query:
        """Return `cell_of` a query in a layer's map."""
        return cell_of(query, self.img_size, self.maps[layer].feat_size)

    def query_map(
        self,
        layer: int,
        query: Query,
        head: Head,
        part: str = "attn",
    ) -> np.ndarray:
        """Return (H', W'): a query's row of a part, among the map's pixels, by one head or on average; of ALL the mean
        over the queries of all pixels. Attention, that of OWN_ALONE too, is in units of uniform attention."""
        maps = self.maps[layer]
        if query == ALL:
            rows = maps.spatial(part)  # (B, K, H, W, H', W')
        else:
            cell = self.cell(layer, query)
            _, rows = maps.of_cell(cell, part)  # (B, K, H', W')
        values = of_head(rows[0], head).float().cpu().numpy()
        if part.startswith("attn"):
            keys = maps.num_keys()
            if query == ALL:
                keys = keys[:, :, None, None]
            elif isinstance(query, str):
                keys = keys.max()
            else:
                keys = keys[cell]
            values = values * keys
        return values.mean((0, 1)) if query == ALL else values

    def beside_patches(self, layer: int, query: Query, head: Head) -> str:
        """Say how much of a query's attention goes to the tokens before the patches: "cls 12%, reg 30%" (all registers
        together); "" where there are none."""
        maps = self.maps[layer]
        shares = Counter()
        row = maps.of_cell(self.cell(layer, query))[0][0]  # (K, P)
        for name, share in zip(maps.prefix_names, of_head(row, head).tolist(), strict=True):
            shares[name.rstrip("0123456789")] += share
        return ", ".join(f"{kind} {share:.0%}" for kind, share in shares.items())


def as_model(model: nn.Module | LoadedModel | str, **images) -> LoadedModel:
    """Return a network with what is known of its images: a timm model, or one by name, run folder or checkpoint.

    **images: processor, mean, std, see `ea_vision.recorder.loading.set_preprocessing`.
    """
    if isinstance(model, nn.Module):
        config = getattr(model, "pretrained_cfg", None) or {}
        evolved_from = getattr(model, "_model_args", {}).get("base")
        label = evolved_from or config.get("architecture") or type(model).__name__
        return as_loaded(model, label, **images)
    loaded = load_model(model) if isinstance(model, str) else replace(model)
    set_preprocessing(loaded, **images)
    return loaded


def title_of(model: LoadedModel) -> str:
    """Name a model in a title, with its weights."""
    if model.weights in model.label:
        return model.label
    return f"{model.label}, weights {model.weights}"


def as_models(models, **images) -> list[LoadedModel]:
    """Return the models of one, several, or several by label (a mapping); their labels differ. **images: see
    `as_model`."""
    if isinstance(models, Mapping):
        loaded = [as_model(model, **images) for model in models.values()]
        labels = list(models)
    else:
        several = [models] if isinstance(models, (str, nn.Module, LoadedModel)) else models
        loaded = [as_model(model, **images) for model in several]
        labels = numbered([model.label for model in loaded])
    for model, label in zip(loaded, labels, strict=True):
        model.label = label
    return loaded


def as_images(images: AnyImage | Sequence[AnyImage]) -> list[AnyImage]:
    """Return a list of one image or several.

    Raises:
        UsageError: none.
    """
    several = list(images) if isinstance(images, (list, tuple)) else [images]
    if not several:
        raise UsageError("at least one image required, got none")
    return several


def numbered(names: Sequence[str]) -> list[str]:
    """Return the names, equal ones numbered."""
    labels = []
    for place, name in enumerate(names):
        number = names[:place].count(name) + 1
        labels.append(f"{name} [{number}]" if names.count(name) > 1 else name)
    return labels


@contextmanager
def evaluating(model: nn.Module) -> Iterator[None]:
    """Keep evaluation mode inside the block, and restore each module's own mode after it."""
    modes = [(module, module.training) for module in model.modules()]
    model.eval()
    try:
        yield
    finally:
        for module, training in modes:
            module.training = training


def as_batch(model: LoadedModel, images: Sequence[AnyImage]) -> Tensor:
    """Return (B, 3, H, W) as the network takes it, on its device."""
    batch = torch.stack([as_input(model, image) for image in images])
    return model.normalize(batch.to(model.device))


def record(
    model: nn.Module | LoadedModel | str,
    image: AnyImage,
    layers: Sequence[AttentionLayer],
    parts: Sequence[str] = ("attn",),
) -> Recording:
    """Run a network on an image, in evaluation mode; see `as_model` and `as_input`.

    Args:
        layers: those to record, if any.
        parts: some of `ea_vision.recorder.recording.PARTS`; those that none of the layers has are left out.

    Raises:
        UsageError: layers with none of the parts, or an input size that the network refuses.
    """
    model = as_model(model)
    image = as_image(image)
    prepared = as_input(model, image)
    batch = as_batch(model, [prepared])
    watch = nullcontext(AttentionMaps())
    if layers:
        known = set().union(*(layer.parts for layer in layers))
        present = [part for part in parts if part in known] or parts
        numbers = [layer.number for layer in layers]
        watch = ea_vision.record_attention(model.model, numbers, parts=present)
    try:
        with evaluating(model.model), torch.inference_mode(), watch as maps:
            output = model.model(batch)
    except (ValueError, AssertionError) as error:
        raise UsageError(
            f"{model.label} on a {prepared.shape[1]}x{prepared.shape[2]} input: {error}"
        ) from error
    photo = None if isinstance(image, Tensor) else model.photo(image)
    return Recording(model, prepared, maps, photo, output)


def cell_of(
    query: Query,
    img_size: tuple[int, int],
    feat_size: tuple[int, int],
) -> Query:
    """Return (row, column) of the map's cell that a pixel (y, x) of the input lies in, which is also its place in an
    input of another size; a token by name as it is."""
    if isinstance(query, str):
        return query
    return query[0] * feat_size[0] // img_size[0], query[1] * feat_size[1] // img_size[1]


def add_own_alone(recording: Recording) -> None:
    """Add to the maps of evolving layers their attention without the previous map, the part OWN_ALONE; see
    `ea_vision.recorder.quantities.own_alone`. The recording must have all parts and all heads."""
    for layer in recording.maps.values():
        module = recording.model.model.get_submodule(layer.name)
        with evaluating(module):
            alone = own_alone(layer, module)
        if alone is not None:
            layer.save(OWN_ALONE, alone)
