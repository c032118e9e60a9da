"""How a run is put together: one place, few files to read, and run folders from before it was that place."""
from __future__ import annotations

import sys

import pytest

from ea_vision.engine import train_cifar, train_imagenet
from ea_vision.engine.config import TrainConfig, resolve
from ea_vision.engine.train import Trainer
from tests.data.photos import make_photos


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
