"""Reading a tar gives what unpacking it would give: repeated names, other files; the rest is refused by name."""

import os
import subprocess
import tarfile

import pytest
from PIL import Image

from ea_vision.data.image_files import ImageFiles
from tests.data.photos import make_photos, pack, same, without_end_mark
from tests.refused import refused

GREY = Image.new("RGB", (8, 8), "grey")


@pytest.fixture
def photos(tmp_path):
    """Six images in 3 classes."""
    return make_photos(tmp_path / "photos", train=6, val=0) / "train"


def test_the_later_of_two_entries_counts(photos, tmp_path):
    tar = pack(photos, tmp_path / "x.tar")
    GREY.save(photos / "class_0" / "000.jpg")
    subprocess.run(["tar", "-rf", tar, "-C", photos, "./class_0/000.jpg"], check=True)
    same(photos, tar)


def test_joined_tars_are_refused(photos, tmp_path):
    joined = tmp_path / "x.tar"
    parts = [pack(folder, joined).read_bytes() for folder in sorted(photos.iterdir())]
    for padding in (0, 3 * 512, 2**20 + 512):
        joined.write_bytes(bytes(padding).join(parts))
        with refused(f"^{joined}.*bytes follow its end, at byte [0-9]+"):
            ImageFiles(joined)
    with tarfile.open(tmp_path / "outer.tar", "w") as tar:
        tar.add(joined, "inner.tar")
    with refused("bytes follow its end"):
        ImageFiles(tmp_path / "outer.tar")


def test_bytes_behind_the_end_are_refused(photos, tmp_path):
    tar = pack(photos, tmp_path / "x.tar")
    whole = tar.read_bytes()
    for more in (b"x", bytes(700) + b"some text", os.urandom(2000)):
        tar.write_bytes(whole + more)
        with refused("follow its end, at byte [0-9]+"):
            ImageFiles(tar)
    start = whole.index(b"./class_1/001.jpg")
    tar.write_bytes(whole[:start] + bytes(1024) + whole[start + 512 :])
    with refused("follow its end, at byte"):
        ImageFiles(tar)


def test_a_tar_in_a_tar_ends_where_its_bytes_end(photos, tmp_path):
    """The inner tar has no end mark, so the next member of the outer tar could be mistaken for one of its own."""
    inner = pack(photos, tmp_path / "x.tar")
    inner.write_bytes(without_end_mark(inner.read_bytes()))
    GREY.save(tmp_path / "y.png")
    with tarfile.open(tmp_path / "outer.tar", "w") as tar:
        tar.add(inner, "inner.tar")
        tar.add(tmp_path / "y.png", "other/y.png")
    with refused("damaged or cut off at byte"):
        ImageFiles(tmp_path / "outer.tar")


@pytest.mark.parametrize(
    "name, target",
    [
        ("class_0/x.png", "x.png"),
        ("class_0/x.PNG", "../../elsewhere.png"),
        ("class_0/x.cls", "000.jpg"),
        ("class_3", "/data/class_3"),
        ("class_3", "class_0"),
        ("class_3.tar", "class_0"),
    ],
)
def test_links_are_refused_by_name(photos, tmp_path, name, target):
    (photos / name).symlink_to(target)
    tar = pack(photos, tmp_path / "x.tar")
    with refused(f"^{tar}: '{name}' is a link to '{target}'"):
        ImageFiles(tar)


def test_a_hard_link_is_refused_by_name(photos, tmp_path):
    os.link(photos / "class_0" / "000.jpg", photos / "class_1" / "linked.jpg")
    tar = pack(photos, tmp_path / "x.tar")
    with refused("'class_1/linked.jpg' is a link to './class_0/000.jpg'"):
        ImageFiles(tar)
    same(photos, pack(photos, tar, "-h", "--hard-dereference"))


@pytest.mark.parametrize(
    "name, target",
    [
        ("class_0/notes.txt", "/data/notes.txt"),
        ("class_0/self", "self"),
        ("class_0/again", ".."),
        ("class_0/again", "../class_0"),
        ("class_0/.x.png", "000.jpg"),
    ],
)
def test_links_that_add_no_image_are_passed_over(photos, tmp_path, name, target):
    (photos / name).symlink_to(target)
    same(photos, pack(photos, tmp_path / "x.tar"))


def test_sparse_files_are_refused_by_name(photos, tmp_path):
    size = 300_016
    with open(photos / "class_0" / "holes.ppm", "wb") as file:
        file.write(b"P6\n100 1000\n255\n")
        file.truncate(size)
        file.seek(size - 10)
        file.write(b"0123456789")
    for form in ("gnu", "pax"):
        tar = pack(photos, tmp_path / f"{form}.tar", "-S", f"--format={form}")
        with refused("'class_0/holes.ppm' is stored sparse or in parts"):
            ImageFiles(tar)
    same(photos, pack(photos, tmp_path / "whole.tar"))
