"""The format of a COCO JSON, which is read and checked as a whole before work starts."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

from ea_vision.base.errors import UsageError, as_usage_error

MOST = 2**53  # the largest number that every JSON reader represents exactly
ABSENT = ...  # stands for a field that an entry lacks


class Field(NamedTuple):
    """What a field must be: in words, and as a function that checks a value."""

    required: str
    fits: Callable[[Any], bool]


def _is_number(value: Any) -> bool:
    return type(value) in (int, float) and abs(value) <= MOST


def _is_whole(value: Any) -> bool:
    return type(value) is int and abs(value) <= MOST


def _is_box(value: Any) -> bool:
    return isinstance(value, list) and len(value) == 4 and all(map(_is_number, value))


WHOLE = Field("a whole number", _is_whole)
TEXT = Field("a text", lambda value: isinstance(value, str))
PIXELS = Field("a positive whole number of pixels", lambda value: _is_whole(value) and value > 0)
OPTIONAL = ("area", "iscrowd")
OWNERS = {"image_id": "images", "category_id": "categories"}
# The fields that are read.
FIELDS = {
    "images": {"id": WHOLE, "file_name": TEXT, "width": PIXELS, "height": PIXELS},
    "categories": {"id": WHOLE, "name": TEXT},
    "annotations": {
        "image_id": WHOLE,
        "category_id": WHOLE,
        "bbox": Field("four numbers: x, y, width, height in pixels", _is_box),
        "area": Field("a number of at least 0", lambda value: _is_number(value) and value >= 0),
        "iscrowd": Field("0 or 1", lambda value: type(value) is int and value in (0, 1)),
    },
}


def read_coco(path: Path) -> dict[str, list[dict]]:
    """Return images, categories and annotations of a COCO JSON, each with only the fields in FIELDS.

    Raises:
        UsageError: it cannot be read or is damaged; the message says where.
    """
    with as_usage_error(f"{path} is damaged: it is not valid JSON"):
        content = json.loads(path.read_bytes())
    ids: dict[str, set[int]] = {part: set() for part in FIELDS}
    parts = {}
    for part in FIELDS:
        entries = content.get(part) if isinstance(content, dict) else None
        may_be_empty = part == "annotations"
        if not isinstance(entries, list) or not (entries or may_be_empty):
            _refuse(path, part, "a list that is not empty", entries)
        parts[part] = [_checked(path, part, n, entry, ids) for n, entry in enumerate(entries)]
    return parts


def _checked(path: Path, part: str, number: int, entry: Any, ids: dict[str, set[int]]) -> dict:
    """Return the fields in FIELDS of an entry, and add its id to those of its part."""
    if not isinstance(entry, dict):
        _refuse(path, f"{part}[{number}]", "a mapping", entry)
    kept = {}
    for name, field in FIELDS[part].items():
        value = entry.get(name, ABSENT)
        if value is ABSENT and name in OPTIONAL:
            continue
        where = f"{part}[{number}].{name}"
        if not field.fits(value):
            _refuse(path, where, field.required, value)
        owner = OWNERS.get(name)
        if owner and value not in ids[owner]:
            _refuse(path, where, f"the id of one of its {owner}", value)
        if name == "id" and value in ids[part]:
            _refuse(path, where, "unique", value)
        kept[name] = value
    ids[part].add(kept.get("id"))
    return kept


def _refuse(path: Path, where: str, required: str, received: Any) -> None:
    got = "nothing" if received is ABSENT else f"{received!r:.60}"
    raise UsageError(f"{path} is damaged: {where} must be {required}, got {got}")
