"""The picture of evolution at work: chosen as its script says, and each number of its caption recomputed."""
from pathlib import Path

import pytest
import torch
from PIL import Image

from ea_vision.recorder.loading import load_model
from ea_vision.recorder.recording import PARTS, recordable_layers
from ea_vision.visualize.image_maps import cell_of, record
from experiments.evolution_at_work import changes, choose, main

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture(scope="module")
def recording():
    model = load_model("ea_conv_transformer_cifar")
    return record(model, Image.open(ROOT / "docs" / "cat.jpg"), recordable_layers(model.model)[:3], PARTS)


def test_the_picture_shows_evolution_at_work(recording):
    """Without the previous map the chosen head looks elsewhere in every layer; the caption's numbers are the maps'."""
    changed = changes(recording)
    head, query = choose(changed, recording.img_size)
    row, col = cell_of(query, recording.img_size, (8, 8))
    assert (head, list(changed)) == (0, [2, 3])
    page = (ROOT / "docs" / "how-it-works.md").read_text()
    caption = " ".join(page.partition("visualize/evolution.png)")[2].partition("\n\n")[2].partition("\n\n")[0].split())
    for number, of_layer in changed.items():
        maps = recording.maps[number]
        own, rest = (maps[part][0, head, row * 8 + col] for part in ("attn", "attn_without_previous"))
        change = torch.minimum(own, rest).sum()  # what both have in common
        assert of_layer[head, row, col] == pytest.approx(1 - change.item(), abs=1e-5) and of_layer[head, row, col] > 0.5
        assert f"{of_layer[head, row, col]:.2f} in layer {number}" in caption and f"{of_layer.mean():.2f}" in caption
    assert (changed[2].shape, changed[3].amin() >= 0) == ((4, 8, 8), True)


def test_the_script_draws_it(tmp_path, capsys):
    cat = ROOT / "docs" / "cat.jpg"
    assert main(f"{cat} --typical {cat} -o {tmp_path}/evolution.png".split()) == 0
    assert "layer 2: change 0.60 of head 0 and query 10,22; 1 images: mean 0.42" in capsys.readouterr().out
    with Image.open(tmp_path / "evolution.png") as new, Image.open(ROOT / "visualize" / "evolution.png") as shown:
        assert new.size == shown.size and new.width >= 2 * 72 * 6.7
