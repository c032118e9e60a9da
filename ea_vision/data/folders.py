"""Find the image files below a folder. Links are followed, hidden files skipped."""

import os
import stat
from collections.abc import Iterator
from pathlib import Path

from ea_vision.data.image_names import hidden_part, is_image_name, log_hidden


def list_images(folder: str | Path) -> list[str]:
    """Return the paths of the images below a folder, in the order of their names; log how many hidden ones there are.

    Raises:
        OSError: a folder cannot be read.
    """
    hidden: set[str] = set()
    names = [name for name, _ in walk_images(Path(folder), hidden)]
    log_hidden(folder, hidden)
    return sorted(os.path.join(folder, name) for name in names)


def walk_images(root: Path, hidden: set[str]) -> Iterator[tuple[str, int]]:
    """Yield the names of the images below a folder, with /, and their bytes; a broken link has 0. Skipped
    names are added to `hidden`.

    Raises:
        OSError: a folder cannot be read.
    """
    for folder, folders, files in os.walk(root, followlinks=True, onerror=_raise):
        inside = os.path.relpath(folder, root).replace(os.sep, "/")
        prefix = "" if inside == "." else f"{inside}/"
        visible = []
        for name in folders:
            if hidden_part(name) or _leads_back(folder, name):
                hidden.add(prefix + name)
            else:
                visible.append(name)
        folders[:] = visible
        for name in filter(is_image_name, files):
            size = -1 if hidden_part(name) else _size_of(os.path.join(folder, name))
            if size < 0:
                hidden.add(prefix + name)
            else:
                yield prefix + name, size


def _raise(error: OSError) -> None:
    raise error


def _leads_back(folder: str, name: str) -> bool:
    """Return whether a folder is a link to one that contains it, so that its images would be listed without end."""
    path = os.path.join(folder, name)
    if not os.path.islink(path):
        return False
    target = os.path.realpath(path)
    return f"{os.path.realpath(folder)}{os.sep}".startswith(f"{target}{os.sep}")


def _size_of(path: str) -> int:
    """Return the bytes of a file; 0 for a broken link; -1 for a pipe or device, since reading it could block."""
    try:
        about = os.stat(path)
    except OSError:  # reported when the image is read
        return 0
    return about.st_size if stat.S_ISREG(about.st_mode) else -1
