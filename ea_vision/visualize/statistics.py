"""Entropy, distance, likeness to the previous layer's map and share of position alone, by layer and head."""

import math
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

import numpy as np
import torch
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from torch import Tensor
from tqdm import tqdm

from ea_vision.base.figures import PAGE, check_width, color_cycle
from ea_vision.base.files import atomic_write
from ea_vision.base.print import legend_below, new_figure, points, print_style, small_ticks, wrapped
from ea_vision.recorder.inputs import find_images
from ea_vision.recorder.loading import positive
from ea_vision.recorder.quantities import LayerQuantities, measure, quantities_csv
from ea_vision.visualize.figure_options import (
    Asked,
    Layers,
    Models,
    check_output,
    make_parser,
    save,
)
from ea_vision.visualize.image_maps import AnyImage, as_batch, as_images, evaluating, title_of

EXAMPLES = """\
  ea-vision statistics --model aa_resnet34,pa_aa_resnet34,ea_aa_resnet34 -o statistics.png images/
  ea-vision statistics --model runs/aa,runs/ea --limit 200 --csv numbers.csv --width 3.3 -o numbers.pdf images/
"""
MARKERS = "osD^vP*"


def plot_statistics(
    models: Models,
    images: AnyImage | Sequence[AnyImage],
    layers: Layers = None,
    *,
    width: float | None = None,
) -> Figure:
    """Draw entropy, distance, likeness to the previous layer's map and share of position alone by layer and head, means
    over images. See `ea_vision.visualize.figure_options` for the arguments.

    Raises:
        UsageError: no image.
    """
    return draw_statistics(_measured(Asked(models, layers), as_images(images)), width=width)


def _measured(
    asked: Asked, images: Sequence[AnyImage], batch_size: int = 16
) -> dict[str, list[LayerQuantities]]:
    """Return quantities by title of the model, with a progress bar in a terminal."""
    measured = {}
    for model, numbers in zip(asked.models, asked.numbers, strict=True):
        starts = tqdm(
            range(0, len(images), batch_size), unit="batch", desc=model.label, disable=None
        )
        batches = (as_batch(model, images[first : first + batch_size]) for first in starts)
        with evaluating(model.model):
            measured[title_of(model)] = measure(model.model, batches, numbers)
    return measured


# title; a layer's values (images, K), not a number where there are none; those of uniform attention; how far the axis
# reaches at least
PANELS = (
    (
        "entropy / log N",
        lambda layer: layer.entropies / layer.uniform_entropy,
        lambda layer: 1.0,
        1.05,
    ),
    (
        "distance of attention (pixels of the input)",
        lambda layer: layer.distances,
        lambda layer: layer.uniform_distance,
        0.0,
    ),
    (
        "correlation with the previous layer's map",
        lambda layer: (
            torch.tensor([[math.nan]]) if layer.correlations is None else layer.correlations
        ),
        None,
        1.05,
    ),
    ("share of position alone", lambda layer: layer.positions, None, 1.05),
)


def draw_statistics(
    measured: Mapping[str, Sequence[LayerQuantities]], *, width: float | None = None
) -> Figure:
    """Draw a panel a quantity over the layers, a dot a head and a line the mean of heads, a colour a model. Bars are
    standard deviations of that mean over images; lines break where maps have another size; dotted is uniform attention.

    Args:
        measured: by label; from `ea_vision.recorder.quantities.measure`.
        width: inches.
    """
    panels = [
        panel
        for panel in PANELS
        if any(panel[1](layer).isfinite().any() for layers in measured.values() for layer in layers)
    ]
    width, longest = check_width(width) or PAGE, max(measured.values(), key=len)
    columns = 2 if width >= 5 and len(panels) > 1 else 1
    rows = -(-len(panels) // columns)
    with print_style():
        figure = new_figure(width, rows * 1.55 + 1.0, layout="constrained")
        grid = figure.subplots(rows, columns, squeeze=False).ravel()
        for axes in grid[len(panels) :]:
            axes.set_visible(False)
        for axes, (title, values_of, uniform, top) in zip(grid, panels, strict=False):
            for number, (label, layers) in enumerate(measured.items()):
                _draw_model(
                    axes,
                    layers,
                    values_of,
                    number,
                    (number - (len(measured) - 1) / 2) * 0.16,
                    label,
                )
                if uniform:
                    places = np.array([layer.number for layer in layers])
                    axes.hlines(
                        [uniform(layer) for layer in layers],
                        places - 0.5,
                        places + 0.5,
                        colors="0.4",
                        linestyles=":",
                        linewidth=1,
                        label="" if number else "uniform attention",
                    )
            low, high = axes.get_ylim()
            axes.set(
                ylim=(min(low, 0.0), max(high, top)),
                xlim=(longest[0].number - 0.6, longest[-1].number + 0.6),
            )
            axes.set_title(wrapped(title, 72 * width / columns - 40, points("medium")))
            axes.xaxis.get_major_locator().set_params(integer=True, min_n_ticks=1)
            axes.grid(alpha=0.3)
            small_ticks(axes)
        for axes in grid[len(panels) - columns : len(panels)]:
            axes.set_xlabel("attention layer")
        legend_below(figure, *grid[0].get_legend_handles_labels())
        images = longest[0].images
        title = f"mean over {images} image{'s' * (images > 1)}; dots: heads; lines: their means"
        title += "; bars: standard deviation over images" * (images > 1)
        figure.suptitle(wrapped(title, 72 * width - 10, points()), fontsize=points())
    return figure


def _draw_model(
    axes: Axes,
    layers: Sequence[LayerQuantities],
    values_of: Callable[[LayerQuantities], Tensor],
    number: int,
    shift: float,
    label: str,
) -> None:
    """Draw a model's heads, their mean and its spread, moved aside so that models do not hide each other."""
    colors, table = color_cycle(), []
    how = {"color": colors[number % len(colors)], "marker": MARKERS[number % len(MARKERS)]}
    for layer in layers:
        heads, images = (
            values_of(layer).nanmean(dim) for dim in (0, 1)
        )  # NaN where a map is constant
        images = images[images.isfinite()]
        spread = images.std() if len(images) > 1 else math.nan
        table.append([layer.number + shift, heads.nanmean(), spread])
        axes.scatter(
            [layer.number + shift] * len(heads), heads, s=5, alpha=0.35, linewidths=0, **how
        )
    breaks = [
        index
        for index in range(1, len(layers))
        if layers[index].feat_size != layers[index - 1].feat_size
    ]
    x, means, spreads = np.insert(np.array(table), breaks, math.nan, axis=0).T
    axes.plot(x, means, label=label, **how)
    axes.errorbar(x, means, spreads, fmt="none", ecolor=how["color"], elinewidth=0.8, alpha=0.7)


def main(argv: Sequence[str] | None = None) -> int:
    parser = make_parser(__doc__, EXAMPLES, output="statistics.png", queries=False, style=False)
    parser.add_argument(
        "--csv", metavar="FILE", help="write the numbers too, a row a model, layer and head"
    )
    parser.add_argument("--limit", type=positive, metavar="N", help="the first N images only")
    parser.add_argument(
        "--batch-size", type=positive, default=16, help="images at a time (default: %(default)s)"
    )
    options = parser.parse_args(argv)
    output = check_output(Path(options.output), options.suffixes)
    written = [output, *([check_output(Path(options.csv), (".csv",))] if options.csv else [])]
    measured = _measured(
        Asked.by_options(options), find_images(options.images)[: options.limit], options.batch_size
    )
    save(draw_statistics(measured, width=options.width), output, options.dpi)
    if options.csv:
        atomic_write(written[1], quantities_csv(measured).encode())
    print("written:", *written)
    return 0
