"""No text lies on another text, on a picture that it does not belong to, or beyond the figure's edge: by matplotlib's
bounding boxes, on maps made here, for few and many models, heads and sizes of maps, and for long names."""
import itertools

import matplotlib
import pytest
import torch
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.text import Annotation, Text
from torch import nn

from ea_vision.analysis.loading import LoadedModel
from ea_vision.analysis.probe_results import Result, results_figure
from ea_vision.analysis.quantities import LayerQuantities
from ea_vision.analysis.recording import AttentionMaps, LayerMaps
from ea_vision.engine.evaluate import Evaluation
from ea_vision.engine.report import plot_confusion
from ea_vision.studies.sweep import plot_sweep
from ea_vision.visualize import (
    MapStyle,
    animation_frames,
    attention_matrices,
    evolution_strip,
    heads_by_queries,
    models_side_by_side,
    rollout_figure,
    statistics_figure,
)
from ea_vision.visualize.image_maps import Recording

LONG = "ea_conv_transformer_cifar_with_learnable_alpha_and_beta_per_head, 2026-11-22-cifar10-holdout-seed-3, epoch 195"


def recording(heads=2, sizes=((8, 8),), label="a model", img_size=(32, 32), name="stages.2.blocks.0.attention.conv"):
    """An EA network's maps: every layer after the first of its size evolves from the one before."""
    torch.manual_seed(0)
    maps, before = AttentionMaps(), None
    for number, size in enumerate(sizes, start=1):
        N = size[0] * size[1]
        own = torch.randn(1, heads, N, N)
        layer = LayerMaps(number, name, tuple(range(heads)), size, self_logits=own, logits=own)
        if before is not None and before.feat_size == size:
            layer.prev_logits, layer.conv_logits = before.logits, torch.randn(1, heads, N, N)
            layer.logits = 0.5 * layer.conv_logits + 0.5 * own
        layer.attn = layer.logits.softmax(-1)
        maps._begin(layer)
        before = layer
    model = nn.Module()
    for part in name.split(".")[::-1]:  # a module of that name, whose layer has no evolution to ask
        model, inner = nn.Module(), model
        model.add_module(part, inner)
    return Recording(LoadedModel(model, label, img_size, {}), torch.rand(3, *img_size), maps)


def problems(figure) -> list[str]:
    """What is wrong with the places of a figure's texts."""
    renderer = FigureCanvasAgg(figure).get_renderer()
    figure.get_layout_engine().execute(figure)  # savefig has two passes, too: places are settled in the second
    figure.draw_without_rendering()
    found, boxes = [], []
    left_out = {text for axes in figure.axes for text in axes.texts  # numbers of queries, a tile's maximum, "none"
                if not isinstance(text, Annotation)}
    for axis in (axis for axes in figure.axes for axis in (axes.xaxis, axes.yaxis)):
        low, high = sorted(axis.get_view_interval())
        left_out |= {label for tick in axis.get_major_ticks() + axis.get_minor_ticks()
                     if not low <= tick.get_loc() <= high for label in (tick.label1, tick.label2)}
    for text in figure.findobj(Text):
        if text in left_out or not (text.get_text().strip() and text.get_visible()):
            continue
        if text.axes is not None and not text.axes.get_visible():
            continue
        box = text.get_window_extent(renderer)
        if box.width and box.height:
            boxes.append((text, box))
    edge = figure.bbox
    for text, box in boxes:
        if box.x0 < edge.x0 - 1 or box.y0 < edge.y0 - 1 or box.x1 > edge.x1 + 1 or box.y1 > edge.y1 + 1:
            found.append(f"cut off: {text.get_text()!r}")
    for (a, box_a), (b, box_b) in itertools.combinations(boxes, 2):
        if meet(box_a, box_b):
            found.append(f"on each other: {a.get_text()!r}, {b.get_text()!r}")
    pictures = [image.get_window_extent(renderer) for axes in figure.axes for image in axes.images]
    for text, box in boxes:
        if any(meet(box, picture) for picture in pictures):
            found.append(f"on a picture: {text.get_text()!r}")
    return found


def meet(a, b, slack: float = 1.0) -> bool:
    """Whether two boxes have more in common than a line of `slack` pixels."""
    return (min(a.x1, b.x1) - max(a.x0, b.x0) > slack) and (min(a.y1, b.y1) - max(a.y0, b.y0) > slack)


def test_what_is_looked_for_is_found():
    figure = matplotlib.figure.Figure(figsize=(2, 2), layout="constrained")
    axes = figure.subplots()
    axes.imshow([[0, 1]], aspect="auto")
    for place, text in ((0.5, "one"), (0.52, "other"), (0.99, "beyond")):
        figure.text(place, 0.5, text)
    found = "\n".join(problems(figure))
    assert "on each other: 'one', 'other'" in found and "on a picture: 'one'" in found and "cut off: 'beyond'" in found


MAPS = [(1, ((8, 8),), "a model"), (12, ((14, 14), (7, 7), (7, 7)), LONG)]


@pytest.mark.parametrize("heads, sizes, label", MAPS)
def test_heads(heads, sizes, label):
    assert not problems(heads_by_queries(recording(heads, sizes[-1:], label), [1], range(heads), [(16, 16)]))


def test_layers():
    assert not problems(heads_by_queries(recording(1, MAPS[1][1], LONG), [1, 2, 3], ["mean"], [(16, 16)]))


def test_queries():
    points = [(3, 3), (16, 16), (31, 31)]
    assert not problems(heads_by_queries(recording(2, ((8, 8), (4, 4)), LONG), [1, 2], [0, "mean"], points))


@pytest.mark.parametrize("count", [1, 4])
def test_models(count):
    sizes = ((8, 8), (4, 4), (2, 2))[:count]
    made = [recording(2, sizes, f"{LONG} [{number}]") for number in range(count)]
    assert not problems(models_side_by_side(made, [range(1, 1 + len(sizes))] * count, ["mean"], [(3, 3)]))
    assert not problems(rollout_figure(made, [(3, 3)]))


@pytest.mark.parametrize("heads, sizes, label", MAPS)
def test_strips(heads, sizes, label):
    assert not problems(evolution_strip(recording(heads, sizes, label), range(1, 1 + len(sizes)), 0, (16, 16)))


@pytest.mark.parametrize("points", [[(3, 3)], [(3, 3), (31, 31)]])
def test_frames(points):
    [figure] = animation_frames([(recording(label=LONG), 1)], [0, "mean"], points)
    assert not problems(figure)


@pytest.mark.parametrize("heads, sizes, label", [MAPS[0], (12, ((4, 4),), LONG)])
def test_matrices(heads, sizes, label):
    assert not problems(attention_matrices(recording(heads, sizes, label), [1], [*range(heads), "mean"]))


@pytest.mark.parametrize("style", [
    MapStyle(overlay=False), MapStyle(scale="tile"), MapStyle(overlay=False, scale="tile")])
def test_looks(style):
    assert not problems(heads_by_queries(recording(), [1], [0], [(3, 3)], style))


def test_the_users_size_of_text():
    with matplotlib.rc_context({"font.size": 16}):
        made = recording(2, ((8, 8), (8, 8), (4, 4)), LONG)
        for figure in (heads_by_queries(made, [1, 3], [0, "mean"], [(3, 3)]), evolution_strip(made, [1, 2], 0, (3, 3)),
                       models_side_by_side([made] * 2, [[1, 3]] * 2, [0], [(3, 3)]),
                       attention_matrices(made, [3], [0, "mean"])):
            assert not problems(figure)
            assert max(text.get_fontsize() for text in figure.findobj(Text)) == pytest.approx(1.2 * 16)  # "large"


@pytest.mark.parametrize("img_size, feat_size", [((64, 24), (8, 3)), ((24, 64), (3, 8))])
def test_tall_and_wide_images(img_size, feat_size):
    made = recording(2, (feat_size, feat_size), LONG, img_size)
    assert not problems(heads_by_queries(made, [1], [0, "mean"], [(3, 3)]))
    assert not problems(evolution_strip(made, [1, 2], 0, (3, 3)))
    assert not problems(models_side_by_side([made] * 2, [[1, 2]] * 2, [0], [(3, 3)]))


@pytest.mark.parametrize("count", [1, 4])
def test_statistics_sweeps_and_probes(count):
    torch.manual_seed(0)
    sizes = ((8, 8), (8, 8), (4, 4))
    layers = [LayerQuantities(number, "a", size, *torch.rand(3, 3, 12), None if number == 3 else torch.rand(3, 12), 1.0,
                              0.5) for number, size in enumerate(sizes, start=1)]
    labels = [f"{LONG} [{number}]" for number in range(count)]
    assert not problems(statistics_figure({label: layers for label in labels}))
    found = [Result(label[-40:], maps, layer, 0, 30.0 + layer, 500, 500) for label in labels
             for maps in ("trained", "untrained") for layer in (1, 2)]
    assert not problems(results_figure(found, 10))
    rows = [{"widths": "w" * 40 + str(a), "beta": b, "top1": 50.0 + a + b} for a in range(3) for b in range(count)]
    assert not problems(plot_sweep(rows, ["widths", "beta"], "top-1 (%)"))
    figure = plot_confusion(Evaluation(30, 50.0, 90.0, 1.0, torch.eye(10)), ["flying_squirrel"] * 10, labels[0])
    assert not problems(figure) and labels[0].replace(" ", "") in figure.axes[0].get_title().replace("\n", "").replace(
        " ", "")
