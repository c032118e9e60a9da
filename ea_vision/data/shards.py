"""Shards of WebDataset (https://github.com/webdataset/webdataset): tars in which an image's label lies beside it.

000012.jpg and 000012.cls are one sample; the .cls is a number or a name. The shards of a folder are one split.
"""

from collections.abc import Iterable, Mapping
from pathlib import Path

from ea_vision.base.errors import UsageError
from ea_vision.data.image_names import displayable, is_image_name
from ea_vision.data.tars import Span

LABEL_SUFFIX = ".cls"
# of files that img2dataset and others put beside an image, and that are not labels
OTHER_SUFFIXES = (".json", ".txt")
LONGEST = 200  # bytes of a label


def shard_labels(path: Path, files: Mapping[str, Span]) -> dict[str, str]:
    """Return the labels of a tar's images by name; {} if it is not a shard.

    Args:
        files: those of the tar, by name.

    Raises:
        UsageError: a shard without labels, an image without a label, or a label that is not text.
    """
    images = [name for name in files if is_image_name(name)]
    labels = {_key(name): span for name, span in files.items() if name.endswith(LABEL_SUFFIX)}
    if not labels:
        _refuse_unlabelled(path, files, images)
        return {}
    without = [name for name in images if _key(name) not in labels]
    if without:
        raise UsageError(
            f"{path} is a shard of WebDataset's: {LABEL_SUFFIX} is required beside each image, and "
            f"{ascii(without[0])} has none"
        )
    labels_by_name = {}
    with open(path, "rb") as file:
        for name in images:
            start, size = labels[_key(name)]
            file.seek(start)
            labels_by_name[name] = _text(path, name, file.read(min(size, LONGEST + 1)))
    return labels_by_name


def _key(name: str) -> str:
    """Return the name of a sample: up to the first dot of the file's name."""
    folder, slash, file = name.rpartition("/")
    return folder + slash + file.partition(".")[0]


def _text(path: Path, name: str, content: bytes) -> str:
    text = content.decode("utf-8", errors="replace").strip()
    if not text or len(content) > LONGEST or not text.isprintable() or "\ufffd" in text:
        raise UsageError(
            f"{path}: the {LABEL_SUFFIX} beside {ascii(name)} must be a number or a name, got {content!r:.60}"
        )
    return displayable(text)


def _refuse_unlabelled(path: Path, files: Iterable[str], images: list[str]) -> None:
    """Raise UsageError if the images of a tar have captions or the like beside them, but no label and no folder."""
    flat = {_key(name) for name in images if "/" not in name}
    for name in files:
        if name.endswith(OTHER_SUFFIXES) and _key(name) in flat:
            raise UsageError(
                f"{path} is a shard of WebDataset's without labels: {LABEL_SUFFIX} is required beside "
                f"each image, and {ascii(name)} is no label"
            )
