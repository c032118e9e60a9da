"""In print, no text is smaller than 6.5 points, overlaps another text or a foreign picture, or leaves the figure, and
every colour bar has a label. This is checked by matplotlib's bounding boxes, with small networks, for every kind of
figure at a paper's column and page width, with few and many models, layers and heads, and with long names."""

import itertools
from dataclasses import replace
from functools import cache

import matplotlib
import pytest
import torch
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.text import Annotation
from matplotlib.transforms import Bbox

from ea_vision.base.print import text_width, wrapped
from ea_vision.recorder.quantities import LayerQuantities
from ea_vision.recorder.recording import PARTS
from ea_vision.visualize import MapStyle, plot_jacobian
from ea_vision.visualize.heatmap import draw_heatmap
from ea_vision.visualize.matrix import draw_matrix
from ea_vision.visualize.rollout import draw_rollout
from ea_vision.visualize.statistics import draw_statistics
from ea_vision.visualize.strip import draw_change, draw_strip
from ea_vision.zoo.loaded import as_model

from .conftest import PHOTO, labelled, record, small, written

LONG = "ea_conv_transformer_cifar_with_learnable_alpha_and_beta_per_head, 2026-11-22-cifar10-holdout-seed-3, epoch 195"
QUERY = (3, 3)


@cache
def recording(heads=2, label="a model", img_size=(32, 32)):
    """An EA network's maps: two chains of three layers."""
    model = as_model(small(num_heads=heads, widths=[24] * 4, img_size=img_size))
    return record(replace(model, label=label, classes=["flying squirrel"] * 3), PARTS)


def free_texts(figure):
    """Return the texts that may be anywhere: numbers of queries, a tile's maximum, labels outside an axis."""
    free = set()
    for axes in figure.axes:
        free.update(text for text in axes.texts if not isinstance(text, Annotation))
        for axis in (axes.xaxis, axes.yaxis):
            low, high = sorted(axis.get_view_interval())
            for tick in axis.get_major_ticks() + axis.get_minor_ticks():
                if not low <= tick.get_loc() <= high:
                    free.update((tick.label1, tick.label2))
    return free


def meet(a, b):
    """Return whether two boxes overlap by more than one pixel."""
    common = Bbox.intersection(a, b)
    return common is not None and min(common.size) > 1


def problems(figure):
    """Return the faults in the sizes and positions of a figure's texts."""
    renderer = FigureCanvasAgg(figure).get_renderer()
    if figure.get_layout_engine():
        # savefig has two passes, too: places are settled in the second
        figure.get_layout_engine().execute(figure)
    figure.draw_without_rendering()
    wrong = []
    for axes in labelled(figure, "<colorbar>"):
        if not axes.get_xlabel() and not axes.get_ylabel():
            wrong.append("a colour bar has no label")
    free = free_texts(figure)
    boxes = []
    for text in written(figure):
        if text.axes is not None and not text.axes.get_visible():
            continue
        if text.get_fontsize() < 6.5:
            wrong.append(f"{text.get_fontsize()} points: {text.get_text()!r}")
        box = text.get_window_extent(renderer)
        if text not in free and box.width and box.height:
            boxes.append((text.get_text(), box))
    edge = figure.bbox.padded(1)
    pictures = []
    for axes in figure.axes:
        pictures += [image.get_window_extent(renderer) for image in axes.images]
    for text, box in boxes:
        if not edge.contains(*box.min) or not edge.contains(*box.max):
            wrong.append(f"cut off: {text!r}")
        if any(meet(box, picture) for picture in pictures):
            wrong.append(f"on a picture: {text!r}")
    for (a, box_a), (b, box_b) in itertools.combinations(boxes, 2):
        if meet(box_a, box_b):
            wrong.append(f"on each other: {a!r}, {b!r}")
    return wrong


def test_the_checks_find_a_bad_layout():
    figure = matplotlib.figure.Figure(figsize=(2, 2), layout="constrained")
    figure.subplots().imshow([[0, 1]], aspect="auto")
    for place, text in ((0.5, "one"), (0.52, "other"), (0.99, "beyond")):
        figure.text(place, 0.5, text)
    wrong = problems(figure)
    assert "on each other: 'one', 'other'" in wrong
    assert "on a picture: 'one'" in wrong
    assert "cut off: 'beyond'" in wrong


def quantities(layers, heads):
    """Return quantities of maps that shrink after the first half of the layers."""
    torch.manual_seed(0)
    measured = []
    for number in range(1, layers + 1):
        size = (8, 8) if number <= (layers + 1) // 2 else (4, 4)
        correlations = torch.rand(3, heads) if number > 1 else None
        per_head = torch.rand(3, 3, heads)
        positions = torch.rand(1, heads)
        layer = LayerQuantities(number, "a", size, 1.0, 0.5, *per_head, correlations, positions)
        measured.append(layer)
    return measured


def images_side_by_side(made, layers, heads, width):
    made = made * 3
    names = [f"{number}.jpg" for number in range(len(made))]
    numbers = [layers[:2]] * len(made)
    return draw_heatmap(made, numbers, heads[:3], ["all"], names=names, photos=True, width=width)


def models_side_by_side(made, layers, heads=(0,), width=None):
    return draw_heatmap(made, [layers] * len(made), heads[:1], [QUERY], width=width)


def statistics(made, layers, heads, width):
    measured = {one.model.label: quantities(len(layers), len(heads)) for one in made}
    return draw_statistics(measured, width=width)


KINDS = {  # of recordings (one per model, all alike), their layers' numbers, their heads, the width
    "heatmap": lambda made, layers, heads, width: draw_heatmap(
        made[:1], [layers], heads, [QUERY], width=width
    ),
    "queries": lambda made, layers, heads, width: draw_heatmap(
        made[:1], [layers[:2]], heads, [QUERY, (31, 31)], width=width
    ),
    "models": models_side_by_side,
    "images": images_side_by_side,
    "strip": lambda made, layers, heads, width: draw_strip(
        made[0], layers, heads[0], (16, 16), width=width
    ),
    "change": lambda made, layers, heads, width: draw_change(
        made[0], [*layers, 2], heads[0], (16, 16), width=width
    ),
    "fog": lambda made, layers, heads, width: draw_heatmap(
        made[:1], [layers], heads[:3], [QUERY], MapStyle(style="fog"), width=width
    ),
    "matrix": lambda made, layers, heads, width: draw_matrix(
        made[0].maps, layers, heads, "logits", title=made[0].model.label, width=width
    ),
    "rollout": lambda made, layers, heads, width: draw_rollout(
        made, [QUERY, (16, 16)], width=width
    ),
    "jacobian": lambda made, layers, heads, width: plot_jacobian(
        made[0].model, PHOTO, 1, layers, width=width
    ),
    "statistics": statistics,
}
SIZES = [(6.75, 1, 3, 2), (3.3, 6, 8, 3)]  # inches, layers, heads, models


@pytest.mark.parametrize("width, layers, heads, models", SIZES)
@pytest.mark.parametrize("kind", KINDS)
def test_every_kind_of_figure_in_print(kind, width, layers, heads, models):
    """Nothing overlaps, text has 7 to 9 points, and there are at most as many photos as images."""
    recorded = [recording(heads, f"{LONG} [{number}]") for number in range(models)]
    figure = KINDS[kind](recorded, list(range(1, layers + 1)), [*range(heads), "mean"], width)
    assert figure.get_size_inches()[0] == pytest.approx(width)
    assert not problems(figure)
    sizes = {round(text.get_fontsize(), 2) for text in written(figure)}
    assert sizes <= {7.0, 8.0, 9.0}
    photos = 3 * models if kind == "images" else 1
    assert len(labelled(figure, "photo")) <= photos


@pytest.mark.parametrize("scale", ["tile", "all"])
def test_scales(scale):
    recorded = recording()
    style = MapStyle(scale=scale)
    assert not problems(draw_strip(recorded, [1, 2], 0, QUERY, style, width=3.3))
    assert not problems(draw_matrix(recorded.maps, [1, 2], [0, 1], "logits", style, width=3.3))


def test_the_users_size_of_text():
    recorded = recording(label=LONG)
    with matplotlib.rc_context({"font.size": 16}):
        for figure in (
            draw_strip(recorded, [1, 2], 0, QUERY),
            models_side_by_side([recorded, recorded], [1, 4]),
        ):
            assert not problems(figure)
            largest = max(text.get_fontsize() for text in written(figure))
            assert largest == pytest.approx(0.9 * 16)


def test_without_a_width_a_figure_is_as_wide_as_it_needs_to_be():
    recorded = recording(8)
    narrow = draw_heatmap([recorded], [[1]], [0], [QUERY])
    wide = draw_heatmap([recorded], [[1, 2]], range(8), [QUERY])
    assert narrow.get_size_inches()[0] < 3.3
    assert 4 < wide.get_size_inches()[0] <= 6.75


@pytest.mark.parametrize("img_size", [(64, 24), (24, 64)])
def test_tall_and_wide_images(img_size):
    recorded = recording(2, LONG, img_size)
    assert not problems(draw_strip(recorded, [1, 2], 0, QUERY))
    assert not problems(models_side_by_side([recorded, recorded], [1, 2]))


@pytest.mark.parametrize(
    "text, fits, lines",
    [
        ("one two-three four", "two-three", "one\ntwo-three\nfour"),
        ("stages.2.blocks.0", "stages.2.", "stages.2.\nblocks.0"),
        ("w" * 9, "w" * 4, "wwww\nwwww\nw"),
    ],
)
def test_names_break_between_words_first(text, fits, lines):
    assert wrapped(text, text_width(fits, 7) + 0.1, 7) == lines


def test_the_layers_of_every_model_lie_on_the_axis():
    later = quantities(2, 2)
    for layer in later:
        layer.number += 9
    figure = draw_statistics({"early": quantities(3, 2), "late": later})
    low, high = figure.axes[0].get_xlim()
    assert low < 1
    assert high > 11
