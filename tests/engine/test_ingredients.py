"""What the recipes are made of, in real runs: killed and continued, exported, tested with views, not tested at all."""
import json
import shutil
import signal

import pytest
import timm
import torch

from ea_vision.engine import run_folder, train_cifar
from ea_vision.engine.train import Trainer
from tests.engine.runner import arguments, assert_equal, make_folder, same_result, saved, stopped, train, weights_of

ALL = ["--opt muon --lr 0.02 --opt-kwargs ns_steps=4 --flip alternate --crop-padding-mode reflect",
       "--model-ema-decay 0.9 --tta six --holdout 8"]
OPTIONS = {"lookahead": ["--opt lookahead_sgd --clip-grad 4 --holdout 8"], "all": ALL}


@pytest.fixture(scope="module")
def data(tmp_path_factory):
    return make_folder(tmp_path_factory.mktemp("data"), train=48, side=16)


@pytest.fixture(scope="module")
def whole(data, tmp_path_factory):
    """Runs that nothing interrupted."""
    folders = {name: tmp_path_factory.mktemp("runs") / name for name in OPTIONS}
    for name, folder in folders.items():
        train(arguments(data, folder, *OPTIONS[name]))
    return folders


# Lookahead's two weights meet after update 6, and at the ends of the epochs, updates 5 and 10.
@pytest.mark.parametrize("name, updates", [("lookahead", (4, 3)), ("all", (4, 4))])
def test_a_run_that_was_killed_ends_as_one_that_was_not(data, whole, tmp_path, name, updates):
    argv = arguments(data, tmp_path / "run", *OPTIONS[name])
    for number, update in zip((signal.SIGKILL, signal.SIGTERM), updates, strict=True):
        stopped(argv, update, number)
    train(argv)
    same_result(tmp_path / "run", whole[name])


def test_exported_weights_give_the_outputs_of_training_bit_for_bit(data, tmp_path, monkeypatch):
    seen = {}
    fit = Trainer.fit

    def spy(trainer):
        fit(trainer)
        trainer.best_model.eval()
        images = next(trainer.eval_loader.batches()).images
        with torch.no_grad():
            seen.update(images=images, logits=trainer.best_model(images))

    monkeypatch.setattr(Trainer, "fit", spy)
    folder = tmp_path / "run"
    assert train_cifar.main(arguments(data, folder, *ALL, "--epochs 1 --resume none")) == 0
    about = run_folder.read_config(folder)[1]
    model = timm.create_model("test_resnet", **about["model_kwargs"],
                              checkpoint_path=str(folder / run_folder.WEIGHTS)).eval()
    with torch.no_grad():
        assert torch.equal(model(seen["images"]), seen["logits"])
    assert_equal(saved(folder)["ema"], weights_of(folder), "weights")


def test_an_evaluation_by_views(whole):
    folder = whole["all"]
    results = run_folder.read_results(folder)
    assert results["test_best"].keys() == {"epoch", "top1", "top5", "held_out_top1"}
    losses = []
    for tta in ("six", "none"):
        assert train_cifar.main(["--evaluate", str(folder), "--tta", tta]) == 0
        numbers = json.loads((folder / "evaluation" / "evaluation.json").read_text())
        assert numbers["tta"] == tta and numbers["images"] == 13
        losses.append(numbers["loss"])
    assert losses[0] != losses[1] and numbers["top1"] == pytest.approx(results["test_best"]["top1"], abs=1e-3)


def test_without_a_test_the_test_images_change_nothing(data, tmp_path, capsys):
    """--no-test: other test images, the same results, and no figure of theirs anywhere; the test can be made up for."""
    other = tmp_path / "data"
    shutil.copytree(data, other)
    for path in (other / "test" / "class_0").iterdir():  # where a test would show it
        shutil.copy(other / "train" / "class_1" / "001.png", path)
    folders = [tmp_path / "a", tmp_path / "b"]
    said = [train(arguments(source, folder, "--holdout 8 --no-test"))
            for folder, source in zip(folders, (data, other), strict=True)]
    results = [run_folder.read_results(folder) for folder in folders]
    assert results[0] == results[1] and not [key for key in results[0] if "test" in key]
    assert results[0]["held_out_last"].keys() == {"epoch", "top1", "top5"}
    assert "test accuracy" not in said[0] and "accuracy on images held out" in said[0]
    tested = arguments(data, folders[0], "--holdout 8")
    train(tested)
    results = run_folder.read_results(folders[0])
    assert results["test_images"] == 13 and "held_out_top1" in results["test_last"]
    assert train_cifar.main(tested) == 0 and "is complete" in capsys.readouterr().out
