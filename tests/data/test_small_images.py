"""Reading small images: folders and tars alike, digits, torchvision's files; bad data is named before training."""

import shutil
from functools import partial

import numpy as np
import pytest
import torch
from PIL import Image
from torchvision import datasets

from ea_vision.data.decoding import BrokenImage
from ea_vision.data.scaling import Scaling
from ea_vision.data.small_images import hold_out, load_dataset
from tests.data.photos import make_folder, pack
from tests.refused import refused

load = partial(load_dataset, "folder")


@pytest.fixture
def folder(tmp_path):
    return make_folder(tmp_path / "data", train=12, test=6)


def replace_by_tar(split, tar):
    pack(split, tar)
    shutil.rmtree(split)


def test_folders_and_tars(folder):
    data = load(folder)
    assert data.classes == ["class_0", "class_1", "class_2"]
    assert data.train.images.shape == (12, 3, 32, 32)
    assert data.train.images.dtype == torch.uint8
    counts = data.train.targets.bincount()
    assert counts.tolist() == [4, 4, 4]
    assert len(data.test) == 6
    for pixels, target, name in zip(
        data.train.images, data.train.targets, data.train.names, strict=True
    ):
        assert f"class_{target}" in name
        assert np.array_equal(Image.open(name), pixels.permute(1, 2, 0))
    replace_by_tar(folder / "train", folder / "train.tar")
    replace_by_tar(folder / "test", folder / "val.tar")
    assert load(folder).fingerprint() == data.fingerprint()


def test_images_too_narrow_to_be_scaled_are_named(folder):
    """Scaled by its short side this one would have 102 megapixels."""
    path = folder / "train" / "class_0" / "narrow.png"
    Image.new("L", (1, 100_000)).save(path)
    with refused(r"narrow.png \(must have at most 100 megapixels once its short side has 32 pix"):
        load(folder)
    scaling = Scaling.cropped(224, 256)
    with refused("got 2x4000", BrokenImage):
        scaling.pixels(Image.new("RGB", (2, 4000)))
    assert scaling.pixels(Image.new("RGB", (2, 400))).shape == (224, 224, 3)


def test_broken_images_are_named(folder):
    path = folder / "train" / "class_1" / "001.png"
    content = path.read_bytes()
    path.write_bytes(content[: len(content) // 2])
    (folder / "train" / "class_2" / "002.png").write_text("not an image", encoding="utf-8")
    for source in ("train/", "train.tar/"):
        with refused(f"2 of 12 images cannot be decoded: .*{source}class_1/001.*class_2/002"):
            load(folder)
        if source == "train/":
            replace_by_tar(folder / "train", folder / "train.tar")


def test_bad_folders_are_named(folder):
    (folder / "test" / "class_2").rename(folder / "test" / "class_x")
    with refused("must have the same classes; they differ in class_2, class_x"):
        load(folder)
    with refused("needs --data-dir"):
        load("")


def test_digits():
    data = load_dataset("digits")
    assert len(data.train) + len(data.test) == 1797
    assert data.train.images.shape[1:] == (3, 32, 32)
    assert data.train.images.max() == 255
    assert data.train.images.min() == 0
    assert not set(data.train.names) & set(data.test.names)
    train = data.train.targets.bincount()
    test = data.test.targets.bincount()
    share = test / (test + train)
    assert (share - 0.2).abs().max() < 0.01, "every class is split alike"
    assert data.fingerprint() == load_dataset("digits").fingerprint()


def test_hold_out_is_decided_by_the_seed():
    train = load_dataset("digits", scaling=Scaling.filled(8)).train
    kept, held_out = hold_out(train, 100, 3)
    _, again = hold_out(train, 100, 3)
    _, other = hold_out(train, 100, 4)
    assert len(held_out) == 100
    assert sorted(kept.names + held_out.names) == sorted(train.names)
    assert again.names == held_out.names != other.names
    assert torch.equal(again.images, held_out.images)
    for count in (0, len(train)):
        with refused("holdout must lie between"):
            hold_out(train, count, seed=0)


@pytest.mark.parametrize("name", ["cifar10", "cifar100"])
def test_torchvisions_files(tmp_path, monkeypatch, name):
    """The loaded images are those that torchvision reads; if it finds nothing, that is one clear error."""
    with refused(f"{name} cannot be read from {tmp_path}.*--download"):
        load_dataset(name, str(tmp_path))
    pixels = np.random.default_rng(0).integers(0, 256, (2, 4, 32, 32, 3), dtype=np.uint8)

    def read(self, root, train, download):
        self.data = pixels[int(train)]
        self.targets = [0, 1, 2, 3]
        self.classes = [name]

    monkeypatch.setattr(getattr(datasets, name.upper()), "__init__", read)
    data = load_dataset(name, str(tmp_path))
    for split, images in zip((data.test, data.train), pixels, strict=True):
        assert np.array_equal(split.images.permute(0, 2, 3, 1), images)
        assert split.targets.tolist() == [0, 1, 2, 3]
    assert data.classes == [name]
