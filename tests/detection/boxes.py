"""A synthetic data set: rectangles of three colours on noise, with exact boxes, as folders and COCO JSON."""

import json

import numpy as np
import torch
from PIL import Image

from ea_vision.data.bad_images import BadImages

CATEGORIES = [{"id": 3, "name": "red"}, {"id": 7, "name": "green"}, {"id": 90, "name": "blue"}]


def make_boxes(out, train=1, val=1, empty=None):
    """Write `out`/{train,val}/ and {train,val}.json. Each image of 64 pixels has a rectangle of 16 to 32 pixels per
    side in its left half, or one in each half. The image at place `empty` of each split has no annotation."""
    for split, count in (("train", train), ("val", val)):
        (out / split).mkdir(parents=True)
        rng = np.random.default_rng(count)
        images = []
        annotations = []
        for index in range(count):
            pixels = rng.integers(0, 120, (64, 64, 3), dtype=np.uint8)
            for left in (0, 32)[: rng.integers(1, 3)]:
                label, width, height = rng.integers((0, 16, 16), (3, 33, 33)).tolist()
                x, y = (rng.integers((33 - width, 65 - height)) + (left, 0)).tolist()
                pixels[y : y + height, x : x + width, label] = 255
                row = {"image_id": index + 1, "category_id": CATEGORIES[label]["id"]}
                if index != empty:
                    annotations.append({**row, "bbox": [x, y, width, height]})
            Image.fromarray(pixels).save(out / split / f"{index}.png")
            images.append({"id": index + 1, "file_name": f"{index}.png", "width": 64, "height": 64})
        content = {"images": images, "annotations": annotations, "categories": CATEGORIES}
        (out / f"{split}.json").write_text(json.dumps(content))


def box_loader(kind, source, transform, img_size=32, workers=0):
    """Return a loader, in batches of three, on a CPU."""
    return kind(
        source,
        transform=transform,
        img_size=img_size,
        mean=(0, 0, 0),
        std=(1, 1, 1),
        device=torch.device("cpu"),
        batch_size=3,
        workers=workers,
        bad_images=BadImages(9),
    )
