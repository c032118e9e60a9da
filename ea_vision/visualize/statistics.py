"""Entropy, distance, likeness to the previous layer's map and share of position alone, by layer and head."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from torch import Tensor
from tqdm import tqdm

from ea_vision.base.errors import UsageError
from ea_vision.base.figures import PAGE, check_width, color_cycle
from ea_vision.base.files import atomic_write, write_npz
from ea_vision.base.print import legend_below, new_figure, points, print_style, small_ticks, wrapped
from ea_vision.recorder.inputs import ImageSource, as_input, find_images
from ea_vision.recorder.loading import positive
from ea_vision.recorder.quantities import LayerQuantities, measure, quantities_arrays, quantities_csv
from ea_vision.visualize.figure_options import Asked, Layers, Models, make_parser
from ea_vision.visualize.image_maps import evaluating, title_of
from ea_vision.visualize.writing import check_output, save

EXAMPLES = """\
  ea-vision statistics --model aa_resnet34,pa_aa_resnet34,ea_aa_resnet34 -o statistics.png images/
  ea-vision statistics --model runs/aa,runs/ea --limit 200 --csv numbers.csv --width 3.3 -o numbers.pdf images/
"""
MARKERS = "osD^vP*"


def plot_statistics(models: Models, images: ImageSource | Tensor | Sequence[ImageSource | Tensor],
                    layers: Layers = None, *, width: float | None = None) -> Figure:
    """Draw entropy, distance, likeness to the previous layer's map and share of position alone by layer and head, means
    over images. See `ea_vision.visualize.figure_options` for the arguments.

    Raises:
        UsageError: no image.
    """
    several = list(images) if isinstance(images, (list, tuple)) else [images]
    if not several:
        raise UsageError("at least one image required, got none")
    return draw_statistics(_measured(Asked(models, layers), several), width=width)


def _measured(asked: Asked, images: Sequence[ImageSource | Tensor], batch_size: int = 16,
              progress: bool = False) -> dict[str, list[LayerQuantities]]:
    """Return quantities by title of the model, with a progress bar where it is asked for."""
    measured = {}
    for model, numbers in zip(asked.models, asked.numbers, strict=True):
        starts = tqdm(range(0, len(images), batch_size), unit="batch", desc=model.label,
                      disable=None if progress else True)
        batches = (torch.stack([as_input(model, image) for image in images[first:first + batch_size]])
                   for first in starts)
        device = next(model.model.parameters()).device
        with evaluating(model.model):
            measured[title_of(model)] = measure(
                model.model, (model.normalize(batch.to(device)) for batch in batches), numbers)
    return measured


class Panel(NamedTuple):
    """A panel: its title, a layer's values (images, K) or None, that of uniform attention or None, and how far its axis
    reaches at least."""

    title: str
    values: Callable[[LayerQuantities], Tensor | None]
    uniform: Callable[[LayerQuantities], float] | None = None
    top: float = 1.05


PANELS = (
    Panel("entropy / log N", lambda layer: layer.entropies / layer.uniform_entropy, lambda layer: 1.0),
    Panel("distance of attention (pixels of the input)", lambda layer: layer.distances,
          lambda layer: layer.uniform_distance, 0.0),
    Panel("correlation with the previous layer's map", lambda layer: layer.correlations),
    Panel("share of position alone", lambda layer: layer.positions),
)


def draw_statistics(measured: Mapping[str, Sequence[LayerQuantities]], *, width: float | None = None) -> Figure:
    """Draw a panel a quantity over the layers, a dot a head and a line the mean of heads, a colour a model. Bars are
    standard deviations of that mean over images; lines break where maps have another size; dotted is uniform attention.

    Args:
        measured: by label; from `ea_vision.recorder.quantities.measure`.
        width: inches.
    """
    panels = [panel for panel in PANELS if any(_has(panel, layer) for layers in measured.values() for layer in layers)]
    width = check_width(width) or PAGE
    columns = 2 if width >= 5 and len(panels) > 1 else 1
    rows = -(-len(panels) // columns)
    longest = max(measured.values(), key=len)
    images = longest[0].images
    with print_style():
        figure = new_figure(width, rows * 1.55 + 1.0, layout="constrained")
        grid = list(figure.subplots(rows, columns, squeeze=False).ravel())
        for index, (place, panel) in enumerate(zip(grid, panels, strict=False)):
            _draw_panel(place, panel, measured)
            place.set_title(wrapped(panel.title, 72 * width / columns - 40, points("medium")), parse_math=False)
            small_ticks(place)
            place.grid(alpha=0.3)
            place.set_xlabel("attention layer" if index >= len(panels) - columns else "")
            place.set_xlim(longest[0].number - 0.6, longest[-1].number + 0.6)
            place.xaxis.get_major_locator().set_params(integer=True, min_n_ticks=1)
        for place in grid[len(panels):]:
            place.set_visible(False)
        legend_below(figure, *grid[0].get_legend_handles_labels())
        title = (f"mean over {images} image{'s' * (images > 1)}; dots: heads; lines: their means"
                 + ("; bars: standard deviation over images" if images > 1 else ""))
        figure.suptitle(wrapped(title, 72 * width - 10, points()), fontsize=points())
    return figure


def _draw_panel(place: Axes, panel: Panel, measured: Mapping[str, Sequence[LayerQuantities]]) -> None:
    colors = color_cycle()
    for index, (label, layers) in enumerate(measured.items()):
        how = {"color": colors[index % len(colors)], "marker": MARKERS[index % len(MARKERS)]}
        shift = (index - (len(measured) - 1) / 2) * 0.16
        line = []
        for before, layer in zip([layers[0], *layers], layers, strict=False):
            if before.feat_size != layer.feat_size:
                line.append([math.nan] * 3)
            line.append([layer.number + shift, math.nan, math.nan])
            if _has(panel, layer):
                values = panel.values(layer)
                of_heads, of_images = values.nanmean(0), values.nanmean(1)  # NaN where a map is constant
                of_images = of_images[of_images.isfinite()]
                line[-1][1:] = float(of_heads.nanmean()), float(of_images.std()) if len(of_images) > 1 else math.nan
                place.scatter([line[-1][0]] * len(of_heads), of_heads, s=5, alpha=0.35, linewidths=0, **how)
        x, means, spreads = zip(*line, strict=True)
        place.plot(x, means, label=label, **how)
        place.errorbar(x, means, spreads, fmt="none", ecolor=how["color"], elinewidth=0.8, alpha=0.7)
        if panel.uniform:
            places = np.array([layer.number for layer in layers])
            place.hlines([panel.uniform(layer) for layer in layers], places - 0.5, places + 0.5, colors="0.4",
                         linestyles=":", linewidth=1, label="uniform attention" if index == 0 else None)
    low, high = place.get_ylim()
    place.set_ylim(min(low, 0.0), max(high, panel.top))


def _has(panel: Panel, layer: LayerQuantities) -> bool:
    values = panel.values(layer)
    return values is not None and bool(values.isfinite().any())


def main(argv: Sequence[str] | None = None) -> int:
    parser = make_parser(__doc__, EXAMPLES, output="statistics.png", queries=False, style=False)
    parser.add_argument("--csv", metavar="FILE", help="write the numbers too, a row a model, layer and head")
    parser.add_argument("--limit", type=positive, metavar="N", help="the first N images only")
    parser.add_argument("--batch-size", type=positive, default=16, help="images at a time (default: %(default)s)")
    options = parser.parse_args(argv)
    output = check_output(Path(options.output), options.suffixes)
    table = check_output(Path(options.csv), (".csv",)) if options.csv else None
    asked = Asked.by_options(options)
    measured = _measured(asked, find_images(options.images)[:options.limit], options.batch_size, True)
    figure = draw_statistics(measured, width=options.width)
    save(figure, output, options.dpi)
    if table:
        atomic_write(table, quantities_csv(measured).encode())
    written = [output, *([table] if table else [])]
    if options.npz:
        written.append(output.with_suffix(".npz"))
        write_npz(written[-1], quantities_arrays(measured))
    print("written:", *written)
    return 0
