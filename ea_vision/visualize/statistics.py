"""Entropy, distance and likeness to the previous layer's map, by layer and head, over a folder of images."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from matplotlib.figure import Figure
from torch import Tensor
from tqdm import tqdm

from ea_vision.analysis.inputs import find_images, read_image
from ea_vision.analysis.loading import LoadedModel, parse_layers, positive
from ea_vision.analysis.quantities import LayerQuantities, measure, quantities_arrays, quantities_csv
from ea_vision.base.figures import color_cycle
from ea_vision.base.files import atomic_write, write_npz
from ea_vision.visualize.figure_options import load_models, make_parser
from ea_vision.visualize.map_style import new_figure, text_scale, wrapped
from ea_vision.visualize.writing import check_output, save

EXAMPLES = """\
  ea-vision statistics --model aa_resnet34,pa_aa_resnet34,ea_aa_resnet34 -o statistics.png images/
  ea-vision statistics --model runs/aa,runs/ea --limit 200 --csv numbers.csv -o numbers.pdf images/
"""
MARKERS = "osD^vP*"


def statistics_figure(measured: dict[str, Sequence[LayerQuantities]]) -> Figure:
    """Three panels over the layers, a dot a head and a line the mean of heads, a colour a model. Bars are standard
    deviations of that mean over images; lines break where maps have another size; dotted is uniform attention.

    Args:
        measured: by label; from `ea_vision.analysis.quantities.measure`.
    """
    text = text_scale()
    width = 13.0 * max(1.0, 0.8 * text)
    names = {label: wrapped(label, 6, 8) for label in measured}
    ncols = max(1, min(len(measured) + 1, int(width / (max(map(len, measured)) * 0.08 * text + 0.6))))
    rows = -(-(len(measured) + 1) // ncols)
    figure = new_figure(width, 3.5 + (0.5 + 0.22 * rows * (1 + max(n.count("\n") for n in names.values()))) * text)
    panels = figure.subplots(1, 3)
    colors = color_cycle()
    for index, (label, layers) in enumerate(measured.items()):
        color, marker = colors[index % len(colors)], MARKERS[index % len(MARKERS)]
        shift = (index - (len(measured) - 1) / 2) * 0.16
        for axes, panel in zip(panels, PANELS, strict=True):
            x, means, spreads = [], [], []
            for layer, before in zip(layers, [None, *layers], strict=False):
                if before is not None and before.feat_size != layer.feat_size:
                    x, means, spreads = [*x, math.nan], [*means, math.nan], [*spreads, math.nan]
                values = panel.values(layer)
                heads = None if values is None else values.mean(0)  # NaN where a map is constant
                x.append(layer.number + shift)
                means.append(math.nan if heads is None else float(heads.nanmean()))
                spreads.append(math.nan if values is None or len(values) < 2 else float(values.nanmean(1).std()))
                if heads is not None:
                    axes.scatter([x[-1]] * len(heads), heads, s=9, alpha=0.35, color=color, marker=marker, linewidths=0)
            axes.plot(x, means, color=color, marker=marker, markersize=5, label=names[label])
            axes.errorbar(x, means, spreads, fmt="none", ecolor=color, elinewidth=1, capsize=2, alpha=0.7)
            uniform = [panel.uniform(layer) for layer in layers]
            if uniform[0] is not None:
                places = [layer.number for layer in layers]
                axes.hlines(uniform, np.subtract(places, 0.5), np.add(places, 0.5), colors="0.4", linestyles=":",
                            linewidth=1, label="uniform attention" if index == 0 else None)
    layers = max(measured.values(), key=len)
    for axes, panel in zip(panels, PANELS, strict=True):
        axes.set(xlabel="attention layer", title=panel.title)
        axes.title.set_fontsize("medium")
        axes.grid(alpha=0.3)
        axes.set_xlim(layers[0].number - 0.6, layers[-1].number + 0.6)
        axes.xaxis.get_major_locator().set_params(integer=True)
    figure.legend(*panels[0].get_legend_handles_labels(), loc="outside lower center", ncols=ncols, fontsize="small")
    images = f"{layers[0].images} image{'s' * (layers[0].images > 1)}"
    bars = "; bars: standard deviation over images" if layers[0].images > 1 else ""
    figure.suptitle(f"mean over {images}; dots are heads, lines their means{bars}", fontsize="medium")
    return figure


@dataclass(frozen=True)
class Panel:
    """A panel: its title, a layer's values (images, K) or None, and that of uniform attention or None."""

    title: str
    values: Callable[[LayerQuantities], Tensor | None]
    uniform: Callable[[LayerQuantities], float | None]


PANELS = (
    Panel("entropy / log N", lambda layer: layer.entropies / layer.uniform_entropy, lambda layer: 1.0),
    Panel("distance of attention (pixels of the input)", lambda layer: layer.distances,
          lambda layer: layer.uniform_distance),
    Panel("correlation with the previous layer's map", lambda layer: layer.correlations, lambda layer: None),
)


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
                         queries=False)
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
    written = [output, *([table] if table else [])]
    if options.npz:
        written.append(output.with_suffix(".npz"))
        write_npz(written[-1], quantities_arrays(measured))
    print("written:", *written)
    return 0
