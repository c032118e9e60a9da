"""JPEG files decoded by torchvision in threads: Pillow's pixels, timm's crops, and whatever else lies in a folder."""
from __future__ import annotations

import random

import numpy as np
import pytest
import torch
from PIL import Image
from timm.data.transforms import RandomResizedCropAndInterpolation
from torchvision.transforms import InterpolationMode
from torchvision.transforms.v2 import functional as F

from ea_vision.base.errors import UsageError
from ea_vision.data.bad_images import BadImages
from ea_vision.data.imagenet import ImageSource
from ea_vision.data.threads import TRIES, FileTrainLoader, crop_box
from tests.data.photos import make_photos

COMMON = {"img_size": 32, "mean": (0.5,) * 3, "std": (0.2,) * 3, "device": torch.device("cpu"), "seed": 1,
          "scale": (0.3, 1), "hflip": 0.5}


def loader(source, batch_size: int = 8, workers: int = 2, **more) -> FileTrainLoader:
    return FileTrainLoader(source, batch_size=batch_size, workers=workers,
                           **{"bad_images": BadImages(0), **COMMON, **more})


@pytest.fixture(scope="module")
def photos(tmp_path_factory):
    return make_photos(tmp_path_factory.mktemp("photos"), side=70)


def test_pixels_are_pillows(photos):
    source = ImageSource("", photos / "train", "train")
    reads = loader(source)
    for index in range(0, 40, 7):
        found, wanted = reads.read(index).permute(1, 2, 0).numpy(), np.asarray(source.read(index)[0])
        assert np.abs(found.astype(int) - wanted).max() <= 1, index


@pytest.mark.parametrize("interpolation", ["bilinear", "bicubic"])
def test_crops_are_pillows(photos, interpolation):
    source = ImageSource("", photos / "train", "train")
    fills, box, out = loader(source, interpolation=interpolation), np.full(2 * TRIES + 2, 0.4), np.zeros((3, 32, 32))
    for index in range(3):
        fills.fill(index, box, out)
        image, _ = source.read(index)
        top, left, height, width = crop_box(image.height, image.width, box.tolist(), (0.3, 1))
        wanted = F.resized_crop(image, top, left, height, width, [32, 32], InterpolationMode(interpolation))
        assert np.abs(out.transpose(1, 2, 0) - np.asarray(wanted)).mean() < 1.0


def test_crops_are_drawn_as_timms():
    draws, area, shape = np.random.default_rng(0), [], []
    for _ in range(4000):
        top, left, height, width = crop_box(300, 400, draws.random(2 * TRIES + 2).tolist(), (0.08, 1))
        assert 0 <= top <= 300 - height and 0 <= left <= 400 - width and height > 0 and width > 0
        area.append(height * width / 120000)
        shape.append(width / height)
    random.seed(0)
    image = Image.new("RGB", (400, 300))
    timms = [RandomResizedCropAndInterpolation.get_params(image, (0.08, 1), (3 / 4, 4 / 3)) for _ in range(4000)]
    assert np.mean(area) == pytest.approx(np.mean([h * w / 120000 for _, _, h, w in timms]), abs=0.02)
    assert np.std(area) == pytest.approx(np.std([h * w / 120000 for _, _, h, w in timms]), abs=0.02)
    assert np.mean(shape) == pytest.approx(np.mean([w / h for _, _, h, w in timms]), abs=0.02)
    assert crop_box(10, 1000, [0.99] * (2 * TRIES + 2), (0.9, 1)) == (0, 493, 10, 13), "no try fits: the middle"


def test_other_files_go_to_pillow_and_unreadable_ones_are_named(tmp_path):
    pixels = np.tile(np.arange(0, 240, 4, dtype=np.uint8)[None, :, None], (40, 1, 3))
    image = Image.fromarray(pixels)
    folder = tmp_path / "a"
    folder.mkdir()
    image.save(folder / "plain.jpg", quality=95)
    image.convert("L").save(folder / "grey.jpg", quality=95)
    image.convert("CMYK").save(folder / "cmyk.jpg", quality=95)
    image.save(folder / "png.jpg", format="PNG")
    image.convert("RGBA").save(folder / "rgba.png")
    Image.fromarray(pixels[..., 0].astype(np.uint16) * 256).save(folder / "sixteen.png")
    exif = Image.Exif()
    exif[0x0112] = 6  # turned by a quarter
    image.save(folder / "turned.jpg", quality=95, exif=exif)
    source = ImageSource("", tmp_path, "train")
    reads = loader(source, batch_size=7)
    for index in range(7):
        found = reads.read(index).permute(1, 2, 0).numpy()
        assert found.shape == (40, 60, 3) and np.abs(found.astype(int) - pixels).max() <= 3, source.describe(index)
    turned = ImageSource("", tmp_path, "train", exif_rotation=True)
    shapes = [tuple(loader(turned).read(index).shape[1:]) for index in range(7)]
    assert sorted(shapes) == [(40, 60)] * 6 + [(60, 40)]

    whole = (folder / "plain.jpg").read_bytes()
    (folder / "half.jpg").write_bytes(whole[:len(whole) // 2])
    (folder / "text.jpg").write_text("no image")
    bad = BadImages(5)
    batch, = loader(ImageSource("", tmp_path, "train"), batch_size=9, bad_images=bad).batches(0)
    assert sorted(path.rsplit("/")[-1] for path in bad.new) == ["half.jpg", "text.jpg"]
    assert len(set(batch.ids.tolist())) == 7


def test_what_threads_finish_is_what_a_device_would(photos):
    """Flipped and normalised image by image, or in batches: the same to the bit."""
    source = ImageSource("", photos / "train", "train")
    finished, in_bytes = loader(source), loader(source)
    in_bytes.in_bytes = True
    for first, second in zip(finished.batches(1), in_bytes.batches(1), strict=True):
        assert torch.equal(first.images, second.images) and torch.equal(first.ids, second.ids)


def test_the_number_of_threads_changes_nothing(photos):
    source = ImageSource("", photos / "train", "train")
    ways = [[batch for batch in loader(source, workers=workers).batches(2)] for workers in (0, 1, 3)]
    assert len(ways[0]) == 5
    for batches in zip(*ways, strict=True):
        assert all(torch.equal(batches[0].images, other.images) for other in batches[1:])


def test_what_timm_reads_is_refused(tmp_path):
    make_photos(tmp_path)
    with pytest.raises(UsageError, match="threads decode files of a folder or tar, got torch/image_folder train"):
        loader(ImageSource("torch/image_folder", tmp_path, "train"))
