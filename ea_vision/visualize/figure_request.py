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
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from itertools import chain
from numbers import Number
from pathlib import Path
from typing import Any

import numpy as np
from matplotlib.figure import Figure
from torch import nn

from ea_vision.base.errors import UsageError
from ea_vision.base.figures import check_width
from ea_vision.recorder.recording import AttentionLayer, LayerMaps
from ea_vision.recorder.selection import parse_layers, parse_queries
from ea_vision.visualize.image_maps import AnyImage, as_models, record
from ea_vision.visualize.map_style import style_of
from ea_vision.visualize.sheet import TooHigh
from ea_vision.visualize.tiles import ALL, MEAN, Head, Query, Recording
from ea_vision.zoo.loaded import LoadedModel

log = logging.getLogger(__name__)

Model = nn.Module | LoadedModel | str | Path
Models = Model | Sequence[Model] | Mapping[str, Model]
Layers = str | int | Sequence[int | str] | None
Heads = str | int | Sequence[int | str] | None
Queries = Sequence[Query] | str | None
MOST_LAYERS = 6  # drawn by default
DIAGONAL = ((0.25, 0.25), (0.5, 0.5), (0.75, 0.75))  # queries, as fractions of height and width
MIDDLE = ((0.5, 0.5),)


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
    common = [head for head in layers[0].heads if all(head in layer.heads for layer in layers)]
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


def refuse_arguments(figure: str, how: Mapping[str, Any], **reasons: str) -> None:
    """Raise UsageError if `how` has an argument that a figure lacks.

    Args:
        figure: name of its function.
        reasons: by argument, why the figure lacks it.
    """
    for name, reason in reasons.items():
        if name in how:
            raise UsageError(f"{figure} has no {name}: {reason}")


def select_layers(layers: Layers, model: LoadedModel, some: bool = False) -> list[AttentionLayer]:
    """Return a model's layers; by default all of them, or with `some` at most MOST_LAYERS."""
    if layers is not None:
        return parse_layers(text_of(layers), model)
    every_layer = parse_layers("all", model)
    return spread(every_layer) if some else every_layer


class FigureRequest:
    """The models of a figure, their layers, and the heads and queries that all models share.

    Args:
        models, layers, heads, queries, width, mean, std, processor, **style: see above; heads None: all and their mean,
            or with several models the mean alone.
        some: by default take the layers that `spread` chooses, not all.

    Attributes:
        models: loaded.
        layers: of each model.
        queries: as they were passed; `points` parses them.
        style: a `MapStyle`.
        width: inches, or None.

    Raises:
        UsageError: layers that a model lacks, or an unknown style.
    """

    def __init__(
        self,
        models: Models,
        layers: Layers = None,
        heads: Heads = None,
        queries: Queries = None,
        *,
        some: bool = False,
        width: float | None = None,
        mean: Sequence[float] | None = None,
        std: Sequence[float] | None = None,
        processor: Any = None,
        **style,
    ):
        self.style = style_of(style)
        self.width = check_width(width)
        if queries is None:
            self.queries = []
        else:
            self.queries = [queries] if isinstance(queries, (str, Number)) else list(queries)
        self.some = some
        self.default_layers = layers is None
        self.models = as_models(models, processor=processor, mean=mean, std=std)
        self.layers = [select_layers(layers, model, some) for model in self.models]
        if heads is None:
            heads = MEAN if len(self.models) > 1 else f"{ALL},{MEAN}"
        self.head_text = text_of(heads)

    @property
    def numbers(self) -> list[list[int]]:
        """The numbers of each model's layers."""
        return [[layer.number for layer in layers] for layers in self.layers]

    def record(self, image: AnyImage, parts: Sequence[str] = ("attn",)) -> list[Recording]:
        """Run each model on an image; see `ea_vision.visualize.image_maps.record`. If no layers were named, those that
        lack the queries are skipped (class attention has no queries of pixels)."""
        recordings = []
        for index, model in enumerate(self.models):
            recording = record(model, image, self.layers[index], parts)
            if self.default_layers and not all(map(self._has_queries, recording.maps.values())):
                layers = select_layers(None, model)
                maps = record(model, image, layers).maps
                # if none has the queries, drawing them raises the error
                layers = [one for one in layers if self._has_queries(maps[one.number])] or layers
                self.layers[index] = spread(layers) if self.some else layers
                recording = record(model, image, self.layers[index], parts)
            recordings.append(recording)
        return recordings

    def _has_queries(self, layer: LayerMaps) -> bool:
        texts = [text_of(query) for query in self.queries or ["0,0"]]
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
        return parse_queries(list(map(text_of, self.queries)), size, default)

    def fit_page(self, draw: Callable[..., Figure]) -> Figure:
        """Draw the layers. Of layers that were taken by default, draw only as many, evenly spaced, as fit a page.

        Args:
            draw: a function of the numbers of each model's layers, and of the keywords style, width and left_out (see
                `sheet.sheet`).
        """
        draw = partial(draw, style=self.style, width=self.width)
        if not self.default_layers:
            return draw(*self.numbers)
        total = max(len(select_layers(None, model)) for model in self.models)
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


def text_of(value: str | int | Sequence[int | str]) -> str:
    """Write items as the commands take them, separated by commas."""
    items = [value] if isinstance(value, (str, Number)) else value
    return ",".join(map(str, items))
