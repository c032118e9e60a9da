"""Any change in a .beton file's tables or in FILE.json is noticed when the file is opened; two writers at once do not
disturb each other."""

import shutil
import subprocess
import sys

import numpy as np
import pytest
import torch

from ea_vision.base.errors import UsageError
from ea_vision.data.beton import Beton, read_tables, sidecar
from ea_vision.data.image_files import ImageFiles
from ea_vision.data.write_ffcv import write_beton
from tests.data.photos import make_photos
from tests.data.test_ffcv import shown
from tests.refused import refused
from tests.slow import needs_ffcv

pytestmark = needs_ffcv


@pytest.fixture(scope="module")
def photos(tmp_path_factory):
    return make_photos(tmp_path_factory.mktemp("photos"), train=12, val=6)


@pytest.fixture(scope="module")
def written(photos, tmp_path_factory):
    """12 images of 3 classes, some as JPEG, some as pixels."""
    out = tmp_path_factory.mktemp("written") / "train.beton"
    write_beton(ImageFiles(photos / "train"), out)
    return out


@pytest.fixture
def beton(written, tmp_path):
    """A copy to damage."""
    for path in (written, sidecar(written)):
        shutil.copy(path, tmp_path / path.name)
    return tmp_path / written.name


def flip(path, bit):
    with open(path, "r+b") as file:
        file.seek(bit // 8)
        byte = file.read(1)[0]
        file.seek(bit // 8)
        file.write(bytes([byte ^ (1 << bit % 8)]))


def test_the_same_images_make_the_same_file(photos, written, tmp_path):
    again = tmp_path / "again.beton"
    write_beton(ImageFiles(photos / "train"), again, workers=3)
    assert again.read_bytes() == written.read_bytes()


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
    assert len(Beton(beton)) == 12


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


def test_a_file_of_another_writer_is_refused(beton):
    """FFCV's own writer writes no FILE.json, and so no fingerprint."""
    sidecar(beton).unlink()
    with refused("train.beton.json is required .*write both anew"):
        Beton(beton)


def test_another_files_classes_are_refused(beton, photos, tmp_path):
    other = tmp_path / "other.beton"
    write_beton(ImageFiles(photos / "train"), other, jpeg_share=0)
    shutil.copy(sidecar(other), sidecar(beton))
    with refused("do not belong together, or one of them is damaged"):
        Beton(beton)


def test_two_writers_at_once_leave_a_whole_file(photos, tmp_path):
    out = tmp_path / "train.beton"
    code = (
        "import sys, time; from ea_vision.__main__ import main; from ea_vision.data import write_ffcv; "
        "read = write_ffcv.ImageFiles.read; "
        "write_ffcv.ImageFiles.read = lambda *a: time.sleep(0.05) or read(*a); "
        "sys.exit(main(['write-ffcv', *sys.argv[1:]]))"
    )
    command = [sys.executable, "-c", code, "--data-dir", photos, "--out", out, "--workers", "1"]
    writers = [subprocess.Popen(command) for _ in range(2)]
    assert [writer.wait(100) for writer in writers] == [0, 0]
    files = ImageFiles(photos / "train")
    beton = Beton(out)
    assert len(beton) == 12
    assert np.array_equal(beton.labels, files.targets)
    assert sorted(path.name for path in tmp_path.iterdir()) == [out.name, sidecar(out).name]
