"""The picture of a chain: each statement of its caption, recomputed from the recorded maps."""
import re
from pathlib import Path

import pytest
from PIL import Image

from ea_vision.recorder.loading import load_model
from ea_vision.recorder.recording import PARTS, attention_layers
from ea_vision.visualize.image_maps import add_contributions, record

ROOT = Path(__file__).resolve().parents[2]
LEFT_EYE, RIGHT_EYE, BESIDE_THE_NOSE = (2, 2), (3, 6), (5, 5)  # cells of the 8x8 map


@pytest.fixture(scope="module")
def maps():
    model = load_model("ea_conv_transformer_cifar")
    recording = record(model, Image.open(ROOT / "docs" / "cat.jpg"), attention_layers(model.model)[:3], PARTS)
    add_contributions(recording)
    return recording.maps


def strongest(maps, layer: int, part: str = "attn") -> tuple[tuple[int, int], float]:
    """Cell and probability of what the query at y 16, x 16 attends to most, by head 1."""
    row = maps[layer][part][0, 1, 4 * 8 + 4]
    return divmod(int(row.argmax()), 8), round(row.max().item(), 2)


def test_the_caption_says_what_the_maps_show(maps):
    page = (ROOT / "docs" / "how-it-works.md").read_text()
    text = " ".join(page.split("visualize/evolution.png)")[1].split("## ")[0].split())
    assert "head 1" in text and "nose" in text
    said = {
        r"Layer 1 looks at the right eye \(probability ([\d.]+)\)": (1, "attn", RIGHT_EYE),
        r"layer 2 at the left one \(([\d.]+)\)": (2, "attn", LEFT_EYE),
        r"its own logits alone layer 2 chooses the left eye, too \(([\d.]+)\)": (2, "attn_without_previous", LEFT_EYE),
        r"with layer 1's alone a cell beside the nose \(([\d.]+)\)": (2, "attn_without_own", BESIDE_THE_NOSE),
    }
    for pattern, (layer, part, cell) in said.items():
        [probability] = re.findall(pattern, text)
        assert strongest(maps, layer, part) == (cell, float(probability)), pattern


def test_the_picture_is_there_in_print_quality():
    with Image.open(ROOT / "visualize" / "evolution.png") as picture:
        assert picture.width >= 2 * 72 * 6.7
