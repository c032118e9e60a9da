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
               such as "cls"; or "all": the mean of all pixels' queries. None: three points on the diagonal.
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
from ea_vision.recorder.recording import AttentionLayer, AttentionMaps, LayerMaps
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


def parse_heads(text: str, layers: Sequence[AttentionLayer]) -> list[Head]:
    """Parse heads: `all`, numbers and `mean`, separated by commas.

    Raises:
        UsageError: a head that a layer does not have.
    """
    num_heads = min(layer.num_heads for layer in layers)
    heads = []
    for item in text.split(","):
        if item == "all":
            heads += range(num_heads)
        elif item == MEAN:
            heads.append(MEAN)
        elif item in map(str, range(num_heads)):
            heads.append(int(item))
        else:
            raise UsageError(f"heads must be 0 to {num_heads - 1}, all or {MEAN}, got {item!r}")
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
        heads: numbers, or "mean".
        queries: as they were passed; `points` parses them.
        style: a `MapStyle`.
        width: inches, or None.

    Raises:
        UsageError: layers or heads that a model lacks, or an unknown style.
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
            heads = MEAN if len(self.models) > 1 else f"all,{MEAN}"
        text = text_of(heads)
        self.all_heads = ALL in text.split(",")
        self.heads = parse_heads(text, list(chain.from_iterable(self.layers)))

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
                maps = record(model, image, select_layers(None, model)).maps
                self.layers[index] = self._layers_with_queries(model, maps)
                recording = record(model, image, self.layers[index], parts)
            recordings.append(recording)
        return recordings

    def _has_queries(self, layer: LayerMaps) -> bool:
        texts = [text_of(query) for query in self.queries or ["0,0"]]
        tokens = [text for text in texts if text.isalnum() and text != ALL]
        if len(tokens) < len(texts) and not layer.pixels_ask:
            return False
        return set(tokens) <= set(layer.query_names)

    def _layers_with_queries(self, model: LoadedModel, maps: AttentionMaps) -> list[AttentionLayer]:
        """Return the layers whose `maps` have the queries. If none has, return all: drawing them raises the error."""
        layers = select_layers(None, model)
        layers = [layer for layer in layers if self._has_queries(maps[layer.number])] or layers
        return spread(layers) if self.some else layers

    def warn_of_heads_left_out(self) -> None:
        """If layers have different numbers of heads, warn that `all` means the heads that every layer has."""
        counts = {layer.num_heads for layer in chain.from_iterable(self.layers)}
        if self.all_heads and len(counts) > 1:
            log.warning(
                "layers have %d to %d heads, so only heads 0 to %d of each are drawn: --layers (layers=) "
                "chooses layers with equally many heads",
                min(counts),
                max(counts),
                min(counts) - 1,
            )

    def points(
        self, default: Sequence[tuple[float, float]] = DIAGONAL, seen: Sequence[Recording] = ()
    ) -> list[Query]:
        """Return the query points in pixels of the first recording in `seen`, or without one of the first model's
        input. default: points as fractions of height and width."""
        size = (seen or self.models)[0].img_size
        if not self.queries:
            return parse_queries([], size, default)
        points = []
        for query in map(text_of, self.queries):
            points += [ALL] if query == ALL else parse_queries([query], size)
        return points

    def fit_page(self, draw: Callable[..., Figure], **options) -> Figure:
        """Draw the layers. Of layers that were taken by default, draw only as many as fit a page.

        Args:
            draw: a function of the numbers of the model's layers (with several models, of a list for each), of the
                keywords style, width and left_out (see `sheet.sheet`), and of the options.
        """
        draw = partial(draw, style=self.style, width=self.width, **options)
        if not self.default_layers:
            return draw(self._one_or_all(self.numbers))
        totals = [len(select_layers(None, model)) for model in self.models]
        one_or_all = self._one_or_all
        return fit_page(
            lambda numbers, **how: draw(one_or_all(numbers), **how), self.numbers, totals
        )

    def _one_or_all(self, numbers: list[list[int]]) -> list:
        """Return the list of the only model, or those of all."""
        return numbers if len(self.models) > 1 else numbers[0]


def fit_page(draw: Callable[..., Figure], layers: Sequence[list], totals: Sequence[int]) -> Figure:
    """Draw the layers of each model; evenly spaced ones of them if all together do not fit a page.

    Args:
        draw: a function of such lists and of the keyword left_out; see `sheet.sheet`.
        totals: numbers of layers of the models.
    """
    for count in range(max(map(len, layers)), 1, -1):
        drawn = [spread(its_layers, count) for its_layers in layers]
        left_out = ""
        if any(len(its_layers) < total for its_layers, total in zip(drawn, totals, strict=True)):
            left_out = (
                f"; {len(drawn[0])} of {max(totals)} layers: --layers (layers=) chooses others"
            )
        try:
            return draw(drawn, left_out=left_out)
        except TooHigh:
            continue
    if max(totals) > 1:
        log.warning(
            "1 of %d layers is drawn, since two do not fit a page: --layers (layers=) chooses others",
            max(totals),
        )
    return draw([its_layers[:1] for its_layers in layers])


def text_of(value: str | int | Sequence[int | str]) -> str:
    """Write items as the commands take them, separated by commas."""
    items = [value] if isinstance(value, (str, Number)) else value
    return ",".join(map(str, items))
