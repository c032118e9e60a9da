"""The command, as users meet it: a run folder that others can read, modes, and bad input in one clear line."""

import csv
import json
import math
import shutil
from functools import partial

import pytest
import safetensors.torch
import timm
from PIL import Image

from ea_vision.engine import run_folder, train_cifar
from tests.engine.runner import (
    arguments,
    assert_equal,
    error_of,
    make_folder,
    saved,
    stopped,
    train,
    words,
)


@pytest.fixture(scope="module")
def data(tmp_path_factory):
    return make_folder(tmp_path_factory.mktemp("data"), train=64, test=30)


fails = partial(error_of, train_cifar.main)
SWITCHES = "--img-size 32 --holdout 16 --model-ema-decay 0.5 --amp bfloat16 --channels-last --cutmix 1 --opt adamw"


@pytest.fixture(scope="module")
def finished(data, tmp_path_factory):
    """A run with held-out images, averaged weights and every switch that this machine has."""
    folder = tmp_path_factory.mktemp("runs") / "finished"
    train(arguments(data, folder, SWITCHES, "--epochs 3 --lr 0.001"))
    return folder


def test_run_folder(finished):
    rows = list(csv.DictReader((finished / "metrics.csv").open()))
    assert ",".join(rows[0]) == "epoch,step,lr,train_loss,eval_loss,top1,top5,images_per_s,seconds"
    assert [(r["epoch"], r["step"]) for r in rows] == [("1", "6"), ("2", "12"), ("3", "18")]
    config, about = run_folder.read_config(finished)
    assert config["lr"] == 0.001 and config["momentum"] == 0.9, (
        "resolved: given options and defaults"
    )
    assert (
        about["versions"].keys() >= {"ea_vision", "torch", "timm"}
        and len(about["data_fingerprint"]) == 64
    )
    assert (about["train_images"], about["eval_images"], about["eval_split"]) == (
        48,
        16,
        "held_out",
    )


def test_epochs_may_end_inside_one(data, tmp_path, capsys):
    """2.6 epochs of 8 updates are 21 updates; the rate falls to the end of these."""
    whole = arguments(
        data, tmp_path / "whole", "--epochs 2.6 --opt sgd --lr 0.4 --recipe fast_sgd --cutout 0"
    )
    train(whole)
    rows = run_folder.read_metrics(tmp_path / "whole")
    assert rows["step"] == [8, 16, 21]
    assert rows["lr"][-1] == pytest.approx(0.4 / (21 - 4), rel=1e-5), (
        "after 4 of warm-up, one update before the end"
    )
    epochs = run_folder.read_results(tmp_path / "whole")["epochs"]
    assert epochs == run_folder.read_config(tmp_path / "whole")[0]["epochs"] == 2.6
    assert train_cifar.main(whole) == 0 and "is complete" in capsys.readouterr().out
    assert "more cannot be added: epochs must be 2.6" in fails([*whole, "--epochs", "4"], capsys)


def test_evaluate_a_run(finished, capsys):
    written, results = finished / "evaluation", run_folder.read_results(finished)
    assert results["test_images"] == 30
    assert results["test_best"].keys() == {"epoch", "top1", "top5", "held_out_top1"}
    losses = []
    for tta in ("six", "none"):
        assert train_cifar.main(["--evaluate", str(finished), "--channels-last", "--tta", tta]) == 0
        numbers = json.loads((written / "evaluation.json").read_text())
        assert numbers["images"] == 30 and numbers["tta"] == tta
        losses.append(numbers["loss"])
    assert losses[0] != losses[1] and numbers["top1"] == pytest.approx(
        results["test_best"]["top1"], abs=1e-3
    )
    rows = list(csv.DictReader((written / "per_class.csv").open()))
    assert [row["class"] for row in rows] == ["class_0", "class_1", "class_2"]
    mean = sum(float(row["top1"]) * int(row["images"]) for row in rows) / 30
    assert mean == pytest.approx(numbers["top1"], abs=0.01)
    assert Image.open(written / "confusion.png").size[0] > 300
    assert f"top1 {numbers['top1']:.2f}%" in capsys.readouterr().out


def test_evaluate_a_model_with_weights(finished, data, tmp_path, capsys):
    common = ["--dataset", "folder", "--data-dir", str(data), "--output", str(tmp_path / "e")]
    weights = finished / "model.safetensors"
    assert (
        train_cifar.main(["--evaluate", "test_resnet", "--pretrained-path", str(weights), *common])
        == 0
    )
    capsys.readouterr()
    error = fails(["--evaluate", "test_resnet", *common, "--pretrained-path", str(data)], capsys)
    assert "cannot be read" in error
    other = timm.create_model("test_resnet", num_classes=7)
    safetensors.torch.save_file(other.state_dict(), tmp_path / "seven.safetensors")
    error = fails(
        [
            "--evaluate",
            "test_resnet",
            *common,
            "--pretrained-path",
            f"{tmp_path}/seven.safetensors",
        ],
        capsys,
    )
    assert (
        "do not fit the model: " in error
        and "size mismatch for fc.weight" in error
        and "[7, " in error
    )


def test_evaluating_on_other_classes_is_an_error(finished, capsys):
    error = fails(["--evaluate", str(finished), "--dataset", "digits", "--data-dir", ""], capsys)
    assert "has 3 classes, the data 10" in error


def test_learning_curves_that_cannot_be_drawn(finished, tmp_path, capsys):
    assert "not a run folder" in fails(["--learning-curves", str(tmp_path)], capsys)
    assert "must end in .png" in fails(
        ["--learning-curves", str(finished), "--output", "a.gif"], capsys
    )


def test_a_run_folder_is_not_overwritten_nor_continued_with_other_options(finished, data, capsys):
    given = arguments(data, finished, SWITCHES, "--epochs 3 --lr 0.001")
    assert "holds a run" in fails([*given, "--resume", "none"], capsys)
    assert "weight_decay was 0.1, got 0.3" in fails([*given, "--weight-decay", "0.3"], capsys)


def test_epochs_left_out_of_evaluation_train_the_same(data, tmp_path, capsys):
    """--eval-epochs 2 of 3: epoch 1 is not evaluated, the last is; killed and continued, it ends like one that was.

    Where one epoch alone is evaluated nothing is chosen by it.
    """
    every, second = tmp_path / "every", tmp_path / "second"
    assert (
        "chosen by the images that it is evaluated on: quote the last weights, or hold images out"
        in train(arguments(data, every, "--epochs 3"))
    )
    assert "chosen by" not in train(
        arguments(data, tmp_path / "once", "--epochs 2 --eval-epochs 2")
    )
    argv = arguments(data, second, "--epochs 3 --eval-epochs 2")
    assert "not evaluated" in stopped(argv, 9)
    assert not (second / "best.ckpt").exists()
    assert "--epochs must be more than 1, got 1" in fails([*argv, "--epochs", "1"], capsys)
    train(argv)
    expected, metrics = run_folder.read_metrics(every), run_folder.read_metrics(second)
    for column in ("top1", "top5"):
        assert math.isnan(metrics[column][0]) and metrics[column][1:] == expected[column][1:]
    assert metrics["train_loss"] == expected["train_loss"]
    assert_equal(*(saved(folder)["model"] for folder in (every, second)), "model")
    results = run_folder.read_results(second)
    assert results["test_last"] == run_folder.read_results(every)["test_last"]
    assert results["test_best"]["top1"] == max(metrics["top1"][1:])
    picture = tmp_path / "curves.png"
    assert (
        train_cifar.main(["--learning-curves", str(every), str(second), "--output", str(picture)])
        == 0
    )
    assert Image.open(picture).size[0] > 1000


def test_resume_from_a_named_run(finished, data, tmp_path):
    """Another folder continues from a run's checkpoint, here for one more epoch, with a changed option named."""
    output = tmp_path / "more"
    argv = arguments(data, output, SWITCHES, "--lr 0.0005 --epochs 4 --resume", str(finished))
    said = train(argv)
    assert "lr was 0.001, got 0.0005" in said and "epochs were 3, now 4" in said
    assert run_folder.read_metrics(output)["epoch"] == [1, 2, 3, 4]


def test_recipe_keywords_a_model_lacks_are_left_out_with_a_notice(data, tmp_path):
    recipe, folder = tmp_path / "r.yaml", tmp_path / "run"
    recipe.write_text("model_kwargs: {attn_drop_rate: 0.3, drop_rate: 0.1}\n")
    argv = words(
        f"--model test_resnet --recipe {recipe} --dataset folder --data-dir {data} --epochs 1 --batch-size 16",
        f"--output {folder}",
    )
    assert "test_resnet has no attn_drop_rate" in train(argv)
    about = run_folder.read_config(folder)[1]
    assert about["model_kwargs"] == {"num_classes": 3, "in_chans": 3, "drop_rate": 0.1}
    assert "is complete" in train(argv), "the same command continues, or finds it done"


def test_without_a_test_the_test_images_change_nothing(data, tmp_path, capsys):
    """--no-test: other test images, the same results, and no figure of theirs anywhere; the test can be made up for."""
    other = tmp_path / "data"
    shutil.copytree(data, other)
    for path in (other / "test" / "class_0").iterdir():  # where a test would show it
        shutil.copy(other / "train" / "class_1" / "001.png", path)
    folders = [tmp_path / "a", tmp_path / "b"]
    said = [
        train(arguments(source, folder, "--holdout 16 --no-test"))
        for folder, source in zip(folders, (data, other), strict=True)
    ]
    results = [run_folder.read_results(folder) for folder in folders]
    assert results[0] == results[1] and not [key for key in results[0] if "test" in key]
    assert results[0]["held_out_last"].keys() == {"epoch", "top1", "top5"}
    assert "test accuracy" not in said[0] and "accuracy on images held out" in said[0]
    tested = arguments(data, folders[0], "--holdout 16")
    train(tested)
    results = run_folder.read_results(folders[0])
    assert results["test_images"] == 30 and "held_out_top1" in results["test_last"]
    assert train_cifar.main(tested) == 0 and "is complete" in capsys.readouterr().out
