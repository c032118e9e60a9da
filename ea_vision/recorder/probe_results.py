"""What probes found: rows, and a table and bars of them."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from statistics import mean, stdev

from matplotlib.colors import to_rgba
from matplotlib.figure import Figure

from ea_vision.base.figures import PAGE, check_width, color_cycle
from ea_vision.base.print import legend_below, new_figure, print_style, small_ticks
from ea_vision.base.tables import markdown

PUBLISHED = "AA-ResNet-34 24.50 / 31.18 / 17.55; EA-AA-ResNet-34 31.02 / 31.71 / 31.93"  # layers 16 / 17 / 18
SHADES = {"trained": (1.0, ""), "untrained": (0.55, "//"), "shuffled": (0.3, ""), "shuffled-together": (0.3, "..")}


@dataclass(frozen=True)
class Result:
    """A row of results.csv. top1 in percent."""

    model: str
    maps: str
    layer: int
    seed: int
    top1: float
    train_images: int
    test_images: int


def over_seeds(results: Sequence[Result]) -> dict[tuple[str, str], dict[int, tuple[float, float]]]:
    """Return top-1 by model and maps, and by layer: the mean over seeds and the standard deviation, nan of one seed."""
    found: dict[tuple[str, str], dict[int, list[float]]] = defaultdict(lambda: defaultdict(list))
    for one in results:
        found[one.model, one.maps][one.layer].append(one.top1)
    return {series: {layer: (mean(values), stdev(values) if len(values) > 1 else math.nan)
                     for layer, values in by_layer.items()} for series, by_layer in found.items()}


def results_table(results: Sequence[Result]) -> str:
    """Return rows model and maps, columns layers: top-1 in percent, of several seeds the mean ± the deviation."""
    layers = sorted({one.layer for one in results})
    lines = [["model", "maps", *(f"layer {layer}" for layer in layers)]]
    for (model, maps), by_layer in over_seeds(results).items():
        scores = (by_layer.get(layer) for layer in layers)
        lines.append([model, maps, *("" if score is None else f"{score[0]:.2f}" + (
            "" if math.isnan(score[1]) else f" ± {score[1]:.2f}") for score in scores)])
    return markdown(lines)


def results_figure(results: Sequence[Result], num_classes: int, *, width: float | None = None) -> Figure:
    """Draw bars by layer, a colour a model, a shade and hatch a kind of maps; `width` is in inches."""
    found, layers = over_seeds(results), sorted({one.layer for one in results})
    models, bar = list(dict.fromkeys(model for model, _ in found)), 0.8 / len(found)
    with print_style():
        figure = new_figure(check_width(width) or PAGE, 2.8, layout="constrained")
        axes = figure.subplots()
        for index, ((model, maps), by_layer) in enumerate(found.items()):
            color, (shade, hatch) = color_cycle()[models.index(model) % len(color_cycle())], SHADES[maps]
            means, deviations = zip(*by_layer.values(), strict=True)
            axes.bar([layers.index(layer) + (index - (len(found) - 1) / 2) * bar for layer in by_layer], means,
                     0.9 * bar, yerr=deviations, label=f"{model}, {maps}", facecolor=to_rgba(color, shade),
                     edgecolor=color, hatch=hatch, linewidth=0.6, error_kw={"elinewidth": 1})
        axes.axhline(100 / num_classes, color="0.5", linestyle=":", label="chance, classes alike")
        axes.set_xticks(range(len(layers)), [f"layer {layer}" for layer in layers])
        axes.set_ylabel("top-1 of the probe (%)")
        axes.set_title(f"learnt from {results[0].train_images} images, measured on {results[0].test_images}")
        axes.spines[["top", "right"]].set_visible(False)
        small_ticks(axes)
        legend_below(figure, *axes.get_legend_handles_labels())
    return figure
