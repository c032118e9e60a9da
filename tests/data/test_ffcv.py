"""FFCV files: images are read back as the image loader shows them, exactly or nearly; any change in a .beton file's
tables or in FILE.json is noticed when the file is opened; two writers at once do not disturb each other."""

import os
import shutil
import signal
import subprocess
import sys
import time
from functools import partial

import numpy as np
import pytest
import torch
from PIL import Image

from ea_vision.__main__ import main
from ea_vision.base.errors import UsageError
from ea_vision.data import write_ffcv
from ea_vision.data.bad_images import BadImages
from ea_vision.data.batches import Batch
from ea_vision.data.beton import Beton, Evaluated, read_tables, sidecar, write_about
from ea_vision.data.ffcv import BetonTrainLoader
from ea_vision.data.image_files import ImageFiles
from ea_vision.data.scaling import Scaling
from tests.data.photos import make_photos
from tests.data.test_image_files import pgm_of
from tests.refused import refused

COMMON = {
    "img_size": 32,
    "mean": (0.5,) * 3,
    "std": (0.2,) * 3,
    "device": torch.device("cpu"),
    "workers": 2,
    "bad_images": BadImages(0),
    "scale": (0.08, 1),
    "hflip": 0.5,
    "batch_size": 8,
}


def test_without_ffcv_the_error_says_how_to_install_it(tmp_path, monkeypatch, capsys):
    for name in [name for name in sys.modules if name.split(".")[0] == "ffcv"]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, "ffcv", None)
    with refused("apt-get install .*libturbojpeg0-dev.* conda"):
        Beton(tmp_path / "a.beton")
    assert write(make_photos(tmp_path), tmp_path / "b.beton") == 2
    assert capsys.readouterr().err.count("\n") == 1


def test_what_a_killed_writer_left_is_removed_at_the_next_start(tmp_path):
    """Files of running writers and of other machines are kept. The private function names and cleans, which a whole
    writer does only where FFCV is installed."""
    dead = subprocess.Popen([sys.executable, "-c", ""])
    dead.wait()
    out = tmp_path / "train.beton"
    temporary_name = write_ffcv._temporary(out).name
    left = temporary_name.replace(str(os.getpid()), str(dead.pid))
    kept = [
        temporary_name.replace(str(os.getpid()), str(os.getppid())),
        ".train.beton.elsewhere-1.tmp",
    ]
    for name in (left, *kept):
        (tmp_path / name).touch()
    assert write_ffcv._temporary(out).name == temporary_name
    assert sorted(os.listdir(tmp_path)) == sorted(kept)


# ---- written and read ------------------------------------------------------------------------------------------------


def write(data, out, more=""):
    return main(f"write-ffcv --data-dir {data} --out {out} --workers 2 {more}".split())


def shown(beton, **more):
    """Return an epoch's batches, joined into one."""
    batches = BetonTrainLoader(beton, **{**COMMON, **more}).batches(0)
    return Batch(*[torch.cat(parts) for parts in zip(*batches, strict=True)])


@pytest.fixture(scope="module")
def photos(tmp_path_factory):
    pytest.importorskip("ffcv")
    return make_photos(tmp_path_factory.mktemp("photos"), side=96)


@pytest.fixture(scope="module")
def betons(photos, tmp_path_factory):
    """The training images as pixels, as JPEG and half and half."""
    folder = tmp_path_factory.mktemp("betons")
    for name, share in (("raw", 0), ("jpeg", 1), ("half", 0.5)):
        assert write(photos, folder / f"{name}.beton", f"--jpeg-share {share}") == 0
    return {path.stem: path for path in folder.glob("*.beton")}


def copied(beton, out):
    """Copy a file and the one beside it."""
    shutil.copy(beton, out)
    shutil.copy(sidecar(beton), sidecar(out))
    return out


@pytest.fixture
def beton(betons, tmp_path):
    """A copy to damage: 40 images of 3 classes, some as JPEG, some as pixels."""
    return copied(betons["half"], tmp_path / "train.beton")


def test_the_same_images_make_the_same_file(photos, betons, tmp_path):
    again = tmp_path / "again.beton"
    assert write(photos, again, "--jpeg-share 0.5 --workers 3") == 0
    assert again.read_bytes() == betons["half"].read_bytes()


@pytest.mark.parametrize("kind, is_jpeg", [("raw", {0}), ("jpeg", {1}), ("half", {0, 1})])
def test_whole_images_are_shown_as_they_are(photos, betons, kind, is_jpeg):
    """Crops of the whole image, resized: re-encoding as JPEG at quality 90 and area scaling change little."""
    files = ImageFiles(photos / "train")
    beton = Beton(betons[kind])
    assert set(beton.table[:, 4].tolist()) == is_jpeg
    assert beton.classes == files.classes
    assert np.array_equal(beton.labels, files.targets)
    images, targets, ids = shown(beton, scale=(1, 1), hflip=0)
    assert targets.tolist() == files.targets[ids].tolist()
    for image, index in zip(images, ids.tolist(), strict=True):
        whole = np.asarray(files.read(index)[0].resize((32, 32), Image.Resampling.BOX))
        levels = image * 51 + 127.5
        difference = whole - levels.permute(1, 2, 0).numpy()
        assert np.abs(difference).mean() < 3


def test_training_crops_are_of_all_sizes_flipped_half_of_the_time_and_kept(tmp_path):
    """400 copies of an image with two ramps, which show the position of a crop; kept batches are not overwritten."""
    pytest.importorskip("ffcv")
    pixels = np.zeros((200, 250, 3), np.uint8)
    pixels[..., 0] = np.arange(250)
    pixels[..., 1] = np.arange(200)[:, None]
    (tmp_path / "train" / "class").mkdir(parents=True)
    Image.fromarray(pixels).save(tmp_path / "train" / "class" / "ramps.png")
    assert write(tmp_path, tmp_path / "train.beton", "--jpeg-share 0") == 0
    beton = Beton(tmp_path / "train.beton")
    beton.labels = np.resize(beton.labels, 400)
    beton.table = np.resize(beton.table, (400, 5))
    images = shown(beton, seed=1).images
    images = images * 0.2 * 255 + 127.5  # (400, 3, 32, 32), in 0..255
    across = (images[:, 0, 16, -1] - images[:, 0, 16, 0]) * 32 / 31
    down = (images[:, 1, -1, 16] - images[:, 1, 0, 16]) * 32 / 31
    area = across.abs() * down / (200 * 250)
    aspect = across.abs() / down
    flipped = (across < 0).float()
    assert (down > 0).all()
    assert 0.4 < flipped.mean() < 0.6
    assert 0.06 < area.min() < 0.15
    assert 0.41 < area.mean() < 0.5
    assert 0.85 < area.max() < 1.05
    assert 0.7 < aspect.min() < 0.82
    assert 1.2 < aspect.max() < 1.4


@pytest.mark.parametrize("interpolation", ["bilinear", "bicubic"])
def test_validation_images_are_the_folders_bit_for_bit(tmp_path, interpolation):
    """Photos of odd sizes, smaller and larger than the target, portrait and landscape, grey and lossless."""
    pytest.importorskip("ffcv")
    root = make_photos(tmp_path, train=0, val=4, side=64)
    for number, size in enumerate([(37, 53), (33, 33), (61, 301), (97, 45), (36, 36), (20, 15)]):
        image = Image.effect_mandelbrot(size, (-2, -1, 1, 1), 90)
        if number != 4:
            image = image.convert("RGB")
        image.save(root / f"val/class_{number % 3}/{number}.png")
    out = tmp_path / "val.beton"
    stored = Evaluated(32, 37, interpolation)
    options = "--eval-img-size 32 --eval-resize 37 --split validation --interpolation "
    assert write(root, out, options + interpolation) == 0
    beton = Beton(out, evaluated=stored)
    files = ImageFiles(root / "val")
    scaling = Scaling.cropped(*stored)
    for index in range(10):
        image, target = files.read(index)
        pixels, label = beton.read(index)
        assert torch.equal(pixels, scaling.pixels(image))
        assert target == label
    message = "must have (validation|whole) images.*, got validation images for .*=37"
    for other in (stored._replace(eval_img_size=24), stored._replace(eval_resize=36), None):
        with refused(message):
            Beton(out, evaluated=other)


def test_a_file_larger_than_the_memory_is_read_as_any_other(betons, tmp_path):
    """The file is large because of a hole (sparse file) between images and tables."""
    from ffcv.types import ALLOC_TABLE_TYPE, HeaderType

    path = tmp_path / "large.beton"
    data = betons["half"].read_bytes()
    header = np.frombuffer(data, HeaderType, 1).copy()
    tables = len(data) - 40 * ALLOC_TABLE_TYPE.itemsize
    header["alloc_table_ptr"] = 2 * os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    with path.open("wb") as file:
        file.write(header.tobytes() + data[header.nbytes : tables])
        file.seek(int(header["alloc_table_ptr"][0]))
        file.write(data[tables:])
    whole = Beton(betons["half"])
    write_about(path, read_tables(path), "photos", whole.classes, None)
    few = shown(whole)
    large = shown(Beton(path))
    assert len(few.ids) == 40
    assert torch.equal(few.images, large.images)


# ---- faults ----------------------------------------------------------------------------------------------------------


def test_broken_images_stop_the_writing_and_are_all_named(tmp_path, capsys):
    pytest.importorskip("ffcv")
    root = make_photos(tmp_path / "photos", train=9)
    out = tmp_path / "out" / "train.beton"
    broken = root / "train/class_0/003.jpg", root / "train/class_1/large.png"
    broken[0].write_bytes(b"no image")
    broken[1].write_bytes(pgm_of(11_000, 10_000))
    Image.new("L", (1, 4000)).save(root / "train/class_2/narrow.png")
    assert write(root, out) == 2
    assert not list(out.parent.iterdir())
    errors = capsys.readouterr().err
    assert "2 of 11 images cannot be decoded" in errors
    assert all(str(path) in errors for path in broken)
    for path in broken:
        path.unlink()
    assert write(root, out) == 0
    beton = Beton(out)
    assert len(beton) == 9
    assert beton.table[:, 2].max() == 500, "the narrow one"
    for more, limits in (("--eval-img-size 300", "8..256"), ("--jpeg-share 2", "0..1")):
        flag, given = more.split()
        assert write(root, out, more) == 2
        assert f"{flag} must lie in {limits}, got {given}" in capsys.readouterr().err


def slow_writer(photos, out, **options):
    """Start a process that waits before each image."""
    code = (
        "import sys, time; from ea_vision.__main__ import main; from ea_vision.data import write_ffcv; "
        "read = write_ffcv.ImageFiles.read; "
        "write_ffcv.ImageFiles.read = lambda *a: time.sleep(0.05) or read(*a); "
        "sys.exit(main(['write-ffcv', *sys.argv[1:]]))"
    )
    command = [sys.executable, "-c", code, "--data-dir", photos, "--out", out, "--workers", "2"]
    return subprocess.Popen(command, **options)


@pytest.mark.slow
def test_a_failed_write_keeps_the_previous_file(photos, beton, tmp_path, monkeypatch, capsys):
    def full(*_):
        raise OSError(28, "disk full")

    with monkeypatch.context() as patch:
        patch.setattr("ffcv.fields.RGBImageField.encode", full)
        assert write(photos, beton) == 1
    assert "disk full" in capsys.readouterr().err
    assert set(tmp_path.iterdir()) == {beton, sidecar(beton)}
    assert len(Beton(beton)) == 40
    as_in_a_terminal = partial(signal.signal, signal.SIGINT, signal.SIG_DFL)
    process = slow_writer(photos, beton, preexec_fn=as_in_a_terminal)
    while not list(tmp_path.glob(".train.beton.*.tmp")):
        time.sleep(0.01)
    process.send_signal(signal.SIGINT)
    assert process.wait(60) == 130
    assert set(tmp_path.iterdir()) == {beton, sidecar(beton)}
    assert len(Beton(beton)) == 40


def test_two_writers_at_once_leave_a_whole_file(photos, tmp_path):
    out = tmp_path / "train.beton"
    writers = [slow_writer(photos, out) for _ in range(2)]
    assert [writer.wait(100) for writer in writers] == [0, 0]
    files = ImageFiles(photos / "train")
    beton = Beton(out)
    assert len(beton) == 40
    assert np.array_equal(beton.labels, files.targets)
    assert set(tmp_path.iterdir()) == {out, sidecar(out)}


def flip(path, bit):
    with open(path, "r+b") as file:
        file.seek(bit // 8)
        byte = file.read(1)[0]
        file.seek(bit // 8)
        file.write(bytes([byte ^ (1 << bit % 8)]))


def test_every_flipped_bit_of_the_tables_is_noticed(beton):
    """The tables are the bytes before the first image and after the last one."""
    whole = beton.read_bytes()
    tables = read_tables(beton)
    header, descriptors, metadata, sizes = tables.stored
    before = 8 * (header.nbytes + descriptors.nbytes + metadata.nbytes)
    after = 8 * (len(whole) - sizes.nbytes)
    rng = np.random.default_rng(0)
    # Most bits before the images are unused arguments of the fields, so the header and the rows are tried more often.
    bits = [
        *rng.integers(0, 8 * header.nbytes, 40),
        *rng.integers(0, before, 40),
        *rng.integers(before - 8 * metadata.nbytes, before, 60),
        *rng.integers(after, 8 * len(whole), 60),
    ]
    for bit in map(int, bits):
        flip(beton, bit)
        with refused("train.beton"):
            Beton(beton)
        flip(beton, bit)
    assert beton.read_bytes() == whole
    assert len(Beton(beton)) == 40


def test_every_flipped_bit_of_the_file_beside_it_is_noticed(beton):
    file = sidecar(beton)
    whole = file.read_bytes()
    rows = shown(Beton(beton)).targets
    silent = []
    for bit in range(8 * len(whole)):
        flip(file, bit)
        try:
            assert torch.equal(shown(Beton(beton)).targets, rows)
            silent.append(whole[bit // 8 : bit // 8 + 1])
        except UsageError:
            pass
        flip(file, bit)
    assert set(silent) <= {b" ", b"\n"}, "white space alone"


@pytest.mark.parametrize(
    "text", ["", "[]", "null", "5", '{"evaluated": 5}', '{"classes": []}', "{" * 10_000, "\xff"]
)
def test_a_damaged_file_beside_it_is_refused_in_one_line(beton, text):
    sidecar(beton).write_bytes(text.encode("latin1"))
    with refused("train.beton.json .*write both anew"):
        Beton(beton)


def test_a_file_beside_it_of_another_writer_or_for_another_file_is_refused(betons, beton):
    """FFCV's own writer writes no FILE.json, and so no fingerprint."""
    sidecar(beton).unlink()
    with refused("train.beton.json is required .*write both anew"):
        Beton(beton)
    shutil.copy(sidecar(betons["raw"]), sidecar(beton))
    with refused("do not belong together, or one of them is damaged"):
        Beton(beton)


def test_damaged_and_foreign_files_are_named(betons, tmp_path):
    data = betons["half"].read_bytes()
    path = tmp_path / "cut.beton"
    lengths = (0, 10, 5000, len(data) // 2, len(data) - 1)
    for content in (*[data[:length] for length in lengths], b"no images " * 100):
        path.write_bytes(content)
        with refused("is not a whole .beton file"):
            Beton(path)
    with refused("not a whole .beton file: .*No such file"):
        Beton(tmp_path / "missing.beton")
    raw = Beton(betons["raw"]).fingerprint()
    assert raw == Beton(betons["raw"]).fingerprint()
    assert raw != Beton(betons["jpeg"]).fingerprint()


@pytest.mark.parametrize("left", [0, 0.5])
def test_a_damaged_jpeg_is_counted_named_and_replaced(betons, tmp_path, left):
    out = copied(betons["jpeg"], tmp_path / "out.beton")
    bad = BadImages(1)
    beton = Beton(out)
    start, size = beton.table[1, :2].tolist()
    kept = int(left * size)
    with out.open("r+b") as file:
        file.seek(start + kept)
        file.write(bytes(size - kept))
    _, targets, ids = shown(beton, bad_images=bad)
    assert len(ids) == 40
    assert 1 not in ids
    assert len(ids.unique()) == 39
    assert targets.tolist() == beton.labels[ids].tolist()
    assert bad.new == {f"{out} 1": "it is a damaged JPEG"}
