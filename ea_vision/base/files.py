"""Files that are written whole or not at all, and the folders they go to."""

from __future__ import annotations

import csv
import io
import json
import os
import uuid
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

import numpy as np

from ea_vision.base.errors import RunError, UsageError


def cache_root() -> Path:
    """Where this package keeps what it can make again: $XDG_CACHE_HOME/ea_vision, or ~/.cache/ea_vision.

    Raises:
        RuntimeError: the user has no home.
    """
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "ea_vision"


def atomic_write(path: Path, data: bytes, keep_previous_as: Path | None = None) -> None:
    """Replace `path` by `data`, all or nothing; the old file becomes `keep_previous_as` if that is given.

    Raises:
        RunError: the file could not be written (disk full, no permission); the old one is untouched.
    """
    temporary = path.with_name(f".{path.name}.{uuid.uuid4().hex}.tmp")  # two runs may write the same file of a cache
    try:
        with open(temporary, "wb") as file:
            file.write(data)
            file.flush()
            os.fsync(file.fileno())
        if keep_previous_as is not None and path.exists():
            os.replace(path, keep_previous_as)
        os.replace(temporary, path)
        directory = os.open(path.parent, os.O_RDONLY)
        try:
            os.fsync(directory)
        finally:
            os.close(directory)
    except OSError as error:
        with suppress(OSError):  # not even that on a read-only file system
            temporary.unlink(missing_ok=True)
        raise RunError(f"cannot write {path}: {error.strerror}; what was there before is whole") from error


def write_json(path: Path, value: Any) -> None:
    atomic_write(path, (json.dumps(value, indent=2) + "\n").encode())


def write_npz(path: Path, arrays: Mapping[str, np.ndarray]) -> None:
    """Arrays by name, compressed, for np.load; all or nothing."""
    data = io.BytesIO()
    np.savez_compressed(data, **arrays)
    atomic_write(path, data.getvalue())


def create(folder: Path) -> None:
    """Make a folder, and those above it.

    Raises:
        UsageError: it cannot be made.
    """
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise UsageError(f"cannot make the folder {folder}: {error.strerror}") from error


def csv_text(rows: Sequence[Mapping[str, Any]], columns: Sequence[str] = ()) -> str:
    """Comma-separated values of rows with the same keys, which make the header line unless `columns` does: where there
    may be no row."""
    text = io.StringIO()
    writer = csv.DictWriter(text, columns or list(rows[0]), lineterminator="\n")
    writer.writeheader()
    writer.writerows(rows)
    return text.getvalue()


def check_writable(folder: Path) -> None:
    """See whether files can be written into a folder or, where it is not there yet, into the one above it.

    Raises:
        UsageError: they cannot.
    """
    while not folder.exists() and folder != folder.parent:
        folder = folder.parent
    probe = folder / f".{uuid.uuid4().hex}.tmp"
    try:
        probe.touch()
        probe.unlink()
    except OSError as error:
        raise UsageError(f"cannot write into the folder {folder}: {error.strerror}") from error
