"""Bad data, a row a fault: the exact message, or the exact count, and what was refused without need is taken."""
from __future__ import annotations

import csv
import importlib.util
import io
import json
import os
import re
import shutil
import struct
import tarfile
import zlib
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image

from ea_vision.base.errors import RunError, UsageError, exit_code
from ea_vision.base.processes import World
from ea_vision.data import image_files, write_ffcv
from ea_vision.data.bad_images import BadImages
from ea_vision.data.ffcv import BetonEvalLoader, BetonTrainLoader, open_beton, sidecar
from ea_vision.data.image_files import BrokenImage, ImageFiles, decode_image
from ea_vision.data.imagenet import ImageEvalLoader, ImageSource, ImageTrainLoader, eval_transform, train_transform
from ea_vision.data.on_disk import on_disk
from ea_vision.data.small_images import load_dataset
from ea_vision.engine import train_cifar, train_imagenet
from tests.data.photos import make_photos

needs_ffcv = pytest.mark.skipif(importlib.util.find_spec("ffcv") is None, reason="needs FFCV: pip install .[ffcv]")
FORM = {"img_size": 16, "mean": (0.5,) * 3, "std": (0.2,) * 3, "device": torch.device("cpu")}
SUFFIXES = ", ".join(image_files.IMAGE_SUFFIXES)


@pytest.fixture
def photos(tmp_path) -> Path:
    """train and val of 12 and 6 images in 3 classes."""
    return make_photos(tmp_path / "photos", train=12, val=6)


def pack(folder: Path, path: Path) -> bytes:
    with tarfile.open(path, "w", format=tarfile.USTAR_FORMAT) as tar:
        tar.add(folder, ".")
    return path.read_bytes()


def narrow_png(width: int, height: int) -> bytes:
    """A grey PNG, a few bytes for many pixels."""
    rows = zlib.compressobj(9)
    data = b"".join(rows.compress(bytes(width + 1)) for _ in range(height)) + rows.flush()

    def chunk(kind: bytes, content: bytes) -> bytes:
        return struct.pack(">I", len(content)) + kind + content + struct.pack(">I", zlib.crc32(kind + content))

    return (b"\x89PNG\r\n\x1a\n" + chunk(b"IHDR", struct.pack(">IIBBBBB", width, height, 8, 0, 0, 0, 0))
            + chunk(b"IDAT", data) + chunk(b"IEND", b""))


# ---- folders and tars: what is refused, word for word ---------------------------------------------------------------

def loop(train: Path) -> None:
    (train / "class_0" / "back").symlink_to(train)


def loop_of_two(train: Path) -> None:
    (train / "class_0" / "there").symlink_to(train / "class_1")
    (train / "class_1" / "back").symlink_to(train / "class_0")


def to_itself(train: Path) -> None:
    (train / "class_0" / "self").symlink_to(train / "class_0" / "self")


def not_utf8(train: Path) -> None:
    os.rename(train / "class_0" / "000.jpg", os.path.join(os.fsencode(train), b"class_0", b"\xff\xe9.jpg"))


def stray(train: Path) -> None:
    shutil.copy(train / "class_0" / "000.jpg", train / "stray.jpg")


def texts(train: Path) -> None:
    for path in train.rglob("*.jpg"):
        path.rename(path.with_suffix(".txt"))


def nothing(train: Path) -> None:
    shutil.rmtree(train)
    train.mkdir()


REFUSED_FOLDERS = {
    loop: "{train}/class_0/back is a link back to {train}, which it lies in",
    loop_of_two: "links of {train} lead in a circle: class_0/there, class_1/back",
    not_utf8: r"file names in {train} must be UTF-8, got b'class_0/\xff\xe9.jpg'",
    stray: "images of {train} must lie in class folders, got stray.jpg",
    texts: f"{{train}} has no images: class/name with a suffix of {SUFFIXES} is required; it has 12 other file(s): "
           "12 of .txt",
    nothing: f"{{train}} has no images: class/name with a suffix of {SUFFIXES} is required; it has no files",
}


@pytest.mark.parametrize("fault", REFUSED_FOLDERS, ids=lambda fault: fault.__name__)
@pytest.mark.parametrize("reader", ["train_imagenet", "train_cifar"])
def test_folders(photos, fault, reader):
    fault(photos / "train")
    with pytest.raises(UsageError) as error:
        if reader == "train_imagenet":
            ImageSource("", photos / "train", "train")
        else:
            load_dataset("folder", str(photos), cache_dir="none")
    assert str(error.value) == REFUSED_FOLDERS[fault].format(train=photos / "train")


FOREIGN = "not a tar at all, but some text " * 40
REFUSED_TARS = {  # what is made of the bytes of a good one, and what is said of it
    "empty": (lambda data: b"", "is not a readable tar: empty file"),
    "foreign": (lambda data: FOREIGN.encode(), "is not a readable tar: invalid header"),
    "cut inside an image": (lambda data: data[:3000], "is not a readable tar: unexpected end of data"),
    "cut inside a header": (lambda data: data[:data.index(b"./class_1") + 100], "the mark of its end is missing"),
    "cut before its end mark": (lambda data: data[:last_member_end(data)], "cut off, the mark of its end is missing"),
    "a damaged header": (lambda data: data.replace(b"./class_1/", b"./klass_1/", 2), "it is damaged at byte "),
    "compressed": (lambda data: b"\x1f\x8b" + data, "it is compressed; its images are read where they lie"),
    "without images": (lambda data: bytes(10240), "has no images: class/name"),
}


def last_member_end(data: bytes) -> int:
    return -(-len(data.rstrip(b"\0")) // 512) * 512


@pytest.mark.parametrize("fault", REFUSED_TARS)
@pytest.mark.parametrize("reader", ["train_imagenet", "train_cifar"])
def test_tars(photos, fault, reader):
    hurt, message = REFUSED_TARS[fault]
    path = photos / "train.tar"
    content = hurt(pack(photos / "train", path))
    path.write_bytes(content)
    shutil.rmtree(photos / "train")
    with pytest.raises(UsageError) as error:
        if reader == "train_imagenet":
            ImageSource("", path, "train")
        else:
            load_dataset("folder", str(photos), cache_dir="none")
    assert str(error.value).startswith(str(path)) and message in str(error.value)


# ---- folders and tars: what is taken, and how many images it has ---------------------------------------------------

def as_they_are(train: Path) -> None:
    pass


def images_folders(train: Path) -> None:
    """class/images/x.jpg, as tiny-imagenet has it."""
    for folder in list(train.iterdir()):
        (folder / "images").mkdir()
        for path in folder.glob("*.jpg"):
            path.rename(folder / "images" / path.name)


def one_folder_around(train: Path) -> None:
    around = train / "train"
    around.mkdir()
    for folder in list(train.glob("class_*")):
        folder.rename(around / folder.name)


def linked_class(train: Path) -> None:
    (train / "class_1").rename(train.parent / "elsewhere")
    (train / "class_1").symlink_to(train.parent / "elsewhere")


def linked_images(train: Path) -> None:
    for number, path in enumerate(sorted((train / "class_2").iterdir())):
        path.rename(train.parent / f"{number}.jpg")
        path.symlink_to(train.parent / f"{number}.jpg")


def linked_twice(train: Path) -> None:
    """Links to folders and files that are there already: each real file once, where it lies."""
    (train / "class_0" / "more").symlink_to(train / "class_1")
    (train / "class_0" / "again.jpg").symlink_to(train / "class_0" / "000.jpg")


def other_files(train: Path) -> None:
    (train / "class_0" / "notes.txt").write_text("no image")
    (train / "README").write_text("none either")
    os.mkfifo(train / "class_0" / "pipe.jpg")


@pytest.mark.parametrize("layout", [as_they_are, images_folders, one_folder_around, linked_class, linked_images,
                                    linked_twice, to_itself, other_files], ids=lambda layout: layout.__name__)
def test_layouts(photos, layout):
    layout(photos / "train")
    source = ImageSource("", photos / "train", "train")
    assert source.classes == ["class_0", "class_1", "class_2"] and len(source) == 12
    for index in range(12):
        number = int(Path(source.describe(index)).stem)
        assert source.read(index)[1] == number % 3
    data = load_dataset("folder", str(photos), cache_dir="none")
    assert data.classes == source.classes and data.train.targets.bincount().tolist() == [4, 4, 4]


def test_a_link_that_leads_nowhere_is_a_bad_image(photos):
    (photos / "train" / "class_0" / "gone.jpg").symlink_to(photos / "nowhere.jpg")
    source, bad = ImageSource("", photos / "train", "train"), BadImages(1)
    loader = ImageEvalLoader(source, transform=eval_transform(16, 20), batch_size=13, workers=0, bad_images=bad, **FORM)
    assert len(source) == 13 and len(next(loader.batches()).ids) == 12
    assert list(bad.new) == [str(photos / "train/class_0/gone.jpg")] and "FileNotFoundError" in str(bad.new)
    with pytest.raises(UsageError, match=r"1 of 13 images cannot be decoded: .*class_0/gone.jpg"):
        load_dataset("folder", str(photos), cache_dir="none")


def test_a_tar_of_tars_has_a_class_in_each(photos, tmp_path):
    """As ILSVRC2012_img_train.tar."""
    with tarfile.open(tmp_path / "train.tar", "w") as outer:
        for number in range(3):
            inner = tmp_path / f"class_{number}.tar"
            with tarfile.open(inner, "w") as tar:
                for path in sorted((photos / "train" / f"class_{number}").iterdir()):
                    tar.add(path, path.name)
            outer.add(inner, inner.name)
    source = ImageSource("", tmp_path / "train.tar", "train")
    assert source.classes == ["class_0", "class_1", "class_2"] and len(source) == 12
    folder = ImageSource("", photos / "train", "train")
    read = {source.describe(index).rpartition("train.tar/")[2]: source.read(index) for index in range(12)}
    for index in range(12):
        image, target = read[folder.describe(index).rpartition("train/")[2]]
        assert target == folder.read(index)[1] and np.array_equal(np.asarray(image), np.asarray(folder.read(index)[0]))


# ---- images ---------------------------------------------------------------------------------------------------------

EPS = b"%!PS-Adobe-3.0 EPSF-3.0\n%%BoundingBox: 0 0 9 9\n%%EndComments\n0 0 9 9 rectfill\nshowpage\n%%EOF\n"


@pytest.mark.parametrize("content, message", [
    (b"", "UnidentifiedImageError: cannot identify image file"),
    (EPS, "UnidentifiedImageError: cannot identify image file"),  # Ghostscript would draw it
    (narrow_png(20_000, 10_000), "must have at most 100 megapixels: Image size (200000000 pixels) exceeds limit"),
    (narrow_png(11_000, 10_000), "must have at most 100 megapixels, got 11000x10000"),
], ids=["empty", "EPS", "200 megapixels", "110 megapixels"])
def test_images(tmp_path, monkeypatch, content, message):
    monkeypatch.setattr("PIL.EpsImagePlugin.Ghostscript", lambda *_: pytest.fail("reached Ghostscript"))
    (tmp_path / "x.jpg").write_bytes(content)
    with pytest.raises(BrokenImage, match=re.escape(message)):
        decode_image(tmp_path / "x.jpg")


def test_an_image_that_would_grow_when_its_short_side_is_scaled_is_a_bad_image(photos):
    (photos / "val" / "class_0" / "narrow.png").write_bytes(narrow_png(1, 400_000))
    source, bad = ImageSource("", photos / "val", "validation"), BadImages(1)
    form = {**FORM, "batch_size": 7, "workers": 0, "bad_images": bad}
    batch, = ImageEvalLoader(source, transform=eval_transform(16, 20), **form).batches()
    assert len(batch.ids) == 6 and bad.new == {str(photos / "val/class_0/narrow.png"): (
        "must have at most 100 megapixels once its short side is 20, got 20x8000000 from 1x400000")}
    batch, = ImageTrainLoader(source, transform=train_transform(16), **form).batches(0)
    assert len(batch.ids) == 7, "a crop of it can be trained on"
    with pytest.raises(UsageError, match="1 of 7 images cannot be decoded: .*narrow.png .must have at most 100 mega"):
        load_dataset("folder", str(photos), cache_dir="none")


def turned(path: Path) -> None:
    """Replace a photo by one that EXIF says lies on its side, wide as it is stored."""
    exif, pixels = Image.Exif(), np.zeros((20, 40, 3), np.uint8)
    exif[0x0112] = 6
    pixels[:, :20, 0] = 255
    Image.fromarray(pixels).save(path, exif=exif, quality=95)


def test_exif_rotation_is_off_unless_asked_for_everywhere(photos):
    turned(photos / "train" / "class_0" / "000.jpg")
    plain, rotated = (ImageSource("", photos / "train", "train", exif_rotation=on) for on in (False, True))
    assert plain.read(0)[0].size == (40, 20) and rotated.read(0)[0].size == (20, 40)
    assert plain.fingerprint() != rotated.fingerprint()
    images = [load_dataset("folder", str(photos), cache_dir=str(photos / "cache"), exif_rotation=on).train.images[0]
              for on in (False, True)]
    assert images[0][0, :, 0].min() > 200 and images[0][0, :, -1].max() < 50, "red on the left"
    assert images[1][0, 0, :].min() > 200 and images[1][0, -1, :].max() < 50, "red at the top"


# ---- data that changes ----------------------------------------------------------------------------------------------

def test_a_fingerprint_is_of_names_sizes_and_contents_wherever_they_lie(photos, tmp_path, monkeypatch):
    def of(root: Path) -> str:
        return ImageSource("", root / "train", "train").fingerprint()

    before = of(photos)
    moved = tmp_path / "moved"
    shutil.copytree(photos, moved)  # other times
    assert of(moved) == before
    path = moved / "train" / "class_0" / "000.jpg"
    content = bytearray(path.read_bytes())
    content[-5] ^= 1
    path.write_bytes(content)
    assert of(moved) != before, "one bit of a small data set"
    assert ImageSource("", moved / "train", "train").earlier_fingerprint() == \
        ImageSource("", photos / "train", "train").earlier_fingerprint(), "of names alone"
    monkeypatch.setattr(image_files, "CHEAP_BYTES", 1000)
    assert of(moved) == of(photos), "of large ones, contents are too dear"
    path.write_bytes(content + b"\0")
    assert of(moved) != of(photos), "but not sizes"


def test_the_earlier_fingerprint_is_the_one_that_was(photos, tmp_path):
    """As timm's readers named images, which run folders of before were compared by."""
    import hashlib

    import timm.data

    pack(photos / "train", tmp_path / "train.tar")
    for place in (photos / "train", tmp_path / "train.tar"):
        theirs = timm.data.create_dataset("", str(place), search_split=False)
        digest = hashlib.sha256("\n".join(["class_0", "class_1", "class_2", "", "12"]).encode())
        for name in theirs.filenames():
            digest.update(f"\n{name}".encode())
        assert ImageSource("", place, "train").earlier_fingerprint() == digest.hexdigest()


# ---- in this process ------------------------------------------------------------------------------------------------

def test_no_workers_decode_the_same_here_and_leave_the_random_state_alone(photos):
    source = ImageSource("", photos / "train", "train")
    form = {**FORM, "batch_size": 4, "bad_images": BadImages(0), "seed": 3}
    transform = train_transform(16, color_jitter=0.4)
    before = torch.get_rng_state(), np.random.get_state()[1].tolist()
    here = list(ImageTrainLoader(source, transform=transform, workers=0, **form).batches(1))
    assert torch.equal(before[0], torch.get_rng_state()) and before[1] == np.random.get_state()[1].tolist()
    there = list(ImageTrainLoader(source, transform=transform, workers=1, **form).batches(1))
    assert len(here) == len(there) == 3
    for a, b in zip(here, there, strict=True):
        assert torch.equal(a.images, b.images) and torch.equal(a.ids, b.ids)
    threads = [load_dataset("folder", str(photos), cache_dir="none", workers=workers) for workers in (0, 2)]
    assert threads[0].fingerprint() == threads[1].fingerprint()


# ---- FFCV -----------------------------------------------------------------------------------------------------------

def write(photos: Path, out: Path, *more: str, split: str = "train") -> int:
    argv = ["--data-dir", str(photos), "--split", split, "--out", str(out), "--workers", "0", *more]
    return exit_code(lambda: write_ffcv.main(argv))


def spoil(path: Path, index: int, kind: str) -> None:
    """Damage the bytes of an image."""
    beton = open_beton(path)
    start, size = int(beton.images["data_ptr"][index]), int(beton.sizes[index])
    with open(path, "r+b") as file:
        if kind == "zeros":
            file.seek(start)
            file.write(bytes(size))
        elif kind == "cut":
            file.seek(start + size // 2)
            file.write(bytes(size - size // 2))
        elif kind == "another size":
            other = io.BytesIO()
            Image.new("RGB", (8, 8)).save(other, "jpeg")
            file.seek(start)
            file.write(other.getvalue())
        else:
            file.seek(start + size - 40)
            byte = file.read(1)[0]
            file.seek(start + size - 40)
            file.write(bytes([byte ^ 1]))


@needs_ffcv
@pytest.mark.parametrize("kind, error, verify", [
    ("zeros", "it is no JPEG of 160x169 pixels", False), ("another size", "it is no JPEG of 160x169 pixels", False),
    ("cut", "it is a damaged JPEG", False), ("one bit", "its checksum does not match", True),
])
def test_a_damaged_image_in_an_ffcv_file_is_counted_and_named(tmp_path, kind, error, verify):
    out = tmp_path / "train.beton"
    assert write(make_photos(tmp_path / "larger", train=12, side=160), out, "--jpeg-share", "1") == 0
    spoil(out, 1, kind)
    bad = BadImages(1)
    form = {**FORM, "batch_size": 4, "bad_images": bad}
    for workers in (0, 2):
        beton = open_beton(out, verify=verify)
        loader = BetonTrainLoader(beton, seed=0, scale=(0.5, 1), hflip=0.5, os_cache=True, workers=workers, **form)
        batches = list(loader.batches(0))
        ids = torch.cat([batch.ids for batch in batches])
        assert len(ids) == 12 and 1 not in ids and len(set(ids.tolist())) == 11
        for batch in batches:
            assert torch.equal(batch.targets, torch.from_numpy(beton.labels.copy())[batch.ids])
            for place, index in enumerate(batch.ids.tolist()):
                twins = (batch.ids == index).nonzero()[:, 0]
                assert all(torch.equal(batch.images[place], batch.images[twin]) for twin in twins)
        evaluated = torch.cat([b.ids for b in BetonEvalLoader(beton, resize=20, workers=workers, **form).batches()])
        assert sorted(evaluated.tolist()) == [index for index in range(12) if index != 1]
        assert bad.new == {f"{out} 1": error}
    world = World(0, 1, torch.device("cpu"))
    bad.collect(world, tmp_path)
    assert list(csv.reader((tmp_path / "bad_images.csv").open())) == [["path", "error"], [f"{out} 1", error]]
    bad.limit = 0
    with pytest.raises(RunError, match=r"1 images cannot be read, --max-bad-images allows 0"):
        bad.collect(world, tmp_path)


@needs_ffcv
def test_verify(photos, tmp_path, capsys):
    out = tmp_path / "train.beton"
    assert write(photos, out) == 0 and "EXIF rotation not applied" in capsys.readouterr().out
    assert exit_code(lambda: write_ffcv.main(["--verify", str(out)])) == 0
    assert capsys.readouterr().out.endswith(f"{out}: 12 images, none is damaged\n")
    spoil(out, 3, "one bit")
    spoil(out, 4, "zeros")
    assert exit_code(lambda: write_ffcv.main(["--verify", str(out)])) == 1
    said = capsys.readouterr()
    assert said.out == f"{out} 3: its checksum does not match\n{out} 4: its checksum does not match\n"
    assert said.err.splitlines()[-1] == f"error: 2 of 12 images of {out} are damaged: write it anew"
    sidecar(out).unlink()
    assert exit_code(lambda: write_ffcv.main([])) == 2
    assert "--data-dir and --out are required, or --verify" in capsys.readouterr().err


@needs_ffcv
@pytest.mark.parametrize("width, height, more, message", [
    (1, 4000, (), "1x4000 pixels: nothing is left of it, scaled to --max-size"),
    (1, 70_000, ("--max-size", "0"), "1x70000 pixels: FFCV has sides of at most 65535"),
    (1, 65_535, ("--max-size", "0", "--jpeg-share", "1"), "1x65535 pixels, OpenCV cannot write it: "),
    (3000, 3000, ("--max-size", "0", "--jpeg-share", "0"), "it takes 27000000 bytes, a page has 8388608"),
])
def test_an_image_that_cannot_be_written_is_left_out_and_the_others_are_kept(photos, tmp_path, capsys, width, height,
                                                                             more, message):
    (photos / "train" / "class_1" / "odd.png").write_bytes(narrow_png(width, height))
    out = tmp_path / "train.beton"
    assert write(photos, out, *more) == 2 and message in capsys.readouterr().err and not out.exists()
    assert write(photos, out, "--broken", "skip", *more) == 0
    entry, = json.loads(sidecar(out).read_text())["left_out"]
    assert entry["path"].endswith("class_1/odd.png") and entry["error"].startswith(message)
    assert len(open_beton(out)) == 12


@needs_ffcv
def test_an_ffcv_file_says_whether_images_were_turned(photos, tmp_path, capsys):
    turned(photos / "train" / "class_0" / "000.jpg")
    sizes = {}
    for name, more in (("plain", ()), ("rotated", ("--exif-rotation",))):
        assert write(photos, tmp_path / name, *more) == 0
        said = capsys.readouterr().out
        assert said.rstrip().endswith(f"EXIF rotation {'applied' if more else 'not applied'}")
        beton = open_beton(tmp_path / name)
        assert json.loads(sidecar(beton.path).read_text())["exif_rotation"] == beton.exif_rotation == bool(more)
        sizes[name] = int(beton.heights[0]), int(beton.widths[0])
        beton.check_exif_rotation(bool(more))
        had, asked = ("with", "without") if more else ("without", "with")
        with pytest.raises(UsageError, match=f"was written {had} --exif-rotation, the trainer was started {asked} it"):
            beton.check_exif_rotation(not more)
    assert sizes == {"plain": (20, 40), "rotated": (40, 20)}


@needs_ffcv
def test_the_fingerprint_of_an_ffcv_file_has_its_checksums(photos, tmp_path):
    out = tmp_path / "train.beton"
    assert write(photos, out, "--jpeg-share", "0") == 0
    before = open_beton(out)
    path = photos / "train" / "class_0" / "000.jpg"
    Image.open(path).rotate(180).save(path)
    assert write(photos, out, "--jpeg-share", "0") == 0
    after = open_beton(out)
    assert before.fingerprint() != after.fingerprint() and before.earlier_fingerprint() == after.earlier_fingerprint()
    sidecar(out).write_text(json.dumps({"classes": after.classes}))
    assert open_beton(out).fingerprint() == before.earlier_fingerprint(), "as it was written before"


@needs_ffcv
def test_a_damaged_cache_of_decoded_images_ends_the_run(photos, tmp_path):
    data = load_dataset("folder", str(photos), cache_dir="none", workers=0)
    kept = on_disk(data.train, tmp_path, workers=0)
    assert torch.equal(kept.images[torch.arange(12)], data.train.images)
    path, = tmp_path.glob("*.beton")
    spoil(path, 5, "one bit")
    with pytest.raises(RunError, match=r"image 5 of .* is damaged .*: delete this file, it will be written anew"):
        on_disk(data.train, tmp_path, workers=0).images[torch.arange(12)]


@needs_ffcv
def test_trainers_refuse_ffcv_files_of_another_rotation_and_without_checksums(photos, tmp_path, capsys):
    out = tmp_path / "train.beton"
    assert write(photos, out) == 0
    argv = ["--train-beton", str(out), "--val-beton", str(out), "--model", "test_resnet", "--output",
            str(tmp_path / "run"), "--device", "cpu"]
    capsys.readouterr()
    assert exit_code(lambda: train_imagenet.main([*argv, "--exif-rotation"])) == 2
    assert capsys.readouterr().err == (f"error: {out} was written without --exif-rotation, the trainer was started "
                                       "with it: both must be alike\n")
    sidecar(out).unlink()
    assert exit_code(lambda: train_imagenet.main([*argv, "--verify-beton"])) == 2
    assert capsys.readouterr().err == f"error: {sidecar(out)} has no checksums to verify {out} with: write it anew\n"


@pytest.mark.parametrize("trainer", ["train_imagenet", "train_cifar"])
def test_trainers_go_without_workers(photos, tmp_path, capsys, trainer):
    argv = ["--data-dir", str(photos), "--model", "test_resnet", "--output", str(tmp_path / "run"), "--device", "cpu",
            "--epochs", "1", "--warmup-epochs", "0", "--batch-size", "4", "--img-size", "16", "--workers", "0"]
    if trainer == "train_imagenet":
        assert exit_code(lambda: train_imagenet.main([*argv, "--eval-resize", "20"])) == 0
    else:
        assert exit_code(lambda: train_cifar.main([*argv, "--dataset", "folder", "--cache-dir", "none"])) == 0
    assert (tmp_path / "run" / "results.json").exists()


def test_a_batch_without_a_good_image_ends_the_run():
    bad = BadImages(10)
    bad.add("a.jpg", "no image")
    with pytest.raises(RunError, match=r"none of the 2 images of a batch can be read, such as a.jpg \(no image\)"):
        bad.replacements(2, [0, 1])
    assert bad.replacements(4, [1, 2]) == [(1, 0), (2, 3)]


def test_names_in_a_tar_are_those_in_its_folder(photos, tmp_path):
    pack(photos / "train", tmp_path / "train.tar")
    assert ImageFiles(tmp_path / "train.tar").names == ImageFiles(photos / "train").names
