"""Small photos to train on: colours in noise."""

import io
import subprocess
import tarfile

import numpy as np
from PIL import Image

from ea_vision.data.image_files import ImageFiles


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
    """Pack the content of a folder in the order of names, with options by GNU tar; return the tar."""
    if options:
        command = ["tar", "-c", "--sort=name", *options, "-f", tar, "-C", folder, "."]
        subprocess.run(command, check=True)
    else:
        with tarfile.open(tar, "w", format=tarfile.USTAR_FORMAT) as archive:
            archive.add(folder, ".")
    return tar


def without_end_mark(content):
    """Return a tar's bytes up to the end of its last file."""
    used = content.rstrip(b"\0")
    return used + bytes(-len(used) % 512)


def same(folder, tar):
    """Assert that the folder and its tar have the same images."""
    files = ImageFiles(folder)
    packed = ImageFiles(tar)
    assert packed.names == files.names
    assert packed.classes == files.classes
    for index in range(len(files)):
        assert packed.read(index) == files.read(index)


def make_classes(root, counts, classes, suffix, noise):
    """Write root/SPLIT/class_i/NUMBER of noise(rng, number), an array (H, W, 3), with more of the class's colour."""
    rng = np.random.default_rng(0)
    for split, count in counts.items():
        for index in range(count):
            label = index % classes
            pixels = noise(rng, index)
            pixels[..., label % 3] += 100
            path = root / split / f"class_{label}" / f"{index:03d}{suffix}"
            path.parent.mkdir(parents=True, exist_ok=True)
            Image.fromarray(pixels).save(path, quality=95)
    return root


def make_photos(root, train=40, val=13, classes=3, side=40, **more):
    """Write root/{train,val}/class_i/name.jpg of various shapes, the shorter side `side` pixels; more: other splits."""

    def noise(rng, index):
        size = (side + 3 * (index % 4), side) if index % 2 else (side, side + 5)
        small = Image.fromarray(rng.integers(0, 120, (6, 6, 3), dtype=np.uint8))
        return np.array(small.resize(size, Image.Resampling.BICUBIC))

    return make_classes(root, {"train": train, "val": val, **more}, classes, ".jpg", noise)


def make_folder(root, train=40, test=13, classes=3, side=32):
    """Write square images: root/{train,test}/class_i/name.png."""

    def noise(rng, _):
        return rng.integers(0, 120, (side, side, 3), dtype=np.uint8)

    return make_classes(root, {"train": train, "test": test}, classes, ".png", noise)
