"""The first pictures: their commands reproduce them, and the claims of the docs about them are measured."""

import re
import tarfile
from pathlib import Path

import matplotlib
import numpy as np
import pytest
from PIL import Image

from ea_vision.recorder.recording import PARTS, recordable_layers
from ea_vision.visualize.figure_request import record
from ea_vision.visualize.heatmap import main as heatmap
from ea_vision.zoo.inputs import find_images
from ea_vision.zoo.loaded import load_model
from experiments.evolution_at_work import centring, main

ROOT = Path(__file__).resolve().parents[2]
DOCS = ROOT / "docs"
CAT = DOCS / "cat.jpg"
PHOTOS = sorted(DOCS.glob("photos/*.jpg"))
PAGE = (DOCS / "how-it-works.md").read_text(encoding="utf-8")
CIFAR = ROOT.parent / "shared" / "data" / "cifar10" / "test.tar"


def check_picture(path):
    """Compare a picture with the repository's of the same name: on average by less than 0.1 of 255."""
    new = Image.open(path).convert("RGB")
    shown = Image.open(ROOT / "visualize" / path.name).convert("RGB")
    assert new.size == shown.size
    if matplotlib.__version_info__[:2] == (3, 11):  # other releases set text otherwise
        difference = np.asarray(new, float) - shown
        assert np.abs(difference).mean() < 0.1
    return new


def test_the_script_draws_the_picture_and_prints_its_caption(tmp_path, capsys):
    output = tmp_path / "evolution.png"
    assert main(f"{CAT} --typical {CAT} -o {output}".split()) == 0
    assert check_picture(output).width >= 2 * 72 * 6.7
    printed = capsys.readouterr().out.splitlines()[0]
    claims, _, typical = printed.partition(" Over heads and queries")
    below = PAGE.partition("visualize/evolution.png)")[2]
    caption = below.split("\n\n")[1]
    assert claims in " ".join(caption.split())
    numbers = r" of 1 images the mean is \S+ in layer 2 and \S+ in layer 3\."
    assert re.fullmatch(numbers, typical)


def test_the_command_draws_the_first_picture(tmp_path, monkeypatch):
    """Runs the command in the Makefile."""
    monkeypatch.chdir(ROOT)
    makefile = (ROOT / "Makefile").read_text(encoding="utf-8").replace("\\\n", "")
    options = re.search(r"heatmap\.py (.*--style fog.*)", makefile)[1].split()
    options.remove("docs/photos/*.jpg")
    output = tmp_path / "fog.png"
    options[options.index("-o") + 1] = str(output)
    assert heatmap([*options, *map(str, PHOTOS)]) == 0
    check_picture(output)


def test_the_shipped_pa_hardly_uses_the_previous_map():
    """By the paper's equation with alpha 0, which leaves the own logits."""
    model = load_model("pa_conv_transformer_cifar")
    recording = record(model, Image.open(CAT), recordable_layers(model.model)[1:3], PARTS)
    for layer in recording.maps.values():
        change = layer.attn - layer.self_logits.softmax(-1)
        difference = change.abs().sum(-1).mean() / 2
        assert f"{difference:.2f}" == "0.01"
    assert "In `pa_conv_transformer_cifar` the mean is 0.01" in PAGE


@pytest.mark.skipif(not CIFAR.exists(), reason="needs CIFAR-10 beside the checkout")
def test_how_centred_the_maps_are_as_the_docs_say(tmp_path):
    """Every fiftieth of the 10,000 test images, in the order of their names."""
    with tarfile.open(CIFAR) as tar:
        tar.extractall(tmp_path, filter="data")
    folders = sorted(str(path) for path in tmp_path.iterdir() if path.is_dir())
    mirror, mean = centring(load_model("ea_conv_transformer_cifar"), find_images(folders)[::50])
    page = " ".join(PAGE.split())
    assert f"the mirrored map (correlation {mirror:.2f})" in page
    assert f"the mean map of all images is {mean:.2f} correlated" in page
