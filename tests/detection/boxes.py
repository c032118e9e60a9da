"""A made data set: discs, squares and triangles with exact boxes on drawn grounds, as folders and COCO JSON."""
from __future__ import annotations

import json
from pathlib import Path

import numpy as np
from PIL import Image, ImageDraw

SHAPES = ("disc", "square", "triangle")


def shape(name: str, side: int, rng: np.random.Generator) -> tuple[tuple[int, ...], Image.Image]:
    """Return a colour and a mask of side x side pixels, the shape touching all four borders."""
    color = rng.integers(0, 256, 3)
    color[rng.integers(3)] = 255
    mask = Image.new("L", (side, side), 0 if name != "square" else 255)
    if name == "disc":
        ImageDraw.Draw(mask).ellipse((0, 0, side - 1, side - 1), fill=255)
    elif name == "triangle":
        ImageDraw.Draw(mask).polygon([((side - 1) / 2, 0), (0, side - 1), (side - 1, side - 1)], fill=255)
    return tuple(color.tolist()), mask


def picture(side: int, sizes: tuple[int, int], most: int, rng: np.random.Generator,
            ) -> tuple[Image.Image, list[tuple[int, list[int]]]]:
    """Return an image, and of each of its 1 to `most` objects the label and [x, y, width, height]; none overlap."""
    ground = Image.fromarray(rng.integers(0, 160, (4, 4, 3), dtype=np.uint8)).resize((side, side))
    objects: list[tuple[int, list[int]]] = []
    for _ in range(rng.integers(1, most + 1)):
        label, size = int(rng.integers(3)), int(rng.integers(sizes[0], sizes[1] + 1))
        for x, y in rng.integers(0, side - size + 1, (40, 2)).tolist():
            if all(x + size <= left or left + width <= x or y + size <= top or top + height <= y
                   for _, (left, top, width, height) in objects):
                color, mask = shape(SHAPES[label], size, rng)
                ground.paste(color, (x, y, x + size, y + size), mask)
                objects.append((label, [x, y, size, size]))
                break
    return ground, objects


def make_boxes(out: Path, img_size: int = 64, sizes: tuple[int, int] = (16, 32), most: int = 3, train: int = 1,
               val: int = 1, category_ids: tuple[int, int, int] = (1, 2, 3), empty: int | None = None) -> None:
    """Write `out`/{train,val}/ and {train,val}.json. The image at place `empty` of each split has no annotation."""
    for number, (split, count) in enumerate((("train", train), ("val", val))):
        (out / split).mkdir(parents=True)
        rng = np.random.default_rng(number)
        images, annotations = [], []
        for index in range(count):
            image, objects = picture(img_size, sizes, most, rng)
            image.save(out / split / f"{index}.png")
            images.append({"id": index + 1, "file_name": f"{index}.png", "width": img_size, "height": img_size})
            annotations += [{"id": len(annotations) + n, "image_id": index + 1, "category_id": category_ids[label],
                             "bbox": box, "area": box[2] * box[3], "iscrowd": 0}
                            for n, (label, box) in enumerate(objects, start=1) if index != empty]
        categories = [{"id": number, "name": name} for number, name in zip(category_ids, SHAPES, strict=True)]
        (out / f"{split}.json").write_text(json.dumps({"images": images, "annotations": annotations,
                                                       "categories": categories}))
