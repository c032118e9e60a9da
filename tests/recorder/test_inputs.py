"""Images as people have them are read alike by the figures, predict and the page."""

from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image

from ea_vision.predict import predict
from ea_vision.zoo.inputs import as_image, find_images, read_image
from ea_vision.zoo.loaded import load_model
from tests.recorder.networks import photo
from tests.refused import refused


def test_images_of_files_folders_and_digits(tmp_path):
    folder = tmp_path / "a"
    second = folder / "b" / "2.png"
    second.parent.mkdir(parents=True)
    photo().save(second)
    photo().save(folder / "1.JPEG")
    (folder / "notes.txt").write_text("no image", encoding="utf-8")
    names = find_images([str(folder), "digits#3"])
    assert [Path(name).name for name in names] == ["1.JPEG", "2.png", "digits#3"]
    assert read_image(second).size == (80, 60)
    assert read_image("digits#3").size == (8, 8)
    (folder / "cut.png").write_bytes(second.read_bytes()[:5000])
    for name in ("notes.txt", "cut.png"):
        with refused(f"{name} cannot be read"):
            read_image(folder / name)
    (tmp_path / "empty").mkdir()
    for wrong, message in (
        (["nowhere.png"], "does not exist"),
        ([], "got none"),
        ([str(tmp_path / "empty")], "has no image"),
    ):
        with refused(message):
            find_images(wrong)


def test_a_pattern_stands_for_its_files_as_windows_shells_hand_it_on(tmp_path):
    folder = tmp_path / "a[1] b"
    folder.mkdir()
    for name in ("2.png", "1.png", "3.jpg"):
        Image.new("RGB", (4, 4)).save(folder / name)
    images = find_images([f"{folder}/*.png", f"{folder}/?.jpg"])
    assert [Path(image).name for image in images] == ["1.png", "2.png", "3.jpg"]
    with refused(r"\*.gif does not exist"):
        find_images([f"{folder}/*.gif"])


def test_arrays_files_and_pil_images_are_one_image(tmp_path):
    model = load_model("conv_transformer_cifar", random=True)
    image = photo()
    path = tmp_path / "a photo.png"
    image.save(path)
    array = np.asarray(image)
    float32 = array.astype(np.float32) / 255
    float64 = array.astype(np.float64) / 255
    clear = image.convert("RGBA")
    clear.putalpha(127)
    with_alpha = np.asarray(clear)
    expected = model.preparation(image)
    big_endian = float32.astype(">f4")
    for source in (image, array, float32, float64, big_endian, str(path), path, with_alpha):
        assert torch.equal(model.input_of(as_image(source)), expected)
    grey = np.asarray(image.convert("L"))
    with_axis = as_image(grey[:, :, None])
    assert torch.equal(model.input_of(as_image(grey)), model.input_of(with_axis))
    ones = torch.ones(1, 3, 5, 6, dtype=torch.uint8)
    assert torch.equal(model.input_of(ones), model.preparation.normalize(ones[0]))
    followed = expected.clone().requires_grad_()  # whose gradient is wanted elsewhere
    assert torch.equal(model.input_of(followed), expected)
    assert not model.input_of(followed).requires_grad
    with refused(r"a tensor \(3, H, W\), got \(3, 0, 4\)"):
        model.input_of(torch.rand(3, 0, 4))


@pytest.mark.parametrize(
    "source, message",
    [
        (
            "https://example.org/cat.jpg",
            "image https://example.org/cat.jpg does not exist .*download first",
        ),
        (".", "one image file is required, and . is a folder"),
        (b"text", r"got bytes"),
        (torch.zeros(3, 8, 8), r"an array \(H, W, 3\) .*, got Tensor"),
        ("digits#100000", r"must have N in 0\.\.\d+, got digits#100000"),
        (np.zeros((3, 8, 9), np.uint8), r"got \(3, 8, 9\)"),
        (np.zeros((0, 8, 3), np.uint8), r"got \(0, 8, 3\)"),
        (np.full((8, 8, 3), 2.0), "lie in 0..1; .* got torch.float64 from 2 to 2"),
        (np.full((8, 8, 3), np.nan), "from nan"),
        (np.zeros((8, 8, 3), np.uint16), "got torch.uint16"),
        (
            np.zeros((8, 8, 3), bool),
            "or floating point and lie in 0..1; .* got torch.bool from 0 to 0",
        ),
        (np.array([[None, "a"]]), "an image array must be of numbers, got object"),
        (Image.new("RGB", (0, 5)), "an image must have pixels, got 0x5"),
        (Image.new("F", (4, 4)), "cannot be read: must have 8 or 16 bits per channel"),
    ],
)
def test_what_is_no_image_is_refused_with_one_line(source, message):
    with refused(message):
        read_image(source)


def test_predict_takes_the_same_images(tmp_path):
    """Paths are listed by name, other images by number; an unreadable one is named, and the others are classified."""
    path = tmp_path / "cat.png"
    cat = photo()
    cat.save(path)
    web = "https://example.org/cat.jpg"
    images = [str(path), path, np.asarray(cat), web, cat, np.zeros(3)]
    model = load_model("conv_transformer_cifar", random=True)
    rows = list(predict(model, images, batch_size=2))
    names = [str(path), str(path), "image 3", web, "image 5", "image 6"]
    assert [row["image"] for row in rows] == names
    assert rows[0]["classes"]
    for index in (1, 2, 4):
        assert rows[index]["classes"] == rows[0]["classes"]
    assert "does not exist" in rows[3]["error"]
    assert "an image array must have" in rows[5]["error"]
