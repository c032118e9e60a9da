"""The files of a tar and the places of their bytes. The later of two entries with one name counts; links are refused.

Python's tarfile reads the headers. But it takes damage for the end of the tar.
"""

import os
import posixpath
import tarfile
from pathlib import Path
from typing import BinaryIO, NamedTuple

from ea_vision.base.errors import UsageError, as_usage_error
from ea_vision.data.image_names import IMAGE_SUFFIXES, hidden_part, is_image_name, may_be_folder

BLOCK = tarfile.BLOCKSIZE
CHUNK = 2**20  # bytes read together where only zeros are expected
READ_SUFFIXES = (
    *IMAGE_SUFFIXES,
    ".cls",
    ".tar",
)  # of images, WebDataset's labels, and tars in a tar
PLAIN = (tarfile.REGTYPE, tarfile.AREGTYPE, tarfile.CONTTYPE)
NO_FILES = (tarfile.DIRTYPE, tarfile.FIFOTYPE, tarfile.CHRTYPE, tarfile.BLKTYPE)


class Span(NamedTuple):
    """Where a file's bytes lie in its tar."""

    start: int
    size: int


def list_tar(path: Path) -> dict[str, Span]:
    """Return the files of a tar by name, and those of the tars in it (ILSVRC2012_img_train.tar), NAME.tar as NAME/.

    Raises:
        UsageError: the tar is damaged, cut off or compressed, other bytes follow its end (as where tars were joined by
            `cat`), or it has an image, label or class that is a link, or a file that is stored sparse or in parts.
        OSError: it cannot be read.
    """
    files: dict[str, Span] = {}
    with open(path, "rb") as file:
        entries = _list_archive(path, file, 0, os.path.getsize(path))
        for name, span in entries.items():
            if not name.lower().endswith(".tar") or hidden_part(name):
                files[name] = span
                continue
            inner = _list_archive(path, file, span.start, span.start + span.size)
            for inner_name, inner_span in inner.items():
                files[f"{name[:-4]}/{inner_name}"] = inner_span
    return files


def _list_archive(path: Path, file: BinaryIO, start: int, end: int) -> dict[str, Span]:
    """Return the files of the tar in bytes `start` to `end` of a file."""
    files: dict[str, Span] = {}
    file.seek(start)
    with as_usage_error(f"{path} is not a readable, uncompressed tar", tarfile.TarError):
        with tarfile.open(fileobj=file, mode="r:") as tar:
            member = tar.next() if tar.offset else None  # Python 3.10 seeks before an empty tar
            while member is not None and tar.offset <= end:
                tar.members.clear()  # it would keep them all
                _add(files, path, member)
                member = tar.next()
    file.seek(tar.offset)
    if tar.offset >= end or file.read(BLOCK) != bytes(BLOCK):
        # tarfile takes a damaged header for the end
        raise UsageError(
            f"{path} is not a readable tar: it is damaged or cut off at byte {tar.offset}"
        )
    _refuse_more(path, file, end)
    return files


def _add(files: dict[str, Span], path: Path, member: tarfile.TarInfo) -> None:
    """Add a tar's entry to its files. It replaces an earlier one of the same name."""
    name = posixpath.normpath(member.name).lstrip("/")  # without ./, //, and / at its start
    if member.type in NO_FILES:
        return
    files.pop(name, None)
    if member.type in PLAIN and not member.issparse():
        files[name] = Span(member.offset_data, member.size)
    elif member.issym() or member.islnk():
        _refuse_link(path, name, member)
    elif is_image_name(name) and not hidden_part(name):
        raise UsageError(
            f"{path}: {ascii(name)} is stored sparse or in parts (tar -S, -M), "
            "which is not read: pack it anew without these options"
        )


def _refuse_link(path: Path, name: str, member: tarfile.TarInfo) -> None:
    """Raise UsageError for a link that may stand for an image, a label or a class."""
    if hidden_part(name):
        return
    folder = posixpath.dirname(name) if member.issym() else ""
    target = posixpath.normpath(posixpath.join(folder, member.linkname))
    adds_nothing = target == "." or f"{name}/".startswith(f"{target}/")  # a folder around the link
    if may_be_folder(name) and not adds_nothing or name.lower().endswith(READ_SUFFIXES):
        raise UsageError(
            f"{path}: {ascii(name)} is a link to {ascii(member.linkname)}, and links in a tar are not "
            "read: pack it anew with the files themselves (tar -h --hard-dereference)"
        )


def _refuse_more(path: Path, file: BinaryIO, end: int) -> None:
    """Raise UsageError if not only zeros follow the end mark of a tar, where a file is read next."""
    place = file.tell()
    while place < end:
        chunk = file.read(min(CHUNK, end - place))
        rest = chunk.lstrip(b"\0")
        place += max(len(chunk), 1)
        if rest:
            raise UsageError(
                f"{path} is not a readable tar: other bytes follow its end, at byte {place - len(rest)} "
                "(unpack joined tars by tar -xi, and pack one)"
            )
