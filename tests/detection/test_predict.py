"""Detections of files: coordinates, COCO's results, pictures, and the maps of a detector's backbone."""

import json

import numpy as np
import pytest
import torch
from PIL import Image
from torchvision.ops import box_convert
from torchvision.transforms.v2.functional import pil_to_tensor

from ea_vision import __main__ as commands
from ea_vision.detection.draw import draw_detections
from ea_vision.detection.predict import detect
from ea_vision.recorder.selection import parse_layers
from ea_vision.visualize.figure_request import record
from ea_vision.zoo.loaded import load_model
from tests.data.photos import picture
from tests.detection.tiny import CLASSES, IDS, SIDE, tiny_run
from tests.engine.runner import error_of

SIZES = {"same.png": (64, 64), "tall.png": (120, 70), "wide.png": (60, 90)}  # H, W


@pytest.fixture(scope="module")
def photos(tmp_path_factory):
    folder = tmp_path_factory.mktemp("photos")
    for seed, (name, (height, width)) in enumerate(SIZES.items()):
        picture(seed, (width, height)).save(folder / name)
    return folder


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    folder = tmp_path_factory.mktemp("runs") / "mine"
    tiny_run(folder)
    return folder


@pytest.fixture(scope="module")
def model(run):
    return load_model(str(run))


def test_boxes_are_in_pixels_of_the_image(model, photos):
    """Compared with the detector's own resizing, which pads in the same way and is exact if nothing is scaled."""
    images = [Image.open(photos / name) for name in SIZES]
    detections = list(detect(model.model, images))
    for one, (H, W) in zip(detections, SIZES.values(), strict=True):
        assert one["boxes"].min() >= 0
        assert (one["boxes"] <= torch.tensor([W, H, W, H])).all()
        assert one["scores"].tolist() == sorted(one["scores"].tolist(), reverse=True)
    with torch.inference_mode():
        expected = model.model([pil_to_tensor(images[0]) / 255])[0]
    torch.testing.assert_close(detections[0], expected, atol=1e-4, rtol=0)
    [double] = detect(model.model, [images[0].resize((128, 128), Image.Resampling.NEAREST)])
    distances = (double["boxes"][:20] - 2 * detections[0]["boxes"][0]).abs()
    assert distances.amax(1).min() < 1.5


def test_drawn_boxes_lie_where_they_were_found():
    detections = {
        "boxes": torch.tensor([[10.0, 12, 50, 72], [60, 20, 100, 60]]),
        "scores": torch.tensor([0.9, 0.6]),
        "labels": torch.tensor([1, 0]),
    }
    drawn = draw_detections(torch.full((3, 80, 120), 90, dtype=torch.uint8), detections, CLASSES)
    assert drawn.shape == (3, 427, 640)
    for color, x1, x2, y in (((0, 114, 178), 10, 50, 66), ((213, 94, 0), 60, 100, 55)):
        row = drawn[:, y * 640 // 120]  # (3, W)
        has_color = (row == torch.tensor(color)[:, None]).all(0)
        columns = has_color.nonzero() * 120 / 640
        assert (columns.min(), columns.max()) == pytest.approx((x1, x2), abs=1)
    nothing = {name: part[:0] for name, part in detections.items()}
    assert torch.equal(draw_detections(drawn, nothing, CLASSES), drawn)


def test_maps_of_the_backbone_lie_over_the_padded_photo(model, photos):
    layers = parse_layers("all", model)
    image = Image.open(photos / "wide.png")
    assert len(layers) == 6
    assert all(layer.name.startswith("backbone.body.") for layer in layers)
    recording = record(model, image, layers)
    for layer in recording.maps.values():
        H, W = layer.feat_size
        for y, x in ((20, 40), (63, 0)):
            cell = y * H // SIDE * W + x * W // SIDE
            row = H * W * layer.attn[0, 0, cell].reshape(H, W)
            shown = recording.query_map(layer.number, (y, x), 0)
            np.testing.assert_allclose(shown, row, rtol=1e-5)
    photo = model.preparation.photo(image)
    assert photo.shape == (90, 90, 3)
    assert (photo[60:] == (124, 116, 104)).all()
    np.testing.assert_array_equal(photo[:60], np.asarray(image))


def test_the_command_writes_results_and_pictures(run, model, photos, tmp_path, capsys):
    """A broken image is named, and the others are processed."""
    broken = tmp_path / "broken.png"
    results = tmp_path / "new" / "results.json"
    drawn = tmp_path / "pictures"
    broken.write_bytes(b"none")
    options = f"--json {results} -o {drawn} --min-score 0.5 --device cpu"
    assert commands.main(f"predict {run} {broken} {photos} {options}".split()) == 1
    captured = capsys.readouterr()
    assert captured.err.count("error: ") == 1
    assert "broken.png cannot be read" in captured.err
    for name in ("2-same", "3-tall", "4-wide"):
        assert Image.open(drawn / f"{name}.png").width >= 373
    rows = json.loads(results.read_text())
    assert {row["category_id"] for row in rows} <= set(IDS)
    assert min(row["score"] for row in rows) >= 0.5
    assert {row["image_id"] for row in rows} == {str(photos / name) for name in SIZES}
    [found] = detect(model.model, [Image.open(photos / "wide.png")])
    bbox = box_convert(found["boxes"][0], "xyxy", "xywh").tolist()
    first, *_ = [row for row in rows if "wide" in row["image_id"]]
    assert first["bbox"] == pytest.approx(bbox, abs=1e-3)
    assert f"wide.png: {CLASSES[found['labels'][0]]} {found['scores'][0]:.2f}" in captured.out


@pytest.mark.parametrize("option", ["-o {folder}", "--json {image}"])
def test_predict_does_not_replace_an_image(option, run, tmp_path, capsys):
    image = tmp_path / "1-photo.png"  # named as the first picture of photo.png is
    first = tmp_path / "photo.png"
    for path in (image, first):
        picture(0, (90, 60)).save(path)
    before = image.read_bytes()
    words = option.format(folder=tmp_path, image=image)
    command = f"predict {run} {first} {image} {words} --min-score 0 --device cpu"
    assert str(image) in error_of(commands.main, command.split(), capsys)
    assert image.read_bytes() == before


def test_outputs_that_are_not_finite_are_an_error_of_the_image(run, photos, monkeypatch, capsys):
    broken = load_model(str(run))
    last = broken.model.head.classification_head.cls_logits
    last.bias.data.fill_(torch.inf)
    monkeypatch.setattr("ea_vision.predict.load_model", lambda *_, **__: broken)
    assert commands.main(["predict", str(run), str(photos / "wide.png"), "--json", "-"]) == 1
    captured = capsys.readouterr()
    assert json.loads(captured.out) == []
    assert "gives no finite number for" in captured.err


NO_CLASSES = "a network that classifies images is required, but ea_aa_resnet34, mine detects"


@pytest.mark.parametrize(
    "command, message",
    [
        (
            "predict ea_conv_transformer_cifar {photo} -o a",
            "--output applies to objects, and ea_conv_transformer_cifar finds none",
        ),
        (
            "predict ea_conv_transformer_cifar {photo} --min-score 0.1",
            "--min-score applies to objects, and ea_conv_transformer_cifar finds none",
        ),
        ("predict {run} {photo} --top 3", "--top applies to classes of images, and"),
        (
            "predict {run} {photo} --min-score nan",
            "--min-score must be a number from 0 to 1, got nan",
        ),
        ("predict {run} {photo} --img-size 32", "mine takes images of 64x64 pixels, got 32x32"),
        ("export {run} -o a.pt2", NO_CLASSES),
        ("probe --model {run} --layers 6", NO_CLASSES),
    ],
)
def test_bad_input_is_one_line(run, photos, command, message, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    argv = command.format(run=run, photo=photos / "wide.png").split()
    assert message in error_of(commands.main, argv, capsys)
