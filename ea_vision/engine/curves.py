"""Learning curves of several runs in one picture (figure 5 of the EA paper, figure 7 of the PA paper)."""

from itertools import cycle
from pathlib import Path

import numpy as np
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator

from ea_vision.base.errors import UsageError
from ea_vision.base.figures import FORMATS, PAGE, check_width, color_cycle, figure_bytes
from ea_vision.base.files import atomic_write, check_output
from ea_vision.base.print import legend_below, new_figure, points, print_style, small_ticks, wrapped
from ea_vision.engine.run_folder import MEASURES, read_config, read_metrics


def write_learning_curves(folders: list[Path], output: Path) -> None:
    """Write `plot_learning_curves` into `output`, PNG, SVG or PDF by its suffix.

    Raises:
        UsageError: as `plot_learning_curves`, or another suffix.
    """
    if output.suffix.lower() not in FORMATS:
        raise UsageError(f"--output of learning curves must end in {' or '.join(FORMATS)}, got {output}")
    atomic_write(check_output(output), figure_bytes(plot_learning_curves(folders), output.suffix.lower()))
    print(f"written: {output}")


def plot_learning_curves(folders: list[Path], *, width: float | None = None) -> Figure:
    """Draw training and evaluation loss and top-1 (of a detector AP) over epochs by run folder; `width` is in inches.

    Raises:
        UsageError: not a run folder, a run without a complete epoch, or a width that no text fits into.
    """
    width = check_width(width) or PAGE
    side = 2 if width >= 5 else 1  # panels side by side
    splits, measures = set(), set()
    with print_style():
        figure = new_figure(width, 4.0 / side + 0.5, layout="constrained")
        loss_axes, measure_axes = figure.subplots(2 // side, side).tolist()
        for color, folder in zip(cycle(color_cycle()), folders, strict=False):
            config, about = read_config(folder)
            columns = {name: np.array(column) for name, column in read_metrics(folder).items()}
            if not len(columns["epoch"]):
                raise UsageError(f"{folder} has no complete epoch yet")
            measure = about.get("measures", MEASURES)[0]
            splits.add(about["eval_split"].replace("_", "-"))
            measures.add(measure)
            evaluated = ~np.isnan(columns[measure])  # --eval-epochs leaves epochs out
            epochs, values, losses = (columns[name][evaluated] for name in ("epoch", measure, "eval_loss"))
            loss_axes.plot(columns["epoch"], columns["train_loss"], color=color, marker=".")
            loss_axes.plot(epochs, losses, color=color, linestyle="--", marker=".")
            label = f"{folder.name}: {config['model']} ({values.max(initial=0):.2f}%)"
            measure_axes.plot(epochs, values, color=color, marker=".", label=label)
        loss_axes.set_ylabel("loss (evaluation dashed)")
        what = f"{' or '.join(sorted(measures))} on {' or '.join(sorted(splits))} images (%)"
        measure_axes.set_ylabel(wrapped(what, 80.0, points()))
        for axes in (loss_axes, measure_axes):
            small_ticks(axes)
            axes.set_xlabel("epoch")
            axes.grid(alpha=0.3)
            axes.xaxis.set_major_locator(MaxNLocator(integer=True))
        legend_below(figure, *measure_axes.get_legend_handles_labels())
    return figure
