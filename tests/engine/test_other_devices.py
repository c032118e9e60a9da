"""A run on a device that is neither a CPU nor CUDA: a fake device, registered as torch's privateuse1, whose tensors are
in main memory. It does not show that the kernels of mps or xpu give these results, since no such device is at hand."""

from types import ModuleType

import torch
from torch.overrides import TorchFunctionMode

from tests.engine.runner import SignalAfterUpdate, same_result, saved, train

NAME = "standin"


class InMainMemory(TorchFunctionMode):
    """Lets torch's functions use main memory when they are called with the fake device."""

    def __torch_function__(self, func, types, args=(), kwargs=None):
        args = [on_cpu(value) for value in args]
        kwargs = {name: on_cpu(value) for name, value in (kwargs or {}).items()}
        return func(*args, **kwargs)


def on_cpu(value):
    if isinstance(value, torch.device) and value.type == NAME:
        return torch.device("cpu")
    return value


def functions():
    """Return the device's own functions; its generator's state is a counter that checkpoints must carry on."""
    module = ModuleType(f"torch.{NAME}")
    state = torch.zeros(1, dtype=torch.uint8)

    def get_rng_state(device):
        assert device.index == 1
        return state.clone()

    def set_rng_state(new, device):
        assert device.index == 1
        state.copy_(new)

    module.is_available = lambda: True
    module.device_count = lambda: 2
    module.set_device = lambda index: state.fill_(7 + index)
    module.get_rng_state = get_rng_state
    module.set_rng_state = set_rng_state
    module.max_memory_allocated = lambda device: 3 * 2**20
    module.get_device_name = lambda device: f"Stand-in {device.index}"
    return module


def install():
    torch.utils.rename_privateuse1_backend(NAME)
    torch._register_device_module(NAME, functions())
    InMainMemory().__enter__()


def install_and_stop():
    install()
    SignalAfterUpdate(15, 3)()


def test_a_step_a_checkpoint_and_a_resume(arguments, folder, tmp_path):
    whole = tmp_path / "whole"
    options = f"--device {NAME}:1 --model-ema-decay 0.9 --log-steps 1"
    printed = train(arguments(whole, options), install)
    assert "1 on Stand-in 1" in printed
    train(arguments(folder, options), install_and_stop, code=143)
    [states, *_] = saved(folder)["random"]
    assert states[NAME].tolist() == [8]
    _, row, *_ = (folder / "speed.csv").read_text().splitlines()
    assert row.endswith(",3.0")
    assert "resumed from" in train(arguments(folder, options), install)
    same_result(folder, whole)
