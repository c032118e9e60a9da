"""The confusion of an evaluation, as a picture.

Importing this imports matplotlib, which training does without.
"""

import matplotlib
import numpy as np
from matplotlib.figure import Figure

from ea_vision.base.figures import figure_bytes
from ea_vision.base.print import text_settings
from ea_vision.data.image_names import displayable
from ea_vision.engine.evaluate import Evaluation

MOST_NAMED = 40  # the names and numbers of more classes do not fit


def confusion_png(result: Evaluation, classes: list[str], name: str) -> bytes:
    """Draw the confusion matrix, each row in percent of its class; up to MOST_NAMED classes have names and numbers.
    Return a PNG file."""
    with matplotlib.rc_context(text_settings()):
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
