"""Images with boxes: a folder of images and one COCO JSON for each split, checked as a whole before work starts."""

import hashlib
import json
import logging
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
from ea_vision.data.decoding import BrokenImage, decode_image
from ea_vision.detection.coco_json import read_coco

COCO_YEARS = ("2017", "2014")
log = logging.getLogger(__name__)


class CocoFolder(Dataset):
    """One split of a data folder, images by index with their boxes.

    The folder holds `train/`, `val/`, `train.json` and `val.json`, or COCO's own `train2017/` and
    `annotations/instances_train2017.json` (2014 too). Images without boxes are kept; crowds (iscrowd) count only in
    the metric. Boxes are clipped to their image. Those that cover less than a pixel of it are left out of training and
    of the metric, and a line says how many. (torchvision's CocoDetection would read the JSON once more, and its errors
    would not say where the JSON is damaged.)

    Attributes:
        name: the path of the JSON.
        images: the JSON's entries (id, file_name, width, height in pixels), in its order.
        categories: the JSON's entries, in the order of their ids, which may have gaps; classes, category_ids: their
            names and ids. A box's label is its category's place in these lists, 0 to C-1.
        annotations: by image: image_id, category_id, bbox (x, y, width, height), area, iscrowd.

    Raises:
        UsageError: no such files, damaged JSON, images that are listed but missing, or no visible box.
    """

    def __init__(self, root: str | Path, split: str):
        self.folder, self.json = find_coco(root, split)
        self.name = str(self.json)
        content = read_coco(self.json)
        self.images = content["images"]
        self._bytes = self._sizes_of_files()
        self.categories = sorted(content["categories"], key=lambda category: category["id"])
        self.category_ids = [category["id"] for category in self.categories]
        self.classes = [category["name"] for category in self.categories]
        self.annotations = self._by_image(content["annotations"])

    def _sizes_of_files(self) -> list[int]:
        """Return the bytes of each image's file."""
        missing = []
        sizes = []
        for image in self.images:
            path = self.folder / image["file_name"]
            if os.path.isfile(path):
                sizes.append(path.stat().st_size)
            else:
                missing.append(ascii(image["file_name"]))
        if missing:
            raise UsageError(
                f"{len(missing)} of the {len(self.images)} images of {self.json} are not in "
                f"{self.folder}: {', '.join(missing[:3])}"
            )
        return sizes

    def _by_image(self, rows: list[dict]) -> list[list[dict]]:
        """Return the annotations of each image, without invisible boxes, which are logged."""
        images = {image["id"]: image for image in self.images}
        kept: dict[int, list[dict]] = {number: [] for number in images}
        objects = lost = 0
        first = ""
        for row in rows:
            image = images[row["image_id"]]
            bbox = row["bbox"]
            if not row.get("iscrowd", 0):
                objects += 1
                bbox = cut_at_border(bbox, image)
                # SanitizeBoundingBoxes of torchvision requires the same of training images
                if min(bbox[2:]) < 1:
                    lost += 1
                    first = first or f"{row['bbox']} of {image['file_name']}"
                    continue
            area = bbox[2] * bbox[3]
            kept[image["id"]].append({"area": area, "iscrowd": 0, **row, "bbox": bbox})
        if not objects:
            raise UsageError(
                f"{len(self)} images of {self.json} must have at least one box that is not a crowd, got none"
            )
        if lost == objects:
            raise UsageError(
                f"boxes of {self.json} must be x, y, width, height in pixels, got {lost} boxes and "
                f"none is visible in its image, such as {first}: fractions of the image are not pixels"
            )
        if lost:
            log.warning(
                f"{self.json}: {lost} of {objects} boxes are left out of training and evaluation, since less "
                f"than a pixel across or down lies in their image; the first: {first}"
            )
        return list(kept.values())

    def __len__(self) -> int:
        return len(self.images)

    def describe(self, index: int) -> str:
        """Return the path of an image."""
        return str(self.folder / self.images[index]["file_name"])

    def __getitem__(self, index: int) -> tuple[Any, dict]:
        """Return (image, target).

        The image is uint8 (3, H, W). The target has boxes: float32 (n, 4), x1 y1 x2 y2 in pixels, n may be 0; labels:
        int64 (n,), 0 to C-1; image_id: the JSON's; size: (H, W) of the image in its file.

        Raises:
            BrokenImage: it cannot be decoded, or its size is not the JSON's.
        """
        about = self.images[index]
        image = decode_image(self.describe(index))
        if image.size != (about["width"], about["height"]):
            raise BrokenImage(
                f"it has {image.width}x{image.height} pixels, {self.json.name} says "
                f"{about['width']}x{about['height']}"
            )
        rows = [row for row in self.annotations[index] if not row["iscrowd"]]
        sides = torch.tensor([row["bbox"] for row in rows], dtype=torch.float32).reshape(-1, 4)
        labels = [self.category_ids.index(row["category_id"]) for row in rows]
        size = (image.height, image.width)
        boxes = box_convert(sides, "xywh", "xyxy")
        return tv_tensors.Image(image), {
            "boxes": tv_tensors.BoundingBoxes(boxes, format="XYXY", canvas_size=size),
            "labels": torch.tensor(labels, dtype=torch.int64),
            "image_id": about["id"],
            "size": size,
        }

    def ground_truth(self, indices: Sequence[int] | None = None) -> dict:
        """Return the content of a COCO JSON for the images of these indices (None: all), for the metric."""
        if indices is None:
            indices = range(len(self))
        annotations = []
        for index in indices:
            for row in self.annotations[index]:
                annotations.append({**row, "id": len(annotations) + 1})
        return {
            "images": [self.images[index] for index in indices],
            "categories": self.categories,
            "annotations": annotations,
        }

    def fingerprint(self) -> str:
        """Return SHA-256 over classes, boxes, and the names and sizes of the images: the same on any disk."""
        content = json.dumps([self.ground_truth(), self._bytes], sort_keys=True)
        return hashlib.sha256(content.encode()).hexdigest()


def cut_at_border(bbox: Sequence[float], image: Mapping[str, int]) -> Sequence[float]:
    """Clip a box (x, y, width, height) to its image: a detector cannot find the rest."""
    x, y, width, height = bbox
    inside = x >= 0 and y >= 0 and x + width <= image["width"] and y + height <= image["height"]
    if inside:
        return bbox
    left = max(x, 0)
    top = max(y, 0)
    right = min(x + width, image["width"])
    bottom = min(y + height, image["height"])
    return [left, top, right - left, bottom - top]


def results_of(
    image_id: int | str, detected: Mapping[str, Tensor], category_ids: Sequence[int]
) -> list[dict]:
    """Return COCO's results of an image: image_id, category_id, bbox (x, y, width, height) in pixels, score.

    Args:
        detected: boxes (n, 4) x1 y1 x2 y2, scores (n,), labels (n,) from 0.
        category_ids: of the labels.
    """
    boxes = box_convert(detected["boxes"].detach().cpu().double(), "xyxy", "xywh").tolist()
    scores = detected["scores"].tolist()
    labels = detected["labels"].tolist()
    rows = []
    for box, score, label in zip(boxes, scores, labels, strict=True):
        row = {
            "image_id": image_id,
            "category_id": category_ids[label],
            "bbox": [round(side, 3) for side in box],
            "score": round(score, 6),
        }
        rows.append(row)
    return rows


def find_coco(root: str | Path, split: str) -> tuple[Path, Path]:
    """Return (folder of images, JSON) of a split; see `CocoFolder`.

    Raises:
        UsageError: they do not exist.
    """
    if not root:
        raise UsageError(
            "no images: --data-dir is required, a folder with train/, val/, train.json and val.json"
        )
    root = Path(root)
    places = [(root / split, root / f"{split}.json")]
    for year in COCO_YEARS:
        json_file = root / "annotations" / f"instances_{split}{year}.json"
        places.append((root / f"{split}{year}", json_file))
    for folder, file in places:
        if folder.is_dir() and file.is_file():
            return folder, file
    missing = "" if root.is_dir() else "; it does not exist"
    raise UsageError(
        f"data folder {root} must have {split}/ with images and {split}.json, or COCO's own {split}2017/ "
        f"and annotations/instances_{split}2017.json{missing}"
    )
