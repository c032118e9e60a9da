"""Runs that go on: options younger than a checkpoint."""
from __future__ import annotations

from ea_vision.engine import train_cifar
from ea_vision.engine.config import resolve


def test_an_option_younger_than_a_checkpoint_had_its_default():
    config, _ = resolve(train_cifar.CifarConfig, {"momentum": 0.8})
    saved = {key: value for key, value in config.as_dict().items() if key not in ("momentum", "clip_grad")}
    assert config.differences(saved) == ["momentum was 0.9, got 0.8"]
