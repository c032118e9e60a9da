"""Output files are written atomically and through links, and never replace a folder or a device."""

import multiprocessing
import os
import signal
from pathlib import Path

import pytest

from ea_vision.base import files
from ea_vision.base.errors import RunError
from ea_vision.base.files import atomic_write, check_keeps_images, check_output, check_writable
from tests.refused import refused


def test_a_link_stays_and_its_file_is_replaced(tmp_path):
    file = tmp_path / "deep" / "file"
    link = tmp_path / "link"
    dangling = tmp_path / "dangling"
    previous = tmp_path / "previous"
    file.parent.mkdir()
    file.write_bytes(b"old")
    link.symlink_to("deep/file")
    dangling.symlink_to("deep/new")
    for path in (link, dangling):
        atomic_write(check_output(path), b"data")
        assert path.is_symlink()
        assert path.read_bytes() == b"data"
    atomic_write(link, b"new", keep_previous_as=previous)
    assert file.read_bytes() == b"new"
    assert previous.read_bytes() == b"data"
    assert sorted(os.listdir(file.parent)) == ["file", "new"], "nothing temporary is left"


def test_what_cannot_be_written_is_said_before_work_and_nothing_is_replaced(tmp_path):
    folder = tmp_path / "folder"
    folder.mkdir()
    (tmp_path / "file").touch()
    (tmp_path / "link").symlink_to("folder")
    with refused("must be a file, and /dev/null is a device"):
        check_output(Path("/dev/null"))
    for name, message in [
        ("folder", "must be a file, and .* is a folder"),
        ("link", "must be a file, and .* is a folder"),
        ("file/result.json", "cannot make the folder .*/file: File exists"),
        ("n" * 256, "cannot write .*nnn: File name too long"),
    ]:
        with refused(message):
            check_output(tmp_path / name)
        with refused("cannot write .*/", RunError):
            atomic_write(tmp_path / name, b"data")
    with refused("cannot write into the folder .*n: File name too long"):
        check_writable(tmp_path / ("n" * 256))
    assert sorted(os.listdir(tmp_path)) == ["file", "folder", "link"]
    assert not os.listdir(folder)


def test_an_output_with_too_long_a_name_is_none_of_the_images(tmp_path):
    image = tmp_path / "photo.png"
    image.touch()
    outputs = [tmp_path / ("n" * 256), tmp_path / "other.png"]
    check_keeps_images(outputs, [str(image)])
    with refused("another file than the images, got .*photo.png"):
        check_keeps_images([*outputs, image], [str(image)])


def test_a_signal_in_the_middle_of_a_write_ends_the_process_after_it(tmp_path):
    path = tmp_path / "file"
    path.write_bytes(b"old")
    fsync = os.fsync

    def signalled(descriptor):
        os.kill(os.getpid(), signal.SIGTERM)
        fsync(descriptor)

    def write():
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
        os.fsync = signalled
        atomic_write(path, b"new")

    process = multiprocessing.get_context("fork").Process(target=write)
    process.start()
    process.join()
    assert process.exitcode == -signal.SIGTERM
    assert path.read_bytes() == b"new"
    assert os.listdir(tmp_path) == ["file"]


class Stopped(BaseException):
    pass


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_that_raises_an_exception_leaves_no_half_of_a_replacement(
    tmp_path, monkeypatch, number
):
    """It comes between the two renames."""
    path = tmp_path / "file"
    path.write_bytes(b"old")
    replace = os.replace

    def signalled(source, target):
        replace(source, target)
        os.kill(os.getpid(), number)

    def stop(number, _):
        raise Stopped

    previous = signal.signal(number, stop)
    monkeypatch.setattr(os, "replace", signalled)
    try:
        with pytest.raises(Stopped):
            atomic_write(path, b"new", keep_previous_as=tmp_path / "previous")
        assert signal.getsignal(number) is stop
    finally:
        signal.signal(number, previous)
    assert path.read_bytes() == b"new"
    assert (tmp_path / "previous").read_bytes() == b"old"
    assert len(os.listdir(tmp_path)) == 2


def test_the_longest_name_is_written(tmp_path):
    atomic_write(check_output(tmp_path / ("n" * 255)), b"data")
    assert [len(name) for name in os.listdir(tmp_path)] == [255]


def test_a_file_that_another_program_has_open_is_replaced_a_little_later(tmp_path, monkeypatch):
    """As on Windows: PermissionError until the other program closes the file."""
    path = tmp_path / "file"
    path.write_bytes(b"old")
    replace = os.replace
    tries = []

    def refused_twice(source, target):
        tries.append(target)
        if len(tries) < 3:
            raise PermissionError(13, "Access is denied")
        replace(source, target)

    monkeypatch.setattr(files.os, "replace", refused_twice)
    with refused("Access is denied", RunError):
        atomic_write(path, b"new")
    assert path.read_bytes() == b"old"
    assert len(tries) == 1, "elsewhere it is no wait that helps"
    tries.clear()
    monkeypatch.setattr(files, "WAITS", (0.0, 0.0))
    atomic_write(path, b"new")
    assert path.read_bytes() == b"new"
    assert os.listdir(tmp_path) == ["file"]
