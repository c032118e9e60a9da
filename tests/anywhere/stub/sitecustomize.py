"""Remove what Windows or macOS lack: Python runs this file at the start of each process that has its folder in
PYTHONPATH, also of worker processes. Paths are hidden only from ea_vision, because psutil needs /proc."""

import builtins
import importlib.util
import io
import multiprocessing
import multiprocessing.context
import os
import signal
import sys
import warnings

import psutil  # noqa: F401  (loaded first: on Linux it needs `resource`)

MODULES = ("fcntl", "resource", "termios", "ffcv")
SIGNALS = ("SIGKILL", "SIGHUP", "SIGUSR1", "SIGUSR2", "SIGALRM", "SIGPIPE")
FUNCTIONS = ("fork", "forkpty", "pread", "sysconf", "sched_getaffinity", "statvfs", "nice")

PASSED_OVER = ("pathlib", "pathlib._local", "io", "genericpath", __name__)


def asked_by_ea_vision() -> bool:
    """Return whether the first frame outside the standard library's own files belongs to the package."""
    frame = sys._getframe(2)
    while frame is not None and frame.f_globals.get("__name__") in PASSED_OVER:
        frame = frame.f_back
    return frame is not None and str(frame.f_globals.get("__name__")).startswith("ea_vision")


def hide(owner, name: str, error: type[OSError], hidden) -> None:
    """Let a function of `owner` raise `error` when ea_vision calls it with a path for which `hidden(path)` is true."""
    original = getattr(owner, name)

    def function(path, *args, **kwargs):
        if (
            isinstance(path, (str, os.PathLike))
            and hidden(os.fspath(path))
            and asked_by_ea_vision()
        ):
            raise error(2, "taken away by the test", path)
        return original(path, *args, **kwargs)

    setattr(owner, name, function)


def in_proc(path) -> bool:
    return str(path).startswith(("/proc", "/sys", "/dev"))


for module in MODULES:
    sys.modules[module] = None
for name in SIGNALS:
    signal.__dict__.pop(name, None)
for name in FUNCTIONS:
    os.__dict__.pop(name, None)
for owner, name in ((builtins, "open"), (io, "open"), (os, "stat"), (os, "listdir"), (os, "open")):
    hide(owner, name, FileNotFoundError, in_proc)
hide(os, "open", PermissionError, os.path.isdir)

# Processes can only be spawned.
multiprocessing.context._concrete_contexts = {"spawn": multiprocessing.get_context("spawn")}
multiprocessing.set_start_method("spawn")

# Opening a text file without an encoding is an error in ea_vision; other packages may do it.
assert sys.flags.warn_default_encoding, "the test needs PYTHONWARNDEFAULTENCODING=1"
warnings.simplefilter("ignore", EncodingWarning)
warnings.filterwarnings("error", category=EncodingWarning, module="ea_vision")
warnings.filterwarnings("ignore", "only soft file lock is available")

find_spec = importlib.util.find_spec
importlib.util.find_spec = lambda name, *more: None if name == "ffcv" else find_spec(name, *more)
