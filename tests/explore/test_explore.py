"""The page's data equals what was recorded; the command refuses impossible requests in one line."""

import base64
import html
import io
import json
import re
import zlib

import numpy as np
import pytest
import timm
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as arrays
from PIL import Image
from torch import nn

from ea_vision.detection.predict import detect
from ea_vision.predict import predict
from ea_vision.recorder.recording import recordable_layers
from ea_vision.visualize import explore, plot_jacobian, plot_rollout, show_page
from ea_vision.visualize.explore import build_page, pack, quantise
from ea_vision.visualize.tiles import OWN_ALONE
from ea_vision.zoo.loaded import as_model, load_model
from tests.data.photos import picture
from tests.detection.tiny import tiny_run
from tests.models.zoo import TINY
from tests.recorder import networks
from tests.refused import refused


def entries_of(text, what='class="image"'):
    pattern = f'<script type="application/json" {what}>(.*?)</script>'
    return [json.loads(entry) for entry in re.findall(pattern, text, flags=re.DOTALL)]


# ---- values ---------------------------------------------------------------------------------------------------------


@settings(max_examples=30, deadline=None)
@given(arrays.arrays(np.float32, (2, 3, 5), elements=st.floats(-1e4, 1e4, width=32)))
def test_quantised_values_are_off_by_at_most_half_a_step(maps):
    low, step, codes = quantise(maps)
    values = low[..., None] + step[..., None] * codes
    check_rounded(values, maps)
    assert np.array_equal(values.min(-1), maps.min(-1))


def test_masked_logits_have_a_code_of_their_own_and_nan_is_refused():
    """The figures leave -inf out of their scale, too. A row may be masked as a whole."""
    maps = np.random.default_rng(0).standard_normal((2, 4, 5), np.float32)
    masked = np.triu(np.ones((4, 5), bool), 1)
    masked[3] = True
    low, step, codes = quantise(np.where(masked, -np.inf, maps))
    assert low.dtype == step.dtype == np.float32
    assert np.array_equal(codes == explore.HIDDEN, np.broadcast_to(masked, codes.shape))
    values = low[..., None] + step[..., None] * codes
    assert np.abs(values - maps)[:, ~masked].max() <= step.max() / 2 * 1.001 + 1e-6
    assert np.array_equal(low[:, 0], maps[:, 0, 0])
    _, places = pack({1: {"logits": np.where(masked, -np.inf, maps), "attn": maps}})
    assert places[1] == {"attn": ["attn", 0], "logits": ["logits", 0, explore.HIDDEN]}
    maps[1, 2, 3] = np.nan
    with refused("finite, got 1 value"):
        quantise(maps)


def check_rounded(values, maps):
    """Values are off by at most half a step of 1/255 of their row's range."""
    step = (maps.max(-1) - maps.min(-1)) / 255
    rounding = 1e-6 * np.abs(maps).max(-1) + np.finfo(np.float32).tiny
    errors = np.abs(values - maps).max(-1)
    assert (errors <= step / 2 * 1.001 + rounding).all()


def unpack(view, number, part, num_heads):
    """Return maps (K, N, N) and their mean (K, N), read as the page reads them."""
    stream, offset = view["places"][number][part]
    height, width = view["featSizes"][number]
    cells = height * width
    rows = num_heads * cells
    data = zlib.decompress(base64.b64decode(view["streams"][stream]))[offset:]
    low, step = np.frombuffer(data, "<f4", 2 * rows).reshape(2, num_heads, cells, 1)
    mean = np.frombuffer(data, "<f4", rows, 8 * rows).reshape(num_heads, cells)
    codes = np.frombuffer(data, np.uint8, rows * cells, 12 * rows)
    return low + step * codes.reshape(num_heads, cells, cells), mean


@pytest.mark.parametrize("index", [0, 1])
def test_entries_hold_the_recorded_maps(explorer, entries, recordings, index):
    view = entries[0]["models"][index]
    recording = recordings[0, index]
    for layer in explorer.layers[index]:
        maps = recording.maps[layer.number]
        places = set(maps.recorded())
        assert (OWN_ALONE in places) == ("prev_logits" in layer.parts)
        if OWN_ALONE in places:
            places.add(explore.DIFFERENCE)
        assert set(view["places"][layer.number]) == places
        assert tuple(view["featSizes"][layer.number]) == maps.feat_size
        for part in maps.recorded():
            expected = maps[part][0].numpy()
            values, mean = unpack(view, layer.number, part, layer.num_heads)
            np.testing.assert_allclose(mean, expected.mean(1), rtol=1e-5, atol=1e-6)
            check_rounded(values, expected)
    probabilities = recording.output.softmax(-1)[0]
    likeliest = int(probabilities.argmax())
    top = view["predictions"][0]
    assert top["probability"] == pytest.approx(probabilities.max().item(), abs=1e-5)
    assert top["name"] == (f"class {likeliest}" if index == 0 else f"kind <{likeliest}>")


def keys_of(name, **options):
    """Return the number of keys in the page's first layer, per query or one number for all."""
    model = load_model(name, random=True, **options)
    [entry] = entries_of(show_page(model, picture(0), layers=[1]).text)
    return entry["models"][0]["keys"]["1"]


def test_how_many_keys_each_query_sees():
    """In windows, the cells within the map; with reduced keys, the cells that they cover; prefix tokens count, too."""
    seen = np.array([3, 4, 5, 5, 5, 5, 4, 3])
    expected = np.outer(seen, seen).ravel()
    assert keys_of("csan_conv_transformer_cifar") == expected.tolist()
    assert keys_of("pvt_v2_b0", img_size=(64, 64)) == [16 * 16]
    assert keys_of("vit_tiny_patch16_224", img_size=(64, 64)) == [4 * 4 + 1]


def test_a_map_that_occurs_twice_is_stored_once():
    first, second, own = np.random.default_rng(0).standard_normal((3, 2, 9, 9), np.float32)
    second_parts = {"logits": second, "conv_logits": second}
    second_parts |= {"prev_logits": first, "self_logits": own}
    streams, places = pack({1: {"logits": first}, 2: second_parts})
    assert places[2]["conv_logits"] == places[2]["logits"]
    assert places[2]["prev_logits"] == places[1]["logits"]
    assert set(streams) == {"logits", "self_logits"}


def test_entries_hold_the_surest_objects_of_a_detector(tmp_path):
    """With their boxes in pixels of the input, whose longer side has 64."""
    tiny_run(tmp_path / "run")
    model = load_model(str(tmp_path / "run"))
    page = explore.Explorer([model], [recordable_layers(model.model)[-2:]])
    photo = picture(0, (90, 60))
    [detected] = detect(model.model, [photo])
    objects = page.view("photo.png", photo)["models"][0]["predictions"]
    sure = detected["scores"] >= 0.3
    labels = detected["labels"][sure][:9].tolist()
    assert [row["name"] for row in objects] == [model.classes[label] for label in labels]
    boxes = detected["boxes"][sure][:9] * torch.tensor([64 / 90, 43 / 60] * 2)
    assert np.allclose([row["box"] for row in objects], boxes, atol=0.5)


# ---- the page -------------------------------------------------------------------------------------------------------


def test_the_page_needs_nothing_from_elsewhere_and_names_cannot_break_out_of_its_data(
    explorer, entries
):
    page = build_page(explorer, entries)
    program = re.sub(r'<script type="application/json".*?</script>', "", page, flags=re.DOTALL)
    assert not re.search(r"https?://|@import|<link[^>]+href=\"(?!data:)|\bsrc=\"(?!data:)", program)
    assert "connect-src 'none'" in page
    assert "{{" not in program
    assert not re.search(r"^(import|export) ", program, flags=re.MULTILINE)
    assert [entry["name"] for entry in entries_of(page)] == [entry["name"] for entry in entries]


def test_the_command_writes_a_page_and_says_what_makes_it_smaller(tmp_path, monkeypatch, capsys):
    image = tmp_path / "photo.png"
    picture(3).save(image)
    output = tmp_path / "pages" / "page.html"
    models = "ea_conv_transformer_cifar,pa_conv_transformer_cifar"
    options = "--layers 1-3 --heads 0,3 --random"
    command = f"--model {models} {options} -o {output} {image}".split()
    assert explore.main(command) == 0
    assert re.search(r"page.html \([\d.]+ MB\)", capsys.readouterr().out)
    monkeypatch.setattr(explore, "MEGABYTE", 1_000)
    assert explore.main(command) == 0
    written = capsys.readouterr()
    assert written.err == ""
    assert re.search(r"page.html \([\d.]+ MB; fewer --layers", written.out)
    [about] = entries_of(output.read_text(encoding="utf-8"), 'id="about"')
    labels = [model["label"] for model in about["models"]]
    assert labels == [f"{name} (untrained)" for name in models.split(",")]
    layers = about["models"][0]["layers"]
    assert [layer["number"] for layer in layers] == [1, 2, 3]
    assert [layer["heads"] for layer in layers] == [[0, 3]] * 3
    assert list(output.parent.iterdir()) == [output]


def test_a_notebook_displays_the_page():
    model = "ea_conv_transformer_cifar"
    shown = show_page([model] * 2, [picture(3), picture(4)], layers="1-2", height=500)
    frame = shown._repr_html_()
    assert frame.startswith("<iframe srcdoc=")
    assert "height: 500px" in frame
    source = re.search('srcdoc="(.*?)"', frame, flags=re.DOTALL)[1]
    assert html.unescape(source) == shown.text
    assert len(entries_of(shown.text)) == 2
    assert f"{model} [2]" in shown.text
    with refused("at most 3 models, got 4"):
        show_page([model] * 4, picture(3))


def without_head(model):
    model.head = nn.Identity()
    return model


HEADLESS = {
    "timm": lambda: timm.create_model("vit_tiny_patch16_224", **{**TINY, "num_classes": 0}),
    "a head taken away": lambda: without_head(timm.create_model("vit_tiny_patch16_224", **TINY)),
    "transformers": lambda: networks.transformers_model("ViT"),
    "torchvision": lambda: without_head(networks.torchvision_swin()),
}


@pytest.mark.parametrize("name", HEADLESS)
def test_what_has_no_classifier_has_no_predictions(name):
    """Known by the module: features (1, C) have the shape of logits."""
    model = HEADLESS[name]().eval()
    assert '"predictions":[]' in show_page(model, picture(0), "1,2").text
    for predicts in (
        lambda: list(predict(as_model(model), [picture(0)])),
        lambda: plot_jacobian(model, picture(0)),
        lambda: plot_rollout(model, picture(0), "1,2", target="predicted"),
    ):
        with refused("classifies .* required, .* has no classifier"):
            predicts()


def test_each_class_has_a_picture_of_its_evidence():
    """Of the likeliest class it is what `plot_rollout` draws."""
    image = picture(0)
    entry = entries_of(show_page("ea_conv_transformer_cifar", image).text)[0]["models"][0]
    pictures = [prediction["evidence"] for prediction in entry["predictions"]]
    assert len(set(pictures)) == 3
    figure = plot_rollout("ea_conv_transformer_cifar", image, target="predicted", style="fog")
    [drawn] = [axes.images[0].get_array() for axes in figure.axes if not axes.get_label()]
    data = base64.b64decode(pictures[0].partition(",")[2])
    shown = Image.open(io.BytesIO(data))
    expected = Image.fromarray((drawn * 255).astype(np.uint8)).resize(shown.size)
    difference = np.asarray(shown, float) - expected
    assert np.abs(difference).mean() < 2
