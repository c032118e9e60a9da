"""In print: no text is smaller than 6.5 points, lies on another text, on a picture that it does not belong to, or
beyond the figure's edge, and every colour bar is labelled. By matplotlib's bounding boxes, of small networks, for every
kind of figure at the widths of a paper's column and page, few and many models, layers and heads, and long names."""

import itertools
from dataclasses import replace
from functools import cache

import matplotlib
import pytest
import torch
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.text import Annotation, Text
from matplotlib.transforms import Bbox

from ea_vision.base.print import text_width, wrapped
from ea_vision.recorder.quantities import LayerQuantities
from ea_vision.recorder.recording import PARTS
from ea_vision.visualize import MapStyle, plot_jacobian
from ea_vision.visualize.heatmap import draw_columns, draw_heatmap
from ea_vision.visualize.image_maps import as_model
from ea_vision.visualize.matrix import draw_matrix
from ea_vision.visualize.rollout import draw_rollout
from ea_vision.visualize.statistics import draw_statistics
from ea_vision.visualize.strip import draw_strip

from .conftest import PHOTO, record, small

LONG = "ea_conv_transformer_cifar_with_learnable_alpha_and_beta_per_head, 2026-11-22-cifar10-holdout-seed-3, epoch 195"


@cache
def recording(heads=2, label="a model", img_size=(32, 32)):
    """An EA network's maps: two chains of three layers."""
    model = as_model(small(num_heads=heads, widths=[24] * 4, img_size=img_size))
    return record(replace(model, label=label, classes=["flying squirrel"] * 3), PARTS)


def problems(figure) -> list[str]:
    """What is wrong with the places of a figure's texts."""
    renderer = FigureCanvasAgg(figure).get_renderer()
    if figure.get_layout_engine():
        figure.get_layout_engine().execute(
            figure
        )  # savefig has two passes, too: places are settled in the second
    figure.draw_without_rendering()
    texts = [
        text
        for text in figure.findobj(Text)
        if text.get_text().strip()
        and text.get_visible()
        and (text.axes is None or text.axes.get_visible())
    ]
    left_out = {
        text
        for axes in figure.axes
        for text in axes.texts  # numbers of queries, a tile's maximum, "none"
        if not isinstance(text, Annotation)
    }
    for axis in (axis for axes in figure.axes for axis in (axes.xaxis, axes.yaxis)):
        low, high = sorted(axis.get_view_interval())
        left_out |= {
            label
            for tick in axis.get_major_ticks() + axis.get_minor_ticks()
            if not low <= tick.get_loc() <= high
            for label in (tick.label1, tick.label2)
        }
    found = [
        f"{text.get_fontsize()} points: {text.get_text()!r}"
        for text in texts
        if text.get_fontsize() < 6.5
    ]
    found += [
        "a colour bar has no label"
        for axes in figure.axes
        if axes.get_label() == "<colorbar>" and not (axes.get_xlabel() or axes.get_ylabel())
    ]
    boxes = [
        (text.get_text(), text.get_window_extent(renderer))
        for text in texts
        if text not in left_out
    ]
    boxes = [(text, box) for text, box in boxes if box.width and box.height]
    edge = figure.bbox.padded(1)
    found += [
        f"cut off: {text!r}"
        for text, box in boxes
        if not (edge.contains(*box.min) and edge.contains(*box.max))
    ]
    found += [
        f"on each other: {a!r}, {b!r}"
        for (a, box_a), (b, box_b) in itertools.combinations(boxes, 2)
        if meet(box_a, box_b)
    ]
    pictures = [image.get_window_extent(renderer) for axes in figure.axes for image in axes.images]
    return found + [
        f"on a picture: {text!r}"
        for text, box in boxes
        if any(meet(box, picture) for picture in pictures)
    ]


def meet(a, b) -> bool:
    """Whether two boxes have more in common than a line of a pixel."""
    common = Bbox.intersection(a, b)
    return common is not None and min(common.size) > 1


def test_what_is_looked_for_is_found():
    figure = matplotlib.figure.Figure(figsize=(2, 2), layout="constrained")
    axes = figure.subplots()
    axes.imshow([[0, 1]], aspect="auto")
    for place, text in ((0.5, "one"), (0.52, "other"), (0.99, "beyond")):
        figure.text(place, 0.5, text)
    found = "\n".join(problems(figure))
    assert (
        "on each other: 'one', 'other'" in found
        and "on a picture: 'one'" in found
        and "cut off: 'beyond'" in found
    )


def quantities(layers, heads):
    """Of maps that shrink after the first half of the layers."""
    torch.manual_seed(0)
    return [
        LayerQuantities(
            number,
            "a",
            (8, 8) if number <= (layers + 1) // 2 else (4, 4),
            1.0,
            0.5,
            *torch.rand(3, 3, heads),
            torch.rand(3, heads) if number > 1 else None,
            torch.rand(1, heads),
        )
        for number in range(1, layers + 1)
    ]


KINDS = {  # of recordings (one per model, all alike), their layers' numbers, their heads, the width
    "heatmap": lambda made, layers, heads, width: draw_heatmap(
        made[0], layers, heads, [(3, 3)], width=width
    ),
    "queries": lambda made, layers, heads, width: draw_heatmap(
        made[0], layers[:2], heads, [(3, 3), (31, 31)], width=width
    ),
    "models": lambda made, layers, heads, width: draw_columns(
        made,
        [one.model.label for one in made],
        [layers] * len(made),
        heads[:1],
        [(3, 3)],
        width=width,
        title="models",
        photos="first",
    ),
    "images": lambda made, layers, heads, width: draw_columns(
        made * 3,
        [f"{number}.jpg" for number in range(3 * len(made))],
        [layers[:2]] * 3 * len(made),
        heads[:3],
        ["all"],
        width=width,
        title=LONG,
        photos="each",
    ),
    "strip": lambda made, layers, heads, width: draw_strip(
        made[0], layers, heads[0], (16, 16), width=width
    ),
    "matrix": lambda made, layers, heads, width: draw_matrix(
        made[0], layers, heads, "logits", width=width
    ),
    "rollout": lambda made, layers, heads, width: draw_rollout(
        made, [(3, 3), (16, 16)], width=width
    ),
    "jacobian": lambda made, layers, heads, width: plot_jacobian(
        made[0].model, PHOTO, 1, layers, width=width
    ),
    "statistics": lambda made, layers, heads, width: draw_statistics(
        {r.model.label: quantities(len(layers), len(heads)) for r in made}, width=width
    ),
}
SIZES = [(6.75, 1, 3, 2), (3.3, 6, 8, 3)]  # inches, layers, heads, models


def check(figure, width, photos=1):
    """In print: nothing lies on anything else, text has 7 to 9 points, and there are as many photos as images."""
    assert figure.get_size_inches()[0] == pytest.approx(width)
    assert not problems(figure)
    sizes = {
        round(text.get_fontsize(), 2)
        for text in figure.findobj(Text)
        if text.get_text().strip() and text.get_visible()
    }
    assert sizes <= {7.0, 8.0, 9.0}
    assert len([axes for axes in figure.axes if axes.get_label() == "photo"]) <= photos


@pytest.mark.parametrize("width, layers, heads, models", SIZES)
@pytest.mark.parametrize("kind", KINDS)
def test_every_kind_of_figure_in_print(kind, width, layers, heads, models):
    made = [recording(heads, f"{LONG} [{number}]") for number in range(models)]
    figure = KINDS[kind](made, list(range(1, layers + 1)), [*range(heads), "mean"], width)
    check(figure, width, photos=3 * models if kind == "images" else 1)


@pytest.mark.parametrize("scale", ["tile", "all"])
def test_scales(scale):
    made, style = recording(), MapStyle(scale=scale)
    assert not problems(draw_strip(made, [1, 2], 0, (3, 3), style, width=3.3))
    assert not problems(draw_matrix(made, [1, 2], [0, 1], "logits", style, width=3.3))


def columns(made, layers):
    return draw_columns(
        [made] * 2, [LONG] * 2, [layers] * 2, [0], [(3, 3)], title="models", photos="first"
    )


def test_the_users_size_of_text():
    with matplotlib.rc_context({"font.size": 16}):
        made = recording(label=LONG)
        for figure in draw_strip(made, [1, 2], 0, (3, 3)), columns(made, [1, 4]):
            assert not problems(figure)
            sizes = [
                text.get_fontsize() for text in figure.findobj(Text) if text.get_text().strip()
            ]
            assert max(sizes) == pytest.approx(0.9 * 16)


def test_without_a_width_a_figure_is_as_wide_as_it_needs_to_be():
    made = recording(8)
    assert draw_heatmap(made, [1], [0], [(3, 3)]).get_size_inches()[0] < 3.3
    assert 4 < draw_heatmap(made, [1, 2], range(8), [(3, 3)]).get_size_inches()[0] <= 6.75


@pytest.mark.parametrize("img_size", [(64, 24), (24, 64)])
def test_tall_and_wide_images(img_size):
    made = recording(2, LONG, img_size)
    assert not problems(draw_strip(made, [1, 2], 0, (3, 3))) and not problems(columns(made, [1, 2]))


def test_names_break_between_words_first():
    assert (
        wrapped("one two-three four", text_width("two-three", 7) + 0.1, 7) == "one\ntwo-three\nfour"
    )
    assert (
        wrapped("stages.2.blocks.0", text_width("stages.2.", 7) + 0.1, 7) == "stages.2.\nblocks.0"
    )
    assert "".join(wrapped("w" * 40, 30, 7).split("\n")) == "w" * 40
