"""Learning curves of several runs in one picture (figure 5 of the EA paper, figure 7 of the PA paper), and where
learnable gates of the maps stood meanwhile."""

from __future__ import annotations

from itertools import cycle
from pathlib import Path

import numpy as np
from matplotlib import colormaps
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.ticker import MaxNLocator

from ea_vision.base.errors import UsageError
from ea_vision.base.figures import FORMATS, PAGE, check_width, color_cycle, figure_bytes
from ea_vision.base.files import atomic_write, check_output
from ea_vision.base.print import legend_below, new_figure, points, print_style, small_ticks, wrapped
from ea_vision.engine.gates import by_gate
from ea_vision.engine.run_folder import MEASURES, read_config, read_gates, read_metrics


def write_learning_curves(folders: list[Path], output: Path, width: float | None = None) -> None:
    """Write `plot_learning_curves` into `output`, PNG, SVG or PDF by its suffix.

    Raises:
        UsageError: as `plot_learning_curves`, or another suffix.
    """
    if output.suffix.lower() not in FORMATS:
        raise UsageError(f"--output of learning curves must end in {' or '.join(FORMATS)}, got {output}")
    figure = plot_learning_curves(folders, width=width)
    check_output(output)
    atomic_write(output, figure_bytes(figure, output.suffix.lower()))


def plot_learning_curves(folders: list[Path], *, width: float | None = None) -> Figure:
    """Draw training and evaluation loss and top-1 (of a detector AP) over epochs by run folder; below, for each run
    whose model has learnable gates, alpha and beta of every layer. `width` is in inches.

    Raises:
        UsageError: not a run folder, a run without a complete epoch, or a width that no text fits into.
    """
    width = check_width(width) or PAGE
    runs = []
    for folder in folders:
        config, about = read_config(folder)
        metrics = read_metrics(folder)
        if not metrics["epoch"]:
            raise UsageError(f"{folder} has no complete epoch yet")
        measure = about.get("measures", MEASURES)[0]
        runs.append((f"{folder.name}: {config['model']}", about["eval_split"], metrics, measure))

    gates = [(label, read) for folder, (label, *_) in zip(folders, runs, strict=True) if (read := read_gates(folder))]
    with print_style():
        return _draw(runs, gates, width)


def _draw(runs: list[tuple], gates: list[tuple], width: float) -> Figure:
    side = 2 if width >= 5 else 1  # panels side by side
    rows = -(-2 // side) + -(-len(gates) // side)
    figure = new_figure(width, 2.0 * rows + 0.5, layout="constrained")
    grid = figure.add_gridspec(rows, side)
    places = [figure.add_subplot(grid[number // side, number % side]) for number in range(2 + len(gates))]
    loss_axes, accuracy_axes = places[:2]
    below: dict[str, Line2D] = {}
    for axes, (label, columns) in zip(places[2:], gates, strict=True):
        below |= _plot_gates(axes, wrapped(label, 72 * width / side - 40, points("medium")), columns)
    for axes in places:
        small_ticks(axes)
    for color, (label, _, metrics, measure) in zip(cycle(color_cycle()), runs, strict=False):
        loss_axes.plot(metrics["epoch"], metrics["train_loss"], color=color, label=label, marker=".")
        epochs, values, losses = (np.array(metrics[name]) for name in ("epoch", measure, "eval_loss"))
        evaluated = ~np.isnan(values)  # --eval-epochs leaves epochs out
        if not np.isnan(losses).all():
            loss_axes.plot(epochs[evaluated], losses[evaluated], color=color, linestyle="--", marker=".")
        best = f" ({values[evaluated].max():.2f}%)" if evaluated.any() else ""
        accuracy_axes.plot(epochs[evaluated], values[evaluated], color=color, label=f"{label}{best}", marker=".")
    splits = sorted({split.replace("_", "-") for _, split, *_ in runs})
    measures = " or ".join(sorted({NAMES.get(measure, measure) for *_, measure in runs}))
    loss_axes.set(xlabel="epoch", ylabel="loss (evaluation dashed)")
    accuracy_axes.set(xlabel="epoch", ylabel=wrapped(f"{measures} on {' or '.join(splits)} images (%)", 80.0, points()))
    for axes in (loss_axes, accuracy_axes):
        axes.grid(alpha=0.3)
        axes.xaxis.set_major_locator(MaxNLocator(integer=True))
    handles, labels = accuracy_axes.get_legend_handles_labels()
    legend_below(figure, [*handles, *below.values()], [*labels, *below])
    return figure


NAMES = {"top1": "top-1"}  # of measures, where a figure has another
STYLES = ("-", "--", "-.", ":")


def _plot_gates(axes: Axes, label: str, columns: dict[str, list[float]]) -> dict[str, Line2D]:
    """Draw the columns of gates.csv over epochs: a colour for each layer, from the first on, a style for each gate;
    return lines for the legend by their names."""
    epochs = columns["epoch"]
    gates = by_gate({name: 0.0 for name in columns if name not in ("epoch", "step")})
    layers = list(dict.fromkeys(name.rpartition(".")[0] for name in columns if name not in ("epoch", "step")))
    colour = {layer: colormaps["viridis"](0.85 * index / max(len(layers) - 1, 1)) for index, layer in enumerate(layers)}
    style = dict(zip(gates, STYLES, strict=False))
    for name, values in columns.items():
        if name not in ("epoch", "step"):
            layer, _, gate = name.rpartition(".")
            axes.plot(epochs, values, style[gate.partition("[")[0]], color=colour[layer], marker=".")
    axes.set(xlabel="epoch", ylabel="gate")
    axes.set_title(label, parse_math=False)
    axes.grid(alpha=0.3)
    axes.xaxis.set_major_locator(MaxNLocator(integer=True))
    of_gates = {gate: Line2D([], [], linestyle=style[gate], color="black") for gate in gates}
    return of_gates | {layer.removesuffix(".evolution"): Line2D([], [], color=colour[layer])
                        for layer in (layers[0], layers[-1])}
