"""Folders, tars and image files: which are read, which are refused and with which message; damage is never silent."""

import io
import re
import shutil
from pathlib import Path

import numpy as np
import pytest
from PIL import Image
from timm.data import create_dataset

from ea_vision.data.decoding import BrokenImage, decode_image, to_rgb
from ea_vision.data.image_files import ImageFiles
from ea_vision.data.splits import find_split
from tests.data.photos import make_photos, pack, picture, same, without_end_mark
from tests.refused import refused


@pytest.fixture
def photos(tmp_path):
    """train and val of 12 and 6 images in 3 classes."""
    return make_photos(tmp_path / "photos", train=12, val=6)


def pgm_of(width, height):
    """Return the bytes of an image whose header has this size and whose pixels are cut off."""
    return f"P5 {width} {height} 255\n".encode()


# ---- folders and tars: what is refused, and what is taken ------------------------------------------------------------


@pytest.mark.parametrize("packed", [False, True], ids=["folder", "tar"])
def test_a_class_has_one_name_however_its_letters_are_stored(photos, packed):
    """macOS may store an umlaut as two characters, while validation images from another system have one."""
    in_parts = "Ba\N{COMBINING DIAERESIS}r"
    (photos / "train" / "class_1").rename(photos / "train" / in_parts)
    (photos / "val" / "class_1").rename(photos / "val" / "B\xe4r")
    train = photos / "train"
    if packed:
        train = pack(train, photos / "train.tar")
    files = ImageFiles(train)
    assert files.classes == ["B\xe4r", "class_0", "class_2"]
    assert files.classes == ImageFiles(photos / "val").classes
    for name, target in zip(files.names, files.targets, strict=True):
        assert (in_parts in name) == (target == 0)


def test_folders_that_are_refused(photos):
    train = photos / "train"
    (train / "class_9").mkdir()
    (train / "class_9" / "x.heic").touch()
    (train / "nowhere").symlink_to("/data/class_3")
    with refused(r"2 class folder\(s\) of .*train have no images: class_9, nowhere"):
        ImageFiles(train)
    for path in train.rglob("*.jpg"):
        path.unlink()
    with refused("train has no images: class/name with a suffix of .jpg, .* is required"):
        ImageFiles(train)


@pytest.mark.parametrize(
    "hurt, message",
    [
        (lambda data: b"", "empty file"),
        (lambda data: b"not a tar, but some text " * 40, "invalid header"),
        (lambda data: data[:3000], "unexpected end of data|cut off at byte"),
        (lambda data: data[: data.index(b"./class_1") + 100], "damaged or cut off at byte"),
        (without_end_mark, "damaged or cut off at byte"),
        (lambda data: data.replace(b"./class_1/", b"./klass_1/", 2), "damaged or cut off at byte"),
        (lambda data: b"\x1f\x8b" + data, "not a readable, uncompressed tar"),
        (lambda data: bytes(10240), "has no images: class/name"),
    ],
)
def test_tars_that_are_refused(photos, hurt, message):
    path = photos / "train.tar"
    path.write_bytes(hurt(pack(photos / "train", path).read_bytes()))
    with refused(f"^{path}.*({message})"):
        ImageFiles(path)


def images_folders(train):
    """class/images/x.jpg, as Tiny-ImageNet has it."""
    for path in list(train.glob("*/*.jpg")):
        (path.parent / "images").mkdir(exist_ok=True)
        path.rename(path.parent / "images" / path.name)


def one_folder_around(train):
    train.rename(train.with_name("inner"))
    train.mkdir()
    train.with_name("inner").rename(train / "train")


def linked_class(train):
    (train / "class_1").rename(train.parent / "elsewhere")
    (train / "class_1").symlink_to(train.parent / "elsewhere")


def other_files(train):
    (train / "class_0" / "notes.txt").write_text("no image", encoding="utf-8")
    (train / "README").write_text("none either", encoding="utf-8")
    (train / "class_0" / "self").symlink_to("self")
    (train / ".cache").mkdir()


@pytest.mark.parametrize("layout", [images_folders, one_folder_around, linked_class, other_files])
def test_layouts(photos, tmp_path, layout):
    """Folders and the tars of them have the same images, classes and names."""
    layout(photos / "train")
    source = ImageFiles(photos / "train")
    if layout is not linked_class:
        same(photos / "train", pack(photos / "train", tmp_path / "train.tar"))
    assert source.classes == ["class_0", "class_1", "class_2"]
    assert len(source) == 12
    for name, target in zip(source.names, source.targets, strict=True):
        assert target == int(Path(name).stem) % 3


def test_images_and_their_order_are_timms(photos):
    for number in range(3):
        (photos / "train" / f"class_{number}").rename(photos / "train" / f"class_{6 * number}")
    source = ImageFiles(photos / "train")
    assert source.classes == ["class_0", "class_6", "class_12"]
    theirs = create_dataset("", root=str(photos / "train"))
    for index in range(12):
        assert source.read(index) == theirs[index]


def test_a_tar_of_tars_and_a_folder_of_tars_have_a_class_in_each(photos, tmp_path):
    """Like ILSVRC2012_img_train.tar, packed and unpacked."""
    (tmp_path / "tars").mkdir()
    for folder in (photos / "train").iterdir():
        pack(folder, tmp_path / "tars" / f"{folder.name}.tar")
    pack(tmp_path / "tars", tmp_path / "train.tar")
    for packed in ("train.tar", "tars"):
        same(photos / "train", tmp_path / packed)


def test_splits_are_found_or_named(photos, tmp_path):
    assert find_split(photos, "validation") == photos / "val"
    assert find_split(photos, "train") == photos / "train"
    assert find_split(photos / "train", "test", or_root=True) == photos / "train", (
        "a folder without splits"
    )
    with refused("must have train/ or train.tar; it does not exist"):
        find_split(photos / "nowhere", "train", or_root=True)
    (tmp_path / "photos.zip").touch()
    with refused("must have train/ or train.tar"):
        find_split(tmp_path / "photos.zip", "train")
    (tmp_path / "half/train").mkdir(parents=True)
    with refused("must have val/ or val.tar or validation/"):
        find_split(tmp_path / "half", "validation", or_root=True)


def test_a_fingerprint_is_of_names_classes_and_sizes_wherever_they_lie(photos, tmp_path):
    train = photos / "train"
    moved = tmp_path / "moved"
    shutil.copytree(train, moved)  # other times
    before = ImageFiles(train).fingerprint()
    assert ImageFiles(moved).fingerprint() == before
    with (moved / "class_0/000.jpg").open("ab") as file:
        file.write(b"\0")
    shutil.move(train / "class_0/000.jpg", train / "class_1/000.jpg")
    assert before not in (ImageFiles(moved).fingerprint(), ImageFiles(train).fingerprint())


# ---- images ----------------------------------------------------------------------------------------------------------

EPS = b"%!PS-Adobe-3.0 EPSF-3.0\n%%BoundingBox: 0 0 9 9\n%%EndComments\n0 0 9 9 rectfill\nshowpage\n%%EOF\n"
UNKNOWN = "UnidentifiedImageError: cannot identify image file, which must be one of JPEG, PNG, WEBP"


@pytest.mark.parametrize(
    "content, message",
    [
        (b"", UNKNOWN),
        (EPS, UNKNOWN),  # Ghostscript would draw it
        (
            pgm_of(20_000, 10_000),
            "must have at most 100 megapixels: Image size (200000000 pixels) exceeds limit",
        ),
        (pgm_of(11_000, 10_000), "must have at most 100 megapixels, got 11000x10000"),
    ],
)
def test_images_that_are_refused(tmp_path, monkeypatch, content, message):
    monkeypatch.setattr(
        "PIL.EpsImagePlugin.Ghostscript", lambda *_: pytest.fail("reached Ghostscript")
    )
    (tmp_path / "x.jpg").write_bytes(content)
    for file in (tmp_path / "x.jpg", io.BytesIO(content)):
        with refused(re.escape(message), BrokenImage):
            decode_image(file)


def test_kinds_of_pixels(tmp_path):
    """CMYK, grey, palettes and 16 bits give the same picture; modes without a known white are errors."""
    pixels = np.tile(np.arange(0, 240, 4, dtype=np.uint8)[None, :, None], (20, 1, 3))  # (20, 60, 3)
    image = Image.fromarray(pixels)
    wide = pixels[..., 0].astype(np.uint16) * 256
    sixteen = Image.fromarray(wide)
    cmyk = image.convert("CMYK")
    for suffix, kind in (
        ("jpg", cmyk),
        ("tif", cmyk),
        ("png", sixteen),
        ("tif", sixteen),
        ("gif", image.quantize(64)),
        ("png", image.convert("L")),
    ):
        kind.save(tmp_path / f"x.{suffix}", quality=95)
        read = decode_image(tmp_path / f"x.{suffix}")
        difference = np.asarray(read).astype(int) - pixels
        assert read.mode == "RGB"
        assert np.abs(difference).max() <= 3, (suffix, kind.mode)
    (tmp_path / "sixteen.pgm").write_bytes(b"P5 60 20 65535\n" + wide.astype(">u2").tobytes())
    assert np.array_equal(decode_image(tmp_path / "sixteen.pgm"), pixels)
    white = Image.fromarray(np.full((1, 1), 65535, np.uint16))
    assert to_rgb(white).getpixel((0, 0)) == (255, 255, 255)
    for numbers in (np.float32(wide / 65536), wide.astype(np.int32)):
        Image.fromarray(numbers).save(tmp_path / "numbers.tif")
        with refused(
            "must have 8 or 16 bits per channel, got pixels of Pillow's mode [FI]", BrokenImage
        ):
            decode_image(tmp_path / "numbers.tif")


def halves(mode, left, right, transparency=None, palette=()):
    """Return an image whose halves have one value each."""
    image = Image.new(mode, (8, 4), left)
    image.paste(right, (4, 0, 8, 4))
    if palette:
        image.putpalette(palette)
    if transparency is not None:
        image.info["transparency"] = transparency
    return image


GREYS = halves("RGBA", (200, 200, 200, 255), (7, 7, 7, 255))


@pytest.mark.parametrize(
    "image, left, right",
    [
        (halves("RGBA", (1, 2, 3, 127), (255, 0, 0, 255)), (1, 2, 3), (255, 0, 0)),
        (halves("P", 0, 1, 0, [9, 9, 9, 0, 200, 0] + [0] * 762), 9, (0, 200, 0)),
        (halves("LA", (7, 0), (76, 255)), 7, 76),
        (GREYS.convert("LA").convert("La"), 200, 7),
        (GREYS.convert("RGBa"), 200, 7),
        (GREYS.quantize(4), 200, 7),
        (halves("I;16", 200 << 8, 0, 0), 200, 0),
        (halves("I", 200 << 8, 7, (200, 200, 200)), 200, 0),  # as of an RGB image that became I
    ],
    ids=lambda value: getattr(value, "mode", None),
)
def test_transparency_is_dropped_as_in_timm(tmp_path, image, left, right):
    """Of files and of images in memory, in rare modes of Pillow's, too."""
    pictures = [to_rgb(image)]
    if image.mode in ("RGBA", "P", "LA", "I;16"):
        image.save(tmp_path / "x.png")
        pictures.append(decode_image(tmp_path / "x.png"))
    for shown in map(np.asarray, pictures):
        assert (shown[:, :4] == left).all()
        assert (shown[:, 4:] == right).all()


def test_fewer_bits_in_a_file_of_sixteen_are_said(tmp_path, caplog):
    """The trainers warn once, for the first image; predict warns once per image."""
    for bits, lines in ((12, 1), (8, 1), (16, 0)):
        folder = tmp_path / str(bits) / "class"
        folder.mkdir(parents=True)
        values = np.linspace(0, 2**bits - 1, 100).astype(np.uint16)
        Image.fromarray(values[:, None]).save(folder / "x.png")
        ImageFiles(folder.parent).read(0)
        decode_image(folder / "x.png")
        said = f"image {folder / 'x.png'} has 16 bits per channel and no value of 4096 or more"
        assert caplog.text.count("much too dark") == caplog.text.count(said) == lines
        caplog.clear()
    to_rgb(Image.new("I;16", (4, 4)))
    assert not caplog.text, "a black image is no mistake"


# ---- damaged bytes: one error, or what was there ---------------------------------------------------------------------

PHOTO = picture(0, (40, 30))


@pytest.mark.parametrize("kind", ["JPEG", "PNG", "WEBP", "BMP", "GIF", "PPM", "TIFF"])
def test_damaged_images(kind):
    """A file with changed bytes or a cut end gives the same picture, perhaps with other pixels, or one error."""
    options = {"compression": "tiff_lzw"} if kind == "TIFF" else {}
    saved = io.BytesIO()
    PHOTO.save(saved, kind, **options)
    content = np.frombuffer(saved.getvalue(), np.uint8)
    rng = np.random.default_rng(0)
    whole = np.asarray(decode_image(saved))
    difference = whole.astype(int) - np.asarray(PHOTO)
    assert np.abs(difference).mean() < 30
    assert whole.shape == (30, 40, 3)
    for changed in rng.integers(4, size=30):
        end = len(content) if changed else rng.integers(len(content))
        data = content[:end].copy()
        if changed:
            data[rng.integers(len(data), size=changed)] ^= rng.integers(1, 256, changed, np.uint8)
        try:
            image = decode_image(io.BytesIO(data.tobytes()))
        except BrokenImage as error:
            assert str(error)
            continue
        assert image.mode == "RGB"
        assert changed or np.array_equal(image, whole), "a cut is noticed"
