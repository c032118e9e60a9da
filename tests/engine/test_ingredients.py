"""What the recipes are made of, in real runs: killed and continued, exported, tested with views, not tested at all."""
import shutil
import signal

import pytest
import timm

from ea_vision.engine import checkpoint, run_folder, train_cifar
from tests.engine.runner import arguments, assert_equal, make_folder, same_result, saved, stopped, train

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


def test_exported_weights_are_those_that_were_evaluated(whole):
    """The averaged ones, bit for bit, as timm loads them by the run's keywords."""
    folder = whole["all"]
    model = timm.create_model("test_resnet", **run_folder.read_config(folder)[1]["model_kwargs"],
                              checkpoint_path=str(folder / run_folder.WEIGHTS))
    assert_equal(saved(folder, checkpoint.BEST)["ema"], dict(model.state_dict()), "weights")


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
