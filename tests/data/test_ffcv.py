"""FFCV files: what was written is read back, as the image loader shows it or near; damage and other files are named."""
from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image

from ea_vision.base.errors import UsageError, exit_code
from ea_vision.data import write_ffcv
from ea_vision.data.augment import normalize
from ea_vision.data.bad_images import BadImages
from ea_vision.data.ffcv import (
    Beton,
    BetonEvalLoader,
    BetonTrainLoader,
    Evaluated,
    centre_crop,
    quasi_random_order,
    sidecar,
)
from ea_vision.data.imagenet import ImageEvalLoader, ImageSource, eval_transform
from ea_vision.engine import train_imagenet
from tests.data.photos import make_photos
from tests.data.test_image_files import narrow_png

COMMON = {"img_size": 32, "mean": (0.5,) * 3, "std": (0.2,) * 3, "device": torch.device("cpu"), "workers": 2,
          "bad_images": BadImages(0)}
# Largest mean difference of evaluation pixels, of 255, between the loaders: JPEG written anew at quality 90, and areas
# averaged instead of interpolated between neighbours.
PARITY = 3.0


def test_without_ffcv_the_error_says_how_to_install_it(tmp_path, monkeypatch, capsys):
    for name in [name for name in sys.modules if name.split(".")[0] == "ffcv"]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, "ffcv", None)
    (tmp_path / "a.beton").write_bytes(b"1")
    with pytest.raises(UsageError, match="apt-get install .*libturbojpeg0-dev.* conda"):
        Beton(tmp_path / "a.beton")
    argv = ["--data-dir", str(make_photos(tmp_path / "photos")), "--out", str(tmp_path / "b.beton")]
    assert exit_code(lambda: write_ffcv.main(argv)) == 2 and capsys.readouterr().err.count("\n") == 1


# ---- crops and orders ------------------------------------------------------------------------------------------------

def test_centre_crop():
    """The places of torchvision's Resize and CenterCrop, its rounding of odd margins included."""
    assert [centre_crop(*sides, 256, 224) for sides in ((256, 400), (300, 256), (512, 343))] == [
        (16, 88, 224, 224), (38, 16, 224, 224), (106, 21, 300, 300)]


def test_quasi_random_order_reads_few_pages_at_a_time():
    pages = np.repeat(np.arange(100, 140), 25)
    order = quasi_random_order(pages, seed=0, epoch=0, together=4).numpy()
    assert sorted(order) == list(range(1000))
    assert all(len(set(pages[order[start:start + 100]])) == 4 for start in range(0, 1000, 100))
    assert not np.array_equal(order, quasi_random_order(pages, seed=0, epoch=1, together=4).numpy())


# ---- written and read ------------------------------------------------------------------------------------------------

def write(data: Path, out: Path, *more: str, split: str = "train") -> int:
    argv = ["--data-dir", str(data), "--split", split, "--out", str(out), "--workers", "1", *more]
    return exit_code(lambda: write_ffcv.main(argv))


@pytest.fixture(scope="module")
def photos(tmp_path_factory):
    return make_photos(tmp_path_factory.mktemp("photos"), side=96)


@pytest.fixture(scope="module")
def betons(photos, tmp_path_factory):
    """The validation images as pixels, as JPEG and half and half."""
    pytest.importorskip("ffcv")
    folder = tmp_path_factory.mktemp("betons")
    for name, share in (("raw", "0"), ("jpeg", "1"), ("half", "0.5")):
        assert write(photos, folder / f"{name}.beton", "--jpeg-share", share, split="validation") == 0
    return {name: folder / f"{name}.beton" for name in ("raw", "jpeg", "half")}


@pytest.mark.parametrize("kind", ["raw", "jpeg", "half"])
def test_pixels_are_near_ffcvs_own_and_the_image_loaders(photos, betons, kind):
    from ffcv.fields.decoders import CenterCropRGBImageDecoder
    from ffcv.loader import Loader
    from ffcv.transforms import ToTensor

    source, beton = ImageSource("", photos / "val", "validation"), Beton(betons[kind], num_classes=3)
    images, targets, ids = next(ImageEvalLoader(source, transform=eval_transform(32, 36), batch_size=13, **COMMON
                                                ).batches())
    ours = next(BetonEvalLoader(beton, resize=36, batch_size=13, **COMMON).batches())
    assert torch.equal(ours.targets, targets) and torch.equal(ours.ids, ids) and beton.classes == source.classes
    apart = (ours.images - images).abs() * 0.2 * 255
    assert apart.mean() < PARITY and apart.mean((1, 2, 3)).max() < 2 * PARITY
    assert set(beton.table[:, 4].tolist()) == {"raw": {0}, "jpeg": {1}, "half": {0, 1}}[kind]
    if kind == "half":  # its Loader compiles for long
        images, labels = next(iter(Loader(str(betons[kind]), 13, num_workers=1, os_cache=True, pipelines={
            "image": [CenterCropRGBImageDecoder((32, 32), 1.0), ToTensor()]})))
        theirs = normalize(images.permute(0, 3, 1, 2), torch.tensor(COMMON["mean"]), torch.tensor(COMMON["std"]))
        assert torch.equal(labels[:, 0], ours.targets)
        ours = next(BetonEvalLoader(beton, resize=32, batch_size=13, **COMMON).batches())
        assert (theirs - ours.images).abs().mean() * 0.2 * 255 < PARITY, "its middle may lie a pixel off"


def test_training_crops_are_of_all_sizes_flipped_half_of_the_time_and_kept(tmp_path):
    """One image of two ramps, which show where a crop lies; a batch that is kept is not written over later."""
    pytest.importorskip("ffcv")
    pixels = np.zeros((200, 250, 3), np.uint8)
    pixels[..., 0], pixels[..., 1] = np.arange(250), np.arange(200)[:, None]
    for number in range(400):
        path = tmp_path / "train" / f"class_{number % 2}" / f"{number}.png"
        path.parent.mkdir(parents=True, exist_ok=True)
        Image.fromarray(pixels).save(path)
    assert write(tmp_path, tmp_path / "train.beton", "--jpeg-share", "0") == 0
    loader = BetonTrainLoader(Beton(tmp_path / "train.beton"), seed=1, scale=(0.08, 1), hflip=0.5, os_cache=True,
                              batch_size=40, **COMMON)
    kept = list(loader.batches(0))
    again = list(loader.batches(0))
    assert all(torch.equal(a.images, b.images) for a, b in zip(kept, again, strict=True))
    images = torch.cat([batch.images for batch in kept]) * 0.2 * 255 + 127.5  # (400, 3, 32, 32), in 0..255
    across, down = (images[:, 0, 16, -1] - images[:, 0, 16, 0]) * 32 / 31, (images[:, 1, -1, 16] - images[:, 1, 0, 16])
    down = down * 32 / 31
    area, aspect = across.abs() * down / (200 * 250), across.abs() / down
    assert (down > 0).all() and 0.4 < (across < 0).float().mean() < 0.6
    assert 0.06 < area.min() < 0.15 and 0.45 < area.mean() < 0.6 and 0.85 < area.max() < 1.05
    assert 0.7 < aspect.min() < 0.82 and 1.2 < aspect.max() < 1.4


@pytest.mark.parametrize("interpolation", ["bilinear", "bicubic"])
def test_images_stored_as_evaluated_are_the_folders_bit_for_bit(tmp_path, interpolation):
    """Photos of odd sizes, smaller and larger than what they are scaled to, upright and wide, grey and lossless."""
    pytest.importorskip("ffcv")
    rng = np.random.default_rng(1)
    for number, size in enumerate([(37, 53), (201, 64), (33, 33), (61, 301), (97, 45), (36, 36), (35, 120), (20, 15)]):
        path = tmp_path / "val" / f"class_{number % 3}" / f"{number}.{'png' if number % 4 == 3 else 'jpg'}"
        path.parent.mkdir(parents=True, exist_ok=True)
        image = Image.fromarray(rng.integers(0, 255, (9, 7, 3), dtype=np.uint8)).resize(size, Image.Resampling.BICUBIC)
        image.convert("L" if number == 4 else "RGB").save(path)
    out, stored = tmp_path / "val.beton", Evaluated(32, 37, interpolation)
    assert write(tmp_path, out, "--eval-img-size", "32", "--eval-resize", "37", "--interpolation", interpolation,
                 split="validation") == 0
    loader = ImageEvalLoader(ImageSource("", tmp_path / "val", "validation"), transform=eval_transform(*stored),
                             batch_size=8, **COMMON)
    beton, (images, targets, ids) = Beton(out), next(loader.batches())
    ours = next(BetonEvalLoader(beton, resize=37, batch_size=8, **COMMON).batches())
    assert torch.equal(ours.images, images) and torch.equal(ours.targets, targets) and torch.equal(ours.ids, ids)
    assert len(images) == 8 and images.std() > 0.1
    beton.check(False, stored)
    for other in (stored._replace(eval_img_size=24), stored._replace(eval_resize=36), None):
        wanted = f"got {other}" if other else "and cannot be trained on"
        with pytest.raises(UsageError, match=f"for eval_img_size 32, eval_resize 37, interpolation .*, {wanted}"):
            beton.check(False, other)


def test_a_file_says_how_it_was_written(photos, tmp_path, capsys):
    pytest.importorskip("ffcv")
    assert write(photos, tmp_path / "a.beton", "--exif-rotation") == 0
    assert capsys.readouterr().out.rstrip().endswith("0 left out, EXIF rotation applied")
    Beton(tmp_path / "a.beton").check(True, None)
    with pytest.raises(UsageError, match="was written with --exif-rotation, the trainer was started without it"):
        Beton(tmp_path / "a.beton").check(False, None)
    assert Beton(tmp_path / "a.beton").fingerprint() == Beton(tmp_path / "a.beton").fingerprint()
    for more, message in ((["--eval-img-size", "300"], "--eval-img-size must lie in 8..256 (--eval-resize), got 300"),
                          (["--eval-img-size", "32", "--max-size", "64"], "--max-size and --jpeg-share must be 0")):
        assert write(photos, tmp_path / "b.beton", *more) == 2 and message in capsys.readouterr().err
    assert not (tmp_path / "b.beton").exists()


@pytest.mark.parametrize("os_cache, said", [(True, "random read of the disk"), (False, "shuffled within 16 pages")])
def test_a_file_larger_than_the_memory_is_read_as_any_other(betons, tmp_path, caplog, os_cache, said):
    """Its size is that of a hole between images and tables; one line of the log tells what its order costs."""
    from ffcv.types import ALLOC_TABLE_TYPE, HeaderType

    path, data = tmp_path / "large.beton", betons["half"].read_bytes()
    header, tables = np.frombuffer(data, HeaderType, 1).copy(), len(data) - 13 * ALLOC_TABLE_TYPE.itemsize
    header["alloc_table_ptr"] = 2 * os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    with path.open("wb") as file:
        file.write(header.tobytes() + data[header.nbytes:tables])
        file.seek(int(header["alloc_table_ptr"][0]))
        file.write(data[tables:])
    with caplog.at_level("INFO", "ea_vision"):
        few, large = ([batch for batch in BetonTrainLoader(
            Beton(file), seed=0, scale=(0.5, 1), hflip=0.5, os_cache=os_cache, batch_size=6, **COMMON).batches(0)]
            for file in (betons["half"], path))
    assert len(few) == 2 and all(torch.equal(a.images, b.images) for a, b in zip(few, large, strict=True))
    line, = caplog.messages
    assert str(path) in line and said in line


# ---- faults ----------------------------------------------------------------------------------------------------------

def test_broken_images_stop_the_writing_or_are_left_out_and_listed(tmp_path, capsys):
    pytest.importorskip("ffcv")
    root, out = make_photos(tmp_path / "photos", train=9), tmp_path / "out" / "train.beton"
    broken = {root / "train/class_0/003.jpg": b"no image", root / "train/class_1/narrow.png": narrow_png(1, 4000),
              root / "train/class_2/large.png": narrow_png(3000, 3000)}
    for path, content in broken.items():
        path.write_bytes(content)
    assert write(root, out, "--max-bad-images", "1") == 2 and not list(out.parent.iterdir())
    assert "2 of 11 images cannot be written, the first: " in capsys.readouterr().err
    assert write(root, out, "--max-bad-images", "2") == 0, "the large one is scaled"
    about = json.loads(sidecar(out).read_text())
    assert about["images"] == len(Beton(out)) == 9 and Beton(out).labels.tolist() == [0, 0, 1, 1, 1, 2, 2, 2, 2]
    assert [entry["path"] for entry in about["left_out"]] == [str(path) for path in broken][:2]
    assert "nothing is left of it" in about["left_out"][1]["error"]
    assert write(root, out, "--max-size", "0", "--jpeg-share", "0", "--max-bad-images", "2") == 0
    assert "a page of FFCV has 8388608 bytes" in sidecar(out).read_text()


def test_a_writing_that_fails_leaves_what_was_there(photos, betons, tmp_path, monkeypatch, capsys):
    from ffcv.memory_allocator import MemoryAllocator

    out = tmp_path / "val.beton"
    shutil.copy(betons["raw"], out)

    def full(self):
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr(MemoryAllocator, "flush_page", full)
        assert write(photos, out, split="validation") == 1
    assert "No space left on device" in capsys.readouterr().err
    assert os.listdir(tmp_path) == ["val.beton"] and len(Beton(out)) == 13
    code = "import sys, time; from ea_vision.base.errors import exit_code; " \
           "from ea_vision.data import imagenet, write_ffcv; imagenet.ImageSource.read = lambda *_: time.sleep(60); " \
           "sys.exit(exit_code(lambda: write_ffcv.main(sys.argv[1:])))"
    process = subprocess.Popen([sys.executable, "-c", code, "--data-dir", str(photos), "--out", str(out)],
                               preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL))  # as in a terminal
    while not (tmp_path / ".val.beton.tmp").exists():
        time.sleep(0.1)
    time.sleep(3)  # by then its processes work
    process.send_signal(signal.SIGINT)
    assert process.wait(60) == 130 and os.listdir(tmp_path) == ["val.beton"] and len(Beton(out)) == 13


def test_damaged_and_foreign_files_are_named(betons, tmp_path):
    data, path = betons["half"].read_bytes(), tmp_path / "cut.beton"
    for content in (*(data[:length] for length in (0, 10, 5000, len(data) // 2, len(data) - 1)), b"no images " * 100):
        path.write_bytes(content)
        with pytest.raises(UsageError, match="is not a whole .beton file"):
            Beton(path)
    with pytest.raises(UsageError, match="no such .beton file"):
        Beton(tmp_path / "missing.beton")
    with pytest.raises(UsageError, match="must have 1000 classes .* got 3"):
        Beton(betons["raw"], num_classes=1000)
    path.write_bytes(data)
    for about in (b"\x00\xff", b"{"):
        sidecar(path).write_bytes(about)
        with pytest.raises(UsageError, match="json cannot be read"):
            Beton(path)


def test_tables_with_flipped_bits_are_named_or_harmless(betons, tmp_path):
    """A file that can be opened can be shown, whatever its tables say; the process does not end."""
    data, path, rng = betons["half"].read_bytes(), tmp_path / "hurt.beton", np.random.default_rng(0)
    tables = [*range(24), *range(2080, 2080 + 13 * 21), *range(len(data) - 13 * 24, len(data))]
    opened = 0
    for at in rng.choice(tables, 150, replace=False).tolist():
        content = bytearray(data)
        content[at] ^= int(rng.integers(1, 256))
        path.write_bytes(content)
        try:
            beton = Beton(path)
        except UsageError as error:
            assert str(path) in str(error)
            continue
        opened += 1
        list(BetonEvalLoader(beton, resize=36, batch_size=13, **{**COMMON, "bad_images": BadImages(99)}).batches())
    assert 0 < opened < 150


@pytest.mark.parametrize("kind", ["zeros", "cut"])
def test_a_damaged_jpeg_is_counted_named_and_replaced(photos, tmp_path, kind):
    pytest.importorskip("ffcv")
    out, bad = tmp_path / "train.beton", BadImages(1)
    assert write(photos, out, "--jpeg-share", "1") == 0
    start, size = Beton(out).table[1, :2].tolist()
    with open(out, "r+b") as file:
        file.seek(start + (0 if kind == "zeros" else size // 2))
        file.write(bytes(size if kind == "zeros" else size - size // 2))
    beton, form = Beton(out), {**COMMON, "batch_size": 8, "bad_images": bad}
    batches = list(BetonTrainLoader(beton, seed=0, scale=(0.5, 1), hflip=0.5, os_cache=True, **form).batches(0))
    ids = torch.cat([batch.ids for batch in batches])
    assert len(ids) == 40 and 1 not in ids and len(set(ids.tolist())) == 39
    for batch in batches:
        assert torch.equal(batch.targets, torch.from_numpy(beton.labels.copy())[batch.ids])
    evaluated = torch.cat([b.ids for b in BetonEvalLoader(beton, resize=36, **form).batches()])
    assert sorted(evaluated.tolist()) == [index for index in range(40) if index != 1]
    assert bad.new == {f"{out} 1": "it is a damaged JPEG"}


@pytest.mark.parametrize("named, num_classes, label, message", [
    ("with names", 0, 3, "must lie in 0..2, got 0..3"), ("with names", 3, -1, "must lie in 0..2, got -1..2"),
    ("alone", 3, 3, "must lie in 0..2, got 0..3"), ("alone", 0, 2**62, f"must lie in 0..999999, got 0..{2**62}"),
    ("alone", 0, 5, "must have the same classes; they differ in 3, 4, 5"),
])
def test_labels_beyond_the_classes_end_the_command_before_training(betons, tmp_path, capsys, named, num_classes, label,
                                                                   message):
    """Of the second image, in the file to train on; its classes are named beside it, counted, or not known."""
    from ffcv.types import FieldDescType, HeaderType

    path, evaluated = tmp_path / "train.beton", tmp_path / "val.beton"
    shutil.copy(betons["raw"], evaluated)
    content, table = bytearray(evaluated.read_bytes()), Beton(betons["raw"]).labels
    second = HeaderType.itemsize + 2 * FieldDescType.itemsize + table.strides[0] * 2 - 8
    assert np.frombuffer(content, np.int64, 1, second)[0] == table[1], "this is where a label lies"
    content[second:second + 8] = np.int64(label).tobytes()
    path.write_bytes(content)
    if named == "with names":
        for file in (path, evaluated):
            sidecar(file).write_text(json.dumps({"classes": ["a", "b", "c"]}))
    argv = ["--train-beton", str(path), "--val-beton", str(evaluated), "--model", "test_resnet", "--img-size", "16",
            "--eval-resize", "20", "--batch-size", "4", "--device", "cpu", "--output", str(tmp_path / "run"),
            *(["--num-classes", str(num_classes)] if num_classes else [])]
    assert exit_code(lambda: train_imagenet.main(argv)) == 2
    error, = capsys.readouterr().err.splitlines()
    assert str(path) in error and message in error and not (tmp_path / "run").exists()
