"""Checkpoint files: states are restored exactly, damage is detected, no code is executed, writes are atomic."""

import os
import pickle
import random

import numpy as np
import pytest
import safetensors.torch
import torch

from ea_vision.base import devices
from ea_vision.engine import checkpoint
from ea_vision.engine.checkpoint import encode
from ea_vision.zoo.weights_file import DamagedCheckpoint, read_checkpoint
from tests.engine.runner import assert_equal

CPU = torch.device("cpu")


def state():
    """A state with every type that a checkpoint may hold."""
    weight = torch.randn(4, 3, 3, 3).contiguous(memory_format=torch.channels_last)
    groups = [{"lr": 0.1, "params": [0]}]
    progress = {"updates": 3, "rows": [{"lr": 0.1}], "best": None, "text": "ä"}
    return {
        "model": {"weight": weight, "count": torch.tensor(1)},
        "random": devices.random_state(CPU),
        "optimizer": {"state": {0: {"momentum_buffer": weight}}, "param_groups": groups},
        "progress": {**progress, "flags": (True, False)},
        "empty": torch.zeros(0),
        "scalar": torch.tensor(2.5, dtype=torch.float64),
        "infinite": float("inf"),
    }


def test_random_states_come_back():
    def drawn():
        python_numbers = [random.gauss(0, 1), random.random()]
        return python_numbers + torch.rand(3).tolist() + np.random.randn(3).tolist()

    # leaves half of a pair behind in both generators
    random.gauss(0, 1)
    np.random.randn()
    saved = devices.random_state(CPU)
    first = drawn()
    devices.set_random_state(saved, CPU)
    assert drawn() == first
    assert set(first).isdisjoint(drawn())


def test_damage_anywhere_is_seen(tmp_path):
    """A flipped bit or a cut anywhere in the file is an error of the right kind, or changes nothing (for example in the
    padding of the zip file). An undamaged file is read back unchanged."""
    saved = state()
    path = tmp_path / "a.ckpt"
    seen = 0
    data = encode(saved)
    path.write_bytes(data)
    assert_equal(read_checkpoint(path), saved)
    for place in range(0, len(data), len(data) // 300):
        damaged = bytearray(data)
        damaged[place] ^= 0x04
        path.write_bytes(damaged)
        try:
            assert_equal(read_checkpoint(path), saved)
        except DamagedCheckpoint:
            seen += 1
    assert seen > 100
    for length in (0, 1, 8, len(data) // 2, len(data) - 1):
        path.write_bytes(data[:length])
        with pytest.raises(DamagedCheckpoint):
            read_checkpoint(path)


def test_foreign_files_are_named_and_never_executed(tmp_path):
    class Evil:
        def __reduce__(self):
            return os.mkdir, (str(tmp_path / "executed"),)

    (tmp_path / "pickle.ckpt").write_bytes(pickle.dumps(Evil()))
    torch.save({"model": {}}, tmp_path / "torch.ckpt")
    safetensors.torch.save_file({"a": torch.zeros(2)}, tmp_path / "weights.ckpt")
    for name in ("pickle", "torch", "weights"):
        with pytest.raises(DamagedCheckpoint, match=name):
            read_checkpoint(tmp_path / f"{name}.ckpt")
    assert not (tmp_path / "executed").exists()


def test_the_last_valid_checkpoint_counts_even_if_others_have_more_updates(tmp_path):
    """A run that went back leaves such others behind. What becomes of a damaged one, test_kill.py says."""
    assert checkpoint.newest_checkpoint(tmp_path) is None
    for name, updates in ((checkpoint.PREVIOUS, 9), (checkpoint.BEST, 8), (checkpoint.LAST, 5)):
        content = dict.fromkeys(checkpoint.PARTS)
        content["progress"] = {"updates": updates}
        (tmp_path / name).write_bytes(encode(content))
    for name in (checkpoint.LAST, checkpoint.PREVIOUS):
        assert checkpoint.newest_checkpoint(tmp_path)[0].name == name
        (tmp_path / name).write_bytes(b"no checkpoint")
