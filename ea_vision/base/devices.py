"""torch's devices: choose one by name; read its random state, its memory and its name.

torch keeps the functions of a kind of device in a module of its name: torch.cuda, torch.mps, torch.xpu, and that of a
backend which registered itself. They differ in what they have, so each function here says what it does without.
"""

import functools
from types import ModuleType

import torch

from ea_vision.base.errors import UsageError

HELP = "where to compute: auto, cpu, cuda, cuda:1, mps, xpu or another device of torch's"
PINNED = (
    "cuda",
    "xpu",
)  # kinds to which copies from pinned memory go while the CPU does other work


def choose_device(
    name: str,
    local_rank: int = 0,
    processes: int = 1,
) -> torch.device:
    """Return the device of this process.

    Args:
        name: auto (torch's accelerator where there is one, else the CPU) or a name of torch's.
        local_rank: number of this process on its machine; each takes a device of its own.
        processes: of the run; of several none can ask for one device by its number.

    Raises:
        UsageError: no such device, or one that is not there.
    """
    if name == "auto":
        name = "cpu"
        if torch.accelerator.is_available():
            name = torch.accelerator.current_accelerator().type
    try:
        device = torch.device(name)
    except RuntimeError as error:
        raise UsageError(
            "--device must be auto, cpu, cuda, cuda:1, mps, xpu or another device of torch's, "
            f"got {name!r}"
        ) from error
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
    """Return torch's module of the functions of this kind of device; None where torch has none, as for meta."""
    if device.type == "cpu":
        return None
    try:
        return torch.get_device_module(device)
    except RuntimeError:
        return None


def _function(device: torch.device, name: str):
    """Return a function of the device's module, or None; mps has one device, and its functions take none."""
    function = getattr(functions_of(device), name, None)
    if function is None or device.type == "mps":
        return function
    return functools.partial(function, device)


def random_state(device: torch.device) -> torch.Tensor | None:
    """Return the state of the device's generator, or None where it has none."""
    function = _function(device, "get_rng_state")
    return None if function is None else function()


def set_random_state(state: torch.Tensor, device: torch.device) -> None:
    """Set the state of the device's generator, where it has one."""
    function = getattr(functions_of(device), "set_rng_state", None)
    if function is None:
        return
    if device.type == "mps":
        function(state)
    else:
        function(state, device)


def peak_memory(device: torch.device) -> int | None:
    """Return the peak bytes of tensors on the device, or the current bytes where it keeps no peak, or None."""
    for name in ("max_memory_allocated", "current_allocated_memory"):
        function = _function(device, name)
        if function is not None:
            return function()
    return None


def reset_peak_memory(device: torch.device) -> None:
    """Forget the peak so far, where the device keeps one."""
    function = _function(device, "reset_peak_memory_stats")
    if function is not None:
        function()


def total_memory(device: torch.device) -> int | None:
    """Return the bytes of memory of the device, or None where it does not say."""
    if device.type == "mps":
        return torch.mps.recommended_max_memory()
    function = _function(device, "get_device_properties")
    return None if function is None else getattr(function(), "total_memory", None)


def device_name(device: torch.device) -> str:
    """Return the name that the device's driver gives it, or its kind."""
    function = _function(device, "get_device_name")
    return device.type if function is None else function()


def synchronize(device: torch.device) -> None:
    """Wait until the device has done all it was asked to do."""
    function = getattr(functions_of(device), "synchronize", None)
    if function is not None:
        function()


def pins_memory(device: torch.device) -> bool:
    """Return whether batches for this device should lie in pinned memory."""
    return device.type in PINNED


def sum_type(device: torch.device) -> torch.dtype:
    """Return the type in which sums over all images are kept: float64, which mps does not have."""
    return torch.float32 if device.type == "mps" else torch.float64
