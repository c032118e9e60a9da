"""Exported files compute what the network computes, and classify photos without anything else."""
import json
import tarfile
from dataclasses import asdict, fields, replace
from pathlib import Path

import numpy as np
import pytest
import timm
import torch
from PIL import Image

from ea_vision import export, predict
from ea_vision.base.errors import RunError, UsageError, exit_code
from ea_vision.deployment import files
from ea_vision.deployment.files import About, ExportedNetwork, export_program, write
from ea_vision.recorder.loading import load_model
from tests.deployment.test_deploy import difference, small
from tests.models import zoo
from tests.slow import slow_but

onnxruntime = pytest.importorskip("onnxruntime", reason="needs onnxruntime")
onnx = pytest.importorskip("onnx", reason="needs onnx")
pytest.importorskip("onnxscript", reason="needs onnxscript")

FAMILIES = {  # a network of each family, with the size of its images in pixels; small ones first
    "ea_conv_transformer_cifar": (32, 40), "ea_vit_tiny_patch16_224": (32, 48), "stn_digits": (32, 40),
    "csan_conv_transformer_cifar": (32, 40), "ea_deit_tiny_patch16_224": (32, 48), "ea_aa_wrn28_10_cifar": (32, 40),
    "ea_aa_resnet50": (64, 96), "pa_aa_resnet34": (64, 96), "ea_aa_mnasnet_075": (64, 96)}
TESTED = list(FAMILIES) if zoo.ALL else list(FAMILIES)[:3]  # torch's exporter takes long with many layers
WIDTHS = dict(widths=(8, 16, 16, 16))
SHIPPED = "ea_conv_transformer_cifar"


def about(model, size=(32, 32), classes=None) -> About:
    return About("test", size, (0.5,) * 3, (0.5,) * 3, 1.0, "bilinear", model.num_classes, classes)


@pytest.fixture(scope="module")
def photos(tmp_path_factory):
    """A folder of five photos: smooth colours, which no two of share."""
    folder = tmp_path_factory.mktemp("photos")
    for seed in range(5):
        coarse = np.random.default_rng(seed).integers(0, 256, (4, 5, 3), dtype=np.uint8)
        Image.fromarray(coarse).resize((60, 44), Image.Resampling.BICUBIC).save(folder / f"{seed}.png")
    return folder


@pytest.mark.parametrize("name", [*slow_but({SHIPPED}, TESTED), f"{SHIPPED}, normalised"])
def test_onnx_computes_what_the_network_computes(name, tmp_path):
    name, normalised, _ = name.partition(", normalised")
    size = FAMILIES[name]
    options = {} if any(kind in name for kind in ("vit", "deit", "stn")) else {"img_size": size}
    if "conv_transformer" in name:
        options |= WIDTHS | {"qk_norm": bool(normalised)}
    model, path = small(name, num_classes=5, **options), tmp_path / "net.onnx"
    write(export_program(model, size), path, about(model, size))
    network = ExportedNetwork(path)
    for batch in (1, 3):
        assert difference(model, network, torch.randn(batch, 3, *size)) < 2e-5
    kinds = [node.op_type for node in onnx.load(path).graph.node]
    assert not {"BatchNormalization", "Einsum", "GatherElements"} & set(kinds)
    if "csan" not in name:
        assert kinds.count("Gather") <= ("vit" in name or "deit" in name)  # theirs takes the class token


@pytest.mark.slow
def test_a_program_of_torch_computes_the_same(tmp_path, photos, capsys):
    path = tmp_path / "net.pt2"
    assert export.main([SHIPPED, "-o", str(path), "--check", str(photos)]) == 0
    assert "torch.export); same class on 5 of 5 image(s), largest difference" in capsys.readouterr().out
    model = load_model(SHIPPED)
    loaded = load_model(str(path))
    assert loaded.img_size == (32, 32) and loaded.config["mean"] == list(model.config["mean"])
    assert difference(model.model, loaded.model, torch.randn(2, 3, 32, 32)) < 1e-5


@pytest.mark.slow
def test_predict_needs_the_file_alone(tmp_path, photos, capsys, monkeypatch):
    path, out = tmp_path / "net.onnx", [tmp_path / "a.json", tmp_path / "b.json"]
    assert export.main([SHIPPED, "-o", str(path), "--check", str(photos)]) == 0
    said = capsys.readouterr().out
    assert "opset 20, float32); same class on 5 of 5 image(s), largest difference" in said
    assert {entry.domain: entry.version for entry in onnx.load(path).opset_import}[""] == 20
    for target, file in zip((SHIPPED, path), out, strict=True):
        assert predict.main([str(target), str(photos), "--json", str(file)]) == 0
    own, got = (json.loads(file.read_text()) for file in out)
    assert [[c["name"] for c in row["classes"]] for row in own] == [[c["name"] for c in row["classes"]] for row in got]
    for a, b in zip(own, got, strict=True):
        probabilities = [[c["probability"] for c in row["classes"]] for row in (a, b)]
        assert probabilities[0] == pytest.approx(probabilities[1], abs=1e-4)


@pytest.fixture(scope="module")
def shipped_file(tmp_path_factory):
    path = tmp_path_factory.mktemp("file") / "net.onnx"
    model = load_model(SHIPPED)
    write(export_program(model.model, model.img_size), path, about(model.model))
    return path


def agrees_on(photos, path) -> None:
    """Assert that a file gives real photos (RGB images) the network's classes and, nearly, its logits."""
    model = load_model(SHIPPED)
    images = torch.stack([model.normalize(model.prepare(photo.convert("RGB"))) for photo in photos])
    with torch.no_grad():
        own, got = model.model(images), ExportedNetwork(path)(images)
    assert torch.equal(own.argmax(1), got.argmax(1))
    assert (own - got).abs().max() < 1e-4 * own.abs().max()


def test_a_photo_gets_the_same_class(shipped_file):
    with Image.open(Path(__file__).parents[2] / "docs" / "cat.jpg") as photo:
        agrees_on([photo, photo.transpose(Image.Transpose.FLIP_LEFT_RIGHT)], shipped_file)


@pytest.mark.slow
def test_photos_of_cifar_get_the_same_classes(shipped_file, shared):
    with tarfile.open(shared / "data" / "cifar10" / "test.tar") as tar:
        members = [member for member in tar if member.isfile()][::50]
        assert len(members) > 100
        agrees_on([Image.open(tar.extractfile(member)) for member in members], shipped_file)


@pytest.mark.slow
@pytest.mark.parametrize("precision, size, close", [("float16", 0.6, 0.02), ("int8", 0.6, 0.5)])
def test_smaller_files(precision, size, close, tmp_path, photos, capsys):
    path = tmp_path / f"{precision}.onnx"
    assert export.main([SHIPPED, "-o", str(path), "--check", str(photos), "--precision", precision]) == 0
    assert f"opset 20, {precision});" in capsys.readouterr().out
    model = load_model(SHIPPED).model
    weights = 4 * sum(parameter.numel() for parameter in model.parameters())
    assert path.stat().st_size < size * weights
    assert difference(model, ExportedNetwork(path), torch.randn(2, 3, 32, 32)) < close


@pytest.mark.slow
def test_a_file_that_computes_something_else_is_told(tmp_path, photos, monkeypatch):
    monkeypatch.setattr(export.ExportedNetwork, "forward", lambda self, images: torch.zeros(1, 10))
    with pytest.raises(RunError, match="computes something else"):
        export.main([SHIPPED, "-o", str(tmp_path / "net.onnx"), "--check", str(photos)])


JUNK = ["", "[", "null", "nan", "true", "-1", "0", "900", "1e400", '"x"', "[]", "[0.5]", '["a", "b"]', "{}", "[[1]]",
        "[NaN, NaN, NaN]", "[0, 0, 0]", "[" * 100_000]


@pytest.mark.parametrize("name", [field.name for field in fields(About)])
def test_damaged_metadata_are_named_or_what_a_network_has(name, tmp_path):
    """Whatever stands in one field: one line that names file and field, or a value of its kind."""
    whole = About("net", (32, 24), (0.5, 0.5, 0.5), (0.2, 0.2, 0.2), 0.9, "bicubic", 2, ["a", "b"])
    said, path = {key: json.dumps(value) for key, value in asdict(whole).items()}, tmp_path / "net.onnx"
    assert files._checked_about(path, said) == replace(whole, mean=[0.5] * 3, std=[0.2] * 3)
    accepted = []
    for junk in JUNK:
        try:
            accepted.append(getattr(files._checked_about(path, {**said, name: junk}), name))
        except UsageError as error:
            assert str(error).startswith(f"{path} is damaged: ") and len(str(error)) < 300
    assert accepted == {"name": ["x"], "classes": [None, ["a", "b"]], "mean": [[0, 0, 0]]}.get(name, [])
    for foreign in (3, None, [], {key: value for key, value in said.items() if key != name}):
        with pytest.raises(UsageError, match="must be a network that ea-vision export wrote"):
            files._checked_about(path, foreign)


def test_errors_are_one_line_before_work_starts(tmp_path, photos, capsys):
    model = timm.create_model(SHIPPED, **WIDTHS).eval()
    torch.onnx.export(model, (torch.zeros(1, 3, 32, 32),), tmp_path / "other.onnx", dynamo=True, verbose=False)
    (tmp_path / "broken.onnx").write_bytes(b"no network")
    capsys.readouterr()
    for argv, message in [
        ([SHIPPED, "-o", "net.txt"], "the file must end in .onnx or .pt2, got net.txt"),
        (["cnn_cifar", "-o", str(tmp_path / "a.onnx")], "cnn_cifar has no weights: --random exports it"),
        ([SHIPPED, "-o", str(tmp_path / "a.onnx"), "--precision", "int8"], "--precision int8 needs --check"),
        ([SHIPPED, "-o", str(tmp_path / "a.pt2"), "--precision", "float16"], "--precision float16 needs .onnx"),
        ([SHIPPED, "-o", str(tmp_path)], "must end in"),
        ([str(tmp_path / "broken.onnx"), "-o", str(tmp_path / "a.onnx")], "cannot read"),
        ([str(tmp_path / "other.onnx"), "-o", str(tmp_path / "a.onnx")], "its metadata lack name, size"),
    ]:
        assert exit_code(lambda argv=argv: export.main(argv)) == 2, argv
        err = capsys.readouterr().err
        assert message in err and err.count("\n") == 1, err
    assert not list(tmp_path.glob("a.*"))
