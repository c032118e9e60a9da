"""FFCV files: what was written is read back, near what the image loader shows, in an order that seed and epoch give."""
from __future__ import annotations

import importlib.util
import json
import os
import subprocess
import sys

import numpy as np
import pytest
import torch
from PIL import Image

from ea_vision.base.errors import UsageError, exit_code
from ea_vision.data import write_ffcv
from ea_vision.data.augment import normalize
from ea_vision.data.bad_images import BadImages
from ea_vision.data.ffcv import (
    BetonEvalLoader,
    BetonTrainLoader,
    Evaluated,
    centre_boxes,
    open_beton,
    quasi_random_order,
    random_boxes,
    sidecar,
)
from ea_vision.data.imagenet import ImageEvalLoader, ImageSource, eval_transform
from ea_vision.data.rand_augment import RandAugment
from ea_vision.data.threads import Recycled
from ea_vision.engine import train_imagenet
from tests.data.photos import make_photos

needs_ffcv = pytest.mark.skipif(importlib.util.find_spec("ffcv") is None, reason="needs FFCV: pip install .[ffcv]")
COMMON = {"img_size": 32, "mean": (0.5,) * 3, "std": (0.2,) * 3, "device": torch.device("cpu"), "workers": 2,
          "bad_images": BadImages(0)}
# Largest mean difference of evaluation pixels, of 255, between the loaders: JPEG written anew at quality 90, and areas
# averaged instead of interpolated between neighbours.
PARITY = 3.0


@pytest.fixture(scope="module")
def photos(tmp_path_factory):
    return make_photos(tmp_path_factory.mktemp("photos"), side=96)


@pytest.fixture(scope="module")
def betons(photos, tmp_path_factory):
    """The validation images as pixels, as JPEG and half and half."""
    pytest.importorskip("ffcv")
    folder = tmp_path_factory.mktemp("betons")
    paths = {}
    for name, share in (("raw", "0"), ("jpeg", "1"), ("half", "0.5")):
        paths[name] = folder / f"{name}.beton"
        argv = ["--data-dir", str(photos), "--split", "validation", "--out", str(paths[name]), "--jpeg-share", share,
                "--workers", "1"]
        assert write_ffcv.main(argv) == 0
    return paths


@needs_ffcv
def test_what_was_written_is_read_back(photos, betons):
    source, beton = ImageSource("", photos / "val", "validation"), open_beton(betons["raw"], num_classes=3)
    assert len(beton) == len(source) == 13
    for index in range(13):
        image, target = source.read(index)
        assert np.array_equal(beton.decode(index), np.asarray(image)) and beton.labels[index] == target
    jpeg = open_beton(betons["jpeg"])
    assert jpeg.path.stat().st_size == beton.path.stat().st_size and jpeg.sizes.sum() < beton.sizes.sum() / 2
    assert np.abs(jpeg.decode(3).astype(int) - np.asarray(source.read(3)[0])).mean() < 3
    assert set(open_beton(betons["half"]).images["mode"].tolist()) == {0, 1}
    about = json.loads((betons["raw"].parent / "raw.beton.json").read_text())
    assert about["classes"] == source.classes and about["counts"] == [5, 4, 4] and about["images"] == 13


@needs_ffcv
@pytest.mark.parametrize("kind", ["raw", "jpeg", "half"])
def test_evaluation_pixels_are_near_the_image_loaders(photos, betons, kind):
    source = ImageSource("", photos / "val", "validation")
    loader = ImageEvalLoader(source, transform=eval_transform(32, 36), batch_size=13, **COMMON)
    images, targets, ids = next(loader.batches())
    ours = next(BetonEvalLoader(open_beton(betons[kind]), resize=36, batch_size=13, **COMMON).batches())
    assert torch.equal(ours.targets, targets) and torch.equal(ours.ids, ids)
    apart = (ours.images - images).abs() * 0.2 * 255
    assert apart.mean() < PARITY and apart.mean((1, 2, 3)).max() < 2 * PARITY


@pytest.fixture(scope="module")
def odd_photos(tmp_path_factory):
    """Photos of odd sizes, smaller and larger than what they are scaled to, upright and wide, grey and lossless."""
    root, rng = tmp_path_factory.mktemp("odd"), np.random.default_rng(1)
    sizes = [(37, 53), (201, 64), (33, 33), (61, 301), (97, 45), (36, 36), (35, 120), (20, 15)]
    for number, size in enumerate(sizes):
        path = root / "val" / f"class_{number % 3}" / f"{number}.{'png' if number % 4 == 3 else 'jpg'}"
        path.parent.mkdir(parents=True, exist_ok=True)
        image = Image.fromarray(rng.integers(0, 255, (9, 7, 3), dtype=np.uint8)).resize(size, Image.Resampling.BICUBIC)
        image.convert("L" if number == 4 else "RGB").save(path)
    return root


@needs_ffcv
@pytest.mark.parametrize("interpolation", ["bilinear", "bicubic"])
@pytest.mark.parametrize("augment", [None, RandAugment("rand-m1-n1", (0.5,) * 3)], ids=["floats", "bytes"])
def test_images_stored_as_evaluated_are_the_folders_bit_for_bit(odd_photos, tmp_path, interpolation, augment):
    """augment: has the loader send bytes, as on a GPU; evaluation does not augment."""
    out = tmp_path / "val.beton"
    argv = ["--data-dir", str(odd_photos), "--split", "validation", "--out", str(out), "--eval-img-size", "32",
            "--eval-resize", "37", "--interpolation", interpolation, "--workers", "1"]
    assert write_ffcv.main(argv) == 0
    source = ImageSource("", odd_photos / "val", "validation")
    transform = eval_transform(32, 37, interpolation)
    images, targets, ids = next(ImageEvalLoader(source, transform=transform, batch_size=8, **COMMON).batches())
    beton = open_beton(out, verify=True)
    ours = next(BetonEvalLoader(beton, resize=37, batch_size=8, augment=augment, **COMMON).batches())
    assert torch.equal(ours.images, images) and torch.equal(ours.targets, targets) and torch.equal(ours.ids, ids)
    assert beton.classes == source.classes and len(images) == 8 and images.std() > 0.1
    beton.check_evaluated(Evaluated(32, 37, interpolation))
    for other in (Evaluated(24, 37, interpolation), Evaluated(32, 36, interpolation), Evaluated(32, 37, "nearest")):
        with pytest.raises(UsageError, match=f"was written for eval_img_size 32, eval_resize 37, interpolation "
                                             f"{interpolation}, got {other}"):
            beton.check_evaluated(other)
    with pytest.raises(UsageError, match="and cannot be trained on"):
        beton.check_evaluated(None)


@needs_ffcv
@pytest.mark.parametrize("more, message", [
    (["--eval-img-size", "300"], r"--eval-img-size must lie in 8..256 \(--eval-resize\), got 300"),
    (["--eval-img-size", "32", "--max-size", "64"], "--max-size and --jpeg-share must be 0"),
    (["--eval-img-size", "32", "--jpeg-share", "0.5"], "--max-size and --jpeg-share must be 0")])
def test_options_of_images_as_evaluated_that_do_not_fit(odd_photos, tmp_path, more, message):
    with pytest.raises(UsageError, match=message):
        write_ffcv.main(["--data-dir", str(odd_photos), "--out", str(tmp_path / "x.beton"), *more])
    assert not list(tmp_path.iterdir())


@needs_ffcv
def test_two_processes_see_together_what_one_sees_wherever_they_enter(betons):
    for os_cache in (True, False):
        def loader(batch_size, source=open_beton(betons["half"]), os_cache=os_cache, **more):
            return BetonTrainLoader(source, seed=1, scale=(0.08, 1), hflip=0.5, os_cache=os_cache,
                                    batch_size=batch_size, **more, **COMMON)

        whole = list(loader(4).batches(2))
        halves = [list(loader(2, rank=rank, world_size=2).batches(2, first=1)) for rank in (0, 1)]
        for batch, first, second in zip(whole[1:], *halves, strict=True):
            for part in range(3):
                assert torch.equal(batch[part], torch.cat([first[part], second[part]]))
        assert not torch.equal(next(loader(4).batches(3)).images, whole[0].images)


@needs_ffcv
def test_batches_are_the_scaled_crops_flipped_and_normalised_and_stay_so(betons):
    """Against the same steps in torch, one image at a time; a batch that is kept is not written over later."""
    source = open_beton(betons["half"])
    loader = BetonTrainLoader(source, seed=1, scale=(0.08, 1), hflip=0.5, os_cache=True, batch_size=2, **COMMON)
    kept = list(loader.batches(0))
    rng = np.random.default_rng((1, 0))
    boxes, flips = random_boxes(source.heights, source.widths, rng, (0.08, 1)), rng.random(13) < 0.5
    assert len(kept) == 6 and flips.any() and not flips.all()
    mean, std = torch.tensor(COMMON["mean"]), torch.tensor(COMMON["std"])
    for batch in kept:
        for image, index in zip(batch.images, batch.ids.tolist(), strict=True):
            pixels = np.empty((32, 32, 3), np.uint8)
            source.scaled(index, boxes[index], pixels)
            wanted = torch.from_numpy(pixels[:, ::-1].copy() if flips[index] else pixels).permute(2, 0, 1)
            assert torch.equal(image, normalize(wanted, mean, std))


@needs_ffcv
def test_memory_is_used_again_once_nothing_shares_it():
    recycled = Recycled()
    batch = recycled.empty(2, 8)
    place, part = batch.data_ptr(), batch[1:, :, 2:4]
    del batch
    other = recycled.empty(2, 8)
    assert other.data_ptr() != place, "a part of it is still in use"
    del part
    assert recycled.empty(2, 8).data_ptr() == place
    assert recycled.empty(3, 8).shape == (3, 3, 8, 8)


@needs_ffcv
@pytest.mark.parametrize("world_size, batch_size", [(1, 5), (3, 2), (4, 4)])
def test_evaluation_shows_every_image_once(betons, world_size, batch_size):
    loaders = [BetonEvalLoader(open_beton(betons["raw"]), resize=36, batch_size=batch_size, rank=rank,
                               world_size=world_size, **COMMON) for rank in range(world_size)]
    batches = [list(loader.batches()) for loader in loaders]
    assert {len(b) for b in batches} == {len(loaders[0])}
    ids = torch.cat([b.ids for of_rank in batches for b in of_rank])
    assert sorted(ids.tolist()) == list(range(13))


@needs_ffcv
def test_damaged_and_foreign_files_are_named(betons, tmp_path):
    data = betons["half"].read_bytes()
    path = tmp_path / "cut.beton"
    for length in (0, 10, 5000, len(data) // 2, len(data) - 1):
        path.write_bytes(data[:length])
        with pytest.raises(UsageError, match="is not a whole .beton file"):
            open_beton(path)
    path.write_text("no images " * 100)
    with pytest.raises(UsageError, match="FFCV's format 2 is required"):
        open_beton(path)
    with pytest.raises(UsageError, match="no such .beton file"):
        open_beton(tmp_path / "missing.beton")
    with pytest.raises(UsageError, match="must have 1000 classes .* got 3"):
        open_beton(betons["raw"], num_classes=1000)


@needs_ffcv
@pytest.mark.parametrize("named, num_classes, label, message", [
    ("with names", 0, 3, "must lie in 0..2, got 0..3"), ("with names", 3, -1, "must lie in 0..2, got -1..2"),
    ("alone", 3, 3, "must lie in 0..2, got 0..3"), ("alone", 0, -5, "must lie in 0..999999, got -5..2"),
    ("alone", 0, 2**62, f"must lie in 0..999999, got 0..{2**62}"),
    ("alone", 0, 5, "must have the same classes; they differ in 3, 4, 5"),
])
def test_labels_beyond_the_classes_end_the_command_before_training(betons, tmp_path, capsys, named, num_classes, label,
                                                                   message):
    """Of the second image, in the file to train on; its classes are named beside it, counted, or not known."""
    from ffcv.types import FieldDescType, HeaderType

    path, evaluated = tmp_path / "train.beton", tmp_path / "val.beton"
    evaluated.write_bytes(betons["raw"].read_bytes())
    content, table = bytearray(evaluated.read_bytes()), open_beton(betons["raw"]).labels
    second = HeaderType.itemsize + 2 * FieldDescType.itemsize + table.strides[0] * 2 - 8
    assert np.frombuffer(content, np.int64, 1, second)[0] == table[1], "this is where a label lies"
    content[second:second + 8] = np.int64(label).tobytes()
    path.write_bytes(content)
    if named == "with names":  # as the first writer left it, without checksums
        for file in (path, evaluated):
            sidecar(file).write_text(json.dumps({"classes": ["a", "b", "c"]}))
    argv = ["--train-beton", str(path), "--val-beton", str(evaluated), "--model", "test_resnet", "--img-size", "16",
            "--eval-resize", "20", "--batch-size", "4", "--device", "cpu", "--output", str(tmp_path / "run"),
            *(["--num-classes", str(num_classes)] if num_classes else [])]
    assert exit_code(lambda: train_imagenet.main(argv)) == 2
    error, = capsys.readouterr().err.splitlines()
    assert str(path) in error and message in error and not (tmp_path / "run").exists()


@needs_ffcv
def test_broken_images_stop_the_writing_or_are_left_out_and_listed(tmp_path, capsys):
    root = make_photos(tmp_path / "photos", train=9)
    (root / "train/class_0/003.jpg").write_text("no image")
    out = tmp_path / "out" / "train.beton"
    argv = ["--data-dir", str(root), "--out", str(out), "--workers", "1"]
    assert exit_code(lambda: write_ffcv.main(argv)) == 2
    assert "class_0/003.jpg" in capsys.readouterr().err and not list(out.parent.iterdir())
    assert exit_code(lambda: write_ffcv.main([*argv, "--broken", "skip"])) == 0
    about = json.loads((out.parent / "train.beton.json").read_text())
    assert about["images"] == len(open_beton(out)) == 8 and about["counts"] == [2, 3, 3]
    assert [entry["path"] for entry in about["left_out"]] == [str(root / "train/class_0/003.jpg")]


@needs_ffcv
@pytest.mark.slow
@pytest.mark.skipif(not hasattr(os, "sched_setaffinity"), reason="needs Linux, to keep a process on one core")
def test_writing_ends_on_one_core(photos, tmp_path):
    code = ("import os, sys; os.sched_setaffinity(0, {min(os.sched_getaffinity(0))}); "
            "from ea_vision.data.write_ffcv import main; sys.exit(main(sys.argv[1:]))")
    out = tmp_path / "val.beton"
    argv = ["--data-dir", str(photos), "--split", "validation", "--out", str(out), "--workers", "1"]
    subprocess.run([sys.executable, "-c", code, *argv], check=True, timeout=900)
    assert len(open_beton(out)) == 13


@needs_ffcv
def test_an_interrupted_writing_leaves_what_was_there(photos, betons, tmp_path, monkeypatch):
    out = tmp_path / "val.beton"
    out.write_bytes(betons["raw"].read_bytes())
    monkeypatch.setattr(write_ffcv, "encoded_images", lambda *_: (_ for _ in ()).throw(KeyboardInterrupt))
    argv = ["--data-dir", str(photos), "--split", "validation", "--out", str(out)]
    assert exit_code(lambda: write_ffcv.main(argv)) == 130
    assert os.listdir(tmp_path) == ["val.beton"] and len(open_beton(out)) == 13


def test_without_ffcv_the_error_says_how_to_install_it(photos, tmp_path, monkeypatch, capsys):
    for name in [name for name in sys.modules if name.split(".")[0] == "ffcv"]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, "ffcv", None)
    (tmp_path / "a.beton").write_bytes(b"1")
    with pytest.raises(UsageError, match="apt-get install .*libturbojpeg0-dev.* conda"):
        open_beton(tmp_path / "a.beton")
    assert exit_code(lambda: write_ffcv.main(["--data-dir", str(photos), "--out", str(tmp_path / "b.beton")])) == 2
    assert capsys.readouterr().err.count("\n") == 1


def test_random_boxes_are_the_recipes():
    rng = np.random.default_rng(0)
    heights, widths = rng.integers(20, 500, (2, 20000))
    boxes = random_boxes(heights, widths, rng, (0.08, 1.0))
    top, left, h, w = boxes.T
    assert (top >= 0).all() and (left >= 0).all() and (h > 0).all() and (w > 0).all()
    assert (top + h <= heights).all() and (left + w <= widths).all()
    square = np.full(20000, 400)
    top, left, h, w = random_boxes(square, square, rng, (0.08, 1.0)).T
    area = h * w / 400**2
    assert area.min() > 0.07 and 0.4 < area.mean() < 0.55 and 0.74 < (w / h).min() and (w / h).max() < 1.35
    assert abs((top + h / 2).mean() - 200) < 3 and top[h < 300].std() > 50
    narrow = random_boxes(np.array([1000]), np.array([10]), rng, (0.9, 1.0))
    assert narrow.tolist() == [[494, 0, 13, 10]], "no crop fits: the middle, at the nearest ratio"


def test_centre_boxes():
    """The places of torchvision's Resize and CenterCrop, its rounding of odd margins included."""
    assert centre_boxes(np.array([256, 300, 512]), np.array([400, 256, 343]), 224, 256).tolist() == [
        [16, 88, 224, 224], [38, 16, 224, 224], [106, 21, 300, 300]]


def test_quasi_random_order_reads_few_pages_at_a_time():
    pages = np.repeat(np.arange(100, 140), 25)
    order = quasi_random_order(pages, seed=0, epoch=0, together=4).numpy()
    assert sorted(order) == list(range(1000))
    assert all(len(set(pages[order[start:start + 100]])) == 4 for start in range(0, 1000, 100))
    assert not np.array_equal(order, quasi_random_order(pages, seed=0, epoch=1, together=4).numpy())
