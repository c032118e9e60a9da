"""What probes found: rows, and CSV, table and bars of them beside the published ones."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from statistics import mean, stdev

from matplotlib.colors import to_rgba
from matplotlib.figure import Figure

from ea_vision.base.figures import PAGE, check_width, color_cycle
from ea_vision.base.files import csv_text
from ea_vision.base.print import legend_below, new_figure, points, print_style, small_ticks, text_width, wrapped
from ea_vision.base.tables import markdown

PUBLISHED = {"AA-ResNet-34": {16: 24.50, 17: 31.18, 18: 17.55}, "EA-AA-ResNet-34": {16: 31.02, 17: 31.71, 18: 31.93}}
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


def results_csv(results: Sequence[Result]) -> str:
    """Comma-separated values; the columns are the fields of `Result`."""
    return csv_text([{**asdict(result), "top1": f"{result.top1:.2f}"} for result in results])


def over_seeds(results: Sequence[Result]) -> dict[tuple[str, str, int], tuple[float, float | None]]:
    """Top-1 by model, maps and layer: the mean over seeds and the standard deviation, None for a single seed."""
    found: dict[tuple[str, str, int], list[float]] = {}
    for result in results:
        found.setdefault((result.model, result.maps, result.layer), []).append(result.top1)
    return {key: (mean(values), stdev(values) if len(values) > 1 else None) for key, values in found.items()}


def results_table(results: Sequence[Result]) -> str:
    """Rows model and maps, columns layers: top-1 in percent, of several seeds the mean ± the standard deviation."""
    layers, found = sorted({result.layer for result in results}), over_seeds(results)
    lines = [["model", "maps", *(f"layer {layer}" for layer in layers)]]
    for model, maps in dict.fromkeys((result.model, result.maps) for result in results):
        scores = (found.get((model, maps, layer)) for layer in layers)
        lines.append([model, maps, *("" if score is None else f"{score[0]:.2f}" if score[1] is None else
                                     f"{score[0]:.2f} ± {score[1]:.2f}" for score in scores)])
    return markdown(lines)


def results_figure(results: Sequence[Result], num_classes: int, *, width: float | None = None) -> Figure:
    """Bars by layer, a colour a model, a shade and hatch a kind of maps; beside them the published ones, in grey.

    Args:
        width: inches; in a column the published ones are below.
    """
    with print_style():
        return _draw(results, num_classes, check_width(width) or PAGE)


def _draw(results: Sequence[Result], num_classes: int, width: float) -> Figure:
    models = list(dict.fromkeys(result.model for result in results))
    measured: dict[str, dict[int, float]] = {}
    errors: dict[str, list[float]] = {}
    styles: dict[str, dict] = {}
    for (model, maps, layer), (top1, deviation) in over_seeds(results).items():
        label = f"{model}, {maps}"
        measured.setdefault(label, {})[layer] = top1
        if deviation is not None:
            errors.setdefault(label, []).append(deviation)
        colors, (shade, hatch) = color_cycle(), SHADES[maps]
        color = colors[models.index(model) % len(colors)]
        styles[label] = {"facecolor": to_rgba(color, shade), "edgecolor": color, "hatch": hatch}
    styles |= {label: {"facecolor": grey, "edgecolor": "0.3"} for label, grey in zip(PUBLISHED, ("0.75", "0.45"),
                                                                                    strict=True)}
    columns = max(3, len({result.layer for result in results}))
    ratios = (columns * (1 + len(measured) / 6), 4)
    beside = width >= 5 and ratios[0] < 12
    if beside:
        figure = new_figure(width, 2.8, layout="constrained")
        panels = figure.subplots(1, 2, width_ratios=ratios)
    else:
        figure = new_figure(width, 4.6, layout="constrained")
        panels = figure.subplots(2, 1)
    shares = [ratio / sum(ratios) if beside else 1.0 for ratio in ratios]
    first = results[0]
    titles = (f"learnt from {first.train_images} images, measured on {first.test_images}",
              "published: EA paper, table 7, ImageNet")
    for axes, bars, title, share in zip(panels, (measured, PUBLISHED), titles, shares, strict=True):
        layers = sorted({layer for values in bars.values() for layer in values})
        bar = 0.8 / len(bars)
        room = (72 * width * share - 40) / (len(layers) * len(bars)) * 0.8  # of a bar, in points
        for index, (label, values) in enumerate(bars.items()):
            places = [layers.index(layer) + (index - (len(bars) - 1) / 2) * bar for layer in values]
            drawn = axes.bar(places, list(values.values()), bar * 0.9, label=label, linewidth=0.6,
                              yerr=errors.get(label), error_kw={"elinewidth": 1}, **styles[label])
            if room > 1.2 * points():
                axes.bar_label(drawn, fmt="%.1f", fontsize=points(), padding=2,
                               rotation=0 if room > text_width("88.8", points()) else 90)
        axes.set_xticks(range(len(layers)), [f"layer {layer}" for layer in layers])
        axes.set_ylabel("top-1 of the probe (%)")
        axes.set_title(wrapped(title, 72 * width * share - 40, points("medium")))
        axes.margins(y=0.16)
        small_ticks(axes)
        axes.spines[["top", "right"]].set_visible(False)
    panels[0].axhline(100 / num_classes, color="0.5", linestyle=":", linewidth=1, label="chance, classes alike")
    handles, labels = [], []
    for axes in panels:
        for handle, label in zip(*axes.get_legend_handles_labels(), strict=True):
            handles, labels = [*handles, handle], [*labels, label]
    legend_below(figure, handles, labels)
    return figure
