"""Learning curves of several runs in one picture (figure 5 of the EA paper, figure 7 of the PA paper)."""

from __future__ import annotations

from pathlib import Path

import numpy as np
from matplotlib.figure import Figure

from ea_vision.base.errors import UsageError
from ea_vision.base.figures import figure_bytes
from ea_vision.base.files import atomic_write, create
from ea_vision.engine.run_folder import read_config, read_metrics


def write_learning_curves(folders: list[Path], output: Path) -> None:
    """Write `plot_learning_curves` into the PNG `output`.

    Raises:
        UsageError: as `plot_learning_curves`, or another suffix.
    """
    if output.suffix.lower() != ".png":
        raise UsageError(f"learning curves are drawn as PNG: --output must end in .png, got {output}")
    figure = plot_learning_curves(folders)
    create(output.parent)
    atomic_write(output, figure_bytes(figure))


def plot_learning_curves(folders: list[Path]) -> Figure:
    """Training loss and top-1 over epochs, one line per run folder.

    Raises:
        UsageError: not a run folder, or a run without a complete epoch.
    """
    runs = []
    for folder in folders:
        config, run = read_config(folder, "eval_split")
        metrics = read_metrics(folder)
        if not metrics["epoch"]:
            raise UsageError(f"{folder} has no complete epoch yet")
        runs.append((f"{folder.name}: {config['model']}", run["eval_split"], metrics))

    figure = Figure(figsize=(12, 4.5), layout="constrained")
    loss_axes, accuracy_axes = figure.subplots(1, 2)
    for label, _, metrics in runs:
        loss_axes.plot(metrics["epoch"], metrics["train_loss"], label=label, marker=".")
        epochs, top1 = np.array(metrics["epoch"]), np.array(metrics["top1"])
        evaluated = ~np.isnan(top1)  # --eval-epochs leaves epochs out
        best = f" ({top1[evaluated].max():.2f}%)" if evaluated.any() else ""
        accuracy_axes.plot(epochs[evaluated], top1[evaluated], label=f"{label}{best}", marker=".")
    splits = sorted({split.replace("_", "-") for _, split, _ in runs})
    loss_axes.set(xlabel="epoch", ylabel="training loss")
    accuracy_axes.set(xlabel="epoch", ylabel=f"top-1 on {' or '.join(splits)} images (%)")
    for axes in (loss_axes, accuracy_axes):
        axes.grid(alpha=0.3)
    accuracy_axes.legend(fontsize=8)
    return figure
