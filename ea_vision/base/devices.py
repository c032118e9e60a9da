"""torch's devices: choose one by its name, read its memory, keep all random states.

torch has one module of functions for each kind of device: torch.cuda, torch.mps, torch.xpu, and those of registered
backends. Not every module has every function, so each function here documents its fallback.
"""

import random
from collections.abc import Iterator
from contextlib import contextmanager
from types import ModuleType

import numpy as np
import torch

from ea_vision.base.errors import UsageError

HELP = "where to compute: auto, cpu, cuda, cuda:1, mps, xpu or another device of torch's"
# kinds of device to which copies from pinned memory are asynchronous
PINNED = ("cuda", "xpu")


def device_named(name: str) -> torch.device:
    """Return torch's device of a name; auto: its accelerator if there is one, else the CPU.

    Raises:
        UsageError: unknown name.
    """
    if name == "auto":
        name = "cpu"
        if torch.accelerator.is_available():
            name = torch.accelerator.current_accelerator().type
    try:
        return torch.device(name)
    except RuntimeError as error:
        raise UsageError(
            "--device must be auto, cpu, cuda, cuda:1, mps, xpu or another device of torch's, "
            f"got {name!r}"
        ) from error


def choose_device(name: str, local_rank: int = 0, processes: int = 1) -> torch.device:
    """Return the device of this process.

    Args:
        name: as `device_named` takes it.
        local_rank: number of this process on its machine; each takes a device of its own.
        processes: number of processes of the run; if there are several, `name` must not have a device number.

    Raises:
        UsageError: unknown device, or one that is not available.
    """
    device = device_named(name)
    if device.type == "cpu":
        return torch.device("cpu")
    kind = device.type.upper() if device.type == "cuda" else device.type
    functions = functions_of(device)
    if functions is None or not functions.is_available():
        raise UsageError(
            f"--device {name} needs a {kind} device and a torch build with {kind}; none was found"
        )
    if device.index is not None and processes > 1:
        raise UsageError(
            f"--device {name} is one device, and there are {processes} processes: --device "
            f"{device.type} gives each its own"
        )
    index = local_rank if device.index is None else device.index
    count = functions.device_count()
    if index >= count:
        raise UsageError(
            f"process {local_rank} needs {kind} device {index} for itself, and there are {count}"
        )
    if hasattr(functions, "set_device"):
        functions.set_device(index)
    torch.backends.cudnn.benchmark = device.type == "cuda"  # every batch has the same shape
    return torch.device(device.type, index)


def functions_of(device: torch.device) -> ModuleType | None:
    """Return torch's module of functions for this kind of device; None if there is none (cpu, meta)."""
    if device.type == "cpu":
        return None
    try:
        return torch.get_device_module(device)
    except RuntimeError:
        return None


def _call(device: torch.device, name: str, *args, default=None):
    """Call a function of the device's module with args and the device; return `default` if the module lacks it.
    Functions of mps take no device."""
    function = getattr(functions_of(device), name, None)
    if function is None:
        return default
    return function(*args) if device.type == "mps" else function(*args, device)


def random_state(device: torch.device) -> dict:
    """Return the state of every random generator that a step may use: torch's, the device's, NumPy's and Python's."""
    name, keys, *rest = np.random.get_state()
    state = {
        "torch": torch.get_rng_state(),
        "python": random.getstate(),
        "numpy": [name, keys.tolist(), *rest],
    }
    device_state = _call(device, "get_rng_state")
    if device_state is not None:
        state[device.type] = device_state
    return state


def set_random_state(state: dict, device: torch.device) -> None:
    """Restore what `random_state` returned."""
    torch.set_rng_state(state["torch"])
    random.setstate(state["python"])
    np.random.set_state(state["numpy"])
    if device.type in state:
        _call(device, "set_rng_state", state[device.type])


@contextmanager
def random_state_kept(device: torch.device) -> Iterator[None]:
    """Restore the random state after the block."""
    state = random_state(device)
    try:
        yield
    finally:
        set_random_state(state, device)


def peak_memory(device: torch.device) -> int | None:
    """Return the peak bytes of tensors on the device; the current bytes if it keeps no peak, else None."""
    current = _call(device, "current_allocated_memory")
    return _call(device, "max_memory_allocated", default=current)


def device_name(device: torch.device) -> str:
    """Return the name that the device's driver gives it, or its kind."""
    return _call(device, "get_device_name", default=device.type)


def synchronize(device: torch.device) -> None:
    """Wait until the device has finished all its work."""
    _call(device, "synchronize")


def pins_memory(device: torch.device) -> bool:
    """Return whether batches for this device should be in pinned memory."""
    return device.type in PINNED


def sum_type(device: torch.device) -> torch.dtype:
    """Return the dtype of sums over all images: float64, or float32 on mps, which lacks float64."""
    return torch.float32 if device.type == "mps" else torch.float64
