"""WebDataset shards: the label beside an image gives its class, a folder's shards are one split, others are refused."""

import io
import tarfile
import unicodedata

import pytest

from ea_vision.data.image_files import ImageFiles
from tests.data.photos import grey_jpeg
from tests.refused import refused


def shard(path, files):
    path.parent.mkdir(exist_ok=True)
    with tarfile.open(path, "w") as tar:
        for name, content in files.items():
            about = tarfile.TarInfo(name)
            about.size = len(content)
            tar.addfile(about, io.BytesIO(content))


def samples(numbers, label="{}\n".format):
    """Return samples whose class is their number modulo 12."""
    files = {}
    for number in numbers:
        files[f"{number:04d}.jpg"] = grey_jpeg(10 * (number % 12))
        files[f"{number:04d}.json"] = b"{}"
        files[f"{number:04d}.cls"] = label(number % 12).encode()
    return files


def in_parts(number):
    """A name whose umlaut is two signs, as macOS may store it."""
    return f"Ba\N{COMBINING DIAERESIS}r {number}"


@pytest.mark.parametrize("label", ["{}\n".format, in_parts])
def test_labels_beside_the_images_count(tmp_path, label):
    folder = tmp_path / "train"
    shard(folder / "000.tar", samples(range(9), label))
    shard(folder / "001.tar", samples(range(9, 24), label))
    files = ImageFiles(folder)
    names = [label(number).strip() for number in range(12)]
    assert files.classes == [unicodedata.normalize("NFC", name) for name in names]
    assert len(files) == 24
    for index, name in enumerate(files.names):
        image, target = files.read(index)
        number = int(name.split("/")[1][:4])
        level = image.getpixel((4, 4))[0]
        assert target == number % 12
        assert abs(level - 10 * target) < 3
    assert len(ImageFiles(folder / "001.tar")) == 15, "one shard alone"


@pytest.mark.parametrize(
    "change, message",
    [
        ({"0003.cls": None}, "is required beside each image, and '0003.jpg' has none"),
        ({"0003.cls": b""}, "beside '0003.jpg' must be a number or a name, got b''"),
        ({"0003.cls": b"\xff\xfe\x00"}, "must be a number or a name"),
        ({"0003.cls": b"x" * 500}, "must be a number or a name"),
        (dict.fromkeys(map("{:04d}.cls".format, range(9))), "shard of WebDataset's without labels"),
    ],
)
def test_shards_that_are_refused(tmp_path, change, message):
    files = samples(range(9)) | change
    shard(tmp_path / "train" / "0.tar", {k: v for k, v in files.items() if v is not None})
    with refused(message):
        ImageFiles(tmp_path / "train")


def test_shards_beside_tars_of_classes_are_refused(tmp_path):
    shard(tmp_path / "train" / "0.tar", samples(range(9)))
    shard(tmp_path / "train" / "n01.tar", {"a.jpg": grey_jpeg(0)})
    with refused("and other images, such as 'n01/a.jpg'"):
        ImageFiles(tmp_path / "train")
