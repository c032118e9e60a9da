"""Outputs: written whole or not at all, through links, into devices and pipes, never in place of a folder."""
import os
import stat
import threading

import pytest

from ea_vision import predict
from ea_vision.base.errors import RunError, UsageError, exit_code
from ea_vision.base.files import atomic_write, check_output


def test_a_link_stays_and_its_file_is_replaced(tmp_path):
    file, link, dangling = tmp_path / "deep" / "file", tmp_path / "link", tmp_path / "dangling"
    file.parent.mkdir()
    file.write_bytes(b"old")
    link.symlink_to("deep/file")
    dangling.symlink_to("deep/new")
    for path in (link, dangling):
        atomic_write(check_output(path), b"data")
        assert path.is_symlink() and path.read_bytes() == b"data"
    assert sorted(os.listdir(file.parent)) == ["file", "new"], "nothing temporary is left"


def test_the_former_file_of_a_link_is_kept(tmp_path):
    (tmp_path / "file").write_bytes(b"old")
    (tmp_path / "link").symlink_to("file")
    atomic_write(tmp_path / "link", b"new", keep_previous_as=tmp_path / "previous")
    assert (tmp_path / "link").read_bytes() == b"new" and (tmp_path / "previous").read_bytes() == b"old"


@pytest.mark.parametrize("linked", [False, True])
def test_a_device_stays_a_device(tmp_path, linked):
    null = tmp_path / "null"
    try:
        os.mknod(null, 0o666 | stat.S_IFCHR, os.stat(os.devnull).st_rdev)
    except PermissionError:
        pytest.skip("only root makes device files")
    path = null
    if linked:
        path = tmp_path / "link"
        path.symlink_to(null)
    atomic_write(check_output(path), b"data")
    assert stat.S_ISCHR(os.stat(null).st_mode) and path.is_symlink() == linked
    with pytest.raises(UsageError, match="must be a regular file, and .* is a device or a pipe"):
        check_output(path, regular=True)


def test_a_pipe_gets_the_data(tmp_path):
    pipe, got = tmp_path / "pipe", []
    os.mkfifo(pipe)
    reader = threading.Thread(target=lambda: got.append(pipe.read_bytes()))
    reader.start()
    atomic_write(check_output(pipe), b"data" * 100_000)
    reader.join()
    assert got == [b"data" * 100_000] and stat.S_ISFIFO(os.stat(pipe).st_mode)


def test_standard_output_of_a_pipe(tmp_path, capfd):
    atomic_write(check_output(tmp_path.__class__("/dev/stdout")), b"data")
    assert capfd.readouterr().out == "data" and os.path.islink("/dev/stdout")


def test_a_folder_is_refused_before_work_and_never_replaced(tmp_path, capsys):
    folder = tmp_path / "folder.json"
    folder.mkdir()
    link = tmp_path / "link.json"
    link.symlink_to(folder)
    for path in (folder, link):
        with pytest.raises(UsageError, match="must be a file, and .* is a folder"):
            check_output(path)
        with pytest.raises(RunError, match="it is a folder"):
            atomic_write(path, b"data")
        assert exit_code(lambda path=path: predict.main(["no_such_model", "digits:0", "--json", str(path)])) == 2
        assert "is a folder" in capsys.readouterr().err
    assert sorted(os.listdir(tmp_path)) == ["folder.json", "link.json"] and not os.listdir(folder)


def test_what_cannot_be_written_is_said_before_work(tmp_path):
    (tmp_path / "file").touch()
    with pytest.raises(UsageError, match="cannot write into .*/file: File exists"):
        check_output(tmp_path / "file" / "result.json")
    with pytest.raises(RunError, match="cannot write into /dev/full: No space left"):
        atomic_write(tmp_path.__class__("/dev/full"), b"data")
