"""A call a figure: a model and an image in, a matplotlib Figure out.

What the functions take alike:

    model    a timm network (an nn.Module, which runs in evaluation mode), or the name of one, a run folder or a
             checkpoint. Several: a list of these, or a mapping from labels to them.
    image    the path of a file, a PIL image or an array (H, W, 3), resized and cut as the model wants it, or a tensor
             (3, H, W) as the network is to see it: uint8, or floating point in 0..1 before normalisation.
    layers   numbers from 1 in forward order, module names, or a text such as "1,3-5"; None: all, and in plot_heads,
             plot_models and plot_matrix at most 6 over the depth of the network.
    heads    numbers from 0, "mean", or a text such as "0,2,mean"; None: all and their mean.
    queries  points (y, x) in pixels of the input as the network sees it, or of a vision transformer tokens before its
             patches by name, such as "cls"; None: three points on the diagonal.
    **style   how maps are drawn, the fields of `MapStyle`: overlay, scale, cmap, opacity, smooth, as_seen.

What cannot be is a UsageError (a ValueError) that names what was required and what was received.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import replace

from matplotlib.figure import Figure
from torch import Tensor, nn

from ea_vision.analysis.inputs import ImageSource, as_input
from ea_vision.analysis.loading import LoadedModel, load_model, parse_layers
from ea_vision.analysis.quantities import measure
from ea_vision.analysis.recording import PARTS, AttentionLayer
from ea_vision.visualize.figure_options import (
    DIAGONAL,
    by_epoch,
    checkpoints_of,
    parse_heads,
    parse_queries,
    some_layers,
)
from ea_vision.visualize.films import animation_frames
from ea_vision.visualize.heatmap import heads_by_queries
from ea_vision.visualize.image_grid import images_grid
from ea_vision.visualize.image_maps import MEAN, Head, Point, Query, Recording, as_model, as_models, evaluating, record
from ea_vision.visualize.map_style import MapStyle
from ea_vision.visualize.match import match, match_figure
from ea_vision.visualize.matrix import attention_matrices, check_part
from ea_vision.visualize.rollout import rollout_figure
from ea_vision.visualize.side_by_side import models_side_by_side
from ea_vision.visualize.statistics import statistics_figure
from ea_vision.visualize.strip import evolution_strip, training_strip

Model = nn.Module | LoadedModel | str
Models = Model | Sequence[Model] | Mapping[str, Model]
Layers = str | int | Sequence[int | str] | None
Heads = str | int | Sequence[int | str] | None
Queries = Sequence[Query] | None


def plot_heads(model: Model, image: ImageSource | Tensor, layers: Layers = None, heads: Heads = None,
               queries: Queries = None, **style) -> Figure:
    """What query points attend to: for each layer a row a head, a column a query."""
    recording, chosen = _record(as_model(model), image, layers, some=True)
    return heads_by_queries(recording, _numbers(chosen), _heads(heads, chosen), _points(queries, recording),
                            MapStyle(**style))


def plot_models(models: Models, image: ImageSource | Tensor, layers: Layers = None, heads: Heads = MEAN,
                queries: Queries = None, **style) -> Figure:
    """The same layers of several models: for each query and head a row a model, a column a layer."""
    recorded = [_record(model, image, layers, some=True) for model in as_models(models)]
    recordings = [recording for recording, _ in recorded]
    return models_side_by_side(recordings, [_numbers(chosen) for _, chosen in recorded],
                               _heads(heads, [layer for _, chosen in recorded for layer in chosen]),
                               _points(queries, recordings[0]), MapStyle(**style))


def plot_strip(model: Model, image: ImageSource | Tensor, layers: Layers = None, head: Head = MEAN,
               query: Query | None = None, **style) -> Figure:
    """One query through the layers of each chain, part by part; `query` None: the middle."""
    model = as_model(model)
    chosen = _chosen(layers, model)
    parts = [part for part in PARTS if any(part in layer.parts for layer in chosen)]
    recording = record(model, image, chosen, parts)
    [one] = _heads([head], chosen)
    [point] = _points(None if query is None else [query], recording, [(0.5, 0.5)])
    return evolution_strip(recording, _numbers(chosen), one, point, MapStyle(**style))


def plot_matrix(model: Model, image: ImageSource | Tensor, layers: Layers = None, heads: Heads = None,
                part: str = "attn", **style) -> Figure:
    """Whole maps, queries by keys: a row a layer, a column a head. `part`: one of PARTS."""
    model = as_model(model)
    chosen = _chosen(layers, model, some=True)
    check_part(part, chosen, model.label)
    recording = record(model, image, chosen, (part,), places=False)
    return attention_matrices(recording, _numbers(chosen), _heads(heads, chosen), part,
                              MapStyle(**style))


def plot_rollout(models: Models, image: ImageSource | Tensor, layers: Layers = None, queries: Queries = None,
                 **style) -> Figure:
    """Where pixels of the last map come from, through all `layers`: a row a model, a column a query."""
    recordings = [_record(model, image, layers)[0] for model in as_models(models)]
    return rollout_figure(recordings, _points(queries, recordings[0]), MapStyle(**style))


def plot_statistics(models: Models, images: Iterable[ImageSource | Tensor], layers: Layers = None) -> Figure:
    """Entropy, distance and likeness to the previous layer's map by layer and head, means over images."""
    images, measured = list(images), {}
    for model in as_models(models):
        device = next(model.model.parameters()).device
        batches = (model.normalize(as_input(model, image)[None].to(device)) for image in images)
        with evaluating(model.model):
            measured[model.label] = measure(model.model, batches, _numbers(_chosen(layers, model)))
    return statistics_figure(measured)


def plot_frames(models: Models, image: ImageSource | Tensor, layers: Layers = None, heads: Heads = MEAN,
                queries: Queries = None, **style) -> Iterator[Figure]:
    """The frames of an animation, of one scale: for each model (such as the snapshots of a run) each layer in turn."""
    recorded = [_record(model, image, layers) for model in as_models(models)]
    frames = [(recording, layer.number) for recording, chosen in recorded for layer in chosen]
    return animation_frames(frames, _heads(heads, [layer for _, chosen in recorded for layer in chosen]),
                            _points(queries, recorded[0][0]), MapStyle(**style))


def plot_grid(model: Model, images: Iterable[ImageSource | Tensor], layer: int | str = 1, head: Head = MEAN,
              query: Query | None = None, **style) -> Figure:
    """One head of one layer on many images; `query` None: the mean of all queries, which is what every pixel gets."""
    model = as_model(model)
    [one] = _chosen(layer, model)
    images = list(images)
    named = [replace(model, label=f"image {number}") for number in range(1, len(images) + 1)]
    recordings = [record(each, image, [one]) for each, image in zip(named, images, strict=True)]
    [head] = _heads([head], [one])
    point = None if query is None else _points([query], recordings[0])[0]
    return images_grid(recordings, one.number, head, point, MapStyle(**style))


def plot_match(model: Model, image: ImageSource | Tensor, other: ImageSource | Tensor, query: Point | None = None,
               layers: Layers = None, heads: Heads = MEAN, **style) -> Figure:
    """What a query of `image` (None: its middle) finds in `other`: a row a layer, a column a head; see
    `ea_vision.visualize.match`."""
    model = as_model(model)
    chosen = _chosen(layers, model, some=True)
    matched = match(model, image, other, chosen)
    [point] = _points(None if query is None else [query], matched.one, [(0.5, 0.5)])
    return match_figure(matched, _numbers(chosen), _heads(heads, chosen), point, MapStyle(**style))


def plot_training(run: str, image: ImageSource | Tensor, layers: Layers = None, head: Head = MEAN,
                  query: Query | None = None, **style) -> Figure:
    """Attention through the checkpoints and snapshots of a run folder: a row a layer, a column an epoch; `query` None:
    the middle."""
    models = by_epoch([load_model(file) for file in checkpoints_of([run])])
    recorded = [_record(model, image, layers) for model in models]
    recordings, chosen = [recording for recording, _ in recorded], recorded[0][1]
    [point] = _points(None if query is None else [query], recordings[0], [(0.5, 0.5)])
    [one] = _heads([head], chosen)
    return training_strip(recordings, _numbers(chosen), one, point, MapStyle(**style))


def _record(model: LoadedModel, image: ImageSource | Tensor, layers: Layers,
            some: bool = False) -> tuple[Recording, list[AttentionLayer]]:
    chosen = _chosen(layers, model, some)
    return record(model, image, chosen), chosen


def _chosen(layers: Layers, model: LoadedModel, some: bool = False) -> list[AttentionLayer]:
    """The layers asked for; by default all, or with `some` those of `some_layers`."""
    chosen = parse_layers(_text(layers, "all"), model)
    return some_layers(chosen) if some and layers is None else chosen


def _numbers(layers: Sequence[AttentionLayer]) -> list[int]:
    return [layer.number for layer in layers]


def _heads(heads: Heads, layers: Sequence[AttentionLayer]) -> list[Head]:
    return parse_heads(_text(heads, f"all,{MEAN}"), layers)


def _points(queries: Queries, recording: Recording, default: Sequence[tuple[float, float]] = DIAGONAL) -> list[Query]:
    queries = [] if queries is None else queries
    texts = [query if isinstance(query, str) else ",".join(map(str, query)) for query in queries]
    return parse_queries(texts, tuple(recording.image.shape[1:]), default)


def _text(value: str | int | Sequence[int | str] | None, default: str) -> str:
    """What the commands take: items separated by commas."""
    if value is None:
        return default
    return ",".join(map(str, [value] if isinstance(value, (str, int)) else value))
