"""Images with boxes: a folder of images and one COCO JSON for each split.

The JSON is read and checked as a whole before any work starts. What is damaged, such as a box of three numbers, is one
error that says where. What is merely useless is counted, listed and mended by a stated rule, see `CocoFolder`.
"""

from __future__ import annotations

import copy
import hashlib
import json
import os
from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.utils.data import Dataset
from torchvision import tv_tensors

from ea_vision.base.errors import UsageError
from ea_vision.data.image_files import (
    CHEAP_BYTES,
    MAX_PIXELS,
    BrokenImage,
    content_digest,
    decode_image,
    open_regular,
)

SPLITS = ("train", "val")
COCO_YEARS = ("2017", "2014")
RULES = {  # what is wrong with an annotation: what happens to it
    "box reaches beyond the image": "cut at its border",
    "box without area inside the image": "left out",
    "unknown category": "left out",
    "unknown image": "left out",
}
LISTED = 5  # annotations that a note names
MOST = 2**53  # of ids and coordinates: what every reader of JSON has exactly


class CocoFolder(Dataset):
    """One split of a data folder, images by index with their boxes.

    The folder holds `train/`, `val/`, `train.json` and `val.json`, or COCO's own `train2017/` and
    `annotations/instances_train2017.json` (2014 too). Images without boxes are kept. Boxes that reach beyond their
    image are cut at its border; boxes without area inside it, and those of unknown categories or images, are left out:
    `notes` counts and lists them. Crowds (iscrowd) are not in `__getitem__`, but stay in `ground_truth` for the metric,
    which ignores what lies in them.

    Attributes:
        images: the JSON's entries (id, file_name, width, height in pixels), in its order.
        classes: names of the categories, in the order of their ids; a box's label is the place here, 0 to C-1.
        category_ids: the id of each of them, which may have gaps; `label_of` is the way back.
        annotations: by image, those that are left, their bbox (x, y, width, height) cut; without outlines
            (segmentation), which would fill the memory of every worker.
        problems: ids of annotations by what is wrong with them, the keys of RULES.

    Args:
        root: the data folder.
        split: train | val.
        transforms: called with (image, target).
        exif_rotation: turn images as their EXIF data says; off by default, as everywhere here.

    Raises:
        UsageError: no such files, damaged JSON, images that are listed but not there.
    """

    def __init__(self, root: str | Path, split: str, transforms=None, exif_rotation: bool = False):
        self.root, self.split = Path(root), split
        self.transforms, self.exif_rotation = transforms, exif_rotation
        self.folder, self.json = find_coco(self.root, split)
        content = read_coco(self.json)
        self.images = [{key: image[key] for key in _FIELDS["images"]} for image in content["images"]]
        categories = sorted(content["categories"], key=lambda category: category["id"])
        self.classes = [category["name"] for category in categories]
        self.category_ids = [category["id"] for category in categories]
        self.label_of = {identity: label for label, identity in enumerate(self.category_ids)}
        self.annotations, self.problems = self._annotations(content["annotations"])
        self._check_files()

    def _annotations(self, found: list[dict]) -> tuple[list[list[dict]], dict[str, list[Any]]]:
        """Return valid annotations per image, and the ids of invalid ones grouped by problem."""
        place = {image["id"]: index for index, image in enumerate(self.images)}
        kept: list[list[dict]] = [[] for _ in self.images]
        problems: dict[str, list[Any]] = {}
        for annotation in found:
            index, wrong = place.get(annotation["image_id"]), ""
            if index is None:
                wrong = "unknown image"
            elif annotation["category_id"] not in self.label_of:
                wrong = "unknown category"
            else:
                box = cut_box(annotation["bbox"], self.images[index]["width"], self.images[index]["height"])
                if box is None:
                    wrong = "box without area inside the image"
                else:
                    if box != annotation["bbox"]:
                        wrong = "box reaches beyond the image"
                        area = box[2] * box[3]
                        annotation = {**annotation, "bbox": box, "area": min(area, annotation.get("area", area))}
                    kept[index].append({key: annotation[key] for key in _FIELDS["annotations"] if key in annotation})
            if wrong:
                problems.setdefault(wrong, []).append(annotation["id"])
        return kept, problems

    def _check_files(self) -> None:
        there = {path.name for path in self.folder.iterdir()}
        missing = [image["file_name"] for image in self.images
                   if image["file_name"] not in there and not os.path.isfile(self.folder / image["file_name"])]
        if missing:
            raise UsageError(f"{len(missing)} of the {len(self.images)} images of {self.json} are not in "
                             f"{self.folder}: {', '.join(missing[:3])}{' ...' if len(missing) > 3 else ''}")

    def __len__(self) -> int:
        return len(self.images)

    def describe(self, index: int) -> str:
        return f"{self.folder}/{self.images[index]['file_name']}"

    def __getitem__(self, index: int) -> tuple[Any, dict[str, Any]]:
        """(image, target), after the transforms.

        The image is uint8 (3, H, W). The target has boxes: float32 (n, 4), x1 y1 x2 y2 in pixels, n may be 0; labels:
        int64 (n,), 0 to C-1; image_id: the JSON's; size: (H, W) of the image as it lies in its file.

        Raises:
            BrokenImage: it cannot be decoded, or has not the size that the JSON says.
        """
        about = self.images[index]
        image = decode_image(self.folder / about["file_name"], self.exif_rotation)
        if image.size != (about["width"], about["height"]):
            raise BrokenImage(f"it has {image.width}x{image.height} pixels, {self.json.name} says "
                              f"{about['width']}x{about['height']}")
        size = (image.height, image.width)
        pixels = torch.frombuffer(bytearray(image.tobytes()), dtype=torch.uint8).view(*size, 3).permute(2, 0, 1)
        own = [annotation for annotation in self.annotations[index] if not annotation.get("iscrowd")]
        corners = [[x, y, x + width, y + height] for x, y, width, height in (entry["bbox"] for entry in own)]
        boxes = torch.tensor(corners, dtype=torch.float32).reshape(-1, 4)
        target = {
            "boxes": tv_tensors.BoundingBoxes(boxes, format="XYXY", canvas_size=size),
            "labels": torch.tensor([self.label_of[entry["category_id"]] for entry in own], dtype=torch.int64),
            "image_id": about["id"],
            "size": size,
        }
        image = tv_tensors.Image(pixels.contiguous())
        return (image, target) if self.transforms is None else self.transforms(image, target)

    def select(self, indices: Sequence[int], transforms=None) -> CocoFolder:
        """The images at these places, in this order, with these transforms."""
        chosen = copy.copy(self)
        chosen.images = [self.images[index] for index in indices]
        chosen.annotations = [self.annotations[index] for index in indices]
        chosen.transforms = transforms
        return chosen

    def num_boxes(self) -> int:
        """Return the number of boxes, without crowds."""
        return sum(not row.get("iscrowd") for of_image in self.annotations for row in of_image)

    def ground_truth(self) -> dict[str, Any]:
        """Return what is left after the check as the content of a COCO JSON, for the metric.

        Every annotation has `area` (that of the box, where the JSON has none), `iscrowd` and a number as its id.
        """
        rows = [row for of_image in self.annotations for row in of_image]
        return {
            "images": self.images,
            "categories": [{"id": identity, "name": name}
                           for identity, name in zip(self.category_ids, self.classes, strict=True)],
            "annotations": [{"id": number, "image_id": row["image_id"], "category_id": row["category_id"],
                             "bbox": row["bbox"], "area": row.get("area", row["bbox"][2] * row["bbox"][3]),
                             "iscrowd": int(bool(row.get("iscrowd")))} for number, row in enumerate(rows, start=1)],
        }

    def results(self, image_id: int | str, detected: Mapping[str, Tensor]) -> list[dict[str, Any]]:
        """A detector's boxes, scores and labels of an image, with the JSON's ids; see `results_of`."""
        return results_of(image_id, detected, self.category_ids)

    def notes(self) -> list[str]:
        """A line for each kind of problem, with its rule, its count and the first ids."""
        return [f"{self.json}: {len(ids)} annotation(s), {wrong}: {RULES[wrong]} (id "
                f"{', '.join(map(str, ids[:LISTED]))}{', ...' if len(ids) > LISTED else ''})"
                for wrong, ids in self.problems.items()]

    def fingerprint(self) -> str:
        """Return SHA-256 over classes, boxes and images: their names, sizes and at most CHEAP_BYTES of contents.

        It is the same for the same data, wherever it lies.
        """
        digest = hashlib.sha256(self.earlier_fingerprint().encode())
        paths = [self.folder / image["file_name"] for image in self.images]
        sizes = [os.path.getsize(path) if os.path.isfile(path) else 0 for path in paths]
        for path, size in zip(paths, sizes, strict=True):
            digest.update(f" {size}".encode())
            if sum(sizes) <= CHEAP_BYTES:
                digest.update(content_digest(partial(open_regular, path)))
        return digest.hexdigest()

    def earlier_fingerprint(self) -> str:
        """Return the fingerprint of release 0.2, without the contents of images, so that its runs can go on."""
        text = json.dumps([self.ground_truth(), self.exif_rotation], sort_keys=True)
        return hashlib.sha256(text.encode()).hexdigest()


def results_of(image_id: int | str, detected: Mapping[str, Tensor], category_ids: Sequence[int],
               ) -> list[dict[str, Any]]:
    """COCO's results of an image: image_id, category_id, bbox (x, y, width, height) in pixels, score; best first as
    the detector gives them.

    Args:
        detected: boxes (n, 4) x1 y1 x2 y2, scores (n,), labels (n,) from 0.
        category_ids: of the labels.
    """
    boxes = detected["boxes"].detach().double().cpu()
    boxes = torch.cat([boxes[:, :2], boxes[:, 2:] - boxes[:, :2]], dim=1)
    return [{"image_id": image_id, "category_id": category_ids[label], "bbox": [round(side, 3) for side in box],
             "score": round(score, 6)}
            for box, score, label in zip(boxes.tolist(), detected["scores"].tolist(), detected["labels"].tolist(),
                                         strict=True)]


def cut_box(bbox: Sequence[float], width: float, height: float) -> list[float] | None:
    """(x, y, width, height) cut at the border of an image of width x height pixels; None if no area is left."""
    x, y, w, h = bbox
    if x >= 0 and y >= 0 and w > 0 and h > 0 and x + w <= width and y + h <= height:
        return list(bbox)
    left, top, right, bottom = max(x, 0), max(y, 0), min(x + w, width), min(y + h, height)
    return [left, top, right - left, bottom - top] if w > 0 and h > 0 and right > left and bottom > top else None


def find_coco(root: Path, split: str) -> tuple[Path, Path]:
    """(folder of images, JSON) of a split; see `CocoFolder`.

    Raises:
        UsageError: they are not there.
    """
    if split not in SPLITS:
        raise ValueError(f"split must be one of {', '.join(SPLITS)}, got {split!r}")
    layouts = [(root / split, root / f"{split}.json"),
               *((root / f"{split}{year}", root / "annotations" / f"instances_{split}{year}.json")
                 for year in COCO_YEARS)]
    for folder, file in layouts:
        if folder.is_dir() and file.is_file():
            return folder, file
    raise UsageError(f"data folder {root} must have {split}/ with images and {split}.json, or COCO's own {split}2017/ "
                     f"and annotations/instances_{split}2017.json" + ("" if root.is_dir() else "; it does not exist"))


def read_coco(path: Path) -> dict[str, Any]:
    """The content of a COCO JSON: images, categories and annotations, every field that is read of its type.

    Raises:
        UsageError: it cannot be read or is damaged; the message says where.
    """
    try:
        content = json.loads(path.read_bytes())
    except OSError as error:
        raise UsageError(f"cannot read {path}: {error.strerror}") from error
    except (ValueError, RecursionError) as error:
        raise UsageError(f"{path} is damaged: it is not valid JSON ({error})") from error
    if not isinstance(content, dict):
        raise UsageError(f"{path} is damaged: a mapping is required, got {type(content).__name__}")
    for part, fields in _FIELDS.items():
        entries = content.get(part)
        if not isinstance(entries, list):
            raise UsageError(f"{path} is damaged: {part} must be a list, got "
                             f"{type(entries).__name__ if part in content else 'nothing'}")
        for number, entry in enumerate(entries):
            if not isinstance(entry, dict):
                raise UsageError(f"{path} is damaged: {part}[{number}] must be a mapping, got {_shown(entry)}")
            for field, (required, fits) in fields.items():
                if not (fits(entry[field]) if field in entry else field in _OPTIONAL):
                    got = _shown(entry[field]) if field in entry else "nothing"
                    raise UsageError(f"{path} is damaged: {part}[{number}].{field} must be {required}, got {got}")
    _check_ids(path, content)
    return content


def _check_ids(path: Path, content: dict[str, Any]) -> None:
    """Raise UsageError unless ids of images and categories are unique and those of images of one type."""
    for part in ("images", "categories"):
        seen: set[Any] = set()
        for number, entry in enumerate(content[part]):
            if entry["id"] in seen:
                raise UsageError(f"{path} is damaged: {part}[{number}].id {entry['id']!r} is there already")
            seen.add(entry["id"])
        if not seen:
            raise UsageError(f"{path} must have at least one of its {part}, got none")
    kind = type(content["images"][0]["id"])  # 1 and "1" would be one image to pycocotools
    for part, field in (("images", "id"), ("annotations", "image_id")):
        for number, entry in enumerate(content[part]):
            if type(entry[field]) is not kind:
                raise UsageError(f"{path} is damaged: {part}[{number}].{field} must be a "
                                 f"{'whole number' if kind is int else 'text'}, as images[0].id is, got "
                                 f"{_shown(entry[field])}")


def _shown(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 60 else text[:57] + "..."


def _number(value: Any) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool) and abs(value) <= MOST


def _whole(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and abs(value) <= MOST


def _file_name(value: Any) -> bool:
    return (_text(value) and "\0" not in value and not Path(value).is_absolute() and ".." not in Path(value).parts
            and Path(value) != Path("."))


def _text(value: Any) -> bool:
    """Return whether this is a text that is not empty and can be written as UTF-8 (JSON allows half of a pair)."""
    return isinstance(value, str) and bool(value) and not any("\ud800" <= letter <= "\udfff" for letter in value)


_ID = (f"a whole number up to {MOST} or a text", lambda value: _whole(value) or _text(value))
_WHOLE = (f"a whole number up to {MOST}", _whole)
_PIXELS = ("a positive whole number of pixels", lambda value: _whole(value) and 0 < value <= MAX_PIXELS)
_OPTIONAL = {"area", "iscrowd"}
_FIELDS = {
    "images": {"id": _ID, "file_name": ("a path inside the folder of images", _file_name), "width": _PIXELS,
               "height": _PIXELS},
    "categories": {"id": _WHOLE, "name": ("a text", _text)},
    "annotations": {"id": _ID, "image_id": _ID, "category_id": _WHOLE,
                    "bbox": ("four numbers: x, y, width, height in pixels",
                             lambda value: isinstance(value, list) and len(value) == 4 and all(map(_number, value))),
                    "area": ("a number of at least 0", lambda value: _number(value) and value >= 0),
                    "iscrowd": ("0 or 1", lambda value: isinstance(value, int) and value in (0, 1))},
}
