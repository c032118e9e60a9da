"""What the page holds equals what was recorded, and what the command cannot do it says in one line."""

import base64
import html
import json
import re
import zlib

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as arrays

from ea_vision.base.errors import UsageError
from ea_vision.recorder.loading import load_model
from ea_vision.recorder.recording import recordable_layers
from ea_vision.visualize import explore, show_page
from ea_vision.visualize.explore import build_page, pack, quantise
from ea_vision.visualize.image_maps import OWN_ALONE
from tests.data.photos import picture
from tests.detection.tiny import tiny_run


def entries_of(text: str, what: str = 'class="image"') -> list:
    return [
        json.loads(found)
        for found in re.findall(
            f'<script type="application/json" {what}>(.*?)</script>', text, flags=re.DOTALL
        )
    ]


# ---- values ---------------------------------------------------------------------------------------------------------


@settings(max_examples=30, deadline=None)
@given(arrays.arrays(np.float32, (2, 3, 5), elements=st.floats(-1e4, 1e4, width=32)))
def test_quantised_values_are_off_by_at_most_half_a_step(maps):
    low, step, codes = quantise(maps)
    values = low[..., None] + step[..., None] * codes
    step = (maps.max(-1) - maps.min(-1)) / 255
    rounding = 1e-6 * np.abs(maps).max(-1) + np.finfo(np.float32).tiny
    assert (np.abs(values - maps).max(-1) <= step / 2 * 1.001 + rounding).all()
    assert np.array_equal(values.min(-1), maps.min(-1))
    with pytest.raises(UsageError, match="finite, got 1 value"):
        quantise(np.where(np.arange(5) == 2, np.nan, maps)[:1, :1])


def unpack(view: dict, number: int, part: str, num_heads: int) -> np.ndarray:
    """(K, N, N), read as the page reads it."""
    stream, offset = view["places"][number][part]
    H, W = view["featSizes"][number]
    rows, N = num_heads * H * W, H * W
    data = zlib.decompress(base64.b64decode(view["streams"][stream]))[offset:]
    low, step = np.frombuffer(data, "<f4", 2 * rows).reshape(2, num_heads, N, 1)
    mean = np.frombuffer(data, "<f4", rows, 8 * rows).reshape(num_heads, N)
    codes = np.frombuffer(data, np.uint8, rows * N, 12 * rows).reshape(num_heads, N, N)
    return low + step * codes, mean


@pytest.mark.parametrize("index", [0, 1])
def test_entries_hold_the_recorded_maps(explorer, entries, recordings, index):
    view, recording = entries[0]["models"][index], recordings[0, index]
    maps, probabilities = recording.maps, recording.output.softmax(-1)[0]
    for layer in explorer.layers[index]:
        assert tuple(view["featSizes"][layer.number]) == maps[layer.number].feat_size
        recorded = set(maps[layer.number].recorded())
        changes = {explore.CHANGE} if OWN_ALONE in recorded else set()
        assert set(view["places"][layer.number]) == recorded | changes
        assert (OWN_ALONE in maps[layer.number].recorded()) == ("prev_logits" in layer.parts)
        for part in recorded:
            expected = maps[layer.number][part][0].numpy()
            values, mean = unpack(view, layer.number, part, layer.num_heads)
            np.testing.assert_allclose(mean, expected.mean(1), rtol=1e-5, atol=1e-6)
            step = (expected.max(-1) - expected.min(-1)) / 255
            error = np.abs(values - expected).max(-1)
            assert (error <= step * 0.501 + 1e-6 * np.abs(expected).max(-1)).all()
    top = view["predictions"][0]
    assert top["probability"] == pytest.approx(probabilities.max().item(), abs=1e-5)
    assert (
        top["name"] == f"class {probabilities.argmax()}"
        or top["name"] == f"kind <{probabilities.argmax()}>"
    )


def test_a_map_that_occurs_twice_is_stored_once():
    maps = np.random.default_rng(0).normal(size=(3, 2, 9, 9)).astype(np.float32)
    streams, places = pack(
        {
            1: {"logits": maps[0]},
            2: {
                "logits": maps[1],
                "conv_logits": maps[1],
                "prev_logits": maps[0],
                "self_logits": maps[2],
            },
        }
    )
    assert (
        places[2]["conv_logits"] == places[2]["logits"]
        and places[2]["prev_logits"] == places[1]["logits"]
    )
    assert set(streams) == {"logits", "self_logits"}


def test_entries_hold_the_surest_objects_of_a_detector(tmp_path):
    """With their boxes in pixels of the input, 64 along the longer side."""
    tiny_run(tmp_path / "run")
    model = load_model(str(tmp_path / "run"))
    made = explore.Explorer([model], [recordable_layers(model.model)[-2:]], parts=("attn",))
    [found], photo = model.detect([picture(0, (90, 60))]), picture(0, (90, 60))
    objects = made.view("photo.png", photo)["models"][0]["predictions"]
    sure = found["scores"] >= 0.3
    assert [row["name"] for row in objects] == [
        model.classes[label] for label in found["labels"][sure].tolist()[:9]
    ]
    boxes = found["boxes"][sure][:9] * torch.tensor([64 / 90, 43 / 60] * 2)
    assert np.allclose([row["box"] for row in objects], boxes, atol=0.5)


# ---- the page -------------------------------------------------------------------------------------------------------


def test_the_page_needs_nothing_from_elsewhere_and_names_cannot_break_out_of_its_data(
    explorer, entries
):
    page = build_page(explorer, entries)
    program = re.sub(r'<script type="application/json".*?</script>', "", page, flags=re.DOTALL)
    assert not re.search(r"https?://|@import|<link[^>]+href=\"(?!data:)|\bsrc=\"(?!data:)", program)
    assert "connect-src 'none'" in page and "{{" not in program
    assert not re.search(r"^(import|export) ", program, flags=re.MULTILINE)
    assert [entry["name"] for entry in entries_of(page)] == [entry["name"] for entry in entries]


@pytest.fixture
def image(tmp_path):
    picture(3).save(tmp_path / "photo.png")
    return tmp_path / "photo.png"


def test_the_command_writes_a_page_and_says_what_makes_it_smaller(
    tmp_path, monkeypatch, capsys, image
):
    output = tmp_path / "pages" / "page.html"
    command = (
        "--model ea_conv_transformer_cifar,pa_conv_transformer_cifar --layers 1-3 --heads 0,3 --random "
        f"--max-mb 1 -o {output} {image}"
    )
    assert explore.main(command.split()) == 0 and capsys.readouterr().err == ""
    monkeypatch.setattr(explore, "MEGABYTE", 20_000)
    assert explore.main(command.split()) == 0
    assert re.search(
        "warning: the page has .* MB, more than --max-mb 1; fewer --layers", capsys.readouterr().err
    )
    [about] = entries_of(output.read_text(), 'id="about"')
    assert [model["label"] for model in about["models"]] == [
        "ea_conv_transformer_cifar (untrained)",
        "pa_conv_transformer_cifar (untrained)",
    ]
    assert [(layer["number"], layer["heads"]) for layer in about["models"][0]["layers"]] == [
        (1, [0, 3]),
        (2, [0, 3]),
        (3, [0, 3]),
    ]
    assert [path.name for path in output.parent.iterdir()] == ["page.html"]


def test_a_notebook_displays_the_page():
    model = load_model("ea_conv_transformer_cifar", random=True)
    shown = show_page([model, model], [picture(3), picture(4)], layers="1-2", height=500)
    frame = shown._repr_html_()
    assert frame.startswith("<iframe srcdoc=") and "height: 500px" in frame
    assert html.unescape(re.search('srcdoc="(.*?)"', frame, flags=re.DOTALL)[1]) == shown.text
    assert (
        len(entries_of(shown.text)) == 2
        and "ea_conv_transformer_cifar (untrained) [2]" in shown.text
    )
    with pytest.raises(UsageError, match="at most 3 models, got 4"):
        show_page([model] * 4, picture(3))
