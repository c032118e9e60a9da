"""The confusion picture of an evaluation."""

from ea_vision.base.figures import check_width
from ea_vision.engine.evaluate import Evaluation


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
    height = (cell * count + names + 20 + 1.25 * medium * (3 + title.count("\n"))) / 72
    with print_style():
        figure = new_figure(width, height, layout="constrained")
        axes = figure.add_subplot()
        image = axes.imshow(percent.numpy(), cmap="Blues", vmin=0, vmax=100)
        small_ticks(figure.colorbar(image, ax=axes, label="percent of the class", shrink=0.8).ax)
        small_ticks(axes)
        axes.set(xlabel="taken for", ylabel="class")
        figure.suptitle(title)
        if named:
            axes.set_xticks(range(count), classes, rotation=90)
            axes.set_yticks(range(count), classes)
        if cell > text_width("100", small):
            for row, column in (percent >= 0.5).nonzero().tolist():
                value = percent[row, column].item()
                axes.text(column, row, f"{value:.0f}", ha="center", va="center", fontsize=small,
                          color="white" if value > 50 else "black")
    return figure
