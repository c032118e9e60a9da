"""Entropy, distance and likeness to the previous layer's map, by layer and head, over a folder of images."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from pathlib import Path

import numpy as np
import torch
from matplotlib.figure import Figure
from torch import Tensor
from tqdm import tqdm

from ea_vision.analysis.loading import LoadedModel, find_images, parse_layers, positive, read_image
from ea_vision.analysis.quantities import LayerQuantities, measure, quantities_csv
from ea_vision.base.files import atomic_write
from ea_vision.visualize.drawing import QUERY_COLORS, new_figure
from ea_vision.visualize.options import load_models, make_parser
from ea_vision.visualize.writing import check_output, save

EXAMPLES = """\
  ea-vision statistics --model aa_resnet34,pa_aa_resnet34,ea_aa_resnet34 -o statistics.png images/
  ea-vision statistics --model runs/aa,runs/ea --limit 200 --csv numbers.csv -o numbers.pdf images/
"""
MARKERS = "osD^vP*"


def statistics_figure(measured: dict[str, Sequence[LayerQuantities]]) -> Figure:
    """Three panels over the layers, a dot a head and a line the mean of heads, a colour a model.

    Args:
        measured: by label; from `ea_vision.quantities.measure`.
    """
    figure = new_figure(13, 4.2)
    panels = figure.subplots(1, 3)
    for index, (label, layers) in enumerate(measured.items()):
        color, marker = QUERY_COLORS[index % len(QUERY_COLORS)], MARKERS[index % len(MARKERS)]
        shift = (index - (len(measured) - 1) / 2) * 0.16
        for axes, name in zip(panels, ("entropy", "distance", "correlation"), strict=True):
            x = np.array([layer.number for layer in layers]) + shift
            values = [getattr(layer, name) for layer in layers]
            for place, heads in zip(x, values, strict=True):
                if heads is not None:
                    axes.scatter([place] * len(heads), heads, s=9, alpha=0.35, color=color, marker=marker, linewidths=0)
            means = [np.nan if heads is None else float(heads.nanmean()) for heads in values]
            axes.plot(x, means, color=color, marker=marker, markersize=5, label=label)
    layers = max(measured.values(), key=len)
    panels[0].step([layers[0].number - 0.5] + [layer.number + 0.5 for layer in layers],
                   [math.log(layer.tokens) for layer in (layers[0], *layers)], color="0.6", linestyle=":",
                   linewidth=1, label="uniform attention")
    for axes, title in zip(panels, ("entropy (nats)", "distance of attention (pixels of the input)",
                                    "correlation with the previous layer's map"), strict=True):
        axes.set(xlabel="attention layer", title=title)
        axes.title.set_fontsize(10)
        axes.grid(alpha=0.3)
        axes.set_xlim(layers[0].number - 0.6, layers[-1].number + 0.6)
        axes.xaxis.get_major_locator().set_params(integer=True)
    figure.legend(*panels[0].get_legend_handles_labels(), loc="outside lower center", ncols=4, fontsize=8)
    images = f"{layers[0].images} image{'s' * (layers[0].images > 1)}"
    figure.suptitle(f"mean over {images}; dots are heads, lines their means", fontsize=9)
    return figure


def batches_of(model: LoadedModel, paths: Sequence[str], batch_size: int,
               exif_rotation: bool = False) -> Iterator[Tensor]:
    """(B, 3, H, W), normalised, on the model's device."""
    device = next(model.model.parameters()).device
    for first in tqdm(range(0, len(paths), batch_size), unit="batch", desc=model.label):
        images = torch.stack([model.prepare(read_image(path, exif_rotation=exif_rotation))
                              for path in paths[first:first + batch_size]])
        yield model.normalize(images.to(device))


def main(argv: Sequence[str] | None = None) -> int:
    parser = make_parser(__doc__, EXAMPLES, output="statistics.png", heads=None,
                         queries=False, maps=False)
    parser.add_argument("--csv", metavar="FILE", help="write the numbers too, a row a model, layer and head")
    parser.add_argument("--limit", type=positive, metavar="N", help="the first N images only")
    parser.add_argument("--batch-size", type=positive, default=16, help="images at a time (default: %(default)s)")
    options = parser.parse_args(argv)
    output = check_output(Path(options.output), options.suffixes)
    table = check_output(Path(options.csv), (".csv",)) if options.csv else None
    models = load_models(options)
    layers = [parse_layers(options.layers, model) for model in models]
    paths = find_images(options.images)[:options.limit]
    measured = {model.label: measure(model.model, batches_of(model, paths, options.batch_size, options.exif_rotation),
                                     [layer.number for layer in chosen])
                for model, chosen in zip(models, layers, strict=True)}
    save(statistics_figure(measured), output, options.dpi)
    if table:
        atomic_write(table, quantities_csv(measured).encode())
    print("written:", output, *([table] if table else []))
    return 0
