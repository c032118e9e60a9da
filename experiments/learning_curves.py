"""Learning curves of runs: losses and top-1 (AP of a detector) by epoch (figure 5 of the EA paper, 7 of the PA paper).

python -m experiments.learning_curves curves.pdf runs/a runs/b
"""

import argparse
import csv
import sys
from pathlib import Path

import numpy as np

from ea_vision.base.errors import UsageError, exit_code
from ea_vision.base.figures import FORMATS, figure_bytes
from ea_vision.base.files import atomic_write, check_output
from ea_vision.data.image_names import displayable
from ea_vision.engine.run_folder import METRICS
from ea_vision.zoo.source import read_config


def read_metrics(folder: Path) -> dict[str, list[float]]:
    """Return the columns of metrics.csv as lists of numbers.

    Raises:
        UsageError: no metrics, or they are damaged.
    """
    columns = {}
    try:
        rows = csv.reader((folder / METRICS).read_text(encoding="utf-8").splitlines())
        for name, *column in zip(*rows, strict=True):
            columns[name] = [float(value) for value in column]
        if "epoch" not in columns:
            raise ValueError("no column epoch")
    except (OSError, ValueError, csv.Error) as error:
        raise UsageError(f"{folder} is not a run folder: it has no readable {METRICS}") from error
    return columns


def write_learning_curves(folders: list[Path], output: Path) -> None:
    """Draw losses and the first measure of run folders over their epochs, into a PNG, SVG or PDF.

    Raises:
        UsageError: not a run folder, a run without a complete epoch, or another suffix.
    """
    if output.suffix.lower() not in FORMATS:
        raise UsageError(f"learning curves must end in {' or '.join(FORMATS)}, got {output}")
    # matplotlib, which readers of metrics do without
    import matplotlib

    from ea_vision.base.print import text_settings

    with matplotlib.rc_context(text_settings()):
        picture = figure_bytes(drawn(folders), output.suffix.lower())
    atomic_write(check_output(output), picture)
    print(f"written: {output}")


def drawn(folders: list[Path]):
    """Return the figure of the runs' losses and first measures."""
    from matplotlib.figure import Figure

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
    return figure


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("output", type=Path, help="file to write: PNG, SVG or PDF")
    parser.add_argument("runs", type=Path, nargs="+", metavar="RUN", help="run folders")
    args = parser.parse_args(argv)
    write_learning_curves(args.runs, args.output)
    return 0


if __name__ == "__main__":
    sys.exit(exit_code(main))
