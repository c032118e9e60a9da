"""Learning curves of runs (figure 5 of the EA paper, figure 7 of the PA paper), and the confusion of an evaluation.

Importing this imports matplotlib, which training does without.
"""

from pathlib import Path

import numpy as np
from matplotlib.figure import Figure

from ea_vision.base.errors import UsageError
from ea_vision.base.figures import FORMATS, figure_bytes
from ea_vision.base.files import atomic_write, check_output
from ea_vision.base.print import as_written
from ea_vision.data.image_names import displayable
from ea_vision.engine.evaluate import Evaluation
from ea_vision.engine.run_folder import read_config, read_metrics

MOST_NAMED = 40  # the names and numbers of more classes do not fit


@as_written()
def write_learning_curves(folders: list[Path], output: Path) -> None:
    """Draw losses and top-1 (AP for a detector) of run folders over their epochs, into a PNG, SVG or PDF.

    Raises:
        UsageError: not a run folder, a run without a complete epoch, or another suffix.
    """
    if output.suffix.lower() not in FORMATS:
        raise UsageError(
            f"--output of learning curves must end in {' or '.join(FORMATS)}, got {output}"
        )
    figure = Figure(figsize=(10, 4.5), layout="constrained")
    loss_axes, measure_axes = figure.subplots(1, 2, subplot_kw={"xlabel": "epoch"})
    loss_axes.set_ylabel("loss (evaluation dashed)")
    for axes in figure.axes:
        axes.locator_params(axis="x", integer=True)
    for folder in folders:
        config, about = read_config(folder)
        columns = {name: np.array(column) for name, column in read_metrics(folder).items()}
        if not len(columns["epoch"]):
            raise UsageError(f"{folder} has no complete epoch yet")
        measure = about["measures"][0]
        evaluated = ~np.isnan(columns[measure])  # --eval-epochs leaves epochs out
        epochs = columns["epoch"][evaluated]
        values = columns[measure][evaluated]
        losses = columns["eval_loss"][evaluated]
        [line] = measure_axes.plot(
            epochs,
            values,
            ".-",
            label=f"{displayable(folder.name)}: {config['model']}, {measure} (%) on "
            f"{about['eval_split']} images, best {values.max(initial=0):.2f}",
        )
        color = line.get_color()
        loss_axes.plot(columns["epoch"], columns["train_loss"], ".-", color=color)
        loss_axes.plot(epochs, losses, ".--", color=color)
    figure.legend(loc="outside lower center")
    atomic_write(check_output(output), figure_bytes(figure, output.suffix.lower()))
    print(f"written: {output}")


@as_written()
def confusion_png(result: Evaluation, classes: list[str], name: str) -> bytes:
    """Draw the confusion matrix, each row in percent of its class; up to MOST_NAMED classes have names and numbers.
    Return a PNG file."""
    percent = 100 * result.confusion / result.confusion.sum(1, keepdim=True).clamp(min=1)
    few = len(classes) <= MOST_NAMED
    side = min(5 + 0.4 * len(classes), 17)
    figure = Figure(figsize=(side, side), layout="constrained")
    axes = figure.add_subplot()
    picture = axes.imshow(percent.numpy(), cmap="Blues")
    figure.colorbar(picture, ax=axes)
    axes.set(xticks=[], yticks=[])
    if few:
        names = list(map(displayable, classes))
        axes.set_xticks(range(len(names)), names, rotation="vertical")
        axes.set_yticks(range(len(names)), names)
        dark = percent > (percent.max() + percent.min()) / 2
        for (row, column), value in np.ndenumerate(percent.numpy()):
            color = "white" if dark[row, column] else "black"
            axes.text(column, row, f"{value:.0f}", color=color, ha="center", va="center")
    title = f"{name}\n{result.line()}; percent of the class"
    axes.set(xlabel="taken for", ylabel="class", title=title)
    return figure_bytes(figure)
