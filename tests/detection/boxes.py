"""A made data set: rectangles of three colours on noise, with exact boxes, as folders and COCO JSON."""
from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import torch
from PIL import Image

from ea_vision.data.bad_images import BadImages

NAMES = ("red", "green", "blue")


def make_boxes(out: Path, img_size: int = 64, sizes: tuple[int, int] = (16, 32), most: int = 3, train: int = 1,
               val: int = 1, category_ids: tuple[int, int, int] = (1, 2, 3), empty: int | None = None) -> None:
    """Write `out`/{train,val}/ and {train,val}.json, each image with 1 to `most` rectangles of sides `sizes` in
    quarters of their own. The image at place `empty` of each split has no annotation."""
    for seed, (split, count) in enumerate((("train", train), ("val", val))):
        (out / split).mkdir(parents=True)
        rng, half = np.random.default_rng(seed), img_size // 2
        images, annotations = [], []
        for index in range(count):
            pixels = rng.integers(0, 120, (img_size, img_size, 3), dtype=np.uint8)
            for quarter in rng.permutation(4)[:rng.integers(1, most + 1)]:
                label, (width, height) = int(rng.integers(3)), rng.integers(sizes[0], sizes[1] + 1, 2).clip(max=half)
                x, y = quarter % 2 * half + rng.integers(half - width + 1), quarter // 2 * half + rng.integers(
                    half - height + 1)
                pixels[y:y + height, x:x + width, label] = 255
                if index != empty:
                    annotations.append({"id": len(annotations), "image_id": index + 1, "area": int(width * height),
                                        "category_id": category_ids[label], "iscrowd": 0,
                                        "bbox": [int(side) for side in (x, y, width, height)]})
            Image.fromarray(pixels).save(out / split / f"{index}.png")
            images.append({"id": index + 1, "file_name": f"{index}.png", "width": img_size, "height": img_size})
        categories = [{"id": number, "name": name} for number, name in zip(category_ids, NAMES, strict=True)]
        (out / f"{split}.json").write_text(json.dumps({"images": images, "annotations": annotations,
                                                       "categories": categories}))


def box_loader(kind: type, source, transform, img_size: int = 32, **options):
    """Return a loader, in batches of three, on a CPU."""
    return kind(source, transform=transform, **{
        "img_size": img_size, "mean": (0, 0, 0), "std": (1, 1, 1), "device": torch.device("cpu"), "batch_size": 3,
        "workers": 0, "bad_images": BadImages(9), **options})
