"""The files of a tar and the places of their bytes, as if it were unpacked: the later of two entries with one name
counts, links are resolved, and tars that were appended by `cat` are read, too.

Python's tarfile reads the headers. But it takes damage for the end of the tar, and resolves links only when it unpacks.
"""

import os
import posixpath
import tarfile
from collections import defaultdict
from pathlib import Path
from typing import BinaryIO, NamedTuple

from ea_vision.base.errors import UsageError
from ea_vision.data.image_names import hidden_part, is_image_name, may_be_folder

BLOCK = tarfile.BLOCKSIZE
CHUNK = 2**20  # bytes read together where only zeros are expected
MOST_LINKS = 40  # that a name may lead through, as on Linux
PLAIN = (tarfile.REGTYPE, tarfile.AREGTYPE, tarfile.CONTTYPE)
NO_FILES = (tarfile.DIRTYPE, tarfile.FIFOTYPE, tarfile.CHRTYPE, tarfile.BLKTYPE)


class Span(NamedTuple):
    """Where a file's bytes lie in its tar."""

    start: int
    size: int


def list_tar(path: Path) -> dict[str, Span]:
    """Return the files of a tar by name, and those of the tars in it (ILSVRC2012_img_train.tar), NAME.tar as NAME/.

    Raises:
        UsageError: the tar is damaged, cut off or compressed, other bytes than a tar follow its end, or it has an image
            that cannot be read: a link out of the tar, or a file that is stored sparse or in parts.
        OSError: it cannot be read.
    """
    found: dict[str, Span] = {}
    with open(path, "rb") as file:
        files = _list_archive(path, file, 0, os.path.getsize(path))
        for name, span in files.items():
            if not name.lower().endswith(".tar") or hidden_part(name):
                found[name] = span
                continue
            inner = _list_archive(path, file, span.start, span.start + span.size)
            for inner_name, inner_span in inner.items():
                found[f"{name[:-4]}/{inner_name}"] = inner_span
    return found


def read_span(path: str | Path, start: int, size: int) -> bytes:
    """Return bytes of a file."""
    with open(path, "rb") as file:
        file.seek(start)
        return file.read(size)


def _list_archive(path: Path, file: BinaryIO, start: int, end: int) -> dict[str, Span]:
    """Return the files of the tar, or of concatenated tars, in bytes `start` to `end` of a file."""
    listing = _Listing(path)
    begin: int | None = start
    while begin is not None:
        mark = _read_members(listing, file, begin, end, first=begin == start)
        begin = _next_archive(file, mark, end)
    return listing.resolved()


def _read_members(listing: "_Listing", file: BinaryIO, start: int, end: int, first: bool) -> int:
    """Add the members of one archive to a listing; return the place of its end mark."""
    path = listing.path
    file.seek(start)
    try:
        with tarfile.open(fileobj=file, mode="r:") as tar:
            member = tar.next()
            while member is not None and tar.offset <= end:
                tar.members.clear()  # it would keep them all
                listing.add(member)
                member = tar.next()
    except tarfile.TarError as error:
        raise UsageError(f"{path} is not a readable, uncompressed tar: {error}") from error
    mark = tar.offset
    file.seek(mark)
    if mark < end and file.read(BLOCK) == bytes(BLOCK):
        return mark
    if mark == start and not first:
        raise UsageError(
            f"{path} is not a readable tar: what follows its end, at byte {mark}, is not another tar"
        )
    # tarfile takes a damaged header for the end
    raise UsageError(f"{path} is not a readable tar: it is damaged or cut off at byte {mark}")


def _next_archive(file: BinaryIO, mark: int, end: int) -> int | None:
    """Return the place of the first nonzero block after the mark; None if there is none."""
    place = mark
    file.seek(place)
    while place < end:
        chunk = file.read(min(CHUNK, end - place))
        zeros = len(chunk) - len(chunk.lstrip(b"\0"))
        if zeros < len(chunk):
            return place + zeros - zeros % BLOCK
        place += max(len(chunk), 1)
    return None


class _Listing:
    """The files and symbolic links of an archive, by name.

    Attributes:
        files: where the bytes of each file lie. links: what each symbolic link says.
    """

    def __init__(self, path: Path):
        self.path = path
        self.files: dict[str, Span] = {}
        self.links: dict[str, str] = {}

    def add(self, member: tarfile.TarInfo) -> None:
        """Add an entry; it replaces an earlier one of the same name."""
        name = _clean(member.name)
        if member.type in NO_FILES:
            return
        self.files.pop(name, None)
        self.links.pop(name, None)
        if member.issym():
            self.links[name] = member.linkname
        elif member.islnk():
            self._add_hard_link(name, _clean(member.linkname))
        elif member.type in PLAIN and not member.issparse():
            self.files[name] = Span(member.offset_data, member.size)
        elif is_image_name(name) and not hidden_part(name):
            raise UsageError(
                f"{self.path}: {ascii(name)} is stored sparse or in parts (tar -S, -M), "
                "which is not read: pack it anew without these options"
            )

    def _add_hard_link(self, name: str, target: str) -> None:
        """Add a hard link as the file that its target is at this point of the archive."""
        if target in self.files:
            self.files[name] = self.files[target]
        elif target in self.links:
            self.links[name] = posixpath.relpath(
                _joined(target, self.links[target]), posixpath.dirname(name) or "."
            )
        else:
            self._refuse(name, target)

    def resolved(self) -> dict[str, Span]:
        """Return the files, with those that symbolic links lead to under the links' names."""
        found = dict(self.files)
        others: dict[str, str] = {}  # links that lead to no file: to folders, or nowhere
        for name in self.links:
            target = self._follow(name)
            if target in self.files:
                found[name] = self.files[target]
            else:
                others[name] = target
        if others:
            below = _by_folder(found)
            for name, target in others.items():
                self._add_folder(found, below, name, target)
        return found

    def _follow(self, name: str) -> str:
        """Return the name that a symbolic link leads to, "" if it leads to itself."""
        path = name
        for _ in range(MOST_LINKS):
            link = self._first_link(path)
            if not link:
                return path
            path = _clean(_joined(link, self.links[link]) + path[len(link) :])
        return ""

    def _first_link(self, path: str) -> str:
        """Return the start of a path that is a link, "" if there is none."""
        if path in self.links:
            return path
        parts = path.split("/")
        starts = ["/".join(parts[:count]) for count in range(1, len(parts))]
        return next((start for start in starts if start in self.links), "")

    def _add_folder(
        self, found: dict[str, Span], below: dict[str, list[str]], name: str, target: str
    ) -> None:
        """Add the files below a link to a folder. A link to a folder that contains it, which has no end, is skipped."""
        in_itself = target in ("", ".") or f"{name}/".startswith(f"{target}/")
        if in_itself and not is_image_name(name):
            return
        if in_itself or target not in below:
            self._refuse(name, self.links[name])
            return
        if any(link.startswith(f"{target}/") and not is_image_name(link) for link in self.links):
            self._refuse(name, f"{self.links[name]}, a folder with links to folders")
        for file in below[target]:
            found[name + file[len(target) :]] = found[file]

    def _refuse(self, name: str, target: str) -> None:
        """Raise UsageError for a link that leads nowhere, if an image or a class may be lost by it."""
        if hidden_part(name):
            return
        if is_image_name(name) or may_be_folder(name):
            raise UsageError(
                f"{self.path}: {ascii(name)} is a link to {ascii(target)}, which this tar does not "
                "hold: pack it anew with the files themselves (tar -h)"
            )


def _by_folder(names: dict[str, Span]) -> dict[str, list[str]]:
    """Return the names of the files below each folder."""
    below = defaultdict(list)
    for name in names:
        parts = name.split("/")
        for count in range(1, len(parts)):
            below["/".join(parts[:count])].append(name)
    return dict(below)


def _clean(name: str) -> str:
    """Return a name without ./, //, and / at its start."""
    return posixpath.normpath(name).lstrip("/")


def _joined(link: str, target: str) -> str:
    """Return what a link's text means, relative to the archive."""
    return posixpath.normpath(posixpath.join(posixpath.dirname(link), target))
