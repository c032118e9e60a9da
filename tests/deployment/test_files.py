"""Exported files compute what the network computes, and are sufficient to classify photos."""

import copy
import json
import logging
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import numpy as np
import onnx
import onnxruntime
import pandas as pd
import pytest
import torch
from onnxruntime.quantization import CalibrationDataReader, quantize_static
from onnxruntime.transformers.float16 import convert_float_to_float16
from PIL import Image
from torch import nn

from ea_vision import export, predict
from ea_vision.base.errors import RunError, UsageError
from ea_vision.deployment.files import About, ExportedNetwork, export_program, sealed, write
from ea_vision.zoo.loaded import LoadedModel, load_model
from tests.data.photos import picture
from tests.deployment.test_deploy import difference, small
from tests.engine.runner import error_of
from tests.models import zoo
from tests.process import ROOT
from tests.refused import refused

FAMILIES = {  # a network of each family, with the size of its images in pixels; small ones first
    "ea_conv_transformer_cifar": (32, 40),
    "ea_vit_tiny_patch16_224": (32, 48),
    "stn_digits": (32, 40),
    "csan_conv_transformer_cifar": (32, 40),
    "ea_deit_tiny_patch16_224": (32, 48),
    "ea_aa_wrn28_10_cifar": (32, 40),
    "ea_aa_resnet50": (64, 96),
    "pa_aa_resnet34": (64, 96),
    "ea_aa_mnasnet_075": (64, 96),
}
# torch's exporter takes long with many layers
TESTED = list(FAMILIES) if zoo.ALL else list(FAMILIES)[:3]
SHIPPED = "ea_conv_transformer_cifar"


def about(model, size, classes=None):
    half = (0.5,) * 3
    return About(
        size, mean=half, std=half, name="test", num_classes=model.num_classes, classes=classes
    )


@pytest.fixture(scope="module")
def photos(tmp_path_factory):
    """A folder of five photos."""
    folder = tmp_path_factory.mktemp("photos")
    for number in range(5):
        picture(number, (60, 44)).save(folder / f"{number}.png")
    return folder


def written(model, path, size):
    """Export a network; check that its file computes the same, of operations that are fast."""
    write(export_program(model, size), path, about(model, size))
    network = ExportedNetwork(path)
    for batch in (1, 3):
        assert difference(model, network, torch.randn(batch, 3, *size)) < 2e-5
    kinds = [node.op_type for node in onnx.load(path).graph.node]
    assert "GatherElements" not in kinds
    if "csan" not in path.stem:  # whose windows are computed by the reference
        class_token = "vit" in path.stem or "deit" in path.stem
        assert "Einsum" not in kinds
        assert kinds.count("Gather") <= class_token
    return network


@pytest.mark.slow
@pytest.mark.parametrize("name", TESTED)
def test_onnx_computes_what_the_network_computes(name, tmp_path):
    """The shipped network is tested below."""
    size = FAMILIES[name]
    options = {"num_classes": 5}
    if not re.search("vit|deit|stn", name):
        options["img_size"] = size
    if "conv_transformer" in name:
        options["widths"] = (8, 16, 16, 16)
    written(small(name, **options), tmp_path / f"{name}.onnx", size)


@pytest.mark.slow
@pytest.mark.parametrize("suffix, kind", [(".onnx", "opset 20"), (".pt2", "torch.export")])
def test_predict_needs_the_file_alone(suffix, kind, tmp_path, photos, capsys):
    path = tmp_path / f"net{suffix}"
    assert export.main([SHIPPED, "-o", str(path), "--check", str(photos)]) == 0
    assert f"{kind}); same class on 5 of 5 image(s), largest difference" in capsys.readouterr().out
    if suffix == ".onnx":
        versions = {entry.domain: entry.version for entry in onnx.load(path).opset_import}
        assert versions[""] == 20
    model = load_model(SHIPPED)
    loaded = load_model(str(path))
    assert loaded.img_size == (32, 32)
    assert list(loaded.preparation.mean) == list(model.preparation.mean)
    assert difference(model.model, loaded.model, torch.randn(2, 3, 32, 32)) < 1e-5

    def classes(target):
        assert predict.main([str(target), str(photos), "--json", "-"]) == 0
        return pd.json_normalize(json.loads(capsys.readouterr().out), "classes", "image")

    pd.testing.assert_frame_equal(classes(path), classes(SHIPPED), atol=1e-4)


def test_photos_get_the_same_classes(tmp_path):
    """And nearly the same logits, of a trained network with a norm of queries and keys."""
    photo = Image.open(ROOT / "docs" / "cat.jpg")
    model = load_model(SHIPPED)
    network = written(model.model, tmp_path / "net.onnx", model.img_size)
    image = model.input_of(photo)
    images = torch.stack([image, image.flip(-1)])
    with torch.no_grad():
        assert torch.equal(network(images).argmax(1), model.model(images).argmax(1))
    assert difference(model.model, network, images) < 1e-4


@pytest.mark.slow
def test_a_file_that_computes_something_else_is_told(tmp_path, photos, monkeypatch):
    monkeypatch.setattr(export.ExportedNetwork, "forward", lambda self, images: torch.zeros(1, 10))
    with refused("outputs differ from those of", RunError):
        export.main([SHIPPED, "-o", str(tmp_path / "net.onnx"), "--check", str(photos)])


def test_outputs_that_are_all_zero_agree(tiny, tmp_path):
    """As with timm's mixers with random weights."""
    model = copy.deepcopy(tiny[0])
    for parameter in model[-1].parameters():
        nn.init.zeros_(parameter)
    path = tmp_path / "net.pt2"
    preparation = about(model, (8, 8))
    write(export_program(model, (8, 8)), path, preparation)
    loaded = LoadedModel(model, "zeros", preparation)
    comparison = export.compare(loaded, [torch.rand(3, 8, 8)], path)
    assert comparison.startswith("same class on 1 of 1 image(s), largest difference 0.0e+00")


@pytest.fixture(scope="module")
def tiny(tmp_path_factory):
    """A small network of ten classes, and its files of both kinds, their names in capitals."""
    folder = tmp_path_factory.mktemp("TINY")
    features = [nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4), nn.ReLU(), nn.Flatten()]
    model = nn.Sequential(*features, nn.Linear(144, 10)).eval()
    model.img_size = 8
    model.num_classes = 10
    program = export_program(model, (8, 8))
    for name in ("NET.ONNX", "NET.PT2"):
        write(program, folder / name, about(model, (8, 8), [f"class {n}" for n in range(10)]))
    return model, folder


def test_what_the_user_silenced_stays_silent(tiny, monkeypatch):
    monkeypatch.setattr(logging.root.manager, "disable", logging.ERROR)
    ExportedNetwork(tiny[1] / "NET.PT2")
    assert logging.root.manager.disable == logging.ERROR


@pytest.mark.parametrize("name", ["NET.ONNX", "NET.PT2"])
def test_a_file_is_whole_and_knows_its_network(name, tiny, tmp_path):
    model, folder = tiny
    data = (folder / name).read_bytes()
    path = tmp_path / name
    rng = np.random.default_rng(0)
    x = torch.randn(3, 3, 8, 8)
    assert difference(model, load_model(str(folder / name)).model, x) < 1e-5
    for place in [*rng.integers(0, len(data), 40), len(data) - 70, len(data) - 1]:
        flipped = data[place] ^ 1 << rng.integers(8)
        path.write_bytes(data[:place] + bytes([flipped]) + data[place + 1 :])
        try:
            network = ExportedNetwork(path)
        except UsageError as error:
            assert str(path) in str(error)
        else:  # a date in a zip, or the name of the checksum
            assert difference(model, network, x) < 1e-5
    for spoilt in (
        data[:-1],
        data[:1000] + bytes(100) + data[1100:],
        data[: len(data) // 2],
        b"",
        b"no network",
    ):
        path.write_bytes(spoilt)
        with refused(f"{name}( is damaged| must be|: )"):
            ExportedNetwork(path)


def renamed(proto):
    proto.graph.input[0].name = proto.graph.node[0].input[0] = "pixels"


def stating(**values):
    """Return a change of a file's metadata."""

    def change(proto):
        for entry in proto.metadata_props:
            if entry.key in values:
                entry.value = json.dumps(values[entry.key])

    return change


def emptied(proto):
    del proto.metadata_props[:]


@pytest.mark.parametrize(
    "change, message",
    [
        (
            stating(size=[16, 8]),
            r"says that it takes images \(3, 16, 8\) .* refuses: .* index: 2 Got: 16 Expected: 8",
        ),
        (renamed, r"says that it takes images .* refuses: Required inputs \(\['pixels'\]\)"),
        (stating(size=8), "wrote, with its metadata: "),
        (emptied, "wrote, with its metadata: there is no 'size'"),
    ],
)
def test_metadata_are_compared_with_the_network(change, message, tiny, tmp_path):
    """Also in a file whose checksum is right."""
    path = tmp_path / "net.onnx"
    proto = onnx.load(tiny[1] / "NET.ONNX")
    change(proto)
    path.write_bytes(sealed(proto))
    onnx.checker.check_model(onnx.load(path))
    with refused(message):
        ExportedNetwork(path)


def test_an_onnx_file_is_one_that_others_read(tiny):
    path = tiny[1] / "NET.ONNX"
    session = onnxruntime.InferenceSession(path, providers=["CPUExecutionProvider"])
    [images] = session.get_inputs()
    [logits] = session.get_outputs()
    assert images.shape == ["batch", 3, 8, 8]
    assert logits.shape == ["batch", 10]
    metadata = session.get_modelmeta().custom_metadata_map
    assert json.loads(metadata["classes"])[9] == "class 9"
    network = ExportedNetwork(path)
    message = r"images of shape \(B, 3, 8, 8\) are required, got \(1, 3, 8, 9\)"
    with refused(message, ValueError):
        network(torch.zeros(1, 3, 8, 9))


def test_what_onnxruntimes_tools_make_is_sealed_anew(tiny, tmp_path, monkeypatch):
    """Runs the calls of docs/deploy.md. The 8 bits are calibrated on the images that are compared, since values beyond
    those of calibration are clipped."""
    images = torch.randn(16, 3, 8, 8)

    class Photos(CalibrationDataReader):
        left = iter([{"images": image[None].numpy()} for image in images])

        def get_next(self):
            return next(self.left, None)

    model, folder = tiny
    photos = Photos()
    shutil.copy(folder / "NET.ONNX", tmp_path / "net.onnx")
    monkeypatch.chdir(tmp_path)
    half = convert_float_to_float16(onnx.load("net.onnx"), keep_io_types=True)
    quantize_static("net.onnx", "int8.onnx", photos, per_channel=True)
    int8 = onnx.load("int8.onnx")
    for proto, rounding in ((half, 0.01), (int8, 0.1)):
        Path("new.onnx").write_bytes(sealed(proto))
        network = ExportedNetwork(Path("new.onnx"))
        session = onnxruntime.InferenceSession(proto.SerializeToString())
        [logits] = session.run(None, {"images": images.numpy()})
        torch.testing.assert_close(network(images), torch.from_numpy(logits))
        assert 1e-6 < difference(model, network, images) < rounding
        assert network.about.classes[0] == "class 0"


@pytest.mark.slow
def test_a_signal_leaves_no_part_of_a_file(tmp_path):
    command = f"{sys.executable} -m ea_vision export {SHIPPED} -o {tmp_path}/net.onnx"
    process = subprocess.Popen(command.split())
    time.sleep(8)
    process.terminate()
    assert process.wait() in (-signal.SIGTERM, 0)
    for path in tmp_path.iterdir():  # a quick machine has written the whole file before
        assert path.name == "net.onnx"
        network = ExportedNetwork(path)
        assert network(torch.zeros(1, 3, 32, 32)).shape == (1, 10)


def test_a_full_folder_for_temporary_files_is_no_obstacle(tiny, tmp_path, monkeypatch):
    monkeypatch.setattr(tempfile, "tempdir", "/dev/full")
    model, _ = tiny
    program = export_program(model, (8, 8))
    for path in (tmp_path / "net.onnx", tmp_path / "net.pt2"):
        write(program, path, about(model, (8, 8)))
        assert difference(model, ExportedNetwork(path), torch.randn(3, 3, 8, 8)) < 1e-5


def test_errors_are_one_line_before_work_starts(tiny, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    proto = onnx.load(tiny[1] / "NET.ONNX")
    emptied(proto)
    onnx.save(proto, "other.onnx")
    Path("broken.onnx").write_bytes(b"no network")
    for source, output, message in (
        (SHIPPED, "net.txt", "the file must end in .onnx or .pt2, got net.txt"),
        (SHIPPED, ".", "must end in"),
        ("cnn_cifar", "a.onnx", "cnn_cifar has no weights: --random exports it"),
        ("broken.onnx", "a.onnx", "must be a network that ea-vision"),
        ("other.onnx", "a.onnx", "its metadata lack 'sha256'"),
    ):
        assert message in error_of(export.main, [source, "-o", output], capsys)
    assert not list(tmp_path.glob("a.*"))
