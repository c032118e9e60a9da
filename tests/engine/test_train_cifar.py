"""The command as users see it: a run folder that other tools can read, its modes, and one clear line for bad input."""

import json
import math
import re
import shutil

import pytest
import safetensors.torch
import timm
import torch
from huggingface_hub import ModelCard
from PIL import Image

from ea_vision.detection import train as detection
from ea_vision.engine import run_folder, train_cifar, train_imagenet
from experiments.learning_curves import read_metrics, write_learning_curves
from tests.data.photos import make_folder
from tests.engine.runner import assert_equal, rows_of, saved, stopped, train, words
from tests.refused import refused


@pytest.fixture(scope="module")
def data(tmp_path_factory):
    return make_folder(tmp_path_factory.mktemp("data"), train=64, test=30)


THREE = "--epochs 3 --lr 0.001"
SWITCHES = "--img-size 32 --holdout 16 --model-ema-decay 0.5 --amp bfloat16 --channels-last --cutmix 1 --opt adamw"


@pytest.fixture(scope="module")
def finished(arguments, tmp_path_factory):
    """A run with held-out images, averaged weights and every switch that this machine has."""
    folder = tmp_path_factory.mktemp("runs") / "finished"
    train(arguments(folder, SWITCHES, THREE))
    return folder


def test_run_folder(finished):
    rows = rows_of(finished / "metrics.csv")
    assert ",".join(rows[0]) == "epoch,step,lr,train_loss,eval_loss,top1,top5,images_per_s,seconds"
    assert [row["epoch"] for row in rows] == ["1", "2", "3"]
    assert [row["step"] for row in rows] == ["6", "12", "18"]
    config, about = run_folder.read_config(finished)
    # resolved: given options and defaults
    assert config["lr"] == 0.001
    assert config["momentum"] == 0.9
    assert about["versions"].keys() >= {"ea_vision", "torch", "timm"}
    assert len(about["data_fingerprint"]) == 64
    assert about["train_images"] == 48
    assert about["eval_images"] == 16
    assert about["eval_split"] == "held_out"


def test_epochs_may_end_inside_one(arguments, folder, capsys, refusal):
    """2.6 epochs of 8 updates are 21 updates; the learning rate reaches its end with the last of them."""
    options = "--epochs 2.6 --opt sgd --lr 0.4 --recipe fast_sgd --cutout 0"
    argv = arguments(folder, options)
    train(argv)
    rows = read_metrics(folder)
    assert rows["step"] == [8, 16, 21]
    # after 4 of warm-up, one update before the end
    assert rows["lr"][-1] == pytest.approx(0.4 / (21 - 4), rel=1e-5)
    config, _ = run_folder.read_config(folder)
    assert run_folder.read_results(folder)["epochs"] == config["epochs"] == 2.6
    train_cifar.main(argv)
    assert "is complete" in capsys.readouterr().out
    assert "more cannot be added: epochs must be 2.6" in refusal([*argv, "--epochs", "4"])


def test_evaluate_a_run(finished, capsys):
    written = finished / "evaluation"
    results = run_folder.read_results(finished)
    best = results["test_best"]
    assert results["test_images"] == 30
    assert best.keys() == {"epoch", "top1", "top5", "held_out_top1"}
    assert best["top5"] is None, "the likeliest five of three classes are all of them"
    assert results["tta"] == "none"
    losses = set()
    for tta in ("six", "none"):
        argv = f"--evaluate {finished} --channels-last --tta {tta}".split()
        assert train_cifar.main(argv) == 0
        numbers = json.loads((written / "evaluation.json").read_text())
        assert numbers["images"] == 30
        assert numbers["tta"] == tta
        losses.add(numbers["loss"])
    assert len(losses) == 2
    assert numbers["top1"] == pytest.approx(best["top1"], abs=1e-3)
    rows = rows_of(written / "per_class.csv")
    assert [row["class"] for row in rows] == ["class_0", "class_1", "class_2"]
    assert {row["tta"] for row in rows} == {"none"}
    mean = sum(float(row["top1"]) * int(row["images"]) for row in rows) / 30
    assert mean == pytest.approx(numbers["top1"], abs=0.01)
    assert Image.open(written / "confusion.png").size[0] > 300
    said = capsys.readouterr().out
    assert f"top1 {numbers['top1']:.2f}%" in said
    assert "views: six" in said
    assert "top5" not in said


def test_a_complete_run_has_a_card_of_its_weights(finished):
    """As the hub reads it: the figures of results.json, the options that differ from the defaults."""
    text = (finished / run_folder.CARD).read_text(encoding="utf-8")
    data = ModelCard(text).data
    [result] = data.eval_results
    best = run_folder.read_results(finished)["test_best"]
    assert data.pipeline_tag == "image-classification"
    assert result.metric_type == "accuracy"
    assert result.metric_value == round(best["top1"], 2)
    config, about = run_folder.read_config(finished)
    assert f"{best['top1']:.2f}% on 30 test images" in text, text
    assert f"model_ema_decay {config['model_ema_decay']}" in text
    assert about["data_fingerprint"] in text
    assert str(finished.parent) not in text, "paths of a machine are private"
    assert len(re.findall(r"^\| \d+ \|", text, re.MULTILINE)) == config["epochs"]


def test_a_runs_rows_say_that_they_are_of_one_view(arguments, folder):
    """--tta of a run is for its later evaluation; its epochs are evaluated by one view of each image."""
    said = train(arguments(folder, "--epochs 1 --tta six"))
    assert read_metrics(folder)["views"] == [1.0]
    assert run_folder.read_results(folder)["tta"] == "none"
    assert "by one view" in said
    assert "top5" not in said


def test_a_run_is_evaluated_by_its_own_trainer(finished, data, tmp_path, refusal):
    for target in (finished, finished / "model.safetensors"):
        for other in (train_imagenet, detection):
            error = refusal(["--evaluate", str(target)], other.main)
            command = f"ea-vision train-cifar --evaluate {target}"
            assert error == f"--evaluate {target} needs the trainer of this run: {command}"
    moved = shutil.copy(finished / "model.safetensors", tmp_path)
    error = refusal(["--evaluate", moved, "--data-dir", str(data)], train_imagenet.main)
    assert error.endswith(
        f"needs the trainer of these weights: ea-vision train-cifar --evaluate {moved}"
    )
    as_recipe = f"--check-options --recipe {finished}/config.yaml --data-dir {data}"
    train_imagenet.main(as_recipe.split())


def test_a_file_named_after_its_network_is_what_is_evaluated(tmp_path):
    """A file without a note; its network answers 3 to every image."""
    model = timm.create_model("stn_digits")
    classifier = model.get_classifier()
    torch.nn.init.zeros_(classifier.weight)
    classifier.bias.data = torch.eye(10)[3]
    file = tmp_path / "stn_digits.safetensors"
    safetensors.torch.save_file(model.state_dict(), file)
    argv = words(f"--evaluate {file} --dataset digits --device cpu --output {tmp_path}/e")
    train_cifar.main(argv)
    tops = [float(row["top1"]) for row in rows_of(tmp_path / "e" / "per_class.csv")]
    assert tops == [0, 0, 0, 100, 0, 0, 0, 0, 0, 0]


def test_a_run_is_evaluated_without_the_weights_that_it_began_with(
    arguments, folder, tmp_path, refusal
):
    first = tmp_path / "first"
    train(arguments(first, "--epochs 1"))
    train(arguments(folder, f"--epochs 1 --pretrained-path {first}"))
    shutil.rmtree(first)
    train_cifar.main(["--evaluate", str(folder)])
    argv = words(f"--evaluate {folder}/model.safetensors --pretrained-path other.safetensors")
    assert refusal(argv).endswith("and --pretrained-path other.safetensors")


@pytest.mark.parametrize("text", ["", "epoch,top1\n1,", "epoch,top1\n1", "epoch;top1\n1;2\n"])
def test_damaged_metrics_are_named(tmp_path, text):
    (tmp_path / "metrics.csv").write_text(text)
    with refused("it has no readable metrics.csv"):
        read_metrics(tmp_path)


def test_curves_of_no_run_and_in_another_format_are_refused(finished, tmp_path):
    with refused("is not a run folder"):
        write_learning_curves([tmp_path], tmp_path / "curves.png")
    with refused("must end in .png"):
        write_learning_curves([finished], tmp_path / "curves.gif")


def test_a_run_folder_is_not_overwritten_nor_continued_with_other_options(
    finished, arguments, refusal
):
    for more, message in (
        ("--resume none", "holds a run"),
        ("--weight-decay 0.3", "weight_decay was 0.1, got 0.3"),
    ):
        assert message in refusal(arguments(finished, SWITCHES, THREE, more))


def test_epochs_left_out_of_evaluation_train_the_same(arguments, tmp_path, refusal):
    """With --eval-epochs 2 of 3, epoch 1 is not evaluated and the last one is. A run that was killed and continued ends
    like one that evaluated every epoch. If only one epoch is evaluated, no weights are chosen by it.
    """
    every = tmp_path / "every"
    second = tmp_path / "second"
    printed = train(arguments(every, "--epochs 3"))
    warning = "by the images that it is evaluated on: quote the last weights, or hold images out"
    assert f"chosen {warning}" in printed
    printed = train(arguments(tmp_path / "once", "--epochs 2 --eval-epochs 2"))
    assert "chosen by" not in printed
    argv = arguments(second, "--epochs 3 --eval-epochs 2")
    assert "not evaluated" in stopped(argv, 9)
    assert not (second / "best.ckpt").exists()
    assert "--epochs must be more than 1, got 1" in refusal([*argv, "--epochs", "1"])
    train(argv)
    expected = read_metrics(every)
    metrics = read_metrics(second)
    for column in ("top1", "eval_loss"):
        assert math.isnan(metrics[column][0])
        assert metrics[column][1:] == expected[column][1:]
    assert metrics["train_loss"] == expected["train_loss"]
    assert_equal(saved(every)["model"], saved(second)["model"])
    results = run_folder.read_results(second)
    assert results["test_last"] == run_folder.read_results(every)["test_last"]
    assert results["test_best"]["top1"] == max(metrics["top1"][1:])
    picture = tmp_path / "curves.png"
    write_learning_curves([every, second], picture)
    assert Image.open(picture).size[0] > 1000


def test_recipe_keywords_a_model_lacks_are_left_out_with_a_notice(data, folder, recipe):
    path = recipe("model_kwargs: {attn_drop_rate: 0.3, drop_rate: 0.1}\n")
    argv = words(
        f"--model test_resnet --recipe {path} --dataset folder --data-dir {data} --epochs 1",
        f"--batch-size 16 --output {folder}",
    )
    assert "test_resnet has no attn_drop_rate" in train(argv)
    about = run_folder.read_config(folder)[1]
    assert about["model_kwargs"] == {"num_classes": 3, "in_chans": 3, "drop_rate": 0.1}
    assert "is complete" in train(argv), "the same command continues, or finds it done"


def test_without_a_test_the_test_images_change_nothing(arguments, data, tmp_path, capsys):
    """With --no-test, other test images give the same results, and no test figure is written; a later call can test."""
    other = tmp_path / "data"
    shutil.copytree(data, other)
    for path in (other / "test" / "class_0").iterdir():  # where a test would show it
        shutil.copy(other / "train" / "class_1" / "001.png", path)
    folder = tmp_path / "a"
    printed = train(arguments(folder, "--holdout 16 --no-test"))
    assert "on the test images" not in printed
    assert "accuracy on images held out" in printed
    train(arguments(tmp_path / "b", f"--holdout 16 --no-test --data-dir {other}"))
    results = run_folder.read_results(folder)
    assert results == run_folder.read_results(tmp_path / "b")
    assert "test" not in " ".join(results)
    assert results["held_out_last"].keys() == {"epoch", "top1", "top5"}
    tested = arguments(folder, "--holdout 16")
    train(tested)
    results = run_folder.read_results(folder)
    assert results["test_images"] == 30
    assert "held_out_top1" in results["test_last"]
    train_cifar.main(tested)
    assert "is complete" in capsys.readouterr().out
