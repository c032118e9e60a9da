"""What an evaluation leaves on disk: numbers, each class's accuracy, the confusion picture, timm's results rows."""

from __future__ import annotations

import csv
import io
import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from torch import nn

from ea_vision.base.figures import check_width, figure_bytes
from ea_vision.base.files import atomic_write, create, csv_text, write_json
from ea_vision.engine import run_folder
from ea_vision.engine.evaluate import Evaluation


def numbers_of(result: Evaluation) -> dict[str, Any]:
    """Return what evaluation.json says: images, top1, top5, loss, and under `views` those of views."""
    numbers = {"images": result.images, "top1": round(result.top1, 4), "top5": round(result.top5, 4),
               "loss": round(result.loss, 6)}
    return {**numbers, **({"views": numbers_of(result.views)} if result.views is not None else {})}


def line_of(result: Evaluation, tta: str) -> str:
    """Return a line: the plain figures and, where there are, those of views."""
    line = f"top1 {result.top1:.2f}%  top5 {result.top5:.2f}%  loss {result.loss:.4f}"
    if result.views is not None:
        line += f"  {tta} views: top1 {result.views.top1:.2f}%  loss {result.views.loss:.4f}"
    return f"{line}  {result.images} images"


def write_evaluation(folder: Path, result: Evaluation, classes: list[str], about: dict[str, Any]) -> list[Path]:
    """Write evaluation.json, per_class.csv and confusion.png (both of the images as they are); return their paths."""
    create(folder)
    paths = [folder / "evaluation.json", folder / "per_class.csv", folder / "confusion.png"]
    write_json(paths[0], {**about, **numbers_of(result)})
    table = io.StringIO()
    writer = csv.writer(table, lineterminator="\n")
    writer.writerow(["class", "images", "top1", "most_confused_with", "confused_images"])
    for index, (name, top1) in enumerate(zip(classes, result.per_class().tolist(), strict=True)):
        row = result.confusion[index].clone()
        images = int(row.sum())
        row[index] = 0
        worst = int(row.argmax())
        writer.writerow([name, images, f"{top1:.2f}", classes[worst] if row[worst] else "", int(row[worst])])
    atomic_write(paths[1], table.getvalue().encode())
    atomic_write(paths[2], figure_bytes(plot_confusion(result, classes, about["model"])))
    return paths


def timm_crop_pct(img_size: int, resize: int) -> float:
    """Return the share img_size / resize in the fewest digits (4 at least) that timm turns back into `resize` pixels,
    floor(img_size / share)."""
    digits = 4
    while True:
        share = img_size / resize
        for near in (round(share, digits), math.floor(share * 10**digits) / 10**digits):
            if near and math.floor(img_size / near) == resize:
                return near
        digits += 1


def timm_row(name: str, model: nn.Module, top1: float, top5: float, img_size: int, resize: int,
             interpolation: str) -> dict[str, Any]:
    """Return a row of `write_timm_results`: `top1` and `top5` in percent, `model` for the number of its parameters."""
    params = sum(p.numel() for p in model.parameters())
    return {"model": name, "img_size": img_size, "top1": f"{top1:.3f}", "top1_err": f"{100 - top1:.3f}",
            "top5": f"{top5:.3f}", "top5_err": f"{100 - top5:.3f}", "param_count": f"{params / 1e6:.2f}",
            "crop_pct": timm_crop_pct(img_size, resize), "interpolation": interpolation}


def write_timm_results(path: Path, rows: Sequence[dict[str, Any]]) -> str:
    """Write rows of `timm_row`, at least one, as a results file of timm's, the best first; return the text."""
    text = csv_text(sorted(rows, key=lambda row: -float(row["top1"])))
    atomic_write(path, text.encode())
    return text


def write_results_row(folder: Path, name: str, model: nn.Module, top1: float, top5: float,
                      preprocessing: tuple[int, int, str]) -> list[Path]:
    """Write accuracies, in percent, in the columns of timm's results files; return the path."""
    path = folder / run_folder.RESULTS_ROW
    write_timm_results(path, [timm_row(name, model, top1, top5, *preprocessing)])
    return [path]


def plot_confusion(result: Evaluation, classes: list[str], name: str, *, width: float | None = None):
    """Draw the confusion matrix, each row as percent of its class, with the numbers and names that have room; a Figure.

    Args:
        width: inches; None: 5 to 17, by the number of classes.
    """
    from ea_vision.base.print import new_figure, points, print_style, small_ticks, text_width, wrapped

    percent = 100 * result.confusion / result.confusion.sum(1, keepdim=True).clamp(min=1)
    count = len(classes)
    width = check_width(width) or min(max(5.0, 0.45 * count + 3), 17.0)
    small, medium = points(), points("medium")
    names = max(text_width(text, small) for text in classes)
    cell = (72 * width - 90 - names) / count  # points
    named = cell >= 1.15 * small
    title = (f"{wrapped(name, 72 * width - 70, medium)}\n"
             f"top-1 {result.top1:.2f}%, top-5 {result.top5:.2f}%, {result.images} images")
    cell += 0.0 if named else names / count
    height = (cell * count + (names if named else 20) + 1.25 * medium * (3 + title.count("\n"))) / 72
    with print_style():
        figure = new_figure(width, height, layout="constrained")
        axes = figure.add_subplot()
        image = axes.imshow(percent.numpy(), cmap="Blues", vmin=0, vmax=100)
        small_ticks(figure.colorbar(image, ax=axes, label="percent of the class", shrink=0.8).ax)
        small_ticks(axes)
        axes.set(xlabel="taken for", ylabel="class")
        figure.suptitle(title).set_parse_math(False)
        if named:
            axes.set_xticks(range(count), classes, rotation=90)
            axes.set_yticks(range(count), classes)
        if cell > text_width("100", small):
            for row in range(count):
                for column in range(count):
                    value = percent[row, column].item()
                    if value >= 0.5:
                        axes.text(column, row, f"{value:.0f}", ha="center", va="center", fontsize=small,
                                  color="white" if value > 50 else "black")
    return figure
