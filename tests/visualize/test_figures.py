"""The figures: what is drawn where, their texts, and the files that they write."""

import copy
import io
import os
import re
import shutil
from dataclasses import replace
from functools import partial
from itertools import product
from pathlib import Path

import numpy as np
import pandas
import pytest
import timm
import torch
import torch.nn.functional as F
from PIL import Image
from scipy.ndimage import map_coordinates
from torch.testing import assert_close

import ea_vision
from ea_vision.base.print import new_figure
from ea_vision.recorder.class_evidence import add_class_evidence
from ea_vision.recorder.quantities import class_rollout
from ea_vision.recorder.recording import PARTS, recordable_layers
from ea_vision.visualize import (
    MapStyle,
    explore,
    heatmap,
    matrix,
    plot_heatmap,
    plot_matrix,
    plot_rollout,
    plot_strip,
    rollout,
    statistics,
    strip,
)
from ea_vision.visualize.figure_options import _outputs
from ea_vision.visualize.heatmap import draw_heatmap
from ea_vision.visualize.map_style import SCALES, norm_of, scaled
from ea_vision.visualize.matrix import draw_matrix
from ea_vision.visualize.rollout import draw_rollout
from ea_vision.visualize.sheet import Tile
from ea_vision.visualize.strip import add_own_alone, draw_change, draw_strip, equation
from ea_vision.visualize.tiles import OWN_ALONE as ALONE_PART
from ea_vision.visualize.tiles import map_of
from ea_vision.zoo.loaded import as_model
from tests.models.zoo import TINY
from tests.recorder import networks
from tests.refused import refused

from .conftest import (
    PHOTO,
    labelled,
    maps_of,
    overlaid,
    record,
    small,
    texts_of,
    tiles_of,
    titles_of,
)

CONV = "conv_transformer_cifar"
EA = "ea_" + CONV
PA = "pa_" + CONV
FOG = MapStyle(style="fog")


@pytest.fixture(scope="module")
def wide():
    """The first layer's maps, 4x8, of a 16x32 input."""
    return record(small(img_size=(16, 32)), ("attn", "logits"), 1)


def test_the_querys_cell_is_framed(wide):
    figure = draw_heatmap([wide], [[1]], ["mean"], [(1, 30), (10, 5)], MapStyle(overlay=False))
    [header] = labelled(figure, "photo")
    frames = []
    for axes in (header, *tiles_of(figure)):
        frames.append([patch.get_bbox().bounds for patch in axes.patches])
    query_1 = (28, 0, 4, 4)
    query_2 = (4, 8, 4, 4)
    assert frames == [[query_1, query_2], [query_1], [query_2]]
    assert [text.get_text() for text in header.texts] == ["1", "2"]


def test_models_side_by_side_share_one_scale_and_place_the_query(wide):
    """With models of different input sizes, the query is at the same relative position in each."""
    recordings = [wide, record(small(img_size=(32, 64), seed=1), layers=1)]

    def draw(layers):
        return draw_heatmap(recordings, layers, [0], [(5, 20)], names=["one", "other"])

    shown = overlaid(draw([[1], [1]]))
    for artist, recording in zip(shown, recordings, strict=True):
        maps = recording.maps[1]
        height, width = maps.feat_size
        row = 5 * height // 16
        column = 20 * width // 32
        attn = maps.attn[0, 0, row * width + column]
        expected = height * width * attn.view(height, width)
        np.testing.assert_allclose(artist.get_array(), expected, rtol=1e-4)
    assert len({artist.get_clim() for artist in shown}) == 1
    with refused("equally many layers, got 1 of one, 2 of other"):
        draw([[1], [1, 1]])


def test_rollout_says_where_it_is_an_approximation(wide):
    """Patches that do not overlap are no approximation, whatever their module is called."""
    approximation = "approximation: convolutions left out"
    assert approximation in texts_of(draw_rollout([wide], [(5, 5)]))
    assert approximation not in texts_of(plot_rollout(networks.torchvision_vit(), PHOTO))


def test_rollout_of_a_class_is_its_evidence_in_the_class_token_or_in_all_pixels():
    """In shares of the sum times the number of patches; classes by number, by name, or the predicted one."""
    vit = networks.timms("vit_tiny_patch16_224", **TINY)
    for model, image in ((vit, torch.rand(3, 32, 32)), (EA, PHOTO)):
        tokens = int(model is vit)  # the class token
        recording = record(model, image=image)
        add_class_evidence(recording.model.model, recording.batch, recording.maps, [2])
        evidence = class_rollout(recording.maps)[0][:, tokens:]
        shares = evidence / evidence.sum(-1, keepdim=True) * evidence.shape[-1]
        expected = shares[0] if model is vit else shares.mean(0)
        figure = plot_rollout(model, image, target=2)
        [shown] = [values for values in maps_of(figure) if values.size == expected.numel()]
        np.testing.assert_allclose(shown.ravel(), expected, rtol=1e-4)
    labels = texts_of(plot_rollout(EA, PHOTO, target="bird", queries=[(3, 3)]))
    assert "bird (" in labels
    assert "query 1" in labels
    assert texts_of(plot_rollout(EA, PHOTO, target="predicted")).count("%") == 1
    with refused("target must be a class .* got 'unicorn'"):
        plot_rollout(EA, PHOTO, target="unicorn")


# ---- strips ---------------------------------------------------------------------------------------------------------

EVOLVING = "prev. logits, + own logits, \u2192 conv. of both, "
PREDICTING = "prev. logits, \u2192 conv. of prev., + own logits, "
FORMED = "\u2192 logits, "
ALONE = "\u2192 attn., own alone"
TWO_SIZES = ["layers 1, 3, 4x4", "layer 4, 2x2"]


@pytest.mark.parametrize(
    "name, layers, kwargs, blocks, columns",
    [
        (EA, [1, 3, 4], {"beta": 1.0}, TWO_SIZES, [EVOLVING + ALONE] * 2),
        (EA, [1, 2, 3], {"beta": 0.5, "alpha": 0.25}, [], [EVOLVING + FORMED + ALONE]),
        (PA, [2, 3], {}, [], [PREDICTING + FORMED + ALONE]),
        (CONV, [1, 3, 4], {}, TWO_SIZES, ["logits, \u2192 attn."] * 2),
    ],
)
def test_strips_say_what_they_show_in_the_order_in_which_it_is_computed(
    name, layers, kwargs, blocks, columns
):
    figure = plot_strip(small(name, **kwargs), PHOTO, layers, 1, (5, 9))
    texts = [text.get_text() for text in figure.texts]
    assert [text for text in texts if re.match("layers? [0-9, to]*, [0-9]x", text)] == blocks
    places = [axes for axes in figure.axes if not axes.get_label()]
    labels = [axes.get_ylabel() for axes in places if axes.get_ylabel()]
    assert [label.split("\n")[0] for label in labels] == [f"layer {layer}" for layer in layers]
    titles = [" ".join(title.split()) for title in titles_of(figure)]
    assert ", ".join(titles) == ", ".join(columns)
    if "alpha" in kwargs:
        mixed = "0.25 previous + 0.75 own"
        equation_text = (
            f"logits = 0.5 relu(conv({mixed})) + 0.5 ({mixed}), attention = softmax(logits)"
        )
        assert equation_text in texts_of(figure)


@pytest.mark.parametrize(
    "name, alpha, kwargs",
    [(EA, 0.3, {"beta": 0.6}), (EA, 0.3, {"beta": 0.6, "learnable": "per_head"}), (PA, 0.4, {})],
)
def test_own_alone_equals_a_recomputation_by_hand(name, alpha, kwargs):
    """By the papers' equations with alpha 0: EA convolves the own logits at the same scale, PA keeps the own logits."""
    model = small(name, alpha=alpha, **kwargs)
    before = copy.deepcopy(model.state_dict())
    recording = record(model, PARTS, 3)
    figure = draw_strip(recording, [1, 2, 3], 2, (5, 9))
    token = 1 * 4 + 2
    assert recording.maps[1].recorded() == ("attn", "logits", "self_logits")
    for number in (2, 3):
        maps = recording.maps[number]
        logits = maps.self_logits
        if name == EA:
            conv = model.get_submodule(maps.name).evolution.convs[0]
            with torch.inference_mode():
                logits = 0.6 * conv(logits).relu() + 0.4 * logits
        alone = maps[ALONE_PART]
        assert_close(alone, logits.softmax(-1))
        change = 1 - torch.minimum(maps.attn[0, 2, token], alone[0, 2, token]).sum()
        assert f"differs by {change:.2f}" in texts_of(figure)
        assert f"{change:.0%} of this query's attention moves" in texts_of(
            draw_change(recording, [number], 2, (5, 9))
        )
    shown = [values for values in maps_of(figure) if values.shape == (4, 4)]
    for part, scale in (("conv_logits", 1), (ALONE_PART, 16)):
        expected = scale * maps[part][0, 2, token].view(4, 4).numpy()
        assert any(np.allclose(values, expected) for values in shown)
    assert list(model.state_dict()) == list(before)
    assert_close(model.state_dict(), before, atol=0, rtol=0)


def test_a_part_that_cannot_be_taken_away_is_left_out():
    """This holds for a layer whose attention cannot be recomputed from the recorded parts."""
    recording = record(small(), PARTS, 2)
    maps = recording.maps[2]
    maps.save("attn", torch.rand_like(maps.attn))
    add_own_alone(recording)
    assert set(maps.recorded()) == set(PARTS)


# ---- scales and colours ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "scale, highest",
    [
        ("layer", [2, 2, 9, 9]),
        ("all", [9, 9, 9, 9]),
        ("uniform", [8, 8, 8, 8]),
        ("tile", [1.1, 1.1, 1.1, 9]),
    ],
)
def test_scales_of_attention(scale, highest):
    """In units of uniform attention: symmetric around it, and nearly uniform maps never look strong."""
    weak = np.array([[0.9, 1.1]])
    strong = np.array([[0.2, 9.0]])
    tiles = [Tile(None, values=values) for values in (weak, weak, weak, strong)]
    scaled([tiles[:2], tiles[2:]], MapStyle(scale=scale))
    assert [tile.norm.vmax for tile in tiles] == highest
    for tile in tiles:
        assert tile.norm.vmin == 1 / tile.norm.vmax
        assert tile.norm(1.0) == pytest.approx(0.5)


@pytest.mark.parametrize("overlay", [True, False])
@pytest.mark.parametrize("scale", SCALES)
def test_a_map_with_zeros_has_no_transparent_cell(wide, scale, overlay):
    """Attention that underflows to 0 has the scale's lowest colour."""
    values = np.array([[0.0, 0.0, 1e-30, 0.5], [1.0, 2.0, 12.0, 0.0]])
    axes = new_figure(1, 1).subplots()
    style = MapStyle(overlay, scale, opacity=0.7)
    norm = norm_of([values], style)
    map_of(values, wide, style).paint(axes, norm)
    artist = axes.images[-1]
    assert not np.ma.is_masked(norm(values))
    colours = artist.cmap(norm(artist.get_array()))
    assert (colours[..., 3] == 1).all()
    assert np.array_equal(colours[0, 0], artist.cmap(0.0))
    assert artist.get_alpha() == (0.7 if overlay else None)


def test_masked_logits_do_not_count_in_the_scale_and_other_infinities_are_refused():
    values = np.array([1.0, -2.0, 0.5])
    masked = np.append(values, -np.inf)
    reach = norm_of([values], MapStyle(), "logits").vmax
    assert norm_of([masked], MapStyle(), "logits").vmax == reach
    for part, wrong in (("logits", [np.inf, 1.0]), ("attn", [np.inf, 1.0]), ("logits", [-np.inf])):
        with refused("maps must be finite, got 1 values that are not"):
            norm_of([np.array([wrong])], MapStyle(), part)


def test_signs_of_logits_survive_greyscale_print(wide):
    [logits] = tiles_of(draw_matrix(wide.maps, [1], [0], "logits"))
    [attention] = tiles_of(draw_matrix(wide.maps, [1], [0], "attn"))
    norm = logits.images[0].norm
    assert norm.vmin == -norm.vmax
    brightness = logits.images[0].to_rgba(np.linspace(norm.vmin, norm.vmax, 9))[:, :3] @ (
        0.299,
        0.587,
        0.114,
    )
    assert (np.diff(brightness) > 0.05).all()
    assert attention.images[0].cmap.name == "viridis"


@pytest.mark.parametrize("scale", SCALES)
def test_every_bar_of_attention_marks_uniform_attention(wide, scale):
    figure = draw_heatmap([wide], [[1]], [0], [(3, 5)], MapStyle(scale=scale), width=3.3)
    [bar] = [axes for axes in figure.axes if axes.get_xlabel().startswith("attention")]
    labels = [text.get_text() for text in bar.get_xticklabels()]
    assert labels.count("1") == 1
    assert len(labels) >= 3
    assert bar.lines[0].get_xdata()[0] == bar.get_xticks()[labels.index("1")]


def test_the_photo_lies_under_the_maps_as_the_network_saw_it_but_finer():
    """Both show the same part of the image: the network's 16x16 pixels are means of the photo's pixels."""
    coarse = np.random.default_rng(0).integers(0, 256, (8, 12, 3), dtype=np.uint8)
    image = Image.fromarray(coarse.repeat(20, 0).repeat(20, 1))
    recording = record(small(), layers=1, image=image)
    means = recording.photo.reshape(16, 10, 16, 10, 3).mean((1, 3))
    seen = recording.image.permute(1, 2, 0).numpy()
    assert np.corrcoef(means.ravel(), seen.ravel())[0, 1] > 0.9
    figure = draw_heatmap([recording], [[1]], [0], [(3, 5)])
    for axes in labelled(figure, "photo") + tiles_of(figure):
        assert axes.images[0].get_array().shape[:2] == (160, 160)


@pytest.mark.parametrize(
    "make, covered",
    [(partial(networks.transformers_model, "Dinov2"), (24, 32)), (networks.padding_vit, (32, 40))],
    ids=["left out", "padded"],
)
def test_maps_lie_on_what_the_patches_cover(make, covered):
    """Patches of 8 pixels on 30x39: transformers drops the remaining pixels, timm pads the last patches with black."""
    model = as_model(make())
    model.preparation = replace(model.preparation, size=(30, 39))
    photo = networks.photo((400, 310))
    recording = record(model, layers=1, image=photo)
    height, width = covered
    assert recording.img_size == covered
    padded = F.pad(model.shown(model.input_of(photo)), (0, 9, 0, 9))
    assert torch.equal(recording.image, padded[:, :height, :width])
    finer = model.preparation.photo(photo)
    times = len(finer) / 30
    padded = np.pad(finer, ((0, 99), (0, 99), (0, 0)))
    rows, columns = round(height * times), round(width * times)
    assert np.array_equal(recording.photo, padded[:rows, :columns])
    figure = draw_heatmap([recording], [[1]], [0], [(22, 31)])
    for axes in tiles_of(figure):
        assert axes.images[-1].get_extent() == [0, width, height, 0]
    explorer = explore.Explorer([model], [recordable_layers(model.model)[:1]])
    [view] = explorer.view("photo", photo)["models"]
    assert view["imgSize"] == covered


# ---- fog, all queries, what is passed over --------------------------------------------------------------------------


def left_of_photo(cells, y, x):
    """Return the share of the photo that is left at (y, x), in cells: bilinear between the middles of cells."""
    share = np.clip((np.log2(cells) + 1) / 2, 0, 1)
    return map_coordinates(share, [y - 0.5, x - 0.5], order=1, mode="nearest")


def test_fog_is_as_the_docs_define_it(wide):
    """No photo is left at half of uniform attention, all of it at twice; the line is where half is left, and the text
    counts the eighth of the cells that has most."""
    figure = draw_heatmap([wide], [[1]], [2], ["all"], FOG)
    [axes] = tiles_of(figure)
    shown = np.asarray(axes.images[0].get_array())
    attn = wide.maps[1].attn[0, 2].double()
    mean = 32 * attn.mean(0).view(4, 8).numpy()
    times = len(shown) // len(wide.pixels())
    pixels = wide.pixels().repeat(times, 0).repeat(times, 1)
    cell = len(shown) / 4
    rows, columns = np.indices(shown.shape[:2]) + 0.5
    share = left_of_photo(mean, rows / cell, columns / cell)[..., None]
    np.testing.assert_allclose(shown, 0.83 + share * (pixels - 0.83), atol=1e-5)
    [line] = axes.collections
    outlines = line.get_paths()[0].to_polygons(closed_only=False)
    x, y = np.concatenate(outlines).T
    np.testing.assert_allclose(left_of_photo(mean, y / 4, x / 4), 0.5, atol=0.01)
    cells = sorted(mean.ravel(), reverse=True)
    label = axes.get_xlabel().replace("\n", " ")
    assert label == f"4 of 32 cells hold {sum(cells[:4]) / sum(cells):.0%}"
    texts = texts_of(figure)
    assert "mean of all queries" in texts
    assert "interpolated from 4 x 8 cells" in texts
    assert not labelled(figure, "<colorbar>")


@pytest.mark.parametrize("attention", [0.0, 1.0, 3.0])
def test_fog_without_a_line(wide, attention):
    """Attention that is nowhere uniform, or everywhere."""
    axes = new_figure(1, 1).subplots()
    tile = map_of(np.full((4, 8), attention), wide, FOG)
    tile.paint(axes, norm_of([tile.values], FOG))
    assert not axes.collections


def test_what_the_previous_map_changed():
    """The third tile is attention minus own alone in units of uniform attention, with a sign where it is more than 1;
    of several heads the differences are averaged, not the maps."""
    recording = record(EA, PARTS, 3)  # trained: changes are more than uniform attention
    figure = draw_change(recording, [1, 2, 3], 1, (5, 9))
    tiles = tiles_of(figure)
    assert len(tiles) == 6
    token = 1 * 8 + 2
    for number, axes in zip((2, 3), tiles[2::3], strict=True):
        maps = recording.maps[number]
        change = maps.attn - maps[ALONE_PART]
        expected = 64 * change[0, 1, token].view(8, 8)
        np.testing.assert_allclose(axes.images[-1].get_array(), expected, atol=1e-4)
        large = expected.abs() > 1
        assert large.any()
        signs = np.zeros((8, 8))
        for line in axes.lines:
            columns, rows = line.get_xydata().T.astype(int) // 4
            signs[rows, columns] = {"+": 1, "_": -1}[line.get_marker()]
        assert np.array_equal(signs, expected.sign() * large)
    moved = change.abs().sum(-1) / 2
    average = f"on average {moved.mean():.0%} of a query's attention moves"
    assert average in texts_of(draw_change(recording, [3], "mean", "all"))
    with refused("layers that evolve .* required"):
        plot_strip(small(CONV), PHOTO, change=True)


def test_default_figures_fit_a_page_and_say_what_they_leave_out():
    model = small(EA, num_heads=12, widths=[24] * 4)
    for plot in (plot_strip, plot_matrix, plot_heatmap):
        figure = plot(model, PHOTO, width=3.3)
        assert figure.get_size_inches()[1] <= 9
    assert re.search(r"[1-5] of 6 layers: --layers", texts_of(figure))
    assert "of 6 layers" not in texts_of(plot_heatmap(small(EA), PHOTO, heads=0))
    assert "of 6 layers" not in texts_of(plot_heatmap(model, PHOTO, layers="1-6", heads=0))


def test_logits_are_scaled_by_row():
    recording = record(small(EA, alpha=0.5), PARTS, 3)
    figure = draw_strip(recording, [2, 3], 1, (5, 9))
    logits = [axes for axes in tiles_of(figure) if len(axes.images) == 1]
    limits = [axes.images[0].get_clim() for axes in logits]
    assert len(set(limits[:3])) == len(set(limits[3:])) == 1
    assert limits[0] != limits[3]


def test_an_equation_has_no_zeros_and_ones():
    evolved = ea_vision.evolve(timm.create_model("vit_tiny_patch16_224", **TINY), "ea")
    layers = recordable_layers(evolved)
    text = equation(evolved, layers)
    assert text == "layer 2: logits = own, attention = softmax(logits)"
    with torch.no_grad():
        evolved.get_submodule(layers[1].name).evolution.beta.fill_(0.25)
    text = equation(evolved, layers)
    assert text == "layer 2: logits = 0.25 relu(conv(own)) + 0.75 own, attention = softmax(logits)"


@pytest.mark.parametrize(
    "name, labels", [("other", ["small", "other"]), ("small", ["small [1]", "small [2]"])]
)
def test_runs_stay_apart_through_checkpoints(name, labels, run, photo, tmp_path):
    """Two runs have the same epochs; each keeps its columns, and a page takes one of them."""
    other = networks.write_run(tmp_path / name)
    figure = plot_strip([run, str(other)], PHOTO, "1", through="checkpoints")
    texts = texts_of(figure)
    for label in labels:
        for epoch in (1, 2, 4):
            assert f"{label}, epoch {epoch}" in texts
    assert f"{labels[0]} and {EA}, {labels[1]}" in texts
    options = f"--model {run},{other} --through checkpoints -o {tmp_path}/a.html {photo}"
    with refused("this figure shows one run; got 2"):
        explore.main(options.split())


# ---- files ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "script, options, suffix, held",
    [
        (
            heatmap,
            "--layers 1,3 --heads 0,mean --scale tile --cmap gray --opacity 1 --queries 2,3",
            ".png",
            b"\x89PNG",
        ),
        (heatmap, "--layers 2,3 --heads 1 --bare", ".svg", b"</text>"),
        (strip, "--heads 1 --layers 2,3", ".pdf", b"/CIDFontType2"),
        (matrix, "--part conv_logits --layers 2,3", ".png", b"\x89PNG"),
        (rollout, "--layers 2,3", ".png", b"\x89PNG"),
        (rollout, "--target predicted --layers 2,3", ".png", b"\x89PNG"),
    ],
)
def test_every_script_writes_its_figure(
    script, options, suffix, held, run, photo, tmp_path, capsys
):
    """SVG and PDF keep text as text, in TrueType fonts: some journals refuse Type 3. Images may follow queries."""
    output = tmp_path / "out" / f"figure{suffix}"
    assert script.main(f"--model {run} -o {output} {options} {photo}".split()) == 0
    content = output.read_bytes()
    assert held in content
    assert b"/Type3" not in content
    assert str(output) in capsys.readouterr().out
    assert list(output.parent.iterdir()) == [output]


def test_several_images_stand_side_by_side_or_get_a_file_each(run, photo, tmp_path):
    """One model has one figure, several models one file per image."""
    PHOTO.rotate(90).save(tmp_path / "1.png")
    snapshot = run / "snapshots" / "epoch_0002.safetensors"
    common = f"--layers 2 --dpi 40 -o {tmp_path}/m.png {photo} {tmp_path}/1.png"
    assert heatmap.main(f"--model {run} --heads 1 {common}".split()) == 0
    assert heatmap.main(f"--model {run},{snapshot} --queries 1,1 {common}".split()) == 0
    names = {path.name for path in tmp_path.iterdir()}
    assert names == {"photo.png", "1.png", "m.png", "m-photo.png", "m-1.png"}
    assert (tmp_path / "m.png").read_bytes().startswith(b"\x89PNG")


def test_no_file_of_several_images_replaces_another():
    """The private function names the files; five figures would take seconds to draw."""
    images = ["a-2.png", "a.png", "b/A.png", "b/a.jpg", "digits#0"]
    outputs = [path.name for path in _outputs(Path("m.png"), images)]
    assert outputs == ["m-a-2.png", "m-a.png", "m-A-2-2.png", "m-a-3.png", "m-digits-0.png"]


@pytest.mark.skipif(os.name == "nt", reason="Windows has no such names")
def test_names_that_are_not_utf8_are_written_with_their_bytes(photo, tmp_path):
    path = os.fsdecode(os.fsencode(tmp_path) + b"/caf\xe9.png")
    shutil.copy(photo, path)
    figure = plot_heatmap(small(), [str(photo), path], 1, 0)
    assert "caf\\xe9.png" in texts_of(figure)
    figure.savefig(io.BytesIO(), format="png")


def test_the_numbers_of_statistics(run, photo, tmp_path):
    """The CSV has the numbers by head; the figure shows their averages."""
    second = tmp_path / "second.png"
    PHOTO.rotate(90).save(second)
    output = tmp_path / "out"
    options = f"--layers 1,2 --csv {output}/s.csv -o {output}/s.png"
    assert statistics.main(f"--model {run} {options} {photo} {second}".split()) == 0
    assert {path.name for path in output.iterdir()} == {"s.png", "s.csv"}
    rows = pandas.read_csv(output / "s.csv")
    assert list(zip(rows["layer"], rows["head"], strict=True)) == [*product((1, 2), range(4))]
    assert (rows["images"] == 2).all()
    assert rows["entropy_nats"].between(1e-5, np.log(16) + 1e-5).all()


def test_training_goes_through_the_epochs_in_order(run):
    """Checkpoints of epochs 1 and 2, snapshots of 2 and 4: one column per epoch."""
    figure = plot_strip(str(run), PHOTO, layers="1,2", head=0, query=(5, 9), through="checkpoints")
    assert titles_of(figure) == ["epoch 1", "epoch 2", "epoch 4"]
    first, _, later, *_ = overlaid(figure)
    assert not np.allclose(first.get_array(), later.get_array())
