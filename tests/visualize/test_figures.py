"""The figures: what is drawn where, what is written, and what bad input leaves behind."""

import csv
import re

import numpy as np
import pytest
import timm
import torch
from PIL import Image

import ea_vision
from ea_vision.base.errors import UsageError
from ea_vision.base.print import new_figure
from ea_vision.recorder.recording import PARTS, recordable_layers
from ea_vision.visualize import (
    MapStyle,
    explore,
    heatmap,
    image_maps,
    matrix,
    plot_heatmap,
    plot_matrix,
    plot_statistics,
    plot_strip,
    rollout,
    statistics,
    strip,
)
from ea_vision.visualize.figure_options import epochs_of
from ea_vision.visualize.heatmap import draw_columns, draw_heatmap
from ea_vision.visualize.map_style import SCALES, equation, map_of, norm_of, scaled
from ea_vision.visualize.matrix import draw_matrix
from ea_vision.visualize.rollout import draw_rollout
from ea_vision.visualize.sheet import Tile
from ea_vision.visualize.strip import draw_strip
from tests.models.zoo import TINY
from tests.recorder import networks

from .conftest import PHOTO, maps_of, overlaid, record, small, texts_of


@pytest.fixture(scope="module")
def wide():
    """The first layer's maps, 4x8, of a 16x32 input."""
    return record(small(img_size=(16, 32)), ("attn", "logits"), 1)


def test_the_querys_cell_is_framed(wide):
    figure = draw_heatmap(wide, [1], ["mean"], [(1, 30), (10, 5)], MapStyle(overlay=False))
    header, *cells = [
        axes for axes in figure.axes if axes.images and axes.get_label() != "<colorbar>"
    ]
    shown = [
        [
            (patch.get_y(), patch.get_x(), patch.get_height(), patch.get_width())
            for patch in axes.patches
        ]
        for axes in (header, *cells[:2])
    ]
    assert shown == [[(0, 28, 4, 4), (8, 4, 4, 4)], [(0, 28, 4, 4)], [(8, 4, 4, 4)]]
    assert [text.get_text() for text in header.texts] == ["1", "2"]


def test_models_side_by_side_share_one_scale_and_place_the_query(wide):
    """Models with inputs of different sizes: the query is at the same place of each."""
    recordings = [wide, record(small(img_size=(32, 64), seed=1), layers=1)]
    shown = overlaid(
        draw_columns(recordings, ["one", "other"], [[1], [1]], [0], [(5, 20)], title="models")
    )
    for artist, recording in zip(shown, recordings, strict=True):
        H, W = recording.maps[1].feat_size
        row, col = 5 * H // 16, 20 * W // 32
        expected = H * W * recording.maps[1].attn[0, 0, row * W + col].view(H, W)
        np.testing.assert_allclose(artist.get_array(), expected, rtol=1e-4)
    assert len({artist.get_clim() for artist in shown}) == 1
    with pytest.raises(UsageError, match="as many layers each, got 1 of one, 2 of other"):
        draw_columns(recordings, ["one", "other"], [[1], [1, 1]], [0], [(5, 20)], title="models")


def test_rollout_says_where_it_is_an_approximation(wide):
    assert "approximation: convolutions left out" in texts_of(draw_rollout([wide], [(5, 5)]))


# ---- strips ---------------------------------------------------------------------------------------------------------

OWN, BOTH, PREVIOUS, ATTENTION = (
    "+ own\nlogits",
    "\u2192 conv.\nof both",
    "prev.\nlogits",
    "\u2192\nattn.",
)
ALONE, LOGITS, OWN_ALONE = (
    "\u2192 conv.\nof prev.",
    "\u2192\nlogits",
    "own\nalone",
)


@pytest.mark.parametrize(
    "name, layers, kwargs, blocks, columns",
    [
        (
            "ea_conv_transformer_cifar",
            [1, 3, 4],
            dict(beta=1.0),
            ["layers 1, 3, 4x4", "layer 4, 2x2"],
            [PREVIOUS, OWN, BOTH, ATTENTION, OWN_ALONE] * 2,
        ),
        (
            "ea_conv_transformer_cifar",
            [1, 2, 3],
            dict(beta=0.5, alpha=0.25),
            [],
            [PREVIOUS, OWN, BOTH, LOGITS, ATTENTION, OWN_ALONE],
        ),
        (
            "pa_conv_transformer_cifar",
            [2, 3],
            {},
            [],
            [PREVIOUS, ALONE, OWN, LOGITS, ATTENTION, OWN_ALONE],
        ),
        (
            "conv_transformer_cifar",
            [2, 3, 4],
            {},
            ["layers 2, 3, 4x4", "layer 4, 2x2"],
            ["logits", "\u2192 attn."] * 2,
        ),
    ],
)
def test_strips_say_what_they_show_in_the_order_in_which_it_is_computed(
    name, layers, kwargs, blocks, columns
):
    figure = plot_strip(small(name, **kwargs), PHOTO, layers, 1, (5, 9))
    axes = [axes for axes in figure.axes if axes.get_label() not in ("<colorbar>", "photo")]
    texts = [text.get_text() for text in figure.texts]
    assert [text for text in texts if re.match("layers? [0-9, to]*, [0-9]x", text)] == blocks
    assert [one.get_ylabel() for one in axes if one.get_ylabel()] == [
        f"layer {layer}" for layer in layers
    ]
    assert [one.get_title() for one in axes if one.get_title()] == columns
    if "alpha" in kwargs:
        mixed = "0.25 previous + 0.75 own"
        equation = f"logits = 0.5 relu(conv({mixed})) + 0.5 ({mixed}), attention = softmax(logits)"
        assert equation in texts_of(figure)


@pytest.mark.parametrize(
    "name, alpha, kwargs",
    [
        ("ea_conv_transformer_cifar", 0.3, dict(beta=0.6)),
        ("ea_conv_transformer_cifar", 0.3, dict(beta=0.6, learnable="per_head")),
        ("pa_conv_transformer_cifar", 0.4, {}),
    ],
)
def test_own_alone_equals_a_recomputation_by_hand(name, alpha, kwargs):
    """By the papers' equations with alpha 0: EA convolves the own logits at their scale, PA is the own logits."""
    model = small(name, alpha=alpha, **kwargs)
    before = {key: value.clone() for key, value in model.state_dict().items()}
    recording = record(model, PARTS, 3)
    figure = draw_strip(recording, [1, 2, 3], 2, (5, 9))
    shown = maps_of(figure)
    assert recording.maps[1].recorded() == ("attn", "logits", "self_logits")
    for maps in (recording.maps[2], recording.maps[3]):
        conv = model.get_submodule(maps.name).evolution.convs[0]
        own = maps.self_logits
        with torch.inference_mode():
            logits = 0.6 * conv(own).relu() + 0.4 * own if name.startswith("ea") else own
        torch.testing.assert_close(maps[image_maps.OWN_ALONE], logits.softmax(-1))
        rows = [maps[part][0, 2, 1 * 4 + 2] for part in ("attn", image_maps.OWN_ALONE)]
        change = 1 - torch.minimum(*rows).sum()
        assert f"{change:.2f} in layer {maps.number}" in texts_of(figure)
    for part, scale in (("conv_logits", 1), (image_maps.OWN_ALONE, 16)):
        expected = scale * recording.maps[3][part][0, 2, 1 * 4 + 2].view(4, 4).numpy()
        assert any(values.shape == (4, 4) and np.allclose(values, expected) for values in shown)
    after = model.state_dict()
    assert list(after) == list(before)
    assert all(torch.equal(after[key], value) for key, value in before.items())


def test_a_part_that_cannot_be_taken_away_is_left_out():
    """Of a layer whose attention is not what its evolution makes of the recorded parts."""
    recording = record(small(), PARTS, 2)
    recording.maps[2].save("attn", torch.rand_like(recording.maps[2].attn))
    image_maps.add_own_alone(recording)
    assert {*recording.maps[2].recorded()} == {*PARTS}


# ---- scales and colours ---------------------------------------------------------------------------------------------


def test_scales_of_attention():
    """In units of uniform attention: as far down as up, and never nearly-uniform maps as if they were strong."""
    weak, strong = np.array([[0.9, 1.1]]), np.array([[0.2, 8.0]])
    tiles, to = [Tile(None, values=values) for values in (weak, weak, weak, strong)], {}
    for scale in SCALES:
        scaled([tiles[:2], tiles[2:]], MapStyle(scale=scale))
        to[scale] = [tile.norm.vmax for tile in tiles]
        assert all(
            tile.norm.vmin == 1 / tile.norm.vmax and tile.norm(1.0) == pytest.approx(0.5)
            for tile in tiles
        )
    assert to == {
        "layer": [2, 2, 8, 8],
        "all": [8] * 4,
        "uniform": [8] * 4,
        "tile": [1.1, 1.1, 1.1, 8],
    }


def test_a_map_with_zeros_has_no_transparent_cell(wide):
    """Attention that underflows to 0 has the scale's lowest colour."""
    values = np.array([[0.0, 0.0, 1e-30, 0.5], [1.0, 2.0, 12.0, 0.0]])
    axes = new_figure(1, 1).subplots()
    for style in (
        MapStyle(overlay, scale, opacity=0.7) for overlay in (True, False) for scale in SCALES
    ):
        norm = norm_of([values], style)
        map_of(values, wide, style).paint(axes, norm)
        artist = axes.images[-1]
        assert not np.ma.is_masked(norm(values))
        colours = artist.cmap(norm(artist.get_array()))
        assert (colours[..., 3] == 1).all() and np.array_equal(colours[0, 0], artist.cmap(0.0))
        assert artist.get_alpha() == (0.7 if style.overlay else None)


def test_logits_are_diverging_around_0_and_probabilities_sequential(wide):
    for part, name in (("logits", "coolwarm"), ("attn", "viridis")):
        [artist] = [
            axes.images[0] for axes in draw_matrix(wide, [1], [0], part).axes if axes.images
        ]
        assert artist.cmap.name == name and (
            part == "attn" or artist.norm.vmin == -artist.norm.vmax
        )


@pytest.mark.parametrize("scale", SCALES)
def test_every_bar_of_attention_marks_uniform_attention(wide, scale):
    figure = draw_heatmap(wide, [1], [0], [(3, 5)], MapStyle(scale=scale))
    [bar] = [axes for axes in figure.axes if axes.get_xlabel().startswith("attention")]
    labels = [text.get_text() for text in bar.get_xticklabels()]
    assert (
        labels.count("1") == 1
        and bar.lines[0].get_xdata()[0] == bar.get_xticks()[labels.index("1")]
    )


def test_the_photo_lies_under_the_maps_as_the_network_saw_it_but_finer():
    """The same part of the image: the network's 16x16 pixels are the means of the photo's."""
    model = image_maps.as_model(small())
    pixels = (
        np.random.default_rng(0)
        .integers(0, 256, (8, 12, 3), dtype=np.uint8)
        .repeat(20, 0)
        .repeat(20, 1)
    )
    recording = image_maps.record(
        model, Image.fromarray(pixels), recordable_layers(model.model)[:1]
    )
    means = recording.photo.reshape(16, 10, 16, 10, 3).mean((1, 3))
    assert np.corrcoef(means.ravel(), recording.image.permute(1, 2, 0).numpy().ravel())[0, 1] > 0.9
    figure = draw_heatmap(recording, [1], [0], [(3, 5)])
    assert {axes.images[0].get_array().shape[:2] for axes in figure.axes if axes.images} == {
        (160, 160)
    }


# ---- light, all queries, what is passed over ------------------------------------------------------------------------


def test_light_multiplies_the_photo_and_all_is_the_mean_of_the_queries(wide):
    """By 0.1 at half of uniform attention and by 1 at twice, linear in the logarithm, bilinear from cell to cell."""
    figure = draw_heatmap(wide, [1], [2], ["all"], MapStyle(style="light"))
    [drawn] = [axes.images[0] for axes in figure.axes if axes.images and not axes.get_label()]
    shown = np.asarray(drawn.get_array())
    mean = 32 * wide.maps[1].attn[0, 2].mean(0).view(4, 8)
    factors = 0.1 + 0.9 * ((mean.log2() + 1) / 2).clamp(0, 1)
    size = shown.shape[:2]
    bilinear = torch.nn.functional.interpolate(factors[None, None], size, mode="bilinear")[0, 0]
    repeats = size[0] // wide.pixels().shape[0]
    photo = wide.pixels().repeat(repeats, 0).repeat(repeats, 1)
    np.testing.assert_allclose(shown, photo * bilinear.numpy()[..., None], atol=1e-5)
    texts = texts_of(figure)
    assert "mean of all queries" in texts and "interpolated from 4 x 8 cells" in texts
    with pytest.raises(UsageError, match="style must be cells or light, got 'dark'"):
        plot_heatmap(small(), PHOTO, style="dark")


def test_several_photos_stand_in_a_row_of_their_own():
    figure = plot_heatmap(small(), [PHOTO, PHOTO.rotate(90)], "1-3", 0, style="light")
    photos = [axes for axes in figure.axes if axes.get_label() == "photo"]
    assert [axes.get_title() for axes in photos] == ["image 1", "image 2"]
    heights = {round(axes.get_position().y0, 6) for axes in photos}
    tiles = [axes for axes in figure.axes if axes.images and not axes.get_label()]
    assert len(heights) == 1 and max(axes.get_position().y0 for axes in tiles) < heights.pop()


def test_every_colour_bar_has_three_numbers():
    for scale in ("layer", "tile", "all"):
        figure = plot_heatmap(small(), PHOTO, "1-3", 0, width=3.3, scale=scale, queries=[(3, 3)])
        bars = [axes for axes in figure.axes if axes.get_label() == "<colorbar>"]
        assert bars and all(len(axes.get_xticklabels()) >= 3 for axes in bars)


def test_layers_without_queries_of_pixels_are_passed_over_unless_they_are_named():
    """CaiT's last two layers are class attention; asked for cls they are those that have it."""
    cait = timm.create_model(
        "cait_xxs24_224", img_size=32, patch_size=8, embed_dim=24, depth=2, num_heads=3
    )
    image = torch.rand(3, 32, 32)
    for queries, numbers in ((None, "1 2"), ("cls", "3 4")):
        texts = texts_of(plot_heatmap(cait, image, heads="mean", queries=queries))
        assert sorted(set(re.findall(r"layer (\d)", texts))) == numbers.split()
    assert plot_statistics(cait, image).axes and plot_strip(cait, image).axes


def test_an_equation_has_no_zeros_and_ones():
    evolved = ea_vision.evolve(timm.create_model("vit_tiny_patch16_224", **TINY), "ea")
    layers = recordable_layers(evolved)
    said = equation(evolved, layers)
    assert said == "layer 2: logits = own, attention = softmax(logits)"
    with torch.no_grad():
        evolved.get_submodule(layers[1].name).evolution.beta.fill_(0.25)
    said = equation(evolved, layers)
    assert said == "layer 2: logits = 0.25 relu(conv(own)) + 0.75 own, attention = softmax(logits)"


def test_a_figure_of_one_model_refuses_two():
    for plot in (plot_matrix, plot_strip):
        with pytest.raises(UsageError, match="this figure shows one model; got 2"):
            plot([small(), small()], PHOTO)


def test_runs_stay_apart_through_checkpoints(run, tmp_path):
    """Two runs have the same epochs; each keeps its columns, and a page takes one of them."""
    other = networks.write_run(tmp_path / "other")
    figure = plot_strip([str(run), str(other)], PHOTO, "1", through="checkpoints")
    texts = texts_of(figure)
    for folder in (run, other):
        for epoch in (1, 2, 4):
            assert f"{folder.name}, epoch {epoch}" in texts
    with pytest.raises(UsageError, match="this figure shows one run; got 2"):
        PHOTO.save(tmp_path / "photo.png")
        options = f"--model {run},{other} --through checkpoints -o {tmp_path}/a.html"
        explore.main([*options.split(), str(tmp_path / "photo.png")])


def test_normalisation_by_keyword():
    """mean= and std= reach the network: twice the standard deviation is half the input."""
    model = small()
    pixels = torch.rand(3, 16, 16)
    changed = image_maps.as_model(model, mean=(0.1, 0.2, 0.3), std=(2.0, 2.0, 2.0))
    expected = (pixels - torch.tensor([0.1, 0.2, 0.3]).view(3, 1, 1)) / 2
    torch.testing.assert_close(image_maps.as_batch(changed, [pixels])[0], expected)
    assert plot_heatmap(model, pixels, 1, mean=(0.5,) * 3, std=(0.5,) * 3).axes


# ---- files ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "script,options,suffix,held",
    [
        (
            heatmap,
            "--layers 1,3 --heads 0,mean --queries 2,3 --scale tile --cmap gray --opacity 1",
            ".png",
            b"\x89PNG",
        ),
        (heatmap, "--layers 2,3 --heads 1 --bare", ".svg", b"</text>"),
        (strip, "--heads 1 --layers 2,3", ".pdf", b"/CIDFontType2"),
        (matrix, "--part conv_logits --layers 2,3", ".png", b"\x89PNG"),
        (rollout, "--layers 2,3", ".png", b"\x89PNG"),
        (strip, "--layers 2,3 --dpi 40", ".gif", b"GIF8"),
    ],
)
def test_every_script_writes_its_figure(
    script, options, suffix, held, run, photo, tmp_path, capsys
):
    """In SVG and PDF text stays text, in TrueType: some journals refuse Type 3."""
    output = tmp_path / "out" / f"figure{suffix}"
    assert script.main(f"--model {run} {options} -o {output} {photo}".split()) == 0
    assert held in output.read_bytes() and b"/Type3" not in output.read_bytes()
    assert str(output) in capsys.readouterr().out and list(output.parent.iterdir()) == [output]


def test_several_images_stand_side_by_side_or_get_a_file_each(run, photo, tmp_path):
    """One model has one figure, several models one file per image."""
    PHOTO.rotate(90).save(tmp_path / "1.png")
    models = f"{run},{run / 'snapshots' / 'epoch_0002.safetensors'}"
    for options in f"{run} --heads 1", f"{models} --queries 1,1":
        command = (
            f"--model {options} --layers 2 --dpi 40 -o {tmp_path}/m.png {photo} {tmp_path}/1.png"
        )
        assert heatmap.main(command.split()) == 0
    assert {path.name for path in tmp_path.iterdir()} == {
        "photo.png",
        "1.png",
        "m.png",
        "m-photo.png",
        "m-1.png",
    }
    assert (tmp_path / "m.png").read_bytes().startswith(b"\x89PNG")


def test_the_numbers_of_statistics(run, photo, tmp_path):
    """By head, as they are averaged in the figure."""
    PHOTO.rotate(90).save(tmp_path / "second.png")
    assert (
        statistics.main(
            f"--model {run} --layers 1,2 --csv {tmp_path}/s.csv -o {tmp_path}/s.png {photo} "
            f"{tmp_path}/second.png".split()
        )
        == 0
    )
    assert {path.name for path in tmp_path.iterdir()} == {
        "photo.png",
        "second.png",
        "s.png",
        "s.csv",
    }
    rows = list(csv.DictReader((tmp_path / "s.csv").open()))
    assert [(row["layer"], row["head"], row["images"]) for row in rows] == [
        (layer, head, "2") for layer in "12" for head in "0123"
    ]
    assert all(0 < float(row["entropy_nats"]) <= np.log(16) + 1e-5 for row in rows)


def test_training_goes_through_the_epochs_in_order(run, photo, tmp_path):
    """Checkpoints of epochs 1 and 2, snapshots of 2 and 4: a column, or a film's picture, an epoch, of its weights."""
    figure = plot_strip(str(run), PHOTO, layers="1,2", head=0, query=(5, 9), through="checkpoints")
    assert [axes.get_title() for axes in figure.axes if axes.get_title()] == [
        "epoch 1",
        "epoch 2",
        "epoch 4",
    ]
    first, _, later = [artist.get_array() for artist in overlaid(figure)][:3]
    assert not np.allclose(first, later)
    assert [model.epoch for model in epochs_of([str(run)])] == [1, 2, 4]
    options = f"--model {run} --layers 2 --through checkpoints --dpi 40 -o {tmp_path}/a.gif {photo}"
    assert strip.main(options.split()) == 0
    with Image.open(tmp_path / "a.gif") as film:
        assert film.n_frames == 3 and film.info["duration"] == 600
