"""Detections of files: coordinates, COCO's results, pictures, and the attention of a detected object."""
import json
import math
import os
import shutil
import sys

import numpy as np
import pytest
import torch
import yaml
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from PIL import Image

from ea_vision import __main__ as commands
from ea_vision.base.errors import UsageError, exit_code
from ea_vision.base.figures import figure_bytes
from ea_vision.detection.coco import CocoFolder
from ea_vision.detection.draw import draw_boxes, gallery, gallery_of, picture
from ea_vision.detection.generate import Boxes, make_boxes
from ea_vision.detection.predict import Detections, detect
from ea_vision.detection.train import load_detector
from ea_vision.recorder.loading import DetectorModel, load_model, parse_layers
from ea_vision.visualize.detections import attention_figure, main
from ea_vision.visualize.image_maps import cell_of, record
from tests.detection.tiny import CLASSES, IDS, SIDE, tiny_run

SIZES = {"wide.png": (60, 90), "tall.png": (120, 70), "same.png": (64, 64)}  # H, W


@pytest.fixture(scope="module")
def photos(tmp_path_factory):
    folder = tmp_path_factory.mktemp("photos")
    rng = np.random.default_rng(0)
    for name, (height, width) in SIZES.items():
        pixels = rng.integers(0, 256, (height // 5, width // 5, 3), dtype=np.uint8)
        Image.fromarray(pixels).resize((width, height)).save(folder / name)
    return folder


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    folder = tmp_path_factory.mktemp("runs") / "mine"
    tiny_run(folder)
    return folder


@pytest.fixture(scope="module")
def model(run) -> DetectorModel:
    return load_model(str(run))


def test_boxes_are_in_pixels_of_the_image(model, photos):
    """Against the detector's own way to fit an image, which pads the same and, where nothing is scaled, is exact."""
    images = [Image.open(photos / name).convert("RGB") for name in SIZES]
    found = list(detect(model.model, images, batch_size=2))
    assert [one.size for one in found] == list(SIZES.values()) and all(len(one) for one in found)
    for one in found:
        assert (one.boxes >= 0).all() and (one.boxes <= torch.tensor([one.size[1], one.size[0]] * 2)).all()
        assert one.scores.tolist() == sorted(one.scores.tolist(), reverse=True)
    same = torch.from_numpy(np.asarray(images[2]).copy()).permute(2, 0, 1) / 255
    with torch.inference_mode():
        own = model.model([same])[0]
    torch.testing.assert_close(found[2].boxes, own["boxes"], atol=1e-4, rtol=0)
    assert found[2].labels.tolist() == own["labels"].tolist()


def test_a_larger_image_has_the_same_objects_at_larger_places(model, photos):
    image = Image.open(photos / "same.png").convert("RGB")
    double = image.resize((128, 128), Image.Resampling.NEAREST)
    one, two = model.detect([image, double])
    surest = one.boxes[0] * 2
    assert (two.boxes[:20] - surest).abs().amax(1).min() < 1.5


def test_results_and_above(model):
    found = Detections((9, 9), torch.tensor([[1.0, 2.0, 4.0, 8.0], [0.0, 0.0, 1.0, 1.0]]), torch.tensor([0.9, 0.3]),
                       torch.tensor([2, 0]))
    assert found.above(0.5).results("a.png", IDS) == [
        {"image_id": "a.png", "category_id": 11, "bbox": [1, 2, 3, 6], "score": 0.9}]
    assert len(found.above(0.2)) == 2 and len(found.above(0.95)) == 0


def test_drawn_boxes_lie_where_they_were_found():
    found = Detections((40, 60), torch.tensor([[5.0, 6.0, 25.0, 36.0], [30.0, 0.0, 50.0, 20.0]]),
                       torch.tensor([0.9, 0.6]), torch.tensor([1, 0]))
    truth = torch.tensor([[4.0, 5.0, 26.0, 35.0]])
    axes = Figure().subplots()
    draw_boxes(axes, torch.rand(3, 40, 60), found, CLASSES, truth)
    places = {kind: [(*patch.get_xy(), patch.get_width(), patch.get_height()) for patch in axes.patches
                     if patch.get_gid() == kind] for kind in ("found", "truth")}
    assert places == {"found": [(5, 6, 20, 30), (30, 0, 20, 20)], "truth": [(4, 5, 22, 30)]}
    assert [text.get_text() for text in axes.texts] == ["dog 0.90", "cat 0.60"]
    drawn = [patch.get_zorder() for patch in axes.patches if patch.get_gid() == "found"]
    assert drawn[0] > drawn[1]  # the surest is on top
    assert axes.get_xlim() == (0, 60) and axes.get_ylim() == (40, 0)
    figure = picture(Image.new("RGB", (60, 40)), found, CLASSES)
    assert figure.get_figwidth() / figure.get_figheight() == pytest.approx(1.5)
    cells = gallery([Image.new("RGB", (60, 40))] * 5, [found] * 5, CLASSES, [truth] * 5).axes
    assert [len(axes.patches) for axes in cells] == [3] * 5 + [0] * 3


def test_names_of_boxes_at_one_place_stand_one_below_another():
    found = Detections((80, 80), torch.tensor([[20.0, 30.0, 60.0, 70.0], [21.0, 29.0, 61.0, 69.0]] * 2),
                       torch.tensor([0.9, 0.8, 0.7, 0.6]), torch.tensor([0, 1, 2, 0]))
    figure = picture(Image.new("RGB", (80, 80)), found, CLASSES)
    renderer = FigureCanvasAgg(figure).get_renderer()
    boxes = [text.get_window_extent(renderer) for text in figure.axes[0].texts]
    assert all(below.y1 <= above.y0 for above, below in zip(boxes, boxes[1:], strict=False))


def test_a_gallery_of_a_data_set_has_found_and_right_boxes(tmp_path):
    make_boxes(tmp_path / "data", Boxes(("disc", "square"), img_size=40, smallest=8, largest=20, train=1, val=7))
    data = CocoFolder(tmp_path / "data", "val")
    rows = [{**row, "score": 0.9 if row["id"] % 2 else 0.1} for row in data.ground_truth()["annotations"]]
    (data.folder / data.images[3]["file_name"]).write_bytes(b"broken")
    cells = gallery_of(data, rows, count=4).axes
    wanted = [data.annotations[index] for index in (0, 1, 5)]
    assert [len(axes.images) for axes in cells] == [1, 1, 1, 0]
    for axes, own in zip(cells[:3], wanted, strict=True):
        drawn = {kind: sorted((*patch.get_xy(), patch.get_width(), patch.get_height()) for patch in axes.patches
                              if patch.get_gid() == kind) for kind in ("truth", "found")}
        assert drawn["truth"] == sorted(tuple(row["bbox"]) for row in own)
        assert drawn["found"] == sorted(tuple(row["bbox"]) for row in rows
                                        if row["image_id"] == own[0]["image_id"] and row["score"] > 0.5)


def test_the_query_is_the_middle_of_the_box_in_every_layer(model, photos):
    """By hand: the middle in pixels of the photo, scaled as the photo is fitted, over the pixels of a cell."""
    layers = parse_layers("all", model)
    assert len(layers) == 6 and all(layer.name.startswith("backbone.body.") for layer in layers)
    for name, (height, width) in SIZES.items():
        image = Image.open(photos / name).convert("RGB")
        [found] = model.detect([image])
        recording = record(model, image, layers)
        for number in range(0, len(found), 17):
            x1, y1, x2, y2 = found.boxes[number].tolist()
            scale = SIDE / max(height, width)
            y, x = scale * (y1 + y2) / 2, scale * (x1 + x2) / 2
            query = model.query_in(found, number)
            for layer in recording.maps.values():
                H, W = layer.feat_size
                cell = cell_of(query, model.img_size, layer.feat_size)
                near = (math.floor(y * H / SIDE), math.floor(x * W / SIDE))
                # the fitted size is a whole number of pixels: at a cell's border half a pixel decides
                assert all(abs(a - b) <= (abs(c % 1 - 0.5) > 0.4) for a, b, c in zip(
                    cell, near, (y * H / SIDE, x * W / SIDE), strict=True))
                drawn = recording.relative_map(layer.number, query, 0)
                row = layer.attn[0, 0, cell[0] * W + cell[1]].reshape(H, W) * H * W
                np.testing.assert_allclose(drawn, row.numpy(), rtol=1e-5)


def test_the_figure_shows_boxes_over_the_padded_photo(model, photos):
    image = Image.open(photos / "wide.png").convert("RGB")
    [found] = model.detect([image])
    layers = parse_layers("1,6", model)
    figure = attention_figure(model, image, found, [0, 2], layers, [0, "mean"])
    [shown] = [axes for axes in figure.axes if axes.get_label() == "photo"]
    boxes = [patch for patch in shown.patches if not patch.get_path_effects()]
    x1, y1, x2, y2 = (found.boxes[2] * SIDE / 90).tolist()
    assert boxes[1].get_xy() == pytest.approx((x1, y1), abs=0.5) and len(boxes) == 2
    assert (boxes[1].get_width(), boxes[1].get_height()) == pytest.approx((x2 - x1, y2 - y1), abs=0.5)
    photo = model.photo(image)
    assert photo.shape == (90, 90, 3) and (photo[60:] == (124, 116, 104)).all()
    np.testing.assert_array_equal(photo[:60], np.asarray(image))


def test_the_command_writes_results_and_pictures(run, photos, tmp_path, capsys):
    results, drawn = tmp_path / "new" / "results.json", tmp_path / "pictures" / "found.png"
    assert main([str(run), str(photos), "--json", str(results), "-o", str(drawn), "--attention", "1", "--layers", "5",
                 "--heads", "mean", "--draw-score", "0.5", "--dpi", "40", "--device", "cpu"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert [line.split(":")[0] for line in lines[:3]] == [str(photos / name) for name in sorted(SIZES)]
    for name in ("found-same.png", "found-same-attention.png", "found-tall.png", "found-wide-attention.png"):
        assert Image.open(drawn.parent / name).width > 50
    rows = json.loads(results.read_text())
    assert {row["category_id"] for row in rows} <= set(IDS) and {row["image_id"] for row in rows} == {
        str(photos / name) for name in SIZES}
    model = load_model(str(run))
    [found] = model.detect([Image.open(photos / "wide.png").convert("RGB")])
    x1, y1, x2, y2 = found.boxes[0].tolist()
    first = next(row for row in rows if row["image_id"].endswith("wide.png"))
    assert first["bbox"] == pytest.approx([x1, y1, x2 - x1, y2 - y1], abs=1e-3)


def test_ids_of_a_coco_json_and_a_broken_image(run, photos, tmp_path, capsys):
    broken = tmp_path / "broken.png"
    broken.write_bytes(b"none")
    coco = {"images": [{"id": 50 + n, "file_name": f"deep/{name}", "width": 9, "height": 9} for n, name in enumerate(
        [*SIZES, "broken.png"])], "categories": [{"id": 1, "name": "x"}], "annotations": []}
    (tmp_path / "val.json").write_text(json.dumps(coco))
    words = [str(run), str(broken), str(photos / "tall.png"), "--json", "-", "--ids", str(tmp_path / "val.json")]
    assert main(words) == 1
    said = capsys.readouterr()
    assert {row["image_id"] for row in json.loads(said.out)} == {51} and f"{broken} is not an image" in said.err


def test_what_is_no_image_is_named_and_the_others_are_gone_through(run, photos, tmp_path, capfd):
    """A named pipe does not keep the command waiting; a name that is not UTF-8 is printed with backslashes."""
    folder = tmp_path / "photos"
    shutil.copytree(photos, folder)
    os.mkfifo(folder / "pipe.png")
    os.rename(os.fsencode(folder / "tall.png"), os.fsencode(folder) + b"/caf\xe9.png")
    before = sys.stdout.errors
    sys.stdout.reconfigure(errors="strict")
    assert exit_code(lambda: main([str(run), str(folder), "--json", str(tmp_path / "r.json"), "-o",
                                   str(tmp_path / "p.png"), "--dpi", "30"])) == 1
    sys.stdout.reconfigure(errors=before)
    said = capfd.readouterr()
    assert "pipe.png" in said.err and said.err.count("error") == 1 and "caf\\udce9.png: " in said.out
    assert "wide.png: " in said.out and len(list(tmp_path.glob("p-*.png"))) == 3
    assert os.fsencode(folder) + b"/caf\xe9.png" in {
        os.fsencode(row["image_id"]) for row in json.loads((tmp_path / "r.json").read_text())}


@pytest.mark.parametrize("words", [["--dpi", "100000"], ["--dpi", "0"], ["--dpi", "²"]])
def test_dots_per_inch_are_limited_before_work(words, capsys):
    with pytest.raises(SystemExit) as left:
        main(["run", "photo", *words])
    assert left.value.code == 2 and "a whole number from 1 to 2400 required" in capsys.readouterr().err
    with pytest.raises(UsageError, match="at most 250 megapixels and 65535 pixels a side, got 24000x12000 at 2400"):
        figure_bytes(Figure((10, 5)), ".png", 2400)


def test_a_run_with_fewer_names_than_outputs_is_refused(run, photos, tmp_path):
    folder = tmp_path / "run"
    shutil.copytree(run, folder)
    config = folder / "config.yaml"
    content = yaml.safe_load(config.read_text())
    content["run"]["classes"].remove("owl")
    config.write_text(yaml.safe_dump(content))
    for load in (load_detector, lambda path: load_model(str(path))):
        with pytest.raises(UsageError, match=r"must have 3 classes, one for each output .* got \['cat', 'dog'\]"):
            load(folder)


@pytest.mark.parametrize("command, words", [
    ("predict", ["RUN", "PHOTO"]), ("probe", ["--model", "RUN", "--layers", "6"])])
def test_commands_that_need_classes_of_images_say_so(run, photos, command, words, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    filled = [{"RUN": str(run), "PHOTO": str(photos / "wide.png")}.get(word, word) for word in words]
    assert commands.run(command, filled) == 2
    assert "a network that classifies images is required, and ea_aa_resnet34, mine finds" in capsys.readouterr().err


@pytest.mark.parametrize("words, message", [
    (["conv_transformer_cifar", "PHOTO"], "a run of train-detection is required"),
    (["RUN", "PHOTO", "--attention", "1"], "--attention needs --output"),
    (["RUN", "PHOTO", "--attention", "0", "-o", "a.png"], "counted from 1"),
    (["RUN", "PHOTO", "--attention", "²", "-o", "a.png"], "counted from 1"),
    (["RUN", "/nowhere.png"], "does not exist"),
    (["RUN", "n" * 300], "does not exist"),
])
def test_bad_input_is_one_line(run, photos, words, message, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    filled = [{"RUN": str(run), "PHOTO": str(photos / "wide.png")}.get(word, word) for word in words]
    assert exit_code(lambda: main(filled)) == 2
    error = capsys.readouterr().err
    assert message in error and error.count("\n") == 1
