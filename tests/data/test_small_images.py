"""Reading small images: folders and tars alike, digits, torchvision's files; bad data is named before training."""
from __future__ import annotations

import hashlib
import pickle
import shutil
import tarfile

import numpy as np
import pytest
import torch
from PIL import Image

from ea_vision.base.errors import UsageError
from ea_vision.data.small_images import decode_split, hold_out, load_dataset
from tests.engine.runner import make_folder


@pytest.fixture
def folder(tmp_path):
    return make_folder(tmp_path / "data", train=12, test=6)


def load(folder, **kwargs):
    return load_dataset("folder", str(folder), **kwargs)


def pack(folder, split):
    with tarfile.open(folder / f"{split}.tar", "w") as tar:
        for path in sorted((folder / split).rglob("*.png"), reverse=True):
            tar.add(path, path.relative_to(folder / split))


def test_folders(folder):
    data = load(folder)
    assert data.classes == ["class_0", "class_1", "class_2"]
    assert data.train.images.shape == (12, 3, 32, 32) and data.train.images.dtype == torch.uint8
    assert data.train.targets.bincount().tolist() == [4, 4, 4] and len(data.test) == 6
    for pixels, target, name in zip(data.train.images, data.train.targets, data.train.names, strict=True):
        assert f"class_{target}" in name
        assert np.array_equal(np.asarray(Image.open(name)), pixels.permute(1, 2, 0).numpy())


def test_tars_are_read_like_folders(folder, tmp_path):
    tars = tmp_path / "tars"
    make_folder(tars, train=12, test=6)
    for split in ("train", "test"):
        pack(tars, split)
    shutil.rmtree(tars / "train")
    (tars / "test").rename(tars / "unused")
    (tars / "test.tar").rename(tars / "val.tar")
    assert load(tars).fingerprint() == load(folder).fingerprint()


def test_trial_data_is_read_as_timm_reads_it(shared):
    from timm.data import create_dataset

    source = shared / "data" / "cifar10" / "test.tar"
    if not source.exists():
        pytest.skip(f"needs {source}")
    ours, classes = decode_split(source, 32, 2)
    theirs = create_dataset("", root=str(source))
    assert len(ours) == len(theirs) == 10_000 and len(classes) == 10
    by_name = {name.removeprefix(f"{source}/"): i for i, name in enumerate(ours.names)}
    for index in range(0, 10_000, 997):
        image, target = theirs[index]
        mine = by_name[theirs.filename(index)]
        assert ours.targets[mine] == target
        assert np.array_equal(np.asarray(image), ours.images[mine].permute(1, 2, 0).numpy())


def test_other_sizes_are_scaled_by_the_short_side_and_cut(folder):
    wide = Image.new("RGB", (64, 32), "red")
    wide.paste("blue", (16, 0, 48, 32))
    wide.save(folder / "train" / "class_0" / "wide.png")
    data = load(folder)
    pixels = data.train.images[next(i for i, n in enumerate(data.train.names) if n.endswith("wide.png"))]
    assert (pixels[2] == 255).all() and (pixels[0] == 0).all(), "the middle 32 x 32"
    assert load(folder, img_size=16).train.images.shape[-2:] == (16, 16)


def test_broken_images_are_named(folder):
    whole = (folder / "train" / "class_1" / "001.png").read_bytes()
    (folder / "train" / "class_1" / "001.png").write_bytes(whole[:len(whole) // 2])
    (folder / "train" / "class_2" / "002.png").write_text("not an image")
    with pytest.raises(UsageError, match="2 of 12 images cannot be decoded") as error:
        load(folder)
    assert "class_1/001.png" in str(error.value) and "class_2/002.png" in str(error.value)
    pack(folder, "train")
    shutil.rmtree(folder / "train")
    with pytest.raises(UsageError, match="train.tar/class_1/001.png"):
        load(folder)


def test_bad_folders_are_named(folder, tmp_path):
    with pytest.raises(UsageError, match="nowhere must have train/ or train.tar; it does not exist"):
        load(tmp_path / "nowhere")
    with pytest.raises(UsageError, match="needs --data-dir"):
        load("")
    (folder / "test" / "class_2").rename(folder / "test" / "class_x")
    with pytest.raises(UsageError, match="must have the same classes; they differ in class_2, class_x"):
        load(folder)
    empty = tmp_path / "empty"
    (empty / "train").mkdir(parents=True)
    (empty / "test.tar").write_bytes(b"not a tar")
    with pytest.raises(UsageError, match="has no images"):
        load(empty)
    with pytest.raises(UsageError, match="is not a readable tar"):
        decode_split(empty / "test.tar", 32, 1)


def test_digits():
    data = load_dataset("digits")
    assert len(data.train) + len(data.test) == 1797 and data.train.images.shape[1:] == (3, 32, 32)
    assert data.train.images.max() == 255 and data.train.images.min() == 0
    assert not set(data.train.names) & set(data.test.names)
    shares = data.test.targets.bincount() / (data.test.targets.bincount() + data.train.targets.bincount())
    assert ((shares - 0.2).abs() < 0.01).all(), "every class is split alike"
    assert data.fingerprint() == load_dataset("digits").fingerprint()


def test_hold_out_is_decided_by_the_seed():
    train = load_dataset("digits").train
    kept, held_out = hold_out(train, 100, seed=3)
    assert len(held_out) == 100 and len(kept) == len(train) - 100
    assert sorted(kept.names + held_out.names) == sorted(train.names)
    again, other = hold_out(train, 100, seed=3)[1], hold_out(train, 100, seed=4)[1]
    assert again.names == held_out.names != other.names
    assert torch.equal(again.images, held_out.images)
    for count in (0, len(train)):
        with pytest.raises(UsageError, match="holdout must lie between"):
            hold_out(train, count, seed=0)


@pytest.mark.parametrize("name, coarse", [("cifar10", False), ("cifar100", True)])
def test_torchvisions_files(tmp_path, monkeypatch, name, coarse):
    """Files in torchvision's layout, a few images each; its checksums are set to theirs."""
    from torchvision import datasets

    kind = {"cifar10": datasets.CIFAR10, "cifar100": datasets.CIFAR100}[name]
    rng = np.random.default_rng(0)
    root = tmp_path / kind.base_folder
    root.mkdir()
    label_key = "fine_labels" if coarse else "labels"
    written = {}
    for attribute in ("train_list", "test_list"):
        entries = []
        for file_name, _ in getattr(kind, attribute):
            pixels = rng.integers(0, 256, (4, 3072), dtype=np.uint8)
            content = pickle.dumps({"data": pixels, label_key: [0, 1, 2, 3]})
            (root / file_name).write_bytes(content)
            written.setdefault(attribute, []).append(pixels)
            entries.append([file_name, hashlib.md5(content).hexdigest()])
        monkeypatch.setattr(kind, attribute, entries)
    meta = pickle.dumps({kind.meta["key"]: [f"class {i}" for i in range(100 if coarse else 10)]})
    (root / kind.meta["filename"]).write_bytes(meta)
    monkeypatch.setattr(kind, "meta", {**kind.meta, "md5": hashlib.md5(meta).hexdigest()})

    data = load_dataset(name, str(tmp_path))
    wanted = np.concatenate(written["train_list"]).reshape(-1, 3, 32, 32)
    assert np.array_equal(data.train.images.numpy(), wanted) and len(data.test) == 4
    assert data.classes[1] == "class 1" and data.test.targets.tolist() == [0, 1, 2, 3]


@pytest.mark.parametrize("name", ["cifar10", "cifar100"])
def test_missing_torchvision_files_are_one_clear_error(tmp_path, name):
    with pytest.raises(UsageError, match=f"{name} cannot be read from {tmp_path}.*--download"):
        load_dataset(name, str(tmp_path))
