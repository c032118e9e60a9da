"""Entropy, distance, correlation with the previous layer's map and share of position alone, by layer and head."""

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import chain
from pathlib import Path

import numpy as np
import torch
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from torch import Tensor
from tqdm import tqdm

from ea_vision.base.errors import UsageError
from ea_vision.base.figures import PAGE, check_width, color_cycle
from ea_vision.base.files import atomic_write
from ea_vision.base.print import legend_below, new_figure, points, print_style, small_ticks, wrapped
from ea_vision.models.modes import evaluating
from ea_vision.recorder.quantities import LayerQuantities, measure, quantities_csv
from ea_vision.visualize.figure_options import check_output, make_parser, run_figure
from ea_vision.visualize.figure_request import (
    AnyImage,
    FigureRequest,
    Layers,
    Models,
    as_images,
    title_of,
)
from ea_vision.zoo.inputs import as_image
from ea_vision.zoo.loaded import LoadedModel

EXAMPLES = """\
  ea-vision statistics --model aa_resnet34,pa_aa_resnet34,ea_aa_resnet34 -o statistics.png images/
  ea-vision statistics --model runs/aa,runs/ea --csv numbers.csv --width 3.3 -o numbers.pdf images/
"""
MARKERS = "osD^vP*"


def plot_statistics(
    models: Models,
    images: AnyImage | Sequence[AnyImage],
    layers: Layers = None,
    *,
    csv: Path | None = None,
    batch_size: int = 16,
    **how,
) -> Figure:
    """Draw entropy, distance, correlation with the previous layer's map and share of position alone by layer and head,
    as means over images, with a progress bar in a terminal.

    Args:
        models, images, layers, **how: see `ea_vision.visualize.figure_request`.
        csv: file for the numbers, one row per model, layer and head.
        batch_size: images at a time.

    Raises:
        UsageError: no image.
    """
    request = FigureRequest(models, layers, style_fields=(), **how)
    images = as_images(images)
    request.record(images[0])  # finds the layers that have queries of pixels
    measured = {}
    for model, numbers in zip(request.models, request.numbers, strict=True):
        with evaluating(model.model):
            batches = _batches(model, images, batch_size)
            measured[title_of(model)] = measure(model.model, batches, numbers)
    figure = draw_statistics(measured, width=request.width)
    if csv:
        atomic_write(csv, quantities_csv(measured).encode())
    return figure


def _batches(model: LoadedModel, images: Sequence[AnyImage], size: int) -> Iterator[Tensor]:
    starts = range(0, len(images), size)
    for first in tqdm(starts, unit="batch", desc=model.label, disable=None):
        batch = map(as_image, images[first : first + size])
        yield model.batch_of([model.input_of(image) for image in batch])


def _correlation(layer: LayerQuantities) -> Tensor:
    if layer.correlations is None:
        return torch.tensor([[math.nan]])
    return layer.correlations


@dataclass
class Panel:
    """A panel of the figure.

    Attributes:
        title: of the quantity.
        values: its function of a layer, (images, K), NaN if it has none.
        uniform: its function of a layer for uniform attention.
        top: the axis reaches at least this far.
    """

    title: str
    values: Callable[[LayerQuantities], Tensor]
    uniform: Callable[[LayerQuantities], float] | None = None
    top: float = 1.05

    def is_known(self, layers: Sequence[LayerQuantities]) -> bool:
        return any(self.values(layer).isfinite().any() for layer in layers)


PANELS = (
    Panel(
        "entropy / log N", lambda layer: layer.entropies / layer.uniform_entropy, lambda layer: 1.0
    ),
    Panel(
        "distance of attention (pixels of the input)",
        lambda layer: layer.distances,
        lambda layer: layer.uniform_distance,
        top=0.0,
    ),
    Panel("correlation with the previous layer's map", _correlation),
    Panel("share of position alone", lambda layer: layer.positions),
)


def draw_statistics(
    measured: Mapping[str, Sequence[LayerQuantities]], *, width: float | None = None
) -> Figure:
    """Draw one panel per quantity over the layers: dots are heads, lines their means, colours models. Bars are standard
    deviations of that mean over images, dotted lines uniform attention. Lines break where maps change size.

    Args:
        measured: results of `ea_vision.recorder.quantities.measure`, by label.
        width: inches.

    Raises:
        UsageError: no quantity is finite: maps contain NaN, or have negative entries and belong to one image and layer.
    """
    layers = list(chain.from_iterable(measured.values()))
    panels = [panel for panel in PANELS if panel.is_known(layers)]
    if not panels:
        raise UsageError(
            f"maps whose entries are numbers of at least 0 are required, got none of {', '.join(measured)}"
        )
    width = check_width(width) or PAGE
    numbers = [layer.number for layer in layers]
    columns = 2 if width >= 5 and len(panels) > 1 else 1
    rows = -(-len(panels) // columns)
    with print_style():
        figure = new_figure(width, rows * 1.55 + 1.0, layout="constrained")
        grid = figure.subplots(rows, columns, squeeze=False).ravel()
        for axes in grid[len(panels) :]:
            axes.set_visible(False)
        for axes, panel in zip(grid, panels, strict=False):
            _draw_panel(axes, panel, measured)
            axes.set_xlim(min(numbers) - 0.6, max(numbers) + 0.6)
            title = wrapped(panel.title, 72 * width / columns - 40, points("medium"))
            axes.set_title(title)
        for axes in grid[len(panels) - columns : len(panels)]:
            axes.set_xlabel("attention layer")
        legend_below(figure, *grid[0].get_legend_handles_labels())
        images = layers[0].images
        title = f"mean over {images} images; dots: heads; lines: their means; bars: standard deviation over images"
        if images == 1:
            title = "mean over 1 image; dots: heads; lines: their means"
        small = points()
        figure.suptitle(wrapped(title, 72 * width - 10, small), fontsize=small)
    return figure


def _draw_panel(
    axes: Axes, panel: Panel, measured: Mapping[str, Sequence[LayerQuantities]]
) -> None:
    for number, (label, layers) in enumerate(measured.items()):
        shift = (number - (len(measured) - 1) / 2) * 0.16  # models do not hide each other
        _draw_model(axes, layers, panel.values, number, shift, label)
        if panel.uniform:
            places = np.array([layer.number for layer in layers])
            uniform = [panel.uniform(layer) for layer in layers]
            lines = axes.hlines(uniform, places - 0.5, places + 0.5, colors="0.4")
            lines.set(linestyle=":", linewidth=1, label="" if number else "uniform attention")
    low, high = axes.get_ylim()
    axes.set_ylim(min(low, 0.0), max(high, panel.top))
    axes.xaxis.get_major_locator().set_params(integer=True, min_n_ticks=1)
    axes.grid(alpha=0.3)
    small_ticks(axes)


def _draw_model(
    axes: Axes,
    layers: Sequence[LayerQuantities],
    values_of: Callable[[LayerQuantities], Tensor],
    number: int,
    shift: float,
    label: str,
) -> None:
    """Draw a model's heads, their mean and its spread, moved aside by `shift`. Lines break where maps change size."""
    colors = color_cycle()
    color = colors[number % len(colors)]
    marker = MARKERS[number % len(MARKERS)]
    line = []  # x, mean and spread of each layer
    for index, layer in enumerate(layers):
        if index and layer.feat_size != layers[index - 1].feat_size:
            line.append([math.nan] * 3)
        values = values_of(layer)
        heads = values.nanmean(0)  # NaN where a map is constant
        images = values.nanmean(1)
        images = images[images.isfinite()]
        x = layer.number + shift
        spread = images.std().item() if len(images) > 1 else math.nan
        line.append([x, heads.nanmean().item(), spread])
        dots = axes.scatter([x] * len(heads), heads, s=5, color=color, marker=marker)
        dots.set(alpha=0.35, linewidths=0)
    x, means, spreads = np.reshape(line, (-1, 3)).T
    axes.plot(x, means, label=label, color=color, marker=marker)
    axes.errorbar(x, means, spreads, fmt="none", ecolor=color, elinewidth=0.8, alpha=0.7)


def main(argv: Sequence[str] | None = None) -> int:
    parser = make_parser(
        __doc__, EXAMPLES, output="statistics.png", heads=None, queries=False, style=()
    )
    parser.add_argument(
        "--csv", metavar="FILE", help="write the numbers too, one row per model, layer and head"
    )
    options = parser.parse_args(argv)
    csv = check_output(Path(options.csv), (".csv",), "--csv") if options.csv else None
    plot = partial(plot_statistics, csv=csv)
    return run_figure(options, plot, together="always", others=[csv] if csv else [])
