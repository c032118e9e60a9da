"""In print, no text is smaller than 6.5 points, overlaps another text or a foreign picture, or leaves the figure, and
every colour bar has a label. This is checked by matplotlib's bounding boxes, with small networks, for every kind of
figure at a paper's column and page width, with few and many models, layers and heads, and with long names."""

import itertools
from dataclasses import replace
from functools import cache, partial

import matplotlib
import pytest
import torch
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.image import AxesImage
from matplotlib.text import Annotation
from matplotlib.transforms import Bbox

from ea_vision.base.print import text_width, wrapped
from ea_vision.recorder.quantities import measure
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
MIDDLE = (16, 16)


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
    pictures = [image.get_window_extent(renderer) for image in figure.findobj(AxesImage)]
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


def quantities(model):
    """Return the quantities of a model's layers on three images."""
    return measure(model.model, [torch.rand(3, 3, 32, 32)])


def figures(recordings, layers, heads):
    """Return functions of the width that draw each kind of figure of recordings, one per model."""
    first = recordings[0]
    measured = {one.model.label: quantities(one.model)[: len(layers)] for one in recordings}
    photos = recordings * 3
    names = [f"{number}.jpg" for number in range(len(photos))]
    numbers = [layers[:2]] * len(photos)
    side_by_side = partial(draw_heatmap, photos, numbers, names=names, photos=True)
    return {
        "heatmap": partial(draw_heatmap, [first], [layers], heads, [QUERY]),
        "queries": partial(draw_heatmap, [first], [layers[:2]], heads, [QUERY, (31, 31)]),
        "models": partial(draw_heatmap, recordings, [layers] * len(recordings), heads[:1], [QUERY]),
        "images": partial(side_by_side, heads[:3], ["all"]),
        "strip": partial(draw_strip, first, layers, heads[0], MIDDLE),
        "change": partial(draw_change, first, [*layers, 2], heads[0], MIDDLE),
        "fog": partial(draw_heatmap, [first], [layers], heads[:3], [QUERY], MapStyle(style="fog")),
        "matrix": partial(draw_matrix, first.maps, layers, heads, "logits", title=LONG),
        "rollout": partial(draw_rollout, recordings, [QUERY, MIDDLE]),
        "jacobian": partial(plot_jacobian, first.model, PHOTO, 1, layers),
        "statistics": partial(draw_statistics, measured),
    }


KINDS = "heatmap queries models images strip change fog matrix rollout jacobian statistics".split()
SIZES = [(6.75, 1, 3, 2), (3.3, 6, 8, 3)]  # inches, layers, heads, models


@pytest.mark.parametrize("width, layers, heads, models", SIZES)
@pytest.mark.parametrize("kind", KINDS)
def test_every_kind_of_figure_in_print(kind, width, layers, heads, models):
    """Nothing overlaps, text has 7 to 9 points, and there are at most as many photos as images."""
    recorded = [recording(heads, f"{LONG} [{number}]") for number in range(models)]
    draw = figures(recorded, list(range(1, layers + 1)), [*range(heads), "mean"])[kind]
    figure = draw(width=width)
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
            draw_heatmap([recorded] * 2, [[1, 4]] * 2, [0], [QUERY]),
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
    assert not problems(draw_heatmap([recorded] * 2, [[1, 2]] * 2, [0], [QUERY]))


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
    early = quantities(recording().model)[:3]
    later = [replace(layer, number=layer.number + 9) for layer in early[:2]]
    figure = draw_statistics({"early": early, "late": later})
    low, high = figure.axes[0].get_xlim()
    assert low < 1
    assert high > 11
