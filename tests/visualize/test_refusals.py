"""Bad input to the figures and the page: one line that names what was required and what was received, at once."""
import re
import time

import pytest
import timm
import torch
from PIL import Image

from ea_vision.__main__ import run
from ea_vision.base.errors import UsageError
from ea_vision.engine import run_folder
from ea_vision.visualize import plot_heatmap, plot_strip, show_page

SMALL = dict(num_classes=3, img_size=16, widths=[8, 8, 16, 16])


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """A run with weights of epoch 1, and a photo beside it."""
    folder = tmp_path_factory.mktemp("runs") / "small"
    folder.mkdir()
    torch.manual_seed(0)
    state = timm.create_model("ea_conv_transformer_cifar", **SMALL).state_dict()
    run_folder.write_config(folder, {"model": "ea_conv_transformer_cifar", "dataset": "digits"},
                            {"model_kwargs": SMALL, "classes": ["one", "two", "three"]})
    run_folder.write_weights(folder, state)
    run_folder.write_snapshot(folder, state, 1)
    Image.new("RGB", (40, 40), "grey").save(folder.parent / "photo.png")
    return folder


@pytest.mark.parametrize("command, options, message", [
    ("heatmap", ["--layers", "1-99999999999"], "no attention layer '7'; it has 1"),
    ("heatmap", ["--layers", "99999999999"], "no attention layer '99999999999'"),
    ("heatmap", ["--layers", "1" * 5000 + "-" + "2" * 5000], "no attention layer"),
    ("heatmap", ["--layers", "\u00b2"], "no attention layer '\u00b2'"),
    ("heatmap", ["--heads", "\u00b2"], "heads must be 0 to 3, all or mean, got '\u00b2'"),
    ("heatmap", ["--heads", "9" * 5000], "heads must be 0 to 3"),
    ("heatmap", ["--queries", "\u00b2,1"], "a query must be y,x in pixels.*got '\u00b2,1'"),
    ("heatmap", ["--queries", "9" * 5000 + ",1"], "must lie within the 16x16 input"),
    ("heatmap", ["--img-size", "\u00b2"], "--img-size must be N or H,W"),
    ("heatmap", ["--img-size", "99999999"], "--img-size must be N or H,W"),
    ("heatmap", ["--dpi", "100000"], "--dpi: a whole number from 1 to"),
    ("heatmap", ["--dpi", "\u00b2"], "--dpi: a whole number from 1 to"),
    ("heatmap", ["--width", "1"], "a width in inches from 2.5 to 40 required, got '1'"),
    ("heatmap", ["--width", "nan"], "a width in inches from 2.5 to 40 required, got 'nan'"),
    ("heatmap", ["--width", "column"], "a width in inches from 2.5 to 40 required, got 'column'"),
    ("strip", ["--seconds", "nan", "-o", "a.gif"], "--seconds must lie between 0.02 and 60, got nan"),
    ("strip", ["-o", "a.webm"], "--output must end in .png or .svg or .pdf or .gif"),
    ("explore", ["--layers", "1-99999999999", "-o", "a.html"], "no attention layer '7'"),
    ("explore", ["--heads", "\u00b2", "-o", "a.html"], "heads must be 0 to 3"),
    ("heatmap", ["digits#\u00b2"], "digits#N must have N in 0..354"),
])
def test_refused_at_once_in_one_line(command, options, message, folder, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    begin = time.monotonic()
    try:
        code = run(command, ["--model", str(folder), str(folder.parent / "photo.png"), *options])
    except SystemExit as left:  # argparse
        code = left.code
    said = capsys.readouterr().err.strip().splitlines()[-1]
    assert code == 2 and re.search(message, said), said
    assert time.monotonic() - begin < 10 and not list(tmp_path.iterdir())


@pytest.mark.parametrize("call, message", [
    (lambda folder: plot_heatmap(str(folder), []), "at least one image required, got none"),
    (lambda folder: plot_heatmap([str(folder)] * 2, [folder.parent / "photo.png"] * 2), "models need one image"),
    (lambda folder: plot_heatmap(str(folder), [folder.parent / "photo.png"], queries=[(1, 1), (2, 2)]), "one query"),
    (lambda folder: plot_heatmap(str(folder), folder.parent / "nothing.png"), "nothing.png does not exist"),
    (lambda folder: plot_strip(str(folder), folder.parent / "photo.png", through="time"), "layers or checkpoints"),
    (lambda folder: plot_strip(str(folder), folder.parent / "photo.png", width=99), "2.5 and 40 inches, got 99"),
])
def test_functions_refuse_alike(call, message, folder):
    with pytest.raises(UsageError, match=message):
        call(folder)


def test_weights_of_an_epoch_and_paths_are_taken_by_figures_and_page(folder, tmp_path):
    snapshot, photo = folder / "snapshots" / "epoch_0001.safetensors", folder.parent / "photo.png"
    assert snapshot.is_file()
    for command, output in ("heatmap", "a.png"), ("explore", "a.html"):
        assert run(command, ["--model", str(snapshot), "-o", str(tmp_path / output), str(photo)]) == 0
    assert "epoch 1" in (tmp_path / "a.html").read_text()
    for image in (photo, str(photo)):
        assert plot_heatmap(str(snapshot), image, layers=1).axes and show_page(str(snapshot), image).text
