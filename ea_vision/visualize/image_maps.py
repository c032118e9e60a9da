"""An image as a network saw it, with the maps of its layers: what every figure is drawn from."""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

import ea_vision
from ea_vision.base.errors import UsageError
from ea_vision.recorder.inputs import ImageSource, as_image, as_input
from ea_vision.recorder.loading import LoadedModel, as_loaded, load_model
from ea_vision.recorder.recording import AttentionLayer, AttentionMaps

MEAN = "mean"
WITHOUT = ("attn_without_previous", "attn_without_own")  # parts of `add_contributions`
Point = tuple[int, int]  # y, x in pixels of the input
Query = Point | str  # a pixel, or a token before a transformer's patches by name: cls, dist, reg1, ...
Head = int | str  # a number, or MEAN
AnyImage = ImageSource | Tensor  # see `ea_vision.recorder.inputs.as_input`


def of_head(maps: Tensor, head: Head) -> Tensor:
    """Return one head of (K, ...), or the mean of all."""
    return maps.mean(0) if head == MEAN else maps[head]


@dataclass
class Recording:
    """An image as a network saw it, and the maps of its layers.

    image: (3, H, W) in 0..1.
    photo: (height, width, 3) uint8, the same part of the image at its own resolution; None where there is only `image`.
    output: what the network gave.
    """

    model: LoadedModel
    image: Tensor
    maps: AttentionMaps
    photo: np.ndarray | None = None
    output: Any = None

    @property
    def img_size(self) -> tuple[int, int]:
        """(height, width) of the input in pixels."""
        return tuple(self.image.shape[1:])

    @property
    def aspect(self) -> float:
        """Height over width of the input."""
        return self.img_size[0] / self.img_size[1]

    def pixels(self) -> np.ndarray:
        """Return the photo, or where there is none (the network sees no less) the image: (height, width, 3) in 0..1."""
        return self.image.permute(1, 2, 0).cpu().numpy() if self.photo is None else self.photo / 255

    def cell(self, layer: int, query: Query) -> Query:
        """Return `cell_of` a query in a layer's map."""
        return cell_of(query, self.img_size, self.maps[layer].feat_size)

    def relative_map(self, layer: int, query: Query, head: Head, part: str = "attn") -> np.ndarray:
        """Return (H', W'): attention of a query in units of uniform attention; part: "attn", or a name of WITHOUT."""
        keys = self.maps[layer].num_keys()
        seen = keys.max() if isinstance(query, str) else keys[self.cell(layer, query)]
        return self.query_map(layer, query, head, part) * seen

    def query_map(self, layer: int, query: Query, head: Head, part: str = "attn") -> np.ndarray:
        """Return (H', W'): what a query attends to among the map's pixels, by one head or on average."""
        maps = self.maps[layer].of_query(self.cell(layer, query), part)[1][0]  # (K, H', W')
        return of_head(maps, head).float().cpu().numpy()

    def received(self, layer: int, head: Head) -> np.ndarray:
        """Return (H', W'): what every pixel gets, mean of all pixels' queries, in units of uniform attention."""
        maps = self.maps[layer]
        maps.check_pixels_ask()
        got = maps.relative()[0, :, maps.num_prefix_tokens:, maps.num_prefix_tokens:].float().mean(1)  # (K, N)
        return of_head(got, head).reshape(maps.key_size).cpu().numpy()

    def beside_patches(self, layer: int, query: Query, head: Head) -> str:
        """Say how much of a query's attention goes to the tokens before the patches: "cls 12%, reg 30%" (all registers
        together); "" where there are none."""
        maps, shares = self.maps[layer], {}
        row = maps.of_query(self.cell(layer, query))[0][0]  # (K, P)
        for name, share in zip(maps.prefix_names, of_head(row, head).tolist(), strict=True):
            kind = name.rstrip("0123456789")
            shares[kind] = shares.get(kind, 0.0) + share
        return ", ".join(f"{kind} {share:.0%}" for kind, share in shares.items())


def as_model(model: nn.Module | LoadedModel | str) -> LoadedModel:
    """Return a network with what is known of its images: a timm model, or one by name, run folder or checkpoint."""
    if isinstance(model, str):
        return load_model(model)
    if isinstance(model, LoadedModel):
        return model
    label = (getattr(model, "pretrained_cfg", None) or {}).get("architecture") or type(model).__name__
    return as_loaded(model, label)


def title_of(model: LoadedModel) -> str:
    """Name a model in a title, with its weights."""
    named = model.weights and model.weights not in model.label
    return f"{model.label}, weights {model.weights}" if named else model.label


def as_models(models) -> list[LoadedModel]:
    """Return the models of one, several, or several by label (a mapping); their labels differ."""
    if isinstance(models, (str, nn.Module, LoadedModel)):
        models = [models]
    named = isinstance(models, Mapping)
    loaded = [as_model(model) for model in (models.values() if named else models)]
    labels = models if named else numbered([model.label for model in loaded])
    return [replace(model, label=label) for model, label in zip(loaded, labels, strict=True)]


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
    """Return the names, those that are the same numbered."""
    return [f"{name} [{names[:place].count(name) + 1}]" if names.count(name) > 1 else name
            for place, name in enumerate(names)]


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
    return model.normalize(batch.to(next(model.model.parameters()).device))


def record(model: nn.Module | LoadedModel | str, image: AnyImage, layers: Sequence[AttentionLayer],
           parts: Sequence[str] = ("attn",)) -> Recording:
    """Run a network on an image, in evaluation mode; see `as_model` and `as_input`.

    Args:
        parts: some of `ea_vision.recorder.recording.PARTS`; those that none of the layers has are left out.

    Raises:
        UsageError: layers with none of the parts, or an input size that the network refuses.
    """
    model, image = as_model(model), as_image(image)
    prepared = as_input(model, image)
    parts = [part for part in parts if any(part in layer.parts for layer in layers)] or parts
    batch = as_batch(model, [prepared])
    try:
        with evaluating(model.model), torch.inference_mode(), ea_vision.record_attention(
                model.model, [layer.number for layer in layers], parts=parts) as maps:
            output = model.model(batch)
    except (ValueError, AssertionError) as error:
        raise UsageError(f"{model.label} on a {prepared.shape[1]}x{prepared.shape[2]} input: {error}") from error
    return Recording(model, prepared, maps, None if isinstance(image, Tensor) else model.photo(image), output)


def cell_of(query: Query, img_size: tuple[int, int], feat_size: tuple[int, int]) -> Query:
    """Return (row, column) of the map's cell that a pixel (y, x) of the input lies in, which is also its place in an
    input of another size; a token by name as it is."""
    if isinstance(query, str):
        return query
    return query[0] * feat_size[0] // img_size[0], query[1] * feat_size[1] // img_size[1]


def add_contributions(recording: Recording) -> None:
    """Add to the maps of evolving layers the attention that remains where the previous map, or the layer's own logits,
    are 0: the parts of WITHOUT. The recording must have all parts and all heads.

    A layer lacks them whose attention is not the softmax of what its evolution makes of both.
    """
    for layer in recording.maps.values():
        module = recording.model.model.get_submodule(layer.name)
        own, previous = layer.self_logits, layer.prev_logits
        if own is None or previous is None or layer.attn is None or getattr(module, "evolution", None) is None:
            continue
        size = [layer.feat_size] if module.evolution.spatial else []
        with evaluating(module), torch.inference_mode():
            again, *without = (module.attention_of(module.evolution(*logits, *size), layer.feat_size) for logits in (
                (own, previous), (own, torch.zeros_like(previous)), (torch.zeros_like(own), previous)))
        if again.shape == layer.attn.shape and torch.allclose(again, layer.attn, atol=1e-3):
            for part, attn in zip(WITHOUT, without, strict=True):
                layer.save(part, attn)


def query_name(query: Query) -> str:
    """Name a query: `y 3, x 4`, `class token`, `distillation token`, `register 1`."""
    if not isinstance(query, str):
        return f"y {query[0]}, x {query[1]}"
    return {"cls": "class token", "dist": "distillation token"}.get(query, query.replace("reg", "register "))
