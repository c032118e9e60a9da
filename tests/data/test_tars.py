"""Reading a tar gives what unpacking it would give: links, repeated names, concatenated tars; the rest is refused."""

import io
import os
import subprocess
import tarfile

import numpy as np
import pytest
from PIL import Image

from ea_vision.base.errors import UsageError
from ea_vision.data.image_files import ImageFiles
from tests.data.photos import make_photos

GREY = Image.new("RGB", (8, 8), "grey")


def png(image=GREY):
    file = io.BytesIO()
    image.save(file, "PNG")
    return file.getvalue()


@pytest.fixture
def photos(tmp_path):
    """Six images in 3 classes."""
    return make_photos(tmp_path / "photos", train=6, val=0) / "train"


def pack(folder, tar, *more):
    subprocess.run(["tar", "--sort=name", *more, "-f", tar, "-C", folder, "."], check=True)
    return tar


def same(folder, tar):
    """Assert that the folder and its tar have the same images."""
    files = ImageFiles(folder)
    packed = ImageFiles(tar)
    assert packed.names == files.names
    assert packed.classes == files.classes
    for index in range(len(files)):
        image, target = files.read(index)
        other, label = packed.read(index)
        assert np.array_equal(image, other)
        assert target == label


def hard_links(root):
    (root / "class_9").mkdir()
    for path in root.glob("class_0/*"):
        os.link(path, root / "class_9" / path.name)


def symbolic_links(root):
    (root / "class_9").mkdir()
    for path in root.glob("class_0/*"):
        (root / "class_9" / path.name).symlink_to(f"../class_0/{path.name}")


def a_link_to_a_folder(root):
    (root / "class_9").symlink_to("class_0")


def a_link_through_a_link(root):
    (root / "class_8").symlink_to("class_0")
    (root / "class_9").mkdir()
    for path in root.glob("class_1/*"):
        path.rename(root / "class_0" / path.name)
        path.symlink_to(f"../class_8/{path.name}")
        (root / "class_9" / path.name).symlink_to(f"../class_1/{path.name}")


def a_hard_link_to_a_link(root):
    symbolic_links(root)
    [first, *_] = root.glob("class_9/*")
    (root / "class_8").mkdir()
    os.link(first, root / "class_8" / first.name, follow_symlinks=False)


def a_folder_in_itself(root):
    (root / "class_0" / "again").symlink_to("..")


@pytest.mark.parametrize(
    "change",
    [
        hard_links,
        symbolic_links,
        a_link_to_a_folder,
        a_link_through_a_link,
        a_hard_link_to_a_link,
        a_folder_in_itself,
    ],
    ids=lambda change: change.__name__,
)
def test_links_lead_to_their_files(photos, tmp_path, change):
    change(photos)
    same(photos, pack(photos, tmp_path / "x.tar", "-c"))


def test_the_later_of_two_entries_counts(photos, tmp_path):
    os.link(photos / "class_0" / "000.jpg", photos / "class_1" / "linked.jpg")
    tar = pack(photos, tmp_path / "x.tar", "-c")
    before = np.asarray(Image.open(photos / "class_1" / "linked.jpg"))
    (photos / "class_0" / "000.jpg").unlink()
    GREY.save(photos / "class_0" / "000.jpg")
    subprocess.run(["tar", "-rf", tar, "-C", photos, "./class_0/000.jpg"], check=True)
    same(photos, tar)
    linked = ImageFiles(tar)
    image, _ = linked.read(linked.names.index("class_1/linked.jpg"))
    assert np.array_equal(image, before), "a hard link keeps the earlier file"


@pytest.mark.parametrize("padding", [0, 3 * 512, 2**20 + 512])
def test_tars_behind_each_other_are_read(photos, tmp_path, padding):
    parts = []
    for name in sorted(os.listdir(photos)):
        part = tmp_path / f"{name}.tar"
        subprocess.run(["tar", "-cf", part, "-C", photos, name], check=True)
        parts.append(part.read_bytes())
    (tmp_path / "x.tar").write_bytes(bytes(padding).join(parts))
    same(photos, tmp_path / "x.tar")
    # and where such a file lies in another tar
    with tarfile.open(tmp_path / "outer.tar", "w") as tar:
        tar.add(tmp_path / "x.tar", "inner.tar")
    assert len(ImageFiles(tmp_path / "outer.tar")) == 6


def test_bytes_behind_the_end_are_refused(photos, tmp_path):
    tar = pack(photos, tmp_path / "x.tar", "-c")
    whole = tar.read_bytes()
    for more in (b"x", bytes(700) + b"some text", os.urandom(2000)):
        tar.write_bytes(whole + more)
        with pytest.raises(UsageError, match="follows its end, at byte [0-9]+, is not another"):
            ImageFiles(tar)
    start = whole.index(b"./class_1/001.jpg")
    tar.write_bytes(whole[:start] + bytes(1024) + whole[start + 512 :])
    with pytest.raises(UsageError, match="follows its end, at byte"):
        ImageFiles(tar)


def test_a_tar_in_a_tar_ends_where_its_bytes_end(photos, tmp_path):
    """The inner tar has no end mark, so the next member of the outer tar could be mistaken for one of its own."""
    inner = pack(photos, tmp_path / "x.tar", "-c")
    content = inner.read_bytes().rstrip(b"\0")
    inner.write_bytes(content + bytes(-len(content) % 512))
    GREY.save(tmp_path / "y.png")
    with tarfile.open(tmp_path / "outer.tar", "w") as tar:
        tar.add(inner, "inner.tar")
        tar.add(tmp_path / "y.png", "other/y.png")
    with pytest.raises(UsageError, match="damaged or cut off at byte"):
        ImageFiles(tmp_path / "outer.tar")


@pytest.mark.parametrize(
    "name, target",
    [
        ("class_0/x.png", "../../elsewhere.png"),
        ("class_0/x.png", "/data/elsewhere.png"),
        ("class_0/x.png", "x.png"),
        ("class_3", "/data/class_3"),
        ("class_3", "nowhere"),
    ],
)
def test_links_to_nowhere_are_refused_by_name(photos, tmp_path, name, target):
    (photos / name).symlink_to(target)
    tar = pack(photos, tmp_path / "x.tar", "-c")
    with pytest.raises(UsageError, match=f"'{name}' is a link to '{target}', which .* not hold"):
        ImageFiles(tar)
    (photos / name).unlink()
    (photos / "class_0" / "notes.txt").symlink_to("/data/notes.txt")
    same(photos, pack(photos, tar, "-c"))


def test_a_class_that_is_a_link_to_nowhere_is_named(photos):
    (photos / "class_3").symlink_to("/data/class_3")
    with pytest.raises(UsageError, match=r"1 class folder\(s\) of .* have no images: class_3"):
        ImageFiles(photos)


def test_sparse_files_are_refused_by_name(photos, tmp_path):
    size = 300_016
    with open(photos / "class_0" / "holes.ppm", "wb") as file:
        file.write(b"P6\n100 1000\n255\n")
        file.truncate(size)
        file.seek(size - 10)
        file.write(b"0123456789")
    for form in ("gnu", "pax"):
        tar = pack(photos, tmp_path / f"{form}.tar", "-cS", f"--format={form}")
        with pytest.raises(UsageError, match="'class_0/holes.ppm' is stored sparse or in parts"):
            ImageFiles(tar)
    same(photos, pack(photos, tmp_path / "whole.tar", "-c"))
