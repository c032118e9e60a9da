"""Bad input to the figures and the page: one line that names what was required and what was received, at once."""

import re
import shutil
import time
from functools import partial
from itertools import product

import matplotlib
import pytest
import torch
from PIL import Image

from ea_vision.__main__ import run as run_command
from ea_vision.visualize import (
    plot_heatmap,
    plot_jacobian,
    plot_matrix,
    plot_rollout,
    plot_statistics,
    plot_strip,
    show_page,
)
from tests.recorder.networks import timms
from tests.refused import refused

from .conftest import PHOTO, small


@pytest.mark.parametrize(
    "command, message",
    [
        ("heatmap --layers 1-99999999999", "no attention layer '1-99999999999'; it has 1"),
        ("heatmap --queries 16,0", "query y,x must lie within 16x16 pixels, got '16,0'"),
        ("heatmap --queries cls a.jpg", "a.jpg does not exist"),
        ("heatmap --model cnn_cifar", "no attention layer that can be recorded"),
        ("heatmap --opacity 2", "opacity must lie between 0 and 1, got 2.0"),
        ("heatmap --cmap virids", "cmap must be one of matplotlib's colour maps"),
        ("heatmap -o /proc/nowhere/a.png", "cannot make the folder /proc/nowhere"),
        (f"heatmap {__file__}", "test_refusals.py cannot be read: UnidentifiedImageError"),
        ("heatmap --heads \u00b2", "heads must be some of 0, 1, 2, 3, all or mean, got '\u00b2'"),
        ("heatmap --queries \u00b2,1", "a query must be y,x in pixels.*got '\u00b2,1'"),
        (
            "heatmap --queries reg0",
            "a token before a transformer's patches .cls, dist, reg1, .*got 'reg0'",
        ),
        (
            "heatmap --img-size 99999999",
            "must be N or H,W in pixels, at most 100 million together, got '99999999'",
        ),
        (
            "heatmap --dpi 100000 -o a.svg",
            "at most 250 megapixels and 65535 pixels per side, got .*--dpi",
        ),
        ("heatmap --dpi 0", "--dpi: a positive whole number"),
        ("heatmap --width 1", "width must lie between 2.5 and 40 inches, got 1"),
        ("strip --heads 0,1", "this figure shows one head; got 2"),
        ("strip --queries 1,1 2,2", "this figure shows one query; got 2"),
        ("strip -o a.webm", "--output must end in .png or .svg or .pdf, got a.webm"),
        ("statistics --csv a.txt", "--csv must end in .csv, got a.txt"),
        ("matrix --style fog", "unknown argument '--style'"),
        ("explore --heads mean", "the page adds the mean"),
        ("explore -o page.png", "must end in .html"),
        ("explore --model a,b,c", "at most 3 models, got 4"),
    ],
)
def test_refused_at_once_in_one_line(command, message, run, photo, monkeypatch, capsys):
    monkeypatch.chdir(photo.parent)
    name, *options = command.split()
    begin = time.process_time()
    try:
        code = run_command(name, ["--model", str(run), str(photo), *options])
    except SystemExit as left:  # argparse
        code = left.code
    last_line = capsys.readouterr().err.splitlines()[-1]
    assert code == 2
    assert re.search(message, last_line), last_line
    assert time.process_time() - begin < 10
    assert list(photo.parent.iterdir()) == [photo]


COMMANDS = []
for name, output in product(["heatmap", "strip", "statistics"], ["photo.png", "link.png"]):
    COMMANDS.append((f"{name} -o {output}", output))


@pytest.mark.parametrize(
    "command, replaced",
    [
        *COMMANDS,
        ("strip maps-photo.png -o maps.png", "maps-photo.png"),  # named as the second picture is
        ("statistics maps-photo.png -o maps-photo.png", "maps-photo.png"),
    ],
)
def test_a_picture_does_not_replace_an_image(command, replaced, run, photo, monkeypatch, capsys):
    monkeypatch.chdir(photo.parent)
    other = photo.with_name("maps-photo.png")
    shutil.copy(photo, other)
    photo.with_name("link.png").symlink_to(photo)
    before = photo.read_bytes()
    name, *options = command.split()
    assert run_command(name, ["--model", str(run), "photo.png", *options]) == 2
    assert f"another file than the images, got {replaced}" in capsys.readouterr().err
    assert photo.read_bytes() == other.read_bytes() == before


MODEL = small()
GREY = timms("vit_tiny_patch16_224", in_chans=1, img_size=32, depth=1)
DIVERGED = small()
torch.nn.init.constant_(next(DIVERGED.parameters()), torch.nan)


@pytest.mark.parametrize(
    "plot, options, message",
    [
        (plot_heatmap, {"style": "dark"}, "must be cells or fog, got 'dark'"),
        (
            plot_heatmap,
            {"bare": True},
            "no keyword bare; those of its style are overlay, scale, cmap, opacity, style",
        ),
        (
            plot_heatmap,
            {"cmap": matplotlib.colormaps["gray"]},
            "such as viridis, plasma or gray, by name, got <matplotlib",
        ),
        (plot_heatmap, {"opacity": "1"}, "between 0 and 1, got '1'"),
        (plot_heatmap, {"width": "3.3"}, "between 2.5 and 40 inches, got '3.3'"),
        (plot_heatmap, {"queries": 5}, "must be y,x in pixels, .* got '5'"),
        (plot_heatmap, {"layers": 1.5}, "no attention layer '1.5'; it has 1"),
        (plot_heatmap, {"style": "fog", "overlay": False}, "fog covers the photo"),
        (plot_matrix, {"part": "conv_logits"}, "no conv_logits in layer 1, 4: choose"),
        (plot_strip, {"through": "checkpoints"}, "run folder.*got ConvTransformer"),
        (plot_strip, {"through": "time"}, "layers or checkpoints"),
        (plot_strip, {"head": None}, "got 'None'"),
    ],
)
def test_functions_refuse_alike(plot, options, message):
    with refused(message):
        plot(MODEL, PHOTO, **options)


TWO_SIZES = [torch.rand(3, 16, 16), torch.rand(3, 16, 20)]
with_two_queries = partial(plot_heatmap, queries=[(1, 1), (2, 2)])
through_training = partial(plot_strip, through="checkpoints")


@pytest.mark.parametrize(
    "plot, models, images, message",
    [
        (plot_heatmap, MODEL, [], "at least one image required, got none"),
        (plot_statistics, MODEL, [], "at least one image required, got none"),
        (plot_heatmap, [MODEL] * 2, [PHOTO] * 2, "models need one image"),
        (with_two_queries, MODEL, [PHOTO] * 2, "one query"),
        (plot_heatmap, GREY, PHOTO, "with 3 channels, and vit_tiny_patch16_224 takes 1 "),
        (plot_statistics, GREY, PHOTO, "with 3 channels, and vit_tiny_patch16_224 takes 1 "),
        (plot_heatmap, MODEL, torch.rand(16, 16), r"tensor \(3, H, W\), got \(16, 16\)"),
        (plot_heatmap, MODEL, Image.new("RGB", (1, 1_000_000)), "at most 100 megapixels"),
        (plot_statistics, MODEL, TWO_SIZES, "must have one size, got 16x16 and 16x20"),
        (plot_heatmap, DIVERGED, PHOTO, r"maps must be finite, got \d+ values that are not"),
        (partial(plot_heatmap, style="fog"), DIVERGED, PHOTO, "maps must be finite"),
        (plot_statistics, DIVERGED, PHOTO, "maps whose entries are numbers of at least 0"),
        (plot_matrix, [MODEL] * 2, PHOTO, "this figure shows one model; got 2"),
        (plot_strip, [MODEL] * 2, PHOTO, "this figure shows one model; got 2"),
        (partial(through_training, change=True), ".", PHOTO, "through layers"),
        (through_training, ".", PHOTO, "nor snapshots/"),
    ],
)
def test_models_and_images_that_have_no_figure(plot, models, images, message):
    with refused(message):
        plot(models, images)


@pytest.mark.parametrize(
    "plot, keywords",
    [
        (plot_strip, "heads queries"),
        (plot_matrix, "queries style overlay opacity"),
        (plot_rollout, "heads"),
        (plot_jacobian, "heads"),
        (plot_statistics, "heads queries style cmap"),
    ],
)
def test_keywords_of_other_figures_are_refused_by_name(plot, keywords):
    for name in keywords.split():
        with refused(f"this figure has no keyword {name}"):
            plot(MODEL, PHOTO, **{name: 0})


def test_figures_and_pages_of_a_snapshot_and_a_page_of_the_epochs_of_a_run(run, photo, tmp_path):
    snapshot = str(run / "snapshots" / "epoch_0002.safetensors")
    for image in (photo, str(photo)):
        assert plot_heatmap(snapshot, image, layers=1).axes
        assert show_page(snapshot, image).text
    output = tmp_path / "a.html"
    through = f"{run} --through checkpoints --layers 1,2"
    for options, names in ((snapshot, ["photo.png"]), (through, ["epoch 1", "epoch 2", "epoch 4"])):
        assert run_command("explore", f"--model {options} -o {output} {photo}".split()) == 0
        page = output.read_text(encoding="utf-8")
        assert re.findall(r'class="image">{"name":"(.*?)"', page) == names
        assert "epoch 2" in page
