"""Images with boxes: a folder of images and one COCO JSON for each split, checked as a whole before work starts.

Damage, such as a box of three numbers, is one error that says where. What is merely useless is counted, listed and
mended by RULES.
"""

from __future__ import annotations

import copy
import hashlib
import json
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.utils.data import Dataset
from torchvision import tv_tensors
from torchvision.ops import box_convert

from ea_vision.base.errors import UsageError
from ea_vision.data.image_files import MAX_PIXELS, BrokenImage, decode_image

COCO_YEARS = ("2017", "2014")
BEYOND = "box reaches beyond the image"
RULES = {  # what is wrong with an annotation: what happens to it
    BEYOND: "cut at its border",
    "box without area inside the image": "left out",
    "unknown category": "left out",
    "unknown image": "left out",
}
LISTED = 5  # annotations that a note names
MOST = 2**53  # of ids and coordinates: what every reader of JSON has exactly


class CocoFolder(Dataset):
    """One split of a data folder, images by index with their boxes.

    The folder holds `train/`, `val/`, `train.json` and `val.json`, or COCO's own `train2017/` and
    `annotations/instances_train2017.json` (2014 too). Images without boxes are kept; crowds (iscrowd) are for the
    metric alone. (torchvision's CocoDetection would read the JSON once more, and fail on damage without a place.)

    Attributes:
        images: the JSON's entries (id, file_name, width, height in pixels), in its order.
        classes: names of the categories, in the order of their ids; a box's label is the place here, 0 to C-1.
        category_ids: the id of each of them, which may have gaps; `label_of` is the way back.
        annotations: by image, those that are left: image_id, category_id, bbox (x, y, width, height), area, iscrowd.
        problems: ids of annotations by what is wrong with them, the keys of RULES.

    Args:
        root: the data folder.
        split: train | val.

    Raises:
        UsageError: no such files, damaged JSON, images that are listed but not there.
    """

    def __init__(self, root: str | Path, split: str):
        self.folder, self.json = find_coco(Path(root), split)
        content = read_coco(self.json)
        self.images = [{key: image[key] for key in FIELDS["images"]} for image in content["images"]]
        categories = sorted(content["categories"], key=lambda category: category["id"])
        self.classes = [category["name"] for category in categories]
        self.category_ids = [category["id"] for category in categories]
        self.label_of = {number: label for label, number in enumerate(self.category_ids)}
        self.annotations, self.problems = self._mended(content["annotations"])
        there = {path.name for path in self.folder.iterdir()}
        missing = [name for name in (image["file_name"] for image in self.images)
                   if name not in there and not os.path.isfile(self.folder / name)]
        if missing:
            raise UsageError(f"{len(missing)} of the {len(self.images)} images of {self.json} are not in "
                             f"{self.folder}: {', '.join(missing[:3])}{' ...' if len(missing) > 3 else ''}")

    def _mended(self, rows: list[dict]) -> tuple[list[list[dict]], dict[str, list[Any]]]:
        """Return valid annotations per image, and the ids of invalid ones grouped by problem."""
        place = {image["id"]: index for index, image in enumerate(self.images)}
        kept: list[list[dict]] = [[] for _ in self.images]
        problems: dict[str, list[Any]] = {}
        for row in rows:
            index, box = place.get(row["image_id"]), None
            if index is not None:
                box = cut_box(row["bbox"], self.images[index]["width"], self.images[index]["height"])
            wrong = ("unknown image" if index is None else
                     "unknown category" if row["category_id"] not in self.label_of else
                     "box without area inside the image" if box is None else BEYOND if box != row["bbox"] else "")
            if wrong:
                problems.setdefault(wrong, []).append(row["id"])
            if wrong in ("", BEYOND):
                area = row.get("area", box[2] * box[3])
                kept[index].append({"image_id": row["image_id"], "category_id": row["category_id"], "bbox": box,
                                    "area": min(area, box[2] * box[3]) if wrong else area,
                                    "iscrowd": int(row.get("iscrowd", 0))})
        return kept, problems

    def __len__(self) -> int:
        return len(self.images)

    def describe(self, index: int) -> str:
        return f"{self.folder}/{self.images[index]['file_name']}"

    def __getitem__(self, index: int) -> tuple[Any, dict[str, Any]]:
        """Return (image, target).

        The image is uint8 (3, H, W). The target has boxes: float32 (n, 4), x1 y1 x2 y2 in pixels, n may be 0; labels:
        int64 (n,), 0 to C-1; image_id: the JSON's; size: (H, W) of the image as it lies in its file.

        Raises:
            BrokenImage: it cannot be decoded, or has not the size that the JSON says.
        """
        about = self.images[index]
        image = decode_image(self.folder / about["file_name"])
        if image.size != (about["width"], about["height"]):
            raise BrokenImage(f"it has {image.width}x{image.height} pixels, {self.json.name} says "
                              f"{about['width']}x{about['height']}")
        own = [row for row in self.annotations[index] if not row["iscrowd"]]
        boxes = box_convert(torch.tensor([row["bbox"] for row in own], dtype=torch.float32).reshape(-1, 4),
                            "xywh", "xyxy")
        size = (image.height, image.width)
        target = {
            "boxes": tv_tensors.BoundingBoxes(boxes, format="XYXY", canvas_size=size),
            "labels": torch.tensor([self.label_of[row["category_id"]] for row in own], dtype=torch.int64),
            "image_id": about["id"],
            "size": size,
        }
        return tv_tensors.Image(image), target

    def select(self, indices: Sequence[int]) -> CocoFolder:
        """Return the images at these places, in this order."""
        chosen = copy.copy(self)
        chosen.images = [self.images[index] for index in indices]
        chosen.annotations = [self.annotations[index] for index in indices]
        return chosen

    def num_boxes(self) -> int:
        """Return the number of boxes, without crowds."""
        return sum(not row["iscrowd"] for rows in self.annotations for row in rows)

    def ground_truth(self) -> dict[str, Any]:
        """Return what is left after the check as the content of a COCO JSON, for the metric."""
        rows = [row for of_image in self.annotations for row in of_image]
        categories = [{"id": number, "name": name}
                      for number, name in zip(self.category_ids, self.classes, strict=True)]
        return {"images": self.images, "categories": categories,
                "annotations": [{"id": number, **row} for number, row in enumerate(rows, start=1)]}

    def notes(self) -> list[str]:
        """Return a line for each kind of problem, with its rule, its count and the first ids."""
        return [f"{self.json}: {len(ids)} annotation(s), {wrong}: {RULES[wrong]} (id "
                f"{', '.join(map(str, ids[:LISTED]))}{', ...' if len(ids) > LISTED else ''})"
                for wrong, ids in self.problems.items()]

    def fingerprint(self) -> str:
        """Return SHA-256 over classes, boxes, and the names and sizes of the images: the same wherever they lie."""
        digest = hashlib.sha256(json.dumps(self.ground_truth(), sort_keys=True).encode())
        paths = [self.folder / image["file_name"] for image in self.images]
        sizes = [os.path.getsize(path) if os.path.isfile(path) else 0 for path in paths]
        digest.update(json.dumps(sizes).encode())
        return digest.hexdigest()


def results_of(image_id: int | str, detected: Mapping[str, Tensor], category_ids: Sequence[int],
               ) -> list[dict[str, Any]]:
    """Return COCO's results of an image: image_id, category_id, bbox (x, y, width, height) in pixels, score.

    Args:
        detected: boxes (n, 4) x1 y1 x2 y2, scores (n,), labels (n,) from 0.
        category_ids: of the labels.
    """
    boxes = box_convert(detected["boxes"].detach().double().cpu(), "xyxy", "xywh")
    return [{"image_id": image_id, "category_id": category_ids[label], "bbox": [round(side, 3) for side in box],
             "score": round(score, 6)}
            for box, score, label in zip(boxes.tolist(), detected["scores"].tolist(), detected["labels"].tolist(),
                                         strict=True)]


def cut_box(bbox: Sequence[float], width: float, height: float) -> list[float] | None:
    """Cut (x, y, width, height) at the border of an image of width x height pixels; None if no area is left."""
    x, y, w, h = bbox
    if x >= 0 and y >= 0 and w > 0 and h > 0 and x + w <= width and y + h <= height:
        return list(bbox)
    left, top, right, bottom = max(x, 0), max(y, 0), min(x + w, width), min(y + h, height)
    return [left, top, right - left, bottom - top] if w > 0 and h > 0 and right > left and bottom > top else None


def find_coco(root: Path, split: str) -> tuple[Path, Path]:
    """Return (folder of images, JSON) of a split; see `CocoFolder`.

    Raises:
        UsageError: they are not there.
    """
    for folder, file in ((root / split, root / f"{split}.json"),
                         *((root / f"{split}{year}", root / "annotations" / f"instances_{split}{year}.json")
                           for year in COCO_YEARS)):
        if folder.is_dir() and file.is_file():
            return folder, file
    raise UsageError(f"data folder {root} must have {split}/ with images and {split}.json, or COCO's own {split}2017/ "
                     f"and annotations/instances_{split}2017.json" + ("" if root.is_dir() else "; it does not exist"))


# ---- what a COCO JSON must be ----------------------------------------------------------------------------------------

def read_coco(path: Path) -> dict[str, Any]:
    """Return the content of a COCO JSON: images, categories and annotations, every field that is read of its type.

    Raises:
        UsageError: it cannot be read or is damaged; the message says where.
    """
    def require(right: bool, required: str, *received: Any) -> None:
        if not right:
            got = "nothing" if not received else f"{received[0]!r:.60}"
            raise UsageError(f"{path} is damaged: {required}, got {got}")

    try:
        content = json.loads(path.read_bytes())
    except OSError as error:
        raise UsageError(f"cannot read {path}: {error.strerror}") from error
    except (ValueError, RecursionError) as error:
        raise UsageError(f"{path} is damaged: it is not valid JSON ({error})") from error
    require(isinstance(content, dict), "a mapping is required", content)
    for part, fields in FIELDS.items():
        entries = content.get(part)
        require(isinstance(entries, list), f"{part} must be a list", *([entries] if part in content else []))
        for number, entry in enumerate(entries):
            require(isinstance(entry, dict), f"{part}[{number}] must be a mapping", entry)
            for field, (required, fits) in fields.items():
                if field in entry or field not in OPTIONAL:
                    require(field in entry and fits(entry[field]), f"{part}[{number}].{field} must be {required}",
                            *([entry[field]] if field in entry else []))
    for part in ("images", "categories"):
        seen: set[Any] = set()
        for number, entry in enumerate(content[part]):
            require(entry["id"] not in seen, f"{part}[{number}].id must be there once", entry["id"])
            seen.add(entry["id"])
        require(bool(seen), f"there must be at least one of its {part}")
    kind = type(content["images"][0]["id"])  # 1 and "1" would be one image to pycocotools
    for part, field in (("images", "id"), ("annotations", "image_id")):
        for number, entry in enumerate(content[part]):
            require(type(entry[field]) is kind, f"{part}[{number}].{field} must be a "
                    f"{'whole number' if kind is int else 'text'}, as images[0].id is", entry[field])
    return content


def _number(value: Any) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool) and abs(value) <= MOST


def _whole(value: Any) -> bool:
    return isinstance(value, int) and _number(value)


def _text(value: Any) -> bool:
    """Return whether this is a text that is not empty and can be written as UTF-8 (JSON allows half of a pair)."""
    return isinstance(value, str) and bool(value) and not any("\ud800" <= letter <= "\udfff" for letter in value)


def _file_name(value: Any) -> bool:
    return _text(value) and "\0" not in value and Path(value) != Path(".") and not (
        Path(value).is_absolute() or ".." in Path(value).parts)


ID = (f"a whole number up to {MOST} or a text", lambda value: _whole(value) or _text(value))
WHOLE = (f"a whole number up to {MOST}", _whole)
PIXELS = ("a positive whole number of pixels", lambda value: _whole(value) and 0 < value <= MAX_PIXELS)
OPTIONAL = {"area", "iscrowd"}
FIELDS = {  # that are read: what they must be
    "images": {"id": ID, "file_name": ("a path inside the folder of images", _file_name), "width": PIXELS,
               "height": PIXELS},
    "categories": {"id": WHOLE, "name": ("a text", _text)},
    "annotations": {"id": ID, "image_id": ID, "category_id": WHOLE,
                    "bbox": ("four numbers: x, y, width, height in pixels",
                             lambda value: isinstance(value, list) and len(value) == 4 and all(map(_number, value))),
                    "area": ("a number of at least 0", lambda value: _number(value) and value >= 0),
                    "iscrowd": ("0 or 1", lambda value: isinstance(value, int) and value in (0, 1))},
}
