"""Names of images, and of files that other programs leave: one rule for folders, tars and predictions."""

import logging
import unicodedata
from collections.abc import Iterable

from timm.utils.misc import natural_key

log = logging.getLogger(__name__)
IMAGE_SUFFIXES = (
    ".jpg",
    ".jpeg",
    ".png",
    ".webp",
    ".bmp",
    ".gif",
    ".ppm",
    ".pgm",
    ".pbm",
    ".tif",
    ".tiff",
)
# Folders that Synology, macOS and Windows leave. Those that begin with a dot need no list.
FOREIGN_FOLDERS = ("@eaDir", "__MACOSX", "$RECYCLE.BIN", "System Volume Information")
NAMED = 3  # how many hidden files a message names


def is_image_name(name: str) -> bool:
    """Return whether a file's name ends as an image's does."""
    return name.lower().endswith(IMAGE_SUFFIXES)


def hidden_part(name: str) -> str:
    """Return the start of a name, relative to its source, up to its first hidden folder or file; "" if there is none.

    Hidden are .ipynb_checkpoints, .cache, .Trash-1000, ._x.jpg and all that begins with a dot, and FOREIGN_FOLDERS.
    """
    parts = name.split("/")
    for place, part in enumerate(parts):
        dotted = part.startswith(".") and part != ".."
        if dotted or part in FOREIGN_FOLDERS:
            return "/".join(parts[: place + 1])
    return ""


def may_be_folder(name: str) -> bool:
    """Return whether a link's name has no suffix, so that it may stand for a class folder."""
    return "." not in name.rpartition("/")[2]


def log_hidden(source: object, hidden: Iterable[str]) -> None:
    """Log how many hidden files and folders of a source are skipped, if any, and the first of them."""
    names = sorted(hidden, key=in_order)
    first = ", ".join(ascii(name) for name in names[:NAMED])
    more = ", ..." if len(names) > NAMED else ""
    if names:
        log.warning(
            f"{source}: {len(names)} hidden or special files and folders are skipped: {first}{more}"
        )


def displayable(name: str) -> str:
    """Return a name for tables and figures that is the same on every system: letters with accents are composed (macOS
    may store them in parts), and bytes that are not UTF-8 are written as \\xff."""
    if name.isascii():
        return name
    valid = name.encode("utf-8", "surrogateescape").decode("utf-8", "backslashreplace")
    return unicodedata.normalize("NFC", valid)


def in_order(name: str) -> tuple:
    """Return the sort key of natural order; names that it takes for equal (a1, a01) are ordered, too."""
    return natural_key(name), name
