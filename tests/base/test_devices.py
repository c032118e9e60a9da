"""Devices by torch's names, and the results of functions that a device lacks."""

import pytest
import torch

from ea_vision.base import devices
from ea_vision.engine.evaluate import autocast
from tests.refused import refused

META = torch.device("meta")


@pytest.mark.parametrize(
    "name, message",
    [
        (
            "gpu0",
            "--device must be auto, cpu, cuda, cuda:1, mps, xpu or another device of torch's, got 'gpu0'",
        ),
        ("cuda:x", "--device must be auto, .*, got 'cuda:x'"),
        ("mps", "--device mps needs a mps device and a torch build with mps; none was found"),
        ("xpu:1", "--device xpu:1 needs a xpu device and a torch build with xpu; none was found"),
        ("meta", "--device meta needs a meta device and a torch build with meta; none was found"),
    ],
)
def test_a_device_that_is_not_there(name, message):
    with refused(message):
        devices.choose_device(name)


def test_several_processes_do_not_share_a_numbered_device(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    with refused("--device cuda:1 is one device, and there are 2 processes"):
        devices.choose_device("cuda:1", 0, 2)


def test_a_device_without_functions_has_none_of_their_results():
    for device in (META, torch.device("cpu")):
        assert devices.functions_of(device) is None
        assert device.type not in devices.random_state(device)
        assert devices.peak_memory(device) is None
        devices.synchronize(device)
        assert devices.device_name(device) == device.type
        assert not devices.pins_memory(device)


def test_mps_has_one_device_and_no_float64(monkeypatch):
    """The functions of torch.mps take no device argument."""
    states = []
    monkeypatch.setattr(torch.mps, "get_rng_state", lambda: torch.arange(3))
    monkeypatch.setattr(torch.mps, "set_rng_state", states.append)
    monkeypatch.setattr(torch.mps, "current_allocated_memory", lambda: 7)
    device = torch.device("mps")
    devices.set_random_state(devices.random_state(device), device)
    assert states[0].tolist() == [0, 1, 2]
    assert devices.peak_memory(device) == 7
    assert devices.sum_type(device) == torch.float32
    assert not devices.pins_memory(device)


def test_autocast_of_a_device_without_it_is_refused():
    with autocast("none", META):
        pass
    with refused("--amp bfloat16 needs a device with autocast, got meta"):
        autocast("bfloat16", META)
