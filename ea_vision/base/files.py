"""Atomic writing of files, and their folders.

Files of this package are written by `atomic_write`; commands call `check_output` before they begin to work.
"""

import csv
import io
import json
import os
import re
import signal
import threading
import time
import uuid
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from ea_vision.base.errors import RunError, UsageError

# Seconds between attempts to replace a file that another process has open. Only Windows refuses this.
WAITS = (0.05, 0.1, 0.2, 0.4, 0.8) if os.name == "nt" else ()


def cache_root() -> Path:
    """Return the cache folder of this package: $XDG_CACHE_HOME/ea_vision, or ~/.cache/ea_vision.

    Raises:
        RuntimeError: the user has no home.
    """
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "ea_vision"


def create(folder: Path) -> None:
    """Make a folder, and those above it.

    Raises:
        UsageError: it cannot be made.
    """
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise UsageError(f"cannot make the folder {folder}: {error.strerror}") from error


def check_writable(folder: Path) -> None:
    """Check that files can be written into a folder or, if it does not exist yet, into the nearest folder above it.

    Raises:
        UsageError: they cannot.
    """
    try:
        while not folder.exists() and folder != folder.parent:
            folder = folder.parent
        # Python's tempfile tries names without end in a folder of Windows that refuses files
        probe = folder / f".{uuid.uuid4().hex}.tmp"
        probe.touch()
        # another run that begins in the same folder may have deleted it
        probe.unlink(missing_ok=True)
    except OSError as error:
        raise UsageError(f"cannot write into the folder {folder}: {error.strerror}") from error


def check_output(path: Path) -> Path:
    """Make the folder of an output file and check that the file can be written; return `path`.

    Raises:
        UsageError: it is a folder or a device, its name is too long, or its folder cannot be made or written into.
    """
    try:
        if path.exists() and not path.is_file():
            raise UsageError(
                f"the output must be a file, and {path} is a "
                f"{'folder' if path.is_dir() else 'device'}"
            )
    except OSError as error:  # a name that is too long
        raise UsageError(f"cannot write {path}: {error.strerror}") from error
    create(path.parent)
    check_writable(Path(os.path.realpath(path)).parent)
    return path


def check_keeps_images(outputs: Iterable[Path], images: Sequence[str]) -> None:
    """Check that no file to be written is one of the images.

    Raises:
        UsageError: it is one, and the picture would replace the image.
    """
    read = {_identity(image) for image in images if os.path.exists(image)}
    for output in outputs:
        if os.path.exists(output) and _identity(output) in read:
            raise UsageError(f"--output must be another file than the images, got {output}")


def _identity(path: Path | str) -> tuple[int, int]:
    """Return what tells a file from all others, however its path is written."""
    status = os.stat(path)
    return status.st_dev, status.st_ino


@contextmanager
def _signals_wait() -> Iterator[None]:
    """Delay SIGTERM and Ctrl-C until the block is left, whatever they do: end the process or raise an exception."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    received = []
    handlers = {}
    try:
        for number in (signal.SIGTERM, signal.SIGINT):
            handler = signal.getsignal(number)
            if handler not in (signal.SIG_IGN, None):  # None: not one of Python's
                handlers[number] = handler
                signal.signal(number, lambda number, _: received.append(number))
        yield
    finally:
        for number, handler in handlers.items():
            signal.signal(number, handler)
        for number in received:
            signal.raise_signal(number)


def _replace(source: Path, target: Path) -> None:
    """Rename a file over another one. On Windows this fails while another process has it open: try again."""
    for seconds in WAITS:
        try:
            return os.replace(source, target)
        except PermissionError:
            time.sleep(seconds)
    return os.replace(source, target)


def atomic_write(path: Path, data: bytes, keep_previous_as: Path | None = None) -> None:
    """Replace the content of `path` by `data`, atomically. If `path` is a link, the file that it points to is replaced.
    SIGTERM and Ctrl-C take effect after the write.

    Args:
        keep_previous_as: new name of the previous file (default: it is deleted).

    Raises:
        RunError: the file could not be written (a folder, disk full, no permission); the old one is untouched.
    """
    try:
        path = Path(os.path.realpath(path))
        # two runs may write the same file
        temporary = path.with_name(f".{path.name[:40]}.{uuid.uuid4().hex}.tmp")
        with _signals_wait():
            try:
                with open(temporary, "wb") as file:
                    file.write(data)
                    file.flush()
                    os.fsync(file.fileno())
                if keep_previous_as is not None and path.exists():
                    _replace(path, keep_previous_as)
                _replace(temporary, path)
            finally:
                temporary.unlink(missing_ok=True)
    except OSError as error:
        raise RunError(
            f"cannot write {path}: {error.strerror}; the previous content is intact"
        ) from error


def delete_leftovers(folder: Path) -> None:
    """Delete the temporary files of interrupted writes, by `atomic_write`, in a folder and those below it."""
    for path in folder.rglob(".*.tmp"):
        if re.fullmatch(r"\..*[0-9a-f]{32}\.tmp", path.name):
            path.unlink(missing_ok=True)


def write_json(path: Path, value: Any) -> None:
    """Write a value as JSON, atomically."""
    atomic_write(path, (json.dumps(value, indent=2) + "\n").encode())


def csv_text(rows: Sequence[Mapping[str, Any]], columns: Sequence[str] = ()) -> str:
    """Return rows with the same keys as comma-separated values. `columns`: the header, required if there is no row."""
    text = io.StringIO()
    writer = csv.DictWriter(text, columns or list(rows[0]), lineterminator="\n")
    writer.writeheader()
    writer.writerows(rows)
    return text.getvalue()
