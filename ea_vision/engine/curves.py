"""Learning curves of several runs in one picture (figure 5 of the EA paper, figure 7 of the PA paper), and where
learnable shares of the maps stood meanwhile."""

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
from ea_vision.base.figures import FORMATS, color_cycle, figure_bytes
from ea_vision.base.files import atomic_write, check_output
from ea_vision.engine.gates import by_share
from ea_vision.engine.run_folder import MEASURES, read_config, read_gates, read_metrics


def write_learning_curves(folders: list[Path], output: Path) -> None:
    """Write `plot_learning_curves` into `output`, PNG, SVG or PDF by its suffix.

    Raises:
        UsageError: as `plot_learning_curves`, or another suffix.
    """
    if output.suffix.lower() not in FORMATS:
        raise UsageError(f"--output of learning curves must end in {' or '.join(FORMATS)}, got {output}")
    figure = plot_learning_curves(folders)
    check_output(output)
    atomic_write(output, figure_bytes(figure, output.suffix.lower()))


def plot_learning_curves(folders: list[Path]) -> Figure:
    """Training loss and top-1 (of a detector AP) over epochs, one line per run folder; below, for each run whose model
    has learnable shares, alpha and beta of every layer.

    Raises:
        UsageError: not a run folder, or a run without a complete epoch.
    """
    runs = []
    for folder in folders:
        config, run = read_config(folder, "eval_split")
        measures = run.get("measures", MEASURES)
        metrics = read_metrics(folder, measures)
        if not metrics["epoch"]:
            raise UsageError(f"{folder} has no complete epoch yet")
        runs.append((f"{folder.name}: {config['model']}", run["eval_split"], metrics, measures[0]))

    gates = [(label, read) for folder, (label, *_) in zip(folders, runs, strict=True) if (read := read_gates(folder))]
    rows = 1 + (len(gates) + 1) // 2
    figure = Figure(figsize=(12, 4.5 * rows), layout="constrained")
    grid = figure.add_gridspec(rows, 2)
    loss_axes, accuracy_axes = (figure.add_subplot(grid[0, column]) for column in range(2))
    for number, (label, columns) in enumerate(gates):
        _plot_gates(figure.add_subplot(grid[1 + number // 2, number % 2]), label, columns)
    for color, (label, _, metrics, measure) in zip(cycle(color_cycle()), runs, strict=False):
        loss_axes.plot(metrics["epoch"], metrics["train_loss"], color=color, label=label, marker=".")
        epochs, values = np.array(metrics["epoch"]), np.array(metrics[measure])
        evaluated = ~np.isnan(values)  # --eval-epochs leaves epochs out
        best = f" ({values[evaluated].max():.2f}%)" if evaluated.any() else ""
        accuracy_axes.plot(epochs[evaluated], values[evaluated], color=color, label=f"{label}{best}", marker=".")
    splits = sorted({split.replace("_", "-") for _, split, *_ in runs})
    measures = " or ".join(sorted({NAMES.get(measure, measure) for *_, measure in runs}))
    loss_axes.set(xlabel="epoch", ylabel="training loss")
    accuracy_axes.set(xlabel="epoch", ylabel=f"{measures} on {' or '.join(splits)} images (%)")
    for axes in (loss_axes, accuracy_axes):
        axes.grid(alpha=0.3)
        axes.xaxis.set_major_locator(MaxNLocator(integer=True))
    handles, labels = accuracy_axes.get_legend_handles_labels()
    figure.legend(handles, labels, loc="outside lower center", ncols=2 if max(map(len, labels)) < 60 else 1,
                  fontsize="small")
    return figure


NAMES = {"top1": "top-1"}  # of measures, where a figure has another
STYLES = ("-", "--", "-.", ":")


def _plot_gates(axes: Axes, label: str, columns: dict[str, list[float]]) -> None:
    """The columns of gates.csv over epochs: a colour for each layer, from the first on, a style for each share."""
    epochs = columns["epoch"]
    shares = by_share({name: 0.0 for name in columns if name not in ("epoch", "step")})
    layers = list(dict.fromkeys(name.rpartition(".")[0] for name in columns if name not in ("epoch", "step")))
    colour = {layer: colormaps["viridis"](0.85 * index / max(len(layers) - 1, 1)) for index, layer in enumerate(layers)}
    style = dict(zip(shares, STYLES, strict=False))
    for name, values in columns.items():
        if name not in ("epoch", "step"):
            layer, _, share = name.rpartition(".")
            axes.plot(epochs, values, style[share.partition("[")[0]], color=colour[layer], marker=".")
    axes.set(xlabel="epoch", ylabel="share", title=label)
    axes.title.set_fontsize("medium")
    axes.grid(alpha=0.3)
    axes.xaxis.set_major_locator(MaxNLocator(integer=True))
    handles = [Line2D([], [], linestyle=style[share], color="black", label=share) for share in shares]
    handles += [Line2D([], [], color=colour[layer], label=layer.removesuffix(".evolution"))
                for layer in dict.fromkeys((layers[0], layers[-1]))]
    axes.legend(handles=handles, fontsize="small")
