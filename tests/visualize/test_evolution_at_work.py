"""The picture of evolution at work: its script draws it anew, and says the numbers of its caption."""

import re
from pathlib import Path

import torch
from PIL import Image

from ea_vision.recorder.loading import load_model
from ea_vision.recorder.recording import PARTS, recordable_layers
from ea_vision.visualize.image_maps import record
from experiments.evolution_at_work import changes, choose, main

ROOT = Path(__file__).resolve().parents[2]
CAT = ROOT / "docs" / "cat.jpg"


def test_the_change_is_what_both_maps_do_not_have_in_common():
    model = load_model("ea_conv_transformer_cifar")
    recording = record(model, Image.open(CAT), recordable_layers(model.model)[:3], PARTS)
    changed = changes(recording)
    assert list(changed) == [2, 3] and choose(changed, recording.img_size) == (3, (30, 14))
    for number, of_layer in changed.items():
        own, rest = (recording.maps[number][part][0] for part in ("attn", "attn_without_previous"))
        torch.testing.assert_close(
            of_layer.flatten(1), 1 - torch.minimum(own, rest).sum(-1), atol=1e-5, rtol=0
        )


def test_the_script_draws_it_and_says_the_numbers_of_its_caption(tmp_path, capsys):
    """Without the previous map the chosen head looks elsewhere in every layer."""
    assert main(f"{CAT} --typical {CAT} -o {tmp_path}/evolution.png".split()) == 0
    with (
        Image.open(tmp_path / "evolution.png") as new,
        Image.open(ROOT / "visualize" / "evolution.png") as shown,
    ):
        assert new.size == shown.size and new.width >= 2 * 72 * 6.7
    page = (ROOT / "docs" / "how-it-works.md").read_text()
    caption = " ".join(
        page.partition("visualize/evolution.png)")[2]
        .partition("\n\n")[2]
        .partition("\n\n")[0]
        .split()
    )
    said = re.findall(
        r"layer (\d): change (\S+) of head 3 and query 30,14; 1 images: mean (\S+),",
        capsys.readouterr().out,
    )
    for layer, change, mean in said:
        assert float(change) > max(0.4, 1.5 * float(mean))
        assert f"{change} in layer {layer}" in caption and mean in caption
    assert len(said) == 2
