"""Files with bytes flipped, swapped or cut off: one clear error, or exactly what was there; never anything else."""
from __future__ import annotations

import importlib.util
import io
import json
import shutil
import tarfile
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from PIL import Image

from ea_vision.base.errors import UsageError
from ea_vision.data.ffcv import open_beton, sidecar
from ea_vision.data.image_files import BrokenImage, ImageFiles, decode_image, natural_key
from ea_vision.data.imagenet import ImageSource
from ea_vision.data.write_ffcv import PAGE, write_beton
from tests.data.photos import make_photos

QUICK = settings(max_examples=60, deadline=None, derandomize=True,
                 suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow])


@dataclass
class Flip:
    bits: list[tuple[int, int]]  # where, which

    def __call__(self, data: bytearray) -> None:
        for at, bits in self.bits:
            data[at] ^= bits


@dataclass
class Swap:
    pair: tuple[int, int]

    def __call__(self, data: bytearray) -> None:
        first, second = self.pair
        data[first], data[second] = data[second], data[first]


@dataclass
class Cut:
    at: int

    def __call__(self, data: bytearray) -> None:
        del data[self.at:]


def damage(length: int, places=None):
    """Strategy: a function that damages bytes of this length, at places of a strategy."""
    place = places if places is not None else st.integers(0, length - 1)

    return st.one_of(st.lists(st.tuples(place, st.integers(1, 255)), min_size=1, max_size=3).map(Flip),
                     st.tuples(place, place).map(Swap), place.map(Cut))


def one_line(error: Exception) -> None:
    assert str(error) and "Traceback" not in str(error)


# ---- images ---------------------------------------------------------------------------------------------------------

PHOTO = Image.fromarray(np.random.default_rng(0).integers(0, 255, (6, 7, 3), dtype=np.uint8)).resize((40, 30))
SAVED = {}
for kind, options in {"JPEG": {}, "PNG": {}, "WEBP": {}, "BMP": {}, "GIF": {}, "PPM": {},
                      "TIFF": {"compression": "tiff_lzw"}}.items():
    buffer = io.BytesIO()
    PHOTO.save(buffer, kind, **options)
    SAVED[kind] = buffer.getvalue()


@pytest.mark.parametrize("kind", SAVED)
def test_images(kind):
    """PNG has checksums: nothing but its pixels or an error. The others' pixels may be others; a cut is noticed."""
    whole = np.asarray(decode_image(io.BytesIO(SAVED[kind])))
    assert np.abs(whole.astype(int) - np.asarray(PHOTO)).mean() < 30 and whole.shape == (30, 40, 3)

    @QUICK
    @given(hurt=damage(len(SAVED[kind])))
    def holds(hurt):
        data = bytearray(SAVED[kind])
        hurt(data)
        try:
            image = decode_image(io.BytesIO(bytes(data)))
        except BrokenImage as error:
            one_line(error)
            return
        assert image.mode == "RGB"
        if kind == "PNG" or len(data) < len(whole):
            assert np.array_equal(np.asarray(image), whole)

    holds()


# ---- tars -----------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def tar(tmp_path_factory) -> Path:
    path = tmp_path_factory.mktemp("tars") / "train.tar"
    with tarfile.open(path, "w", format=tarfile.USTAR_FORMAT) as out:
        for index in range(5):
            info = tarfile.TarInfo(f"class_{index % 2}/{index}.png")
            info.size = len(SAVED["PNG"])
            out.addfile(info, io.BytesIO(SAVED["PNG"]))
    return path


@QUICK
@given(data=st.data())
def test_tars(tar, tmp_path, data):
    """The same names and classes, each image as it was or broken; or one error.

    The sum of a tar's header is the same with two of its bytes exchanged, so that names can change unnoticed: then
    only no other exception.
    """
    content, names = tar.read_bytes(), ImageFiles(tar).names
    used = 5 * (512 + -(-len(SAVED["PNG"]) // 512) * 512) + 512  # with the first block of its end mark
    headers = st.integers(0, 5).flatmap(lambda n: st.integers(0, 511).map(lambda at: n * (used - 512) // 5 + at))
    content = bytearray(content)
    hurt = data.draw(damage(used, st.one_of(st.integers(0, used - 1), headers)))
    hurt(content)
    path = tmp_path / "train.tar"
    path.write_bytes(content)
    try:
        files = ImageFiles(path, natural_key)
    except UsageError as error:
        one_line(error)
        assert str(path) in str(error)
        return
    if not isinstance(hurt, Swap):
        assert files.names == names and files.targets.tolist() == [0, 0, 0, 1, 1]
    for index in range(len(files)):
        try:
            assert np.array_equal(np.asarray(decode_image(files.open(index))), np.asarray(PHOTO))
        except BrokenImage as error:
            one_line(error)


# ---- FFCV files and the tables beside them --------------------------------------------------------------------------

needs_ffcv = pytest.mark.skipif(importlib.util.find_spec("ffcv") is None, reason="needs FFCV: pip install .[ffcv]")


@pytest.fixture(scope="module")
def beton(tmp_path_factory) -> Path:
    pytest.importorskip("ffcv")
    folder = tmp_path_factory.mktemp("betons")
    path = folder / "train.beton"
    write_beton(ImageSource("", make_photos(folder / "photos", train=6) / "train", "train"), path, workers=0)
    return path


@pytest.fixture(scope="module")
def whole(beton):
    """Labels, classes and pixels of the file."""
    opened = open_beton(beton, verify=True)
    assert set(opened.images["mode"].tolist()) == {0, 1}
    return opened.labels.tolist(), opened.classes, [opened.decode(index).copy() for index in range(6)]


def same_or_named(path: Path, whole) -> None:
    """A file that can be opened has the labels and classes it had; each image is as it was or broken."""
    labels, classes, pixels = whole
    try:
        opened = open_beton(path, verify=True)
    except UsageError as error:
        one_line(error)
        assert str(path) in str(error)
        return
    assert opened.labels.tolist() == labels and opened.classes == classes
    for index in range(6):
        try:
            assert np.array_equal(opened.decode(index), pixels[index])
        except BrokenImage as error:
            one_line(error)


@needs_ffcv
@QUICK
@given(data=st.data())
def test_betons(beton, whole, tmp_path, data):
    opened = open_beton(beton)
    size, used = beton.stat().st_size, int(opened.sizes.sum())
    places = st.one_of(st.integers(0, 24), st.integers(0, 2200), st.integers(PAGE, PAGE + used - 1),
                       st.integers(size - 6 * 24, size - 1))
    content = bytearray(beton.read_bytes())
    data.draw(damage(size, places))(content)
    path = tmp_path / beton.name
    path.write_bytes(content)
    shutil.copy(sidecar(beton), tmp_path)
    same_or_named(path, whole)


@needs_ffcv
@QUICK
@given(data=st.data())
def test_betons_without_a_table_beside_them(beton, tmp_path, data):
    """As FFCV's own writer leaves them: nothing tells a label from another one; still no traceback."""
    size = beton.stat().st_size
    content = bytearray(beton.read_bytes())
    data.draw(damage(size, st.one_of(st.integers(0, 24), st.integers(2080, 2200), st.integers(size - 144, size - 1))))(
        content)
    path = tmp_path / "alone.beton"
    path.write_bytes(content)
    try:
        opened = open_beton(path)
        for index in range(len(opened)):
            opened.decode(index)
    except (UsageError, BrokenImage) as error:
        one_line(error)


@needs_ffcv
@QUICK
@given(data=st.data())
def test_the_tables_beside_betons(beton, whole, tmp_path, data):
    path = tmp_path / beton.name
    if not path.exists():
        shutil.copy(beton, path)
    content = bytearray(sidecar(beton).read_bytes())
    data.draw(damage(len(content)))(content)
    sidecar(path).write_bytes(content)
    same_or_named(path, whole)


@needs_ffcv
@pytest.mark.parametrize("content, message", [
    (b"{}", "does not name the classes"), (b"[]", "must hold a table, got list"), (b"7", "must hold a table, got int"),
    (b"\x00\xff\xfe", "cannot be read"), (b"", "cannot be read"), (b"[" * 100_000, "cannot be read"),
    (b'{"classes": []}', "does not name the classes"), (b'{"classes": "abc"}', "does not name the classes"),
    (b'{"classes": [1, 2, 3]}', "does not name the classes"), (b'{"classes": {"a": 1}}', "does not name the classes"),
    (b'{"classes": ["a"]}', r"labels of .* must lie in 0\.\.0, got 0\.\.2"),
    (b'{"classes": ["a", "b", "c"], "checksums": "00"}', "is damaged: its checksum does not match"),
])
def test_tables_that_are_valid_but_wrong(beton, tmp_path, content, message):
    path = Path(shutil.copy(beton, tmp_path))
    sidecar(path).write_bytes(content)
    with pytest.raises(UsageError, match=message):
        open_beton(path)


@needs_ffcv
def test_the_table_of_another_file(beton, tmp_path):
    other = tmp_path / "other.beton"
    photos = make_photos(tmp_path / "photos", train=6, side=50)
    write_beton(ImageSource("", photos / "train", "train"), other, workers=0)
    shutil.copy(sidecar(beton), sidecar(other))
    with pytest.raises(UsageError, match="is damaged, or not the file that .* describes"):
        open_beton(other)
    about = json.loads(sidecar(beton).read_text())
    sidecar(other).write_text(json.dumps({"classes": about["classes"]}))
    assert len(open_beton(other)) == 6, "tables of before have no checksums"
    with pytest.raises(UsageError, match="has no checksums to verify"):
        open_beton(other, verify=True)
