"""Hidden folders and files are no classes and no photos, in every walk; one line says how many were skipped."""

import os
import shutil

import pytest
import torch
from PIL import Image

from ea_vision.base.errors import RunError
from ea_vision.base.processes import World
from ea_vision.data.bad_images import BadImages
from ea_vision.data.image_files import ImageFiles
from ea_vision.zoo.inputs import find_images
from tests.data.photos import pack
from tests.refused import refused

HIDDEN = [
    ".ipynb_checkpoints/0-checkpoint.png",
    "a/.ipynb_checkpoints/0-checkpoint.png",
    ".Trash-1000/files/0.png",
    "@eaDir/0.png",
    "a/@eaDir/0.png",
    "__MACOSX/a/0.png",
    "$RECYCLE.BIN/0.png",
    "a/._0.png",
    "._0.png",
]


@pytest.fixture
def folder(tmp_path):
    for name in "ab":
        (tmp_path / "data" / name).mkdir(parents=True)
        Image.new("RGB", (8, 8)).save(tmp_path / "data" / name / "0.png")
    return tmp_path / "data"


def lines(caplog):
    """Return what was said since the last call."""
    report = list(caplog.messages)
    caplog.clear()
    return report


@pytest.mark.parametrize("name", HIDDEN)
def test_hidden_names_are_passed_over_and_counted(folder, tmp_path, caplog, name):
    assert ImageFiles(folder).classes == ["a", "b"]
    assert not lines(caplog)
    (folder / name).parent.mkdir(parents=True, exist_ok=True)
    shutil.copy(folder / "a" / "0.png", folder / name)
    for source in (folder, pack(folder, tmp_path / "x.tar")):
        files = ImageFiles(source)
        assert files.classes == ["a", "b"]
        assert files.names == ["a/0.png", "b/0.png"]
        [line] = lines(caplog)
        assert line.startswith(f"{source}: 1 hidden or special files and folders are skipped: ")
    assert find_images([str(folder)]) == [str(folder / path) for path in ("a/0.png", "b/0.png")]
    assert len(lines(caplog)) == 1
    if "/" not in name:
        assert find_images([str(folder / name)]) == [str(folder / name)], "named, not walked to"


def test_tars_beside_class_folders_are_said(folder, caplog):
    pack(folder / "a", folder / "c.tar")
    assert ImageFiles(folder).classes == ["a", "b"]
    [line] = lines(caplog)
    assert line == f"{folder}: 1 tars beside the folders of images are skipped, such as 'c.tar'"


def test_a_hidden_folder_that_is_named_is_read(folder):
    hidden = folder.rename(folder.with_name(".data"))
    assert ImageFiles(hidden).classes == ["a", "b"]


def test_pipes_are_passed_over_and_a_folder_in_itself_is_walked_once(folder, caplog):
    os.mkfifo(folder / "a" / "z.png")
    (folder / "a" / "again").symlink_to(folder)
    assert len(ImageFiles(folder)) == 2
    assert len(find_images([str(folder)])) == 2
    first, second = lines(caplog)
    assert first == second
    assert "2 hidden or special files and folders are skipped: 'a/again', 'a/z.png'" in first


def test_a_stray_image_beside_class_folders_is_named(folder):
    shutil.copy(folder / "a/0.png", folder / "cover.png")
    for source, name in ((folder, "cover.png"), (folder.parent, "data/cover.png")):
        with refused(f"must lie in class folders, got {name}"):
            ImageFiles(source)


def test_names_that_are_no_utf8_are_read_and_have_a_fingerprint(folder):
    before = ImageFiles(folder).fingerprint()
    os.rename(folder / "a" / "0.png", os.fsencode(folder / "a") + b"/\xff.png")
    files = ImageFiles(folder)
    assert files.read(0)[1] == 0
    assert files.fingerprint() != before
    os.rename(folder / "b", os.fsencode(folder) + b"/caf\xe9")
    assert ImageFiles(folder).classes == ["a", r"caf\xe9"], "in tables and figures"
    bad = BadImages(1)
    bad.new[files.describe(0)] = "it is broken"
    bad.collect(World(0, 1, torch.device("cpu")), folder)
    assert b"/\xff.png,it is broken" in (folder / "bad_images.csv").read_bytes()


def test_a_list_of_bad_images_that_cannot_be_written_ends_no_run(tmp_path, monkeypatch, caplog):
    """Each of four updates meets a bad image on a full disk: there is one warning, and the limit still counts them."""

    def full(*_):
        raise RunError("cannot write bad_images.csv: No space left on device")

    monkeypatch.setattr("ea_vision.data.bad_images.atomic_write", full)
    world = World(0, 1, torch.device("cpu"))
    bad = BadImages(3)
    for number in range(3):
        bad.new[f"{number}.png"] = "it is broken"
        bad.collect(world, tmp_path)
    warnings = [line for line in caplog.messages if "No space left" in line]
    assert len(warnings) == 1
    assert "the run goes on" in warnings[0]
    bad.new["3.png"] = "it is broken"
    with refused(r"4 images cannot be read.*0.png \(it is broken\)$", RunError):
        bad.collect(world, tmp_path)
