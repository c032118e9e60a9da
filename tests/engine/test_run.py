"""How a run is put together: one place, few files to read, and run folders from before it was that place."""
from __future__ import annotations

import json
import shutil
import sys
from pathlib import Path

import pytest

from ea_vision.engine import run_folder, train_cifar, train_imagenet
from ea_vision.engine.config import TrainConfig, resolve
from ea_vision.engine.train import Trainer
from tests.data.photos import make_photos
from tests.engine.runner import run

OLD_RUNS = Path(__file__).parent / "old_runs"  # written by commit 7de86d8, stopped in the second of two epochs
# What that commit said of them, and what its metrics.csv had after it had continued them: loss, top-1.
OLD_EVALUATION = {"cifar": (25.865091, 9.8592), "imagenet": (1.08112, 38.4615)}
OLD_METRICS = {"cifar": ([2.19234, 1.8577], [9.85915, 49.0141]), "imagenet": ([1.12006, 1.05547], [38.4615, 53.8462])}


@pytest.fixture
def old_run(request, tmp_path, monkeypatch):
    """A copy of an old run folder, at the relative path and beside the images of its command."""
    monkeypatch.chdir(tmp_path)
    shutil.copytree(OLD_RUNS / request.param, request.param)
    make_photos(Path("photos"))
    return request.param


@pytest.mark.parametrize("old_run", ["cifar", "imagenet"], indirect=True)
def test_an_old_run_folder_evaluates_to_the_same_figure(old_run, tmp_path):
    main = {"cifar": train_cifar.main, "imagenet": train_imagenet.main}[old_run]
    assert run(["--evaluate", old_run], tmp_path / "log", main=main) == 0, (tmp_path / "log").read_text()
    numbers = json.loads(Path(old_run, "evaluation", "evaluation.json").read_text())
    assert numbers["loss"] == pytest.approx(OLD_EVALUATION[old_run][0], rel=1e-4)
    assert numbers["top1"] == pytest.approx(OLD_EVALUATION[old_run][1], abs=1e-3)


@pytest.mark.parametrize("old_run", ["cifar", "imagenet"], indirect=True)
def test_an_old_run_folder_is_continued_by_its_own_command(old_run, tmp_path):
    main = {"cifar": train_cifar.main, "imagenet": train_imagenet.main}[old_run]
    config, about = run_folder.read_config(Path(old_run))
    assert config["epochs"] == 2 and run_folder.read_metrics(Path(old_run))["epoch"] == [1]
    argv = about["command"].split()[1:]
    if old_run == "cifar":
        argv += ["--recipe", "fast_sgd"]  # the default then, by another name
    assert run(argv, tmp_path / "log", main=main) == 0, (tmp_path / "log").read_text()
    assert f"resumed from {old_run}/last.ckpt: epoch 1" in (tmp_path / "log").read_text()
    metrics = run_folder.read_metrics(Path(old_run))
    assert metrics["train_loss"] == pytest.approx(OLD_METRICS[old_run][0], rel=0.01)
    assert metrics["top1"] == pytest.approx(OLD_METRICS[old_run][1], abs=8)  # another processor rounds otherwise
    assert run_folder.read_results(Path(old_run))["epochs"] == 2


def test_options_that_may_change_on_resume_are_those_that_might_before():
    free = {"recipe", "output", "resume", "device", "workers", "data_dir", "cache_dir", "download", "compile",
            "channels_last", "checkpoint_steps", "on_nan", "epochs", "train_beton", "val_beton", "max_bad_images",
            "log_steps", "tensorboard", "wandb", "snapshot_epochs", "eval_epochs", "loader"}
    for old_run, schema in (("cifar", train_cifar.CifarConfig), ("imagenet", train_imagenet.ImageNetConfig)):
        for name in run_folder.read_config(OLD_RUNS / old_run)[0]:
            if (old_run, name) != ("imagenet", "cache_dir"):  # had no effect there
                field = schema.__dataclass_fields__[name]
                assert field.metadata["may_change_on_resume"] == (name in free), f"{old_run}: {name}"


def test_an_option_younger_than_a_checkpoint_had_its_default():
    config, _ = resolve(train_cifar.CifarConfig, {"momentum": 0.8})
    saved = {key: value for key, value in config.as_dict().items() if key not in ("momentum", "clip_grad")}
    assert config.differences(saved) == ["momentum was 0.9, got 0.8"]


class FirstUpdate(Exception):
    pass


def test_following_the_options_to_the_first_update_visits_few_files(tmp_path, monkeypatch):
    """Modules whose functions hold the options, as themselves or in an attribute, until the first update is made."""
    visited, update = set(), Trainer._update

    def watch(frame, event, _):
        if event == "return" and "/ea_vision/" in (path := frame.f_code.co_filename):
            values = list(frame.f_locals.values())
            values.append(getattr(frame.f_locals.get("self"), "config", None))
            if any(isinstance(value, TrainConfig) for value in values):
                visited.add(path.rpartition("/ea_vision/")[2])

    def stop(trainer, batches):
        update(trainer, batches)
        raise FirstUpdate

    monkeypatch.setattr(Trainer, "_update", stop)
    argv = ["--data-dir", str(make_photos(tmp_path / "photos")), "--output", str(tmp_path / "run"), "--device", "cpu",
            "--model", "test_resnet", "--img-size", "16", "--eval-resize", "20", "--batch-size", "8", "--workers", "1"]
    sys.setprofile(watch)
    try:
        with pytest.raises(FirstUpdate):
            train_imagenet.main(argv)
    finally:
        sys.setprofile(None)
    assert visited == {"engine/train_imagenet.py", "engine/run.py", "engine/config.py", "engine/train.py",
                       "engine/classification.py", "engine/preflight.py", "engine/optimizer.py"}
    assert len(visited) + len(["train_imagenet.py", "ea_vision/__main__.py", "recipes/imagenet.yaml"]) <= 10
