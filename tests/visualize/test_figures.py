"""The figures: what is drawn where, what is written, and what bad input leaves behind."""
import subprocess
import sys

import numpy as np
import pytest
import timm
import torch
from PIL import Image
from torch import nn

from ea_vision.analysis.loading import LoadedModel, load_model
from ea_vision.analysis.recording import PARTS, attention_layers
from ea_vision.base.errors import UsageError
from ea_vision.base.files import atomic_write
from ea_vision.engine import checkpoint, run_folder
from ea_vision.layers import AugmentedConv2d
from ea_vision.visualize import (
    animation,
    attention_matrices,
    evolution_strip,
    heads_by_queries,
    heatmap,
    layer_statistics,
    matrix,
    models_side_by_side,
    recordings,
    rollout,
    rollout_figure,
    strip,
)
from ea_vision.visualize.drawing import new_figure
from ea_vision.visualize.writing import save

from .conftest import SCRIPTS

KWARGS = dict(num_classes=3, img_size=16, widths=[8, 8, 16, 16])
ALL = {"heatmap": heatmap, "strip": strip, "matrix": matrix, "rollout": rollout, "statistics": layer_statistics,
       "animation": animation}


@pytest.fixture
def photo(tmp_path):
    pixels = np.random.default_rng(0).integers(0, 256, (48, 64, 3), dtype=np.uint8)
    path = tmp_path / "photo.png"
    Image.fromarray(pixels).save(path)
    return path


@pytest.fixture
def run(tmp_path):
    """A run folder of a small EA network with two checkpoints."""
    return make_run(tmp_path / "small", "ea_conv_transformer_cifar")


def make_run(folder, name):
    folder.mkdir()
    torch.manual_seed(0)
    model = timm.create_model(name, **KWARGS)
    run_folder.write_config(folder, {"model": name, "dataset": "digits"}, {"model_kwargs": KWARGS})
    run_folder.write_weights(folder, model.state_dict())
    for epoch, file in (2, "last.ckpt"), (1, "best.ckpt"):
        state = {"model": model.state_dict(), "ema": None, "progress": {"epoch": epoch, "updates": epoch}}
        atomic_write(folder / file, checkpoint.encode(state))
    return folder


class Pointer(nn.Module):
    """A network of one attention layer on a 4x8 map; every query attends `down` rows below and `right` columns on."""

    def __init__(self, down, right):
        super().__init__()
        self.layer = AugmentedConv2d(3, 8, dim_qk=4, dim_v=2, num_heads=2, feat_size=(4, 8))
        with torch.no_grad():
            self.layer.qkv.weight.zero_()
            self.layer.qkv.bias.zero_()[:4] = 1.0
            self.layer.height_rel.zero_()[3 + down] = 60.0
            self.layer.width_rel.zero_()[7 + right] = 60.0

    def forward(self, x):
        return self.layer(nn.functional.avg_pool2d(x, 8))[0]


def pointer(down, right):
    config = dict(mean=(0.5,) * 3, std=(0.5,) * 3, crop_pct=1.0, interpolation="bilinear")
    return LoadedModel(Pointer(down, right).eval(), "pointer", (32, 64), config)


def record(model, parts=("attn",)):
    return recordings.record(model, Image.new("RGB", (64, 32), "grey"), attention_layers(model.model), parts)


def brightest(artist):
    """(y, x) in pixels of the input, of the middle of the largest value that an image artist shows."""
    values = artist.get_array()
    row, col = np.unravel_index(values.argmax(), values.shape)
    left, right, bottom, top = artist.get_extent()
    return top + (row + 0.5) * (bottom - top) / values.shape[0], left + (col + 0.5) * (right - left) / values.shape[1]


def command(script, *argv):
    """Run a script's main in this process."""
    before, sys.argv = sys.argv, [script.__name__ + ".py", *map(str, argv)]
    try:
        return script.main()
    finally:
        sys.argv = before


@pytest.mark.parametrize("down,right", [(0, 0), (1, -3), (-1, 2)])
def test_a_map_lies_where_its_query_looks(down, right):
    recording = record(pointer(down, right))
    point = (13, 27)  # in the cell of row 1 and column 3
    figure = heads_by_queries(recording, [1], [0, 1, "mean"], [point])
    shown = [axes.images[-1] for axes in figure.axes if len(axes.images) == 2]  # a map over the grey image
    assert len(shown) == 3
    for artist in shown:
        assert brightest(artist) == (8 * (1 + down) + 4, 8 * (3 + right) + 4)


def test_the_query_is_marked_where_it_was_given():
    recording = record(pointer(0, 0))
    figure = heads_by_queries(recording, [1], ["mean"], [(3, 60), (20, 10)], overlay=False)
    header, *cells = [axes for axes in figure.axes if axes.images]
    assert [tuple(line.get_xydata()[0]) for line in header.lines] == [(60.5, 3.5), (10.5, 20.5)]
    assert [tuple(axes.lines[0].get_xydata()[0]) for axes in cells[:2]] == [(60.5, 3.5), (10.5, 20.5)]


@pytest.mark.parametrize("point,cell", [((0, 0), (0, 0)), ((0, 63), (0, 7)), ((31, 0), (3, 0)), ((15, 16), (1, 2))])
def test_cells_of_pixels(point, cell):
    assert recordings.cell_of(point, (32, 64), (4, 8)) == cell


def test_models_side_by_side_share_one_scale_and_place_the_query():
    recordings = [record(pointer(0, 0)), record(pointer(1, 1))]
    figure = models_side_by_side(recordings, [[1], [1]], [0], [(5, 20)])
    maps = [axes.images[-1] for axes in figure.axes if len(axes.images) == 2]
    assert [brightest(artist) for artist in maps] == [(4, 20), (12, 28)]
    assert len({artist.get_clim() for artist in maps}) == 1
    with pytest.raises(UsageError, match="as many layers each, got 1 of pointer, 2 of pointer"):
        models_side_by_side(recordings, [[1], [1, 1]], [0], [(5, 20)])


def test_the_strip_shows_every_part_of_every_chain(run):
    model = load_model(str(run))
    recording = recordings.record(model, Image.new("RGB", (16, 16), "grey"), attention_layers(model.model), PARTS)
    figure = evolution_strip(recording, [1, 2, 3, 4, 5, 6], 1, (5, 9))
    shown = [axes.images[0].get_array() for axes in figure.axes if axes.images]
    shown = [values for values in shown if values.shape in ((4, 4), (2, 2))]
    assert len(shown) == 2 * (3 + 2 * 5)  # a chain: its first layer has no previous and no convolved logits
    expected = recording.maps[2].conv_logits[0, 1, 1 * 4 + 2].view(4, 4).numpy()
    assert any(values.shape == (4, 4) and np.allclose(values, expected) for values in shown)


def test_matrices_are_the_recorded_ones(run):
    model = load_model(str(run))
    recording = recordings.record(model, Image.new("RGB", (16, 16), "grey"), attention_layers(model.model)[:1])
    figure = attention_matrices(recording, [1], [2, "mean"])
    head, mean = (axes.images[0].get_array() for axes in figure.axes if axes.images)
    attn = recording.maps[1].attn[0]
    assert np.array_equal(head, attn[2]) and np.allclose(mean, attn.mean(0))


def test_rollout_says_where_it_is_an_approximation():
    convolutional = record(pointer(0, 0))
    vit = timm.create_model("vit_tiny_patch16_224", img_size=32, depth=2, num_classes=2).eval()
    config = timm.data.resolve_model_data_config(vit)
    exact = record(LoadedModel(vit, "vit", (32, 32), config))
    labels = [[axes.get_ylabel() for axes in rollout_figure([recording], [(5, 5)]).axes]
              for recording in (convolutional, exact)]
    assert "approximation" in labels[0][0] and "approximation" not in "".join(labels[1])


@pytest.mark.parametrize("script,options,suffix,magic", [
    (heatmap, ["--layers", "1,3", "--heads", "0,mean", "--queries", "2,3"], ".png", b"\x89PNG"),
    (heatmap, ["--layers", "2", "--bare"], ".svg", b"<?xml"),
    (heatmap, ["--heads", "mean", "--layers", "1-3"], ".pdf", b"%PDF"),
    (strip, ["--heads", "1"], ".png", b"\x89PNG"),
    (matrix, ["--part", "conv_logits", "--layers", "2"], ".png", b"\x89PNG"),
    (rollout, [], ".png", b"\x89PNG"),
    (layer_statistics, ["--csv", "CSV"], ".png", b"\x89PNG"),
    (animation, ["--layers", "1-3", "--dpi", "40"], ".gif", b"GIF8"),
])
def test_every_script_writes_its_figure(script, options, suffix, magic, run, photo, tmp_path, capsys):
    output = tmp_path / "out" / f"figure{suffix}"
    options = [str(tmp_path / "out" / "numbers.csv") if option == "CSV" else option for option in options]
    assert command(script, "--model", run, *options, "-o", output, photo) == 0
    assert output.read_bytes().startswith(magic) and str(output) in capsys.readouterr().out
    left = {path.name for path in output.parent.iterdir()}
    assert left == {output.name} | ({"numbers.csv"} if "--csv" in options else set())


@pytest.mark.parametrize("script, options", [(heatmap, ["--heads", "1"]), (strip, []), (matrix, []), (rollout, []),
                                             (animation, ["-o", "{}/a.gif", "--dpi", "40"])])
def test_the_maps_themselves(script, options, run, photo, tmp_path, capsys):
    """Beside the figure, as they were recorded, with the image that the network saw."""
    options = [option.format(tmp_path) for option in options]
    assert command(script, "--model", run, "--layers", "2,3", "-o", tmp_path / "a.png", *options, "--npz", photo) == 0
    assert str(tmp_path / "a.npz") in capsys.readouterr().out
    model = load_model(str(run))
    recording = recordings.record(model, Image.open(photo), attention_layers(model.model)[1:3])
    with np.load(tmp_path / "a.npz") as held:
        assert np.array_equal(held["image"], recording.image)
        for layer in (2, 3):
            assert np.array_equal(held[f"layer{layer}.attn"], recording.maps[layer].attn)
            assert tuple(held[f"layer{layer}.feat_size"]) == recording.maps[layer].feat_size


def test_the_maps_of_several_models(run, photo, tmp_path):
    assert command(heatmap, "--model", f"{run},{run}", "--layers", "1", "--npz", "-o", tmp_path / "a.png", photo) == 0
    with np.load(tmp_path / "a.npz") as held:
        label = "ea_conv_transformer_cifar, small"
        assert np.array_equal(held[f"{label} [1]/layer1.attn"], held[f"{label} [2]/layer1.attn"])


def test_text_stays_text_in_vector_files(tmp_path):
    """So that it can be found and edited, and journals that refuse Type 3 fonts take the PDF."""
    figure = new_figure(2, 1)
    figure.suptitle("layer 16, head 3")
    for suffix in (".svg", ".pdf"):
        save(figure, tmp_path / f"figure{suffix}", 100)
    assert b">layer 16, head 3</text>" in (tmp_path / "figure.svg").read_bytes()
    pdf = (tmp_path / "figure.pdf").read_bytes()
    assert b"/CIDFontType2" in pdf and b"/Type3" not in pdf  # TrueType


def test_several_images_get_a_file_each_and_several_models_one_figure(run, photo, tmp_path):
    other = make_run(tmp_path / "other", "conv_transformer_cifar")
    Image.open(photo).save(tmp_path / "second.png")
    assert command(heatmap, "--model", f"{run},{other}", "--layers", "1", "--heads", "mean", "--queries",
                   "1,1", "-o", tmp_path / "m.png", photo, tmp_path / "second.png") == 0
    assert (tmp_path / "m-photo.png").exists() and (tmp_path / "m-second.png").exists()


def test_animations_through_layers_and_checkpoints(run, photo, tmp_path):
    for options, frames in (["--layers", "1,2,4"], 3), (["--layers", "2", "--through", "checkpoints"], 2):
        output = tmp_path / "a.gif"
        assert command(animation, "--model", run, *options, "--seconds", "0.1", "--dpi", "40", "-o", output,
                       photo) == 0
        with Image.open(output) as film:
            assert film.n_frames == frames and film.info["duration"] == 100


def test_animations_through_the_snapshots_of_a_run(run, photo, tmp_path):
    """Checkpoints of epochs 1 and 2, snapshots of 2 and 4: a frame an epoch, of that epoch's weights."""
    for epoch in (2, 4):
        run_folder.write_snapshot(run, timm.create_model("ea_conv_transformer_cifar", **KWARGS).state_dict(), epoch)
    files = animation.checkpoints_of(str(run)).split(",")
    assert [load_model(file).epoch for file in files] == [1, 2, 2, 4]
    assert command(animation, "--model", run, "--layers", "2", "--through", "checkpoints", "--dpi", "40",
                   "-o", tmp_path / "a.gif", photo) == 0
    with Image.open(tmp_path / "a.gif") as film:
        assert film.n_frames == 3


def test_films_need_ffmpeg(run, photo, tmp_path, monkeypatch):
    monkeypatch.setattr(animation.shutil, "which", lambda name: None)
    with pytest.raises(UsageError, match="ffmpeg"):
        command(animation, "--model", run, "-o", tmp_path / "a.mp4", photo)


@pytest.mark.skipif(animation.shutil.which("ffmpeg") is None, reason="needs ffmpeg")
def test_films(run, photo, tmp_path):
    assert command(animation, "--model", run, "--dpi", "41", "-o", tmp_path / "a.mp4", photo) == 0
    assert (tmp_path / "a.mp4").read_bytes()[4:8] == b"ftyp"


@pytest.mark.parametrize("options,message", [
    (["--layers", "99"], "has no attention layer '99'; it has 1"),
    (["--heads", "4"], "heads must be 0 to 3, all or mean, got '4'"),
    (["--queries", "16,0"], "query y,x must lie within the 16x16 input, got '16,0'"),
    (["--queries", "photo.png"], "a query must be y,x in pixels, got 'photo.png'"),
    (["--model", "cnn_cifar"], "no attention layer that can be recorded"),
    (["--img-size", "x"], "--img-size must be N or H,W"),
    (["-o", "/proc/nowhere/a.png"], "cannot write into /proc/nowhere"),
    (["-o", "a.jpg"], "--output must end in .png or .svg or .pdf"),
    (["README.txt"], "not an image that can be read"),
])
def test_bad_input_leaves_nothing(options, message, run, photo, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "README.txt").write_text("words")
    before = set(tmp_path.iterdir())
    with pytest.raises(UsageError) as error:
        command(heatmap, "--model", run, "-o", tmp_path / "new.png", photo, *options)
    assert message in str(error.value)
    assert set(tmp_path.iterdir()) == before


def test_one_value_where_a_figure_shows_one(run, photo, tmp_path):
    for options in (["--heads", "0,1"], ["--queries", "1,1", "2,2"], ["--model", f"{run},{run}"]):
        with pytest.raises(UsageError, match="this figure shows one .*; got 2"):
            command(strip, "--model", run, "-o", tmp_path / "a.png", *options, "--", photo)
    with pytest.raises(UsageError, match="has no conv_logits in layer 1, 4: choose --layers"):
        command(matrix, "--model", run, "--part", "conv_logits", "-o", tmp_path / "a.png", photo)


def test_help_shows_defaults_and_examples(capsys):
    for name, script in ALL.items():
        with pytest.raises(SystemExit) as left:
            command(script, "--help")
        text = capsys.readouterr().out
        assert left.value.code == 0 and "default:" in text
        assert f"examples:\n  ea-vision {name} " in text


def test_a_user_sees_one_line_and_an_exit_code(tmp_path):
    done = subprocess.run([sys.executable, SCRIPTS / "attention_heatmap.py", "nowhere.png"], capture_output=True,
                          text=True, cwd=tmp_path)
    assert done.returncode == 2 and done.stderr.strip() == "error: image nowhere.png does not exist"
    assert not list(tmp_path.iterdir())
