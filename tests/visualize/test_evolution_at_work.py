"""The picture of evolution at work: its script draws it anew, and prints its caption."""

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


def test_each_claim_of_the_caption_is_a_number_of_the_maps():
    """Recomputed by the paper's equation: alpha 0, the own logits convolved at their scale."""
    model = load_model("ea_conv_transformer_cifar")
    recording = record(model, Image.open(CAT), recordable_layers(model.model)[:3], PARTS)
    changed = changes(recording)
    head, query = choose(changed, recording.img_size)
    caption = the_caption()
    assert f"Head {head}, query y {query[0]}, x {query[1]}, of" in caption
    token = query[0] // 4 * 8 + query[1] // 4
    smallest = []
    for number in (2, 3):
        layer = recording.maps[number]
        conv = model.model.get_submodule(layer.name).evolution.convs[0]
        with torch.inference_mode():
            alone = conv(layer.self_logits).relu().softmax(-1)[0]
        attn = layer.attn[0]
        change = 1 - torch.minimum(attn, alone).sum(-1)
        torch.testing.assert_close(changed[number].flatten(1), change, atol=1e-5, rtol=0)
        smallest.append(change)
        cells = [divmod(int(maps[head, token].argmax()), 8) for maps in (attn, alone)]
        (row, column), (row_alone, column_alone) = cells
        assert (
            f"Layer {number}: attention differs from that of the layer's own logits alone, at the same scale, "
            f"by {change[head, token]:.2f} of 1; its largest cell is row {row}, column {column}, that of own "
            f"alone is row {row_alone}, column {column_alone}."
        ) in caption
    least = torch.stack(smallest).amin(0)
    assert least[head, token] == least.max()


def the_caption() -> str:
    """Return the caption below the picture in the docs, in one line."""
    page = (ROOT / "docs" / "how-it-works.md").read_text()
    below = page.partition("visualize/evolution.png)")[2].split("\n\n")[1]
    return " ".join(below.split())


def test_the_script_draws_the_picture_and_prints_its_caption(tmp_path, capsys):
    assert main(f"{CAT} --typical {CAT} -o {tmp_path}/evolution.png".split()) == 0
    with (
        Image.open(tmp_path / "evolution.png") as new,
        Image.open(ROOT / "visualize" / "evolution.png") as shown,
    ):
        assert new.size == shown.size and new.width >= 2 * 72 * 6.7
        assert new.convert("RGB").tobytes() == shown.convert("RGB").tobytes()
    printed = capsys.readouterr().out.splitlines()[0]
    claims, _, typical = printed.partition(" Mean over")
    assert claims in the_caption()
    assert re.fullmatch(
        r" heads and queries of 1 images: \S+ in layer 2 and \S+ in layer 3\.", typical
    )
