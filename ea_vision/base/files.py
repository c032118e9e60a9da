"""Files that are written whole or not at all, and the folders they go to.

Every writer of this package writes by `atomic_write`; commands ask `check_output` before they begin to work.
"""

import csv
import io
import json
import os
import signal
import threading
import time
import uuid
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from ea_vision.base.errors import RunError, UsageError

# Seconds between attempts to replace a file that another process has open, which Windows alone refuses.
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
    """See whether files can be written into a folder or, where it is not there yet, into the one above it.

    Raises:
        UsageError: they cannot.
    """
    try:
        while not folder.exists() and folder != folder.parent:
            folder = folder.parent
        probe = folder / f".{uuid.uuid4().hex}.tmp"
        probe.touch()
        # another run that begins in the same folder clears such files away
        probe.unlink(missing_ok=True)
    except OSError as error:
        raise UsageError(f"cannot write into the folder {folder}: {error.strerror}") from error


def check_output(path: Path) -> Path:
    """Make the folder of a file that is to be written and see that it can be written; return `path`.

    Raises:
        UsageError: it is a folder or a device, has no possible name, or its folder cannot be made or written into.
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


@contextmanager
def _before_a_signal_ends_it() -> Iterator[None]:
    """Let a SIGTERM that would end the process do so after the block, in which a temporary file may lie about."""
    came = []
    in_main = threading.current_thread() is threading.main_thread()
    if not in_main or signal.getsignal(signal.SIGTERM) != signal.SIG_DFL:
        yield
        return
    signal.signal(signal.SIGTERM, lambda *_: came.append(True))
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
        if came:
            signal.raise_signal(signal.SIGTERM)


def _replace(source: Path, target: Path) -> None:
    """Rename a file over another one. On Windows this fails while another process has it open: try again."""
    for seconds in WAITS:
        try:
            return os.replace(source, target)
        except PermissionError:
            time.sleep(seconds)
    return os.replace(source, target)


def atomic_write(
    path: Path,
    data: bytes,
    keep_previous_as: Path | None = None,
) -> None:
    """Replace `path` by `data`, all or nothing. Of a link, its file is replaced. A process that SIGTERM ends in the
    middle writes it whole first.

    Args:
        keep_previous_as: a name for the file that was there before (default: it is gone).

    Raises:
        RunError: the file could not be written (a folder, disk full, no permission); the old one is untouched.
    """
    try:
        path = Path(os.path.realpath(path))
        # two runs may write the same file
        temporary = path.with_name(f".{path.name[:40]}.{uuid.uuid4().hex}.tmp")
        with _before_a_signal_ends_it():
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


def write_json(path: Path, value: Any) -> None:
    """Write a value as JSON, all or nothing."""
    atomic_write(path, (json.dumps(value, indent=2) + "\n").encode())


def csv_text(rows: Sequence[Mapping[str, Any]], columns: Sequence[str] = ()) -> str:
    """Return rows with the same keys as comma-separated values; `columns` is the header where there may be no row."""
    text = io.StringIO()
    writer = csv.DictWriter(text, columns or list(rows[0]), lineterminator="\n")
    writer.writeheader()
    writer.writerows(rows)
    return text.getvalue()
