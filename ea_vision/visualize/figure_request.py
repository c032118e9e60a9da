"""What a figure is asked to show: models, their layers, heads and queries, its style and width.

Arguments of the functions `plot_*` (each takes those that its figure needs):

    model      a timm network (an nn.Module, which runs in evaluation mode), or the name of one, a run folder or a
               checkpoint. Several: a list of these, or a mapping from labels to them.
    image      a file's path, a PIL image or an array (H, W, 3), which is resized and cropped for the model; or a tensor
               (3, H, W) that is not resized: uint8, or floating point in 0..1 before normalisation.
    layers     numbers from 1 in forward order, module names, or a text such as "1,3-5"; None: of those that have the
               queries at most 6, evenly spaced, and no more than fit a page (rollout, statistics: all).
    heads      numbers from 0, "mean", or a text such as "0,2,mean"; None: all and their mean.
    queries    points (y, x) in pixels of the network's input; names of tokens before a vision transformer's patches,
               such as "cls", or of a detector's learned queries, "query1", ...; or "all": the mean of all pixels'
               queries. None: three points on the diagonal.
    width      of the figure in inches, 3.3 for a paper's column, 6.75 for its page; None: as wide as it needs to be, at
               most 6.75.
    mean, std  three numbers each, for images in 0..1; None: the model's.
    processor  an image processor of transformers, its path or name, for mean, std, size and resampling.
    **style    how maps are drawn, the fields of `MapStyle`: style ("cells" or "fog"), overlay, scale, cmap, opacity.

Invalid arguments raise UsageError (a ValueError), which names what was required and what was received.
"""

import logging
import sys
from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext
from functools import partial
from itertools import chain
from numbers import Number
from pathlib import Path
from typing import Any

import numpy as np
import torch
from matplotlib.figure import Figure
from PIL import Image
from torch import Tensor, nn
from torchvision.transforms.v2.functional import crop

import ea_vision
from ea_vision.base.errors import UsageError
from ea_vision.base.figures import check_width
from ea_vision.models.modes import evaluating
from ea_vision.ops import Size
from ea_vision.recorder.recording import AttentionLayer, AttentionMaps, LayerMaps
from ea_vision.recorder.selection import numbered, parse_layers, parse_queries
from ea_vision.visualize.map_style import STYLE_FIELDS, style_of
from ea_vision.visualize.sheet import TooHigh
from ea_vision.visualize.tiles import ALL, MEAN, Head, Query, Recording
from ea_vision.zoo.inputs import ImageSource, as_image
from ea_vision.zoo.loaded import LoadedModel, as_model, load_model
from ea_vision.zoo.source import checkpoints_of, folder_of_file

log = logging.getLogger(__name__)

AnyImage = ImageSource | Tensor  # see `ea_vision.zoo.loaded.LoadedModel.input_of`
Model = nn.Module | LoadedModel | str | Path
Models = Model | Sequence[Model] | Mapping[str, Model]
Layers = str | int | Sequence[int | str] | None
Heads = str | int | Sequence[int | str] | None
Queries = Sequence[Query] | str | None
MOST_LAYERS = 6  # drawn by default
DIAGONAL = ((0.25, 0.25), (0.5, 0.5), (0.75, 0.75))  # queries, as fractions of height and width
MIDDLE = ((0.5, 0.5),)
NEED_RUNS = "checkpoints need a run folder, its *.ckpt files or its snapshots"


def only(values: Sequence, kind: str):
    """Return the one value of an option that allows one.

    Raises:
        UsageError: there is not exactly one.
    """
    if len(values) != 1:
        raise UsageError(
            f"this figure shows one {kind}; got {len(values)}: --help shows how to choose"
        )
    return values[0]


def parse_heads(text: str, layers: Sequence[LayerMaps]) -> list[Head]:
    """Parse heads: `all`, numbers and `mean`, separated by commas.

    Raises:
        UsageError: a head that was not recorded of every layer.
    """
    shared = set.intersection(*(set(layer.heads) for layer in layers))
    common = [head for head in layers[0].heads if head in shared]
    heads = []
    for item in text.split(","):
        if item == ALL:
            heads += common
        elif item == MEAN:
            heads.append(MEAN)
        elif item in map(str, common):
            heads.append(int(item))
        else:
            names = ", ".join(map(str, common))
            raise UsageError(f"heads must be some of {names}, all or {MEAN}, got {item!r}")
    counts = {len(layer.heads) for layer in layers}
    if ALL in text.split(",") and len(counts) > 1:
        log.warning(
            "layers have %d to %d heads, so only heads 0 to %d of each are drawn: --layers (layers=) "
            "chooses layers with equally many heads",
            min(counts),
            max(counts),
            min(counts) - 1,
        )
    return heads


def spread(items: Sequence, count: int = MOST_LAYERS) -> list:
    """Return at most `count` of the items, evenly spaced, including the first and the last."""
    places = np.linspace(0, len(items) - 1, min(count, len(items)))
    return [items[round(place)] for place in places]


def title_of(model: LoadedModel) -> str:
    """Name a model in a title, with its weights."""
    if model.weights in model.label:
        return model.label
    return f"{model.label}, weights {model.weights}"


def as_models(models, **images) -> list[LoadedModel]:
    """Load one model, several, or a mapping from labels to models; return a list of models with unique labels.
    **images: see `as_model`."""
    if isinstance(models, (str, Path, nn.Module, LoadedModel)):
        models = [models]
    have_labels = isinstance(models, Mapping)
    values = models.values() if have_labels else models
    loaded = [as_model(model, **images) for model in values]
    labels = models if have_labels else numbered([model.label for model in loaded])
    for model, label in zip(loaded, labels, strict=True):
        model.label = label
    return loaded


def epochs_of(
    targets: Models, load: Callable[[str], LoadedModel] = load_model
) -> list[LoadedModel]:
    """Load the *.ckpt files and snapshots of run folders, or such files, ordered by run and epoch. If several files
    have the same epoch, the last one is returned. Models that are loaded already are returned unchanged.

    Runs whose folders have the same name are numbered.

    Raises:
        UsageError: a run folder without such files, or a model without an epoch.
    """
    targets = list(targets) if isinstance(targets, (list, tuple)) else [targets]
    if all(isinstance(target, LoadedModel) for target in targets):
        return targets
    runs = {}
    for target in targets:
        if not isinstance(target, (str, Path)):
            raise UsageError(f"{NEED_RUNS}, got {type(target).__name__}")
        for path in checkpoints_of(str(target)):
            model = load(path)
            if model.epoch is None:
                raise UsageError(f"{NEED_RUNS}, got {model.label}")
            run = folder_of_file(Path(path).resolve())
            runs.setdefault(run, {})[model.epoch] = model
    labels = numbered([run_label(next(iter(epochs.values()))) for epochs in runs.values()])
    models = []
    for label, epochs in zip(labels, runs.values(), strict=True):
        for epoch in sorted(epochs):
            epochs[epoch].label = f"{label}, epoch {epoch}"
            models.append(epochs[epoch])
    return models


def run_label(model: LoadedModel) -> str:
    """Return a checkpoint's label without its epoch."""
    return model.label.removesuffix(f", epoch {model.epoch}")


def as_images(images: AnyImage | Sequence[AnyImage]) -> list[AnyImage]:
    """Return a list of one image or several.

    Raises:
        UsageError: the list is empty.
    """
    image_list = list(images) if isinstance(images, (list, tuple)) else [images]
    if not image_list:
        raise UsageError("at least one image required, got none")
    return image_list


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
    shown = next((layer.layout.covered for layer in maps.values() if layer.layout.covered), size)
    photo = model.preparation.photo(image) if isinstance(image, Image.Image) else None
    if photo is not None and shown != size:
        photo = _part_of_photo(photo, size, shown)
    return Recording(model, crop(model.shown(x), 0, 0, *shown), maps, photo, output, batch)


def _part_of_photo(photo: np.ndarray, size: Size, shown: Size) -> np.ndarray:
    """Crop a photo (height, width, 3) from the top left, as cropping an input of `size` to `shown` would; where `shown`
    is larger than `size`, pad it with black."""
    height = round(shown[0] * photo.shape[0] / size[0])
    width = round(shown[1] * photo.shape[1] / size[1])
    return np.asarray(Image.fromarray(photo).crop((0, 0, width, height)))


class FigureRequest:
    """The models of a figure, their layers, and the heads and queries that all models share.

    Args:
        models, layers, heads, queries, width, mean, std, processor, **style: see above; heads None: all and their mean,
            or with several models the mean alone. The first four go by position, so that by name they are keywords that
            the figure lacks.
        some: by default take the layers that `spread` chooses, not all.
        style_fields: the fields of `MapStyle` that the figure has.

    Attributes:
        models: loaded.
        layers: of each model, those to draw.
        queries: as the commands take them; `points` parses them.
        style: a `MapStyle`.
        width: inches, or None.

    Raises:
        UsageError: layers that a model lacks, a keyword that the figure lacks, or an unknown style.
    """

    def __init__(
        self,
        models: Models,
        layers: Layers = None,
        heads: Heads = None,
        queries: Queries = None,
        /,
        *,
        some: bool = False,
        style_fields: Sequence[str] = STYLE_FIELDS,
        width: float | None = None,
        mean: Sequence[float] | None = None,
        std: Sequence[float] | None = None,
        processor: Any = None,
        **style,
    ):
        self.style = style_of(style, style_fields)
        self.width = check_width(width)
        self.queries = [] if queries is None else list(map(text_of, _listed(queries)))
        self.default_layers = layers is None
        self.most_layers = MOST_LAYERS if some and self.default_layers else sys.maxsize
        self.models = as_models(models, processor=processor, mean=mean, std=std)
        text = ALL if layers is None else text_of(layers)
        self.selected = [parse_layers(text, model) for model in self.models]
        self.layers = [spread(layers, self.most_layers) for layers in self.selected]
        if heads is None:
            heads = MEAN if len(self.models) > 1 else f"{ALL},{MEAN}"
        self.head_text = text_of(heads)

    @property
    def numbers(self) -> list[list[int]]:
        """The numbers of each model's layers."""
        return [[layer.number for layer in layers] for layers in self.layers]

    def record(self, image: AnyImage, parts: Sequence[str] = ("attn",)) -> list[Recording]:
        """Run each model on an image; see `record`. If no layers were named, those that lack the queries are skipped
        (class attention has no queries of pixels)."""
        recordings = []
        for index, model in enumerate(self.models):
            recording = record(model, image, self.layers[index], parts)
            if self.default_layers and not all(map(self._has_queries, recording.maps.values())):
                layers = self.selected[index]
                maps = record(model, image, layers).maps
                asking = [layer for layer in layers if self._has_queries(maps[layer.number])]
                # if none has the queries, drawing them raises the error
                self.layers[index] = spread(asking or layers, self.most_layers)
                recording = record(model, image, self.layers[index], parts)
            recordings.append(recording)
        return recordings

    def _has_queries(self, layer: LayerMaps) -> bool:
        texts = self.queries or ["0,0"]
        tokens = [text for text in texts if text.isalnum() and text != ALL]
        if len(tokens) < len(texts) and not layer.pixels_ask:
            return False
        return set(map(layer.own_name, tokens)) <= set(layer.query_names)

    def heads(self, recordings: Sequence[Recording]) -> list[Head]:
        """Return the heads, numbers or "mean", which every recorded layer must have. If layers have different numbers
        of heads, a warning says that `all` means those that every layer has."""
        maps = [recording.maps.values() for recording in recordings]
        return parse_heads(self.head_text, list(chain.from_iterable(maps)))

    def points(
        self, default: Sequence[tuple[float, float]] = DIAGONAL, seen: Sequence[Recording] = ()
    ) -> list[Query]:
        """Return the query points in pixels of the first recording in `seen`, or without one of the first model's
        input. default: points as fractions of height and width."""
        size = (seen or self.models)[0].img_size
        return parse_queries(self.queries, size, default)

    def fit_page(self, draw: Callable[..., Figure]) -> Figure:
        """Draw the layers. Of layers that were taken by default, draw only as many, evenly spaced, as fit a page.

        Args:
            draw: a function of the numbers of each model's layers, and of the keywords style, width and left_out (see
                `sheet.sheet`).
        """
        draw = partial(draw, style=self.style, width=self.width)
        if not self.default_layers:
            return draw(*self.numbers)
        total = max(map(len, self.selected))
        for count in range(max(map(len, self.numbers)), 1, -1):
            left_out = f"; {count} of {total} layers: --layers (layers=) chooses others"
            drawn = [spread(numbers, count) for numbers in self.numbers]
            try:
                return draw(*drawn, left_out=left_out if count < total else "")
            except TooHigh:
                continue
        if total > 1:
            log.warning(
                "1 of %d layers is drawn, since two do not fit a page: --layers (layers=) chooses others",
                total,
            )
        return draw(*(numbers[:1] for numbers in self.numbers))


def _listed(value: str | Number | Sequence) -> Sequence:
    """Return a list of one value, or several as they are."""
    return [value] if isinstance(value, (str, Number)) else value


def text_of(value: str | int | Sequence[int | str]) -> str:
    """Write items as the commands take them, separated by commas."""
    return ",".join(map(str, _listed(value)))
