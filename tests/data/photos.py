"""Small JPEG photos to train on: colours in noise."""

import io
import subprocess

import numpy as np
from PIL import Image


def picture(seed, size=(120, 90)):
    """Return a smooth image of (width, height) with blobs of colour."""
    small = np.random.default_rng(seed).integers(0, 256, (5, 6, 3), dtype=np.uint8)
    return Image.fromarray(small).resize(size, Image.Resampling.BICUBIC)


def grey_jpeg(level, size=(12, 10)):
    """Return the bytes of a JPEG of one grey."""
    file = io.BytesIO()
    Image.new("RGB", size, (level, level, level)).save(file, "JPEG")
    return file.getvalue()


def pack(folder, tar, *options):
    """Pack the content of a folder by GNU tar, in the order of names; return the tar."""
    subprocess.run(["tar", "-c", "--sort=name", *options, "-f", tar, "-C", folder, "."], check=True)
    return tar


def make_photos(root, train=40, val=13, classes=3, side=40):
    """Write root/{train,val}/class_i/name.jpg of various shapes, the shorter side `side` pixels."""
    rng = np.random.default_rng(0)
    for split, count in (("train", train), ("val", val)):
        for index in range(count):
            label = index % classes
            size = (side + 3 * (index % 4), side) if index % 2 else (side, side + 5)
            path = root / split / f"class_{label}" / f"{index:03d}.jpg"
            path.parent.mkdir(parents=True, exist_ok=True)
            noise = Image.fromarray(rng.integers(0, 120, (6, 6, 3), dtype=np.uint8))
            pixels = np.asarray(noise.resize(size, Image.Resampling.BICUBIC)).copy()
            pixels[..., label % 3] += 100
            Image.fromarray(pixels).save(path, quality=95)
    return root
