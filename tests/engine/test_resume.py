"""--resume PATH: into another folder, back to an earlier epoch, with other options, and interrupted."""

import os
import shutil

import pytest
import timm
import torch

from ea_vision.base.errors import RunError
from ea_vision.engine import checkpoint, run_folder, train_cifar
from ea_vision.engine.evaluate import Evaluation
from ea_vision.engine.pictures import confusion_png
from ea_vision.engine.train import Trainer
from experiments.learning_curves import read_metrics, write_learning_curves
from tests.engine.runner import assert_equal, make_trainer, saved, times_of, weights_of, words
from tests.refused import refused


@pytest.fixture(scope="module")
def begun(arguments, tmp_path_factory):
    """A run of two epochs of five updates."""
    folder = tmp_path_factory.mktemp("runs") / "begun"
    train_cifar.main(arguments(folder))
    return folder


@pytest.fixture
def run(begun, tmp_path):
    """A copy of it."""
    return shutil.copytree(begun, tmp_path / "run")


@pytest.fixture
def output(tmp_path):
    """The folder of another run."""
    return tmp_path / "more"


@pytest.mark.parametrize("epochs", [2, 3])
def test_a_run_that_goes_on_elsewhere_chooses_its_best_epoch_anew(
    run, arguments, output, capsys, epochs
):
    """Among the epoch from which it goes on and those that follow, if any; a warning says so."""
    path = run / checkpoint.LAST
    state = saved(run)
    state["progress"] |= {"best_epoch": 1, "best_top1": 101.0}  # which no later epoch reaches
    path.write_bytes(checkpoint.encode(state))
    train_cifar.main(arguments(output, f"--epochs {epochs} --resume {path}"))
    assert "the weights of the best epoch so far, 1, stay beside" in capsys.readouterr().out
    top1 = read_metrics(output)["top1"]
    best = 3 if epochs == 3 and top1[2] > top1[1] else 2
    assert run_folder.read_results(output)["test_best"]["epoch"] == best
    assert saved(output, checkpoint.BEST)["progress"]["epoch"] == best
    expected = saved(run if best == 2 else output)["model"]
    assert_equal(weights_of(output), expected)


@pytest.mark.parametrize("elsewhere", [True, False])
def test_the_same_command_continues_the_run_that_went_on(
    run, arguments, output, monkeypatch, capsys, elsewhere
):
    """The run is stopped after the first of two epochs; so is a run that went back to epoch 1 in its own folder. It
    does not need the first checkpoint any more."""
    output = output if elsewhere else run
    first = run / "first.ckpt"
    state = saved(run)
    state["progress"] |= {"epoch": 1, "updates": 5, "rows": state["progress"]["rows"][:1]}
    first.write_bytes(checkpoint.encode(state))
    argv = arguments(output, f"--epochs 3 --lr 0.02 --resume {first}")
    finish_epoch = Trainer.finish_epoch

    def stop_after_it(trainer):
        finish_epoch(trainer)
        raise RunError("stopped")

    monkeypatch.setattr(Trainer, "finish_epoch", stop_after_it)
    with refused("stopped", RunError):
        train_cifar.main(argv)
    monkeypatch.setattr(Trainer, "finish_epoch", finish_epoch)
    printed = capsys.readouterr().out
    for said in (f"resumed from {first}: epoch 1, update 5", "lr was 0.05, got 0.02", "now 3"):
        assert said in printed
    first.unlink()
    train_cifar.main(argv)
    last = output / checkpoint.LAST
    assert f"resumed from {last}: epoch 2, update 10" in capsys.readouterr().out
    assert saved(output)["config"]["lr"] == 0.02
    assert read_metrics(output)["epoch"] == [1, 2, 3]


def test_a_damaged_checkpoint_never_replaces_the_good_one_before_it(
    run, arguments, output, monkeypatch
):
    """A run that began from a named checkpoint is continued from last.prev.ckpt. A SIGKILL between the two renames of
    its next checkpoint must leave a good one."""
    argv = arguments(output, f"--epochs 3 --resume {run / checkpoint.LAST}")
    train_cifar.main(argv)
    (output / run_folder.RESULTS).unlink()
    (output / checkpoint.BEST).unlink()
    (output / checkpoint.LAST).write_bytes(b"half of a file")
    checkpoint.read_run_state(output / checkpoint.PREVIOUS)
    replace = os.replace

    def watched(source, target):
        replace(source, target)
        if str(target).startswith(str(output)):  # the process may be killed here
            assert checkpoint.newest_checkpoint(output) is not None

    monkeypatch.setattr(os, "replace", watched)
    train_cifar.main(argv)


def test_the_learning_rate_of_another_batch_size_is_that_of_the_epoch(
    run, arguments, output, tmp_path
):
    """Two epochs of five updates, then two of two: the rates of a run that made two in each."""
    more = "--epochs 4 --batch-size 16"
    train_cifar.main(arguments(tmp_path / "whole", more))
    train_cifar.main(arguments(output, more, f"--resume {run}"))
    expected = read_metrics(tmp_path / "whole")["lr"]
    assert read_metrics(output)["lr"][2:] == expected[2:]


def test_another_optimiser_is_refused_and_another_precision_is_not(run, arguments, output, refusal):
    path = run / checkpoint.LAST
    error = refusal(arguments(output, f"--epochs 3 --opt adamw --resume {path}"))
    assert error.startswith(f"optimiser state of {path} is of sgd and does not fit adamw: ")
    model = timm.create_model("test_resnet", num_classes=3)
    trainer = make_trainer(output, model, amp="float16", lr=0.05)
    trainer.load(saved(run), path)
    assert trainer.scaler.get_scale() == 2.0**16
    assert_equal(saved(run)["model"], model.state_dict())


def test_an_evaluated_file_has_the_classes_the_mean_and_the_size_of_its_run(
    arguments, data, folder, output, tmp_path, capsys, refusal
):
    statistics = "--mean 0.9 0.8 0.7 --std 0.5 0.6 0.7"
    train_cifar.main(arguments(folder, "--epochs 1", statistics))
    weights = shutil.copy(folder / run_folder.WEIGHTS, tmp_path)
    data_options = "--dataset folder --device cpu --img-size 16 --data-dir"
    capsys.readouterr()
    for target, options in (
        (folder, ""),
        (folder / run_folder.WEIGHTS, ""),
        (weights, f"{data_options} {data}"),
    ):
        train_cifar.main(words(f"--evaluate {target} --output {tmp_path / 'e'} {options}"))
    lines = capsys.readouterr().out.splitlines()
    results = {line for line in lines if line.startswith("top1 ")}
    assert len(results) == 1, "whatever names it"
    renamed = shutil.copytree(data, tmp_path / "renamed")
    for split in ("train", "test"):
        (renamed / split / "class_2").rename(renamed / split / "a")
    error = refusal(words(f"--evaluate {weights}", f"{data_options} {renamed}"))
    assert "was trained on other classes: 'class_0' where the data has 'a'" in error
    train_cifar.main(arguments(output, f"--epochs 1 --pretrained-path {weights}"))
    assert run_folder.read_config(output)[1]["mean"] == [0.9, 0.8, 0.7]


def test_a_file_without_a_note_takes_the_models_mean(folder, tmp_path, arguments):
    model = timm.create_model("test_resnet", num_classes=3)
    torch.save(model.state_dict(), tmp_path / "w.pth")
    train_cifar.main(arguments(folder, f"--epochs 1 --pretrained-path {tmp_path}/w.pth"))
    assert run_folder.read_config(folder)[1]["mean"] == list(model.pretrained_cfg["mean"])


@pytest.mark.parametrize("content", ["{}", "[]", "null", "{"])
def test_a_damaged_results_file_is_refused_in_one_line(run, arguments, refusal, content):
    path = run / run_folder.RESULTS
    path.write_text(content)
    error = refusal(arguments(run))
    assert error.startswith(f"cannot read {path}: ")


def test_a_refused_start_deletes_nothing(arguments, folder, tmp_path, refusal):
    """Neither files that look like temporary ones, nor empty folders that were there."""
    folder.mkdir()
    (folder / ".keep.tmp").touch()
    refusal(arguments(folder, f"--data-dir {tmp_path}/no-data"))
    assert os.listdir(folder) == [".keep.tmp"]
    refusal(arguments(tmp_path / "a" / "b", f"--data-dir {tmp_path}/no-data"))
    assert not (tmp_path / "a").exists()


@pytest.mark.parametrize("part", ["config.yaml", "checkpoints"])
def test_a_run_of_another_release_is_never_begun_anew(run, arguments, refusal, part):
    """The same command, after an update of the package in the middle of a run."""
    (run / run_folder.RESULTS).unlink()
    if part == "config.yaml":
        expected = "format 1, got 2"
        text = (run / part).read_text().replace("format: 1", "format: 2")
        (run / part).write_text(text)
    else:
        expected = "got ea_vision-checkpoint-4"
        for name in checkpoint.NAMES:
            state = torch.load(run / name, weights_only=True)
            torch.save({**state, "format": "ea_vision-checkpoint-4"}, run / name)
    written = times_of(run)
    assert expected in refusal(arguments(run))
    assert times_of(run) == written


def test_dollar_signs_in_names_are_no_formulas(begun, tmp_path):
    """The name of a class, and that of a run folder in a legend."""
    confusion = torch.eye(2, dtype=torch.float64)
    result = Evaluation(2, 100.0, 100.0, 0.1, confusion, torch.empty(0))
    assert confusion_png(result, ["$a_$ {b}", "c"], "net").startswith(b"\x89PNG")
    run = shutil.copytree(begun, tmp_path / "$a_$ {b}")
    write_learning_curves([run], tmp_path / "curves.svg")
    assert "$a_$ {b}" in (tmp_path / "curves.svg").read_text(encoding="utf-8")
