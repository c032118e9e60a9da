"""Images as people have them are read alike by the figures, predict and the page."""

from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image

from ea_vision.base.errors import UsageError
from ea_vision.predict import predict
from ea_vision.recorder.inputs import as_input, find_images, read_image
from ea_vision.recorder.loading import load_model
from tests.recorder.networks import photo


def test_images_of_files_folders_and_digits(tmp_path):
    (tmp_path / "a" / "b").mkdir(parents=True)
    photo().save(tmp_path / "a" / "b" / "2.png")
    photo().save(tmp_path / "a" / "1.JPEG")
    (tmp_path / "a" / "notes.txt").write_text("no image")
    found = find_images([str(tmp_path / "a"), "digits#3"])
    assert [Path(name).name for name in found] == ["1.JPEG", "2.png", "digits#3"]
    assert read_image(found[1]).size == (80, 60) and read_image("digits#3").size == (32, 32)
    (tmp_path / "cut.png").write_bytes(Path(found[1]).read_bytes()[:5000])
    for name in ("a/notes.txt", "cut.png"):
        with pytest.raises(UsageError, match=f"{Path(name).name} cannot be read"):
            read_image(tmp_path / name)
    (tmp_path / "empty").mkdir()
    for wrong, message in (
        (["nowhere.png"], "does not exist"),
        ([], "got none"),
        ([tmp_path / "empty"], "has no image"),
    ):
        with pytest.raises(UsageError, match=message):
            find_images(map(str, wrong))


@pytest.mark.parametrize(
    "mode,clear,opaque,left,right",
    [
        ("RGBA", (0, 0, 0, 127), (255, 0, 0, 255), (128,) * 3, (255, 0, 0)),
        ("P", 0, 1, (255,) * 3, (0, 200, 0)),
        ("LA", (0, 0), (76, 255), (255,) * 3, (76,) * 3),
    ],
)
def test_transparent_pixels_are_white(tmp_path, mode, clear, opaque, left, right):
    image = Image.new(mode, (8, 4), clear)
    image.paste(opaque, (4, 0, 8, 4))
    if mode == "P":
        image.putpalette([9, 9, 9, 0, 200, 0] + [0] * 762)
        image.info["transparency"] = 0
    image.save(tmp_path / "clear.png")
    for source in (image, tmp_path / "clear.png", *[np.asarray(image)] * (mode == "RGBA")):
        read = np.asarray(read_image(source))
        assert (read[:, :4] == left).all() and (read[:, 4:] == right).all()


def test_arrays_files_and_pil_images_are_one_image(tmp_path):
    model, image, path = (
        load_model("conv_transformer_cifar", random=True),
        photo(),
        tmp_path / "a photo.png",
    )
    image.save(path)
    array, grey = np.asarray(image), np.asarray(image.convert("L"))
    for source in (
        image,
        array,
        *(array.astype(kind) / 255 for kind in (np.float32, np.float64)),
        str(path),
        path,
        np.asarray(image.convert("RGBA")),
    ):
        assert torch.equal(as_input(model, source), model.prepare(image))
    assert torch.equal(as_input(model, grey), as_input(model, grey[:, :, None]))
    assert torch.equal(
        as_input(model, torch.ones(1, 3, 5, 6, dtype=torch.uint8)), torch.full((3, 5, 6), 1 / 255)
    )


@pytest.mark.parametrize(
    "source,message",
    [
        (
            "https://example.org/cat.jpg",
            "image https://example.org/cat.jpg does not exist .*download first",
        ),
        (".", "one image file is required, and . is a folder"),
        (b"text", r"got bytes"),
        ("digits#100000", r"must have N in 0\.\.\d+, got digits#100000"),
        (np.zeros((3, 8, 9), np.uint8), r"got \(3, 8, 9\)"),
        (np.zeros((0, 8, 3), np.uint8), r"got \(0, 8, 3\)"),
        (np.full((8, 8, 3), 2.0), "0..1 .* got torch.float64 from 2 to 2"),
        (np.full((8, 8, 3), np.nan), "from nan"),
        (np.zeros((8, 8, 3), np.uint16), "got torch.uint16"),
    ],
)
def test_what_is_no_image_is_refused_with_one_line(source, message):
    with pytest.raises(UsageError, match=message) as error:
        read_image(source)
    assert "\n" not in str(error.value)


def test_predict_takes_the_same_images(tmp_path):
    """A path has its name, all else its number; one that cannot be read is named, and the others are classified."""
    path, cat = tmp_path / "cat.png", photo()
    cat.save(path)
    given = [str(path), path, np.asarray(cat), "https://example.org/cat.jpg", cat, np.zeros(3)]
    found = list(predict(load_model("conv_transformer_cifar", random=True), given, batch_size=2))
    assert [one["image"] for one in found] == [
        str(path),
        str(path),
        "image 3",
        given[3],
        "image 5",
        "image 6",
    ]
    assert (
        found[0]["classes"]
        == found[1]["classes"]
        == found[2]["classes"]
        == found[4]["classes"]
        != []
    )
    assert "does not exist" in found[3]["error"] and "an image array must have" in found[5]["error"]
