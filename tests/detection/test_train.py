"""The trainer of detectors is the other trainers' engine: killed runs go on bit for bit, on one and two processes.

Private names: what is compiled shows only there.
"""

import csv
import json
import signal
import sys
from functools import partial
from types import SimpleNamespace

import pytest
import timm
import torch

from ea_vision.detection import train
from ea_vision.detection.model import create_detector
from ea_vision.engine import run_folder
from ea_vision.engine.config import resolve
from ea_vision.zoo.source import source_of
from ea_vision.zoo.weights_file import encode_weights
from experiments.learning_curves import read_metrics, write_learning_curves
from tests.detection.boxes import make_boxes
from tests.engine import runner
from tests.engine.runner import nothing_truncated, same_result, saved, stopped, words
from tests.refused import refused


@pytest.fixture(scope="module")
def data(tmp_path_factory):
    """12 training and 6 validation images of 64 pixels."""
    root = tmp_path_factory.mktemp("data") / "boxes"
    make_boxes(root, train=12, val=6, empty=4)
    return root


def arguments(data, output, *more):
    """Two epochs of three updates of four images, a checkpoint after every second update."""
    return words(
        "--model test_resnet --model-kwargs fpn_channels=16 head_convs=1 drop_path_rate=0.1 score_thresh=0.001",
        f"--recipe none --head-norm batch --data-dir {data} --output {output} --img-size 64 --epochs 2",
        "--batch-size 4 --eval-batch-size 4 --opt adamw --lr 1e-3 --model-ema-decay 0.5 --workers 0",
        "--checkpoint-steps 2 --device cpu",
        *more,
    )


finish = partial(runner.train, main=train.main)


@pytest.fixture(scope="module")
def uninterrupted(data, tmp_path_factory):
    folder = tmp_path_factory.mktemp("runs") / "uninterrupted"
    finish(arguments(data, folder))
    return folder


def test_compile_is_of_backbone_and_heads(monkeypatch):
    """torch.compile is replaced here, without kernels; boxes and losses stay eager."""
    compile_ = torch.compile
    compiled = []

    def eager_compile(call, *, mode, dynamic):
        compiled.append((mode, dynamic))
        return compile_(call, backend="aot_eager", dynamic=dynamic)

    monkeypatch.setattr(torch, "compile", eager_compile)
    options = {"recipe": "none", "compile": True, "compile_mode": "reduce-overhead"}
    config = resolve(train.DetectionConfig, options)
    model = create_detector("test_resnet", 2, 64, fpn_channels=16, head_convs=1)
    images = torch.rand(2, 3, 64, 64)
    expected = train.DetectionTrainer.loss_on_noise(model, images)
    trainer = SimpleNamespace(config=config, _compile=train.DetectionTrainer._compile)
    net = train.DetectionTrainer._compiled(trainer, model)
    assert compiled == [("reduce-overhead", False)] * 2
    loss = train.DetectionTrainer.loss_on_noise(net, images)
    loss.backward()
    torch.testing.assert_close(loss, expected, rtol=1e-4, atol=1e-5)
    assert all(parameter.grad is not None for parameter in net.head.parameters())


# Updates 1 to 3 are the first epoch; checkpoints lie before 1 and after 2, 3, 5 and 6.
@pytest.mark.parametrize(
    "number, update", [(signal.SIGKILL, 3), (signal.SIGKILL, 6), (signal.SIGTERM, 4)]
)
def test_killed_and_resumed_is_undisturbed(data, uninterrupted, tmp_path, number, update):
    folder = tmp_path / "run"
    stopped(arguments(data, folder, "--workers 1"), update, number, main=train.main)
    nothing_truncated(folder)
    finish(arguments(data, folder))
    nothing_truncated(folder)
    same_result(folder, uninterrupted)


@pytest.mark.slow
def test_two_processes_killed_and_resumed_are_undisturbed(data, tmp_path):
    whole, broken = (
        arguments(data, tmp_path / name, "--batch-size 2 --checkpoint-steps 3") for name in "ab"
    )
    finish(whole, size=2)
    stopped(broken, 2, rank=1, size=2, main=train.main)
    assert saved(tmp_path / "b")["progress"]["updates"] == 2, "in the same update"
    finish(broken, size=2)
    same_result(tmp_path / "a", tmp_path / "b")


def test_the_run_folder_has_what_the_other_trainers_write(uninterrupted):
    about = run_folder.read_config(uninterrupted)[1]
    expected = {
        "task": "detection",
        "measures": ["AP", "AP50", "AP75", "APs", "APm", "APl"],
        "category_ids": [3, 7, 90],
        "classes": ["red", "green", "blue"],
    }
    assert expected.items() <= about.items()
    metrics = read_metrics(uninterrupted)
    assert metrics["epoch"] == [1, 2]
    assert metrics["train_loss"][1] < metrics["train_loss"][0]
    results = run_folder.read_results(uninterrupted)
    assert results["test_images"] == 6
    assert results["test_last"]["APl"] is None, "no object has 96 pixels"
    with refused("classification, got one of detection"):
        source_of(str(uninterrupted)).check_kind()


def test_the_best_weights_are_evaluated_and_gaps_in_category_ids_map_back(
    data, uninterrupted, tmp_path, capsys
):
    argv = words(
        f"--evaluate {uninterrupted} --data-dir {data} --output {tmp_path} --workers 0 --device cpu"
    )
    assert train.main(argv) == 0
    assert "AP50" in capsys.readouterr().out
    found, numbers, truth = (
        json.loads(path.read_text())
        for path in (tmp_path / "detections.json", tmp_path / "evaluation.json", data / "val.json")
    )
    assert found
    assert {row["category_id"] for row in found} <= {3, 7, 90}
    assert {row["image_id"] for row in found} <= {1, 2, 3, 4, 5, 6}
    assert numbers["images"] == 6
    best = run_folder.read_results(uninterrupted)["test_best"]
    assert numbers["AP"] == pytest.approx(best["AP"], abs=1e-3)
    rows = list(csv.DictReader((tmp_path / "per_class.csv").open()))
    assert [row["class"] for row in rows] == ["red", "green", "blue"]
    assert sum(int(row["objects"]) for row in rows) == len(truth["annotations"])


def test_bfloat16_trains_and_the_curves_are_drawn(data, tmp_path):
    folder = tmp_path / "run"
    picture = tmp_path / "curves.png"
    more = "--epochs 1 --amp bfloat16 --channels-last --model-ema-decay 0"
    assert train.main(arguments(data, folder, more)) == 0
    write_learning_curves([folder], picture)
    assert picture.stat().st_size


def made(data, **options):
    """Return the model of a run of these options, and its keywords."""
    config = resolve(train.DetectionConfig, {"data_dir": str(data), **options})
    # only loaders need the processes
    return train.CocoDetection(config, None, training=False).create_model()


def test_backbones_begin_with_weights_of_classification(data, tmp_path):
    """Attention's weights fit only at its minimum width."""
    layers = {"layers": [1, 1, 1, 1]}
    path = tmp_path / "weights.safetensors"
    begin = partial(made, data, recipe="none", img_size=64, pretrained_path=str(path))
    classifier = timm.create_model("test_resnet", num_classes=7)
    path.write_bytes(encode_weights(classifier.state_dict()))
    model, kwargs = begin(model="test_resnet")
    assert torch.equal(model.backbone.body.conv1[0].weight, classifier.conv1[0].weight)
    assert set(kwargs) == {"num_classes", "img_size", "anchors", "gamma", "box_loss", "head_norm"}
    classifier = timm.create_model("aa_resnet34", num_classes=7, min_head_qk=20, **layers)
    path.write_bytes(encode_weights(classifier.state_dict()))
    model, _ = begin(model="aa_resnet34", model_kwargs={**layers, "min_head_qk": 20})
    backbone_conv = model.backbone.body.model.layer4[0].conv1
    assert torch.equal(backbone_conv.conv.weight, classifier.layer4[0].conv1.conv.weight)
    with refused("do not fit aa_resnet34: .* min_head_qk=20 gives a detector the same$"):
        begin(model="aa_resnet34", model_kwargs=layers)
    path.write_bytes(b"nothing of the kind")
    with refused("weights.safetensors cannot be read"):
        begin(model="test_resnet")


@pytest.mark.parametrize(
    "more, message",
    [
        ("--mixup 0.2", "unknown argument '--mixup'"),
        ("--anchors 7", "anchors must be 6 or 9, got 7"),
        ("--mean 0.5 --std 0.5", "mean and std must be empty: a detector takes its backbone's"),
        ("--scale-min 2", "scale_min must be at most scale_max .1.2., got 2"),
        ("--model-kwargs anchors=9", "model keyword anchors must be 6"),
        ("--model-kwargs nonsense=9", "no keyword 'nonsense'"),
        ("--pretrained-path {data}", "must be a weights file or a run folder"),
        ("--evaluate resnet18", "resnet18 must be a model of detection, got one of classification"),
    ],
)
def test_errors_are_one_line(data, tmp_path, more, message):
    options = arguments(data, tmp_path / "run", more.replace("{data}", str(data)))
    with refused(message):
        train.main(options[options.index("--recipe") :] if "--evaluate" in more else options)
    assert not (tmp_path / "run").exists()


def test_without_pycocotools_one_line_says_what_to_install(data, tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "pycocotools.coco", None)
    with refused(
        r"needs pycocotools, not installed .*pip install pycocotools.*the extra detection"
    ):
        train.main(arguments(data, tmp_path / "run"))


@pytest.mark.parametrize(
    "recipe, weights", [("coco_aa_retinanet", 32_217_194), ("coco_26_epochs", 32_189_439)]
)
def test_recipes_make_their_detectors(data, recipe, weights):
    with torch.device("meta"):
        model, kwargs = made(data, recipe=recipe, model="resnet50")
    assert sum(p.numel() for p in model.parameters()) == weights
    assert model.anchor_generator.num_anchors_per_location()[0] == kwargs["anchors"]
