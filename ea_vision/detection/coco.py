"""Images with boxes: a folder of images and one COCO JSON for each split, checked as a whole before work starts."""

import hashlib
import json
import os
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.utils.data import Dataset
from torchvision import tv_tensors
from torchvision.ops import box_convert

from ea_vision.base.errors import UsageError
from ea_vision.data.image_files import BrokenImage, decode_image

COCO_YEARS = ("2017", "2014")
MOST = 2**53  # of numbers: what every reader of JSON has exactly


class CocoFolder(Dataset):
    """One split of a data folder, images by index with their boxes.

    The folder holds `train/`, `val/`, `train.json` and `val.json`, or COCO's own `train2017/` and
    `annotations/instances_train2017.json` (2014 too). Images without boxes are kept; crowds (iscrowd) are for the
    metric alone. (torchvision's CocoDetection would read the JSON once more, and fail on damage without a place.)

    Attributes:
        images: the JSON's entries (id, file_name, width, height in pixels), in its order.
        categories: the JSON's entries, in the order of their ids, which may have gaps; classes, category_ids: their
            names and ids. A box's label is the place here, 0 to C-1.
        annotations: by image: image_id, category_id, bbox (x, y, width, height), area, iscrowd.

    Raises:
        UsageError: no such files, damaged JSON, images that are listed but not there.
    """

    def __init__(self, root: str | Path, split: str):
        self.folder, self.json = find_coco(Path(root), split)
        content = read_coco(self.json)
        self.images = content["images"]
        self._bytes = [
            path.stat().st_size if os.path.isfile(path) else None
            for path in (self.folder / image["file_name"] for image in self.images)
        ]
        missing = [
            image["file_name"]
            for image, size in zip(self.images, self._bytes, strict=True)
            if size is None
        ]
        if missing:
            raise UsageError(
                f"{len(missing)} of the {len(self.images)} images of {self.json} are not in "
                f"{self.folder}: {', '.join(map(ascii, missing[:3]))}"
            )
        self.categories = sorted(content["categories"], key=lambda category: category["id"])
        self.category_ids, self.classes = (
            [category[key] for category in self.categories] for key in ("id", "name")
        )
        by_image: dict[int, list[dict]] = {image["id"]: [] for image in self.images}
        for row in content["annotations"]:
            by_image[row["image_id"]].append(
                {"area": row["bbox"][2] * row["bbox"][3], "iscrowd": 0, **row}
            )
        self.annotations = list(by_image.values())
        if all(row["iscrowd"] for rows in self.annotations for row in rows):
            raise UsageError(
                f"{len(self)} images of {self.json} must have at least one box that is no crowd, got none"
            )

    def __len__(self) -> int:
        return len(self.images)

    def describe(self, index: int) -> str:
        return f"{self.folder}/{self.images[index]['file_name']}"

    def __getitem__(self, index: int) -> tuple[Any, dict]:
        """Return (image, target).

        The image is uint8 (3, H, W). The target has boxes: float32 (n, 4), x1 y1 x2 y2 in pixels, n may be 0; labels:
        int64 (n,), 0 to C-1; image_id: the JSON's; size: (H, W) of the image as it lies in its file.

        Raises:
            BrokenImage: it cannot be decoded, or has not the size that the JSON says.
        """
        about = self.images[index]
        image = decode_image(self.describe(index))
        if image.size != (about["width"], about["height"]):
            raise BrokenImage(
                f"it has {image.width}x{image.height} pixels, {self.json.name} says "
                f"{about['width']}x{about['height']}"
            )
        own = [row for row in self.annotations[index] if not row["iscrowd"]]
        boxes = box_convert(
            torch.tensor([row["bbox"] for row in own], dtype=torch.float32).reshape(-1, 4),
            "xywh",
            "xyxy",
        )
        size = (image.height, image.width)
        return tv_tensors.Image(image), {
            "boxes": tv_tensors.BoundingBoxes(boxes, format="XYXY", canvas_size=size),
            "labels": torch.tensor(
                [self.category_ids.index(row["category_id"]) for row in own], dtype=torch.int64
            ),
            "image_id": about["id"],
            "size": size,
        }

    def ground_truth(self, indices: Iterable[int] | None = None) -> dict:
        """Return the content of a COCO JSON of the images at these places (None: of all), for the metric."""
        indices = range(len(self)) if indices is None else indices
        rows = [row for index in indices for row in self.annotations[index]]
        return {
            "images": [self.images[index] for index in indices],
            "categories": self.categories,
            "annotations": [{**row, "id": number} for number, row in enumerate(rows, start=1)],
        }

    def fingerprint(self) -> str:
        """Return SHA-256 over classes, boxes, and the names and sizes of the images: the same wherever they lie."""
        content = json.dumps([self.ground_truth(), self._bytes], sort_keys=True)
        return hashlib.sha256(content.encode()).hexdigest()


def results_of(
    image_id: int | str,
    detected: Mapping[str, Tensor],
    category_ids: Sequence[int],
) -> list[dict]:
    """Return COCO's results of an image: image_id, category_id, bbox (x, y, width, height) in pixels, score.

    Args:
        detected: boxes (n, 4) x1 y1 x2 y2, scores (n,), labels (n,) from 0.
        category_ids: of the labels.
    """
    boxes = box_convert(detected["boxes"].detach().double().cpu(), "xyxy", "xywh")
    return [
        {
            "image_id": image_id,
            "category_id": category_ids[label],
            "bbox": [round(side, 3) for side in box],
            "score": round(score, 6),
        }
        for box, score, label in zip(
            boxes.tolist(), detected["scores"].tolist(), detected["labels"].tolist(), strict=True
        )
    ]


def find_coco(root: Path, split: str) -> tuple[Path, Path]:
    """Return (folder of images, JSON) of a split; see `CocoFolder`.

    Raises:
        UsageError: they are not there.
    """
    for folder, file in (
        (root / split, root / f"{split}.json"),
        *(
            (root / f"{split}{year}", root / "annotations" / f"instances_{split}{year}.json")
            for year in COCO_YEARS
        ),
    ):
        if folder.is_dir() and file.is_file():
            return folder, file
    raise UsageError(
        f"data folder {root} must have {split}/ with images and {split}.json, or COCO's own {split}2017/ "
        f"and annotations/instances_{split}2017.json"
        + ("" if root.is_dir() else "; it does not exist")
    )


# ---- what a COCO JSON must be ----------------------------------------------------------------------------------------


def read_coco(path: Path) -> dict[str, list[dict]]:
    """Return images, categories and annotations of a COCO JSON, the fields of each that are in FIELDS.

    Raises:
        UsageError: it cannot be read or is damaged; the message says where.
    """

    def refuse(where: str, required: str, received: Any) -> None:
        got = "nothing" if received is ABSENT else f"{received!r:.60}"
        raise UsageError(f"{path} is damaged: {where} must be {required}, got {got}")

    try:
        content = json.loads(path.read_bytes())
    except (OSError, ValueError, RecursionError) as error:
        raise UsageError(f"{path} is damaged: it is not valid JSON ({error})") from error
    ids: dict[str, set[int]] = {part: set() for part in FIELDS}
    for part, fields in FIELDS.items():
        entries = content.get(part) if isinstance(content, dict) else None
        if not isinstance(entries, list) or not entries and part != "annotations":
            refuse(part, "a list that is not empty", entries)
        for number, entry in enumerate(entries):
            if not isinstance(entry, dict):
                refuse(f"{part}[{number}]", "a mapping", entry)
            for field, (required, fits) in fields.items():
                where, value = f"{part}[{number}].{field}", entry.get(field, ABSENT)
                if value is ABSENT and field in OPTIONAL:
                    continue
                if not fits(value):
                    refuse(where, required, value)
                if field == "id" and value in ids[part]:
                    refuse(where, "there once", value)
                if field == "id":
                    ids[part].add(value)
                if field in OWNERS and value not in ids[OWNERS[field]]:
                    refuse(where, f"the id of one of its {OWNERS[field]}", value)
    return {
        part: [
            {field: entry[field] for field in fields if field in entry} for entry in content[part]
        ]
        for part, fields in FIELDS.items()
    }


def _number(value: Any) -> bool:
    return type(value) in (int, float) and abs(value) <= MOST


WHOLE = ("a whole number", lambda value: type(value) is int and _number(value))
TEXT = ("a text", lambda value: isinstance(value, str))
PIXELS = ("a positive whole number of pixels", lambda value: WHOLE[1](value) and value > 0)
ABSENT = ...  # stands for what an entry lacks
OPTIONAL = {"area", "iscrowd"}
OWNERS = {"image_id": "images", "category_id": "categories"}
FIELDS = {  # that are read: what they must be
    "images": {"id": WHOLE, "file_name": TEXT, "width": PIXELS, "height": PIXELS},
    "categories": {"id": WHOLE, "name": TEXT},
    "annotations": {
        "image_id": WHOLE,
        "category_id": WHOLE,
        "bbox": (
            "four numbers: x, y, width, height in pixels",
            lambda value: isinstance(value, list) and len(value) == 4 and all(map(_number, value)),
        ),
        "area": ("a number of at least 0", lambda value: _number(value) and value >= 0),
        "iscrowd": ("0 or 1", lambda value: type(value) is int and value in (0, 1)),
    },
}
