"""`ea-vision make-boxes`: exact boxes, and nothing of the validation images in a training image."""
import json

import numpy as np
import pytest
from PIL import Image

from ea_vision.base.errors import UsageError, exit_code
from ea_vision.detection.coco import CocoFolder
from ea_vision.detection.generate import Boxes, main, make_boxes, split_photos


def flat(path, color, size=(32, 32)):
    path.parent.mkdir(parents=True, exist_ok=True)
    Image.new("RGB", size, color).save(path)


@pytest.fixture(scope="module")
def sources(tmp_path_factory):
    """Objects whose red says the split and green the class; photos, blue, each its own shade, 2 to 11."""
    root = tmp_path_factory.mktemp("sources")
    for red, split in ((200, "train"), (250, "test")):
        for green, name in ((100, "cat"), (150, "dog"), (200, "owl")):
            for number in range(3):
                flat(root / "objects" / split / name / f"{number}.png", (red, green, 255))
    for number in range(10):
        flat(root / "photos" / f"{number % 2}" / f"{number}.png", (0, 0, 10 * number), (70, 60 + number))
    return root


def test_boxes_are_exact_and_splits_share_nothing(sources, tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    wanted = Boxes(("dog", "cat"), img_size=48, smallest=8, largest=20, most=4, train=25, val=12, val_photos=0.3)
    counts = make_boxes(tmp_path / "out", wanted, str(sources / "objects"), str(sources / "photos"))
    shades = {}
    for split, red in (("train", 200), ("val", 250)):
        data = CocoFolder(tmp_path / "out", split)
        assert len(data) == getattr(wanted, split) and data.classes == ["dog", "cat"] and not data.notes()
        assert sum(map(len, data.annotations)) == counts[split]
        assert {len(own) for own in data.annotations} <= {1, 2, 3, 4}
        shades[split] = set()
        for image, target in data:
            pixels = image.permute(1, 2, 0).numpy()
            covered = np.zeros((48, 48), int)
            for (x1, y1, x2, y2), label in zip(target["boxes"].int().tolist(), target["labels"].tolist(), strict=True):
                assert 8 <= x2 - x1 == y2 - y1 <= 20
                assert (pixels[y1:y2, x1:x2] == (red, (150, 100)[label], 255)).all()
                covered[y1:y2, x1:x2] += 1
            assert covered.max() == 1 and (pixels[covered == 0][:, 0] == 0).all()
            shades[split] |= set(pixels[covered == 0][:, 2].tolist())
    assert shades["train"] and shades["val"] and not shades["train"] & shades["val"]


def test_drawn_shapes_touch_their_boxes_and_seeds_repeat(tmp_path):
    wanted = Boxes(("disc", "square", "triangle"), img_size=64, smallest=12, largest=30, most=2, train=12, val=2)
    for name in ("a", "b"):
        make_boxes(tmp_path / name, wanted)
    make_boxes(tmp_path / "c", Boxes(**{**vars(wanted), "seed": 1}))
    first, second, third = (CocoFolder(tmp_path / name, "train") for name in "abc")
    assert first.fingerprint() == second.fingerprint() != third.fingerprint()
    labels = set()
    for (image, target), (same, _) in zip(first, second, strict=True):
        assert (image == same).all()
        for (x1, y1, x2, y2), label in zip(target["boxes"].int().tolist(), target["labels"].tolist(), strict=True):
            cut = image[:, y1:y2, x1:x2].numpy()
            shape = (cut == cut[:, (y2 - y1) // 2, (x2 - x1) // 2][:, None, None]).all(0)
            rows, columns = np.flatnonzero(shape.any(1)), np.flatnonzero(shape.any(0))
            assert [rows[0], rows[-1], columns[0], columns[-1]] == [0, y2 - y1 - 1, 0, x2 - x1 - 1]
            share = shape.mean()
            assert (share == 1, 0.7 < share < 0.85, 0.4 < share < 0.6).index(True) == (1, 0, 2)[label]
            labels.add(label)
    assert labels == {0, 1, 2}


def test_the_command_says_what_it_wrote(tmp_path, capsys):
    assert main([str(tmp_path / "new" / "boxes"), "--train", "3", "--val", "1", "--img-size", "70"]) == 0
    boxes = len(json.loads((tmp_path / "new" / "boxes" / "train.json").read_text())["annotations"])
    assert f"training images 3 with {boxes} boxes, validation images 1 with" in capsys.readouterr().out


@pytest.mark.parametrize("words, message", [
    (["--sizes", "30", "20"], "sides of objects must lie between"),
    (["--classes", "disk"], "drawn objects: no class 'disk'; did you mean disc?"),
    (["--objects", "somewhere"], "--objects needs --classes"),
    (["--photos", "/nowhere"], "at least two photos"),
    (["--train", "0"], "at least one object an image"),
    (["--seed", "-1"], "a seed of at least 0 and a share of validation photos between 0 and 1 required, got -1"),
    (["--val-photos", "nan"], "between 0 and 1 required, got 0 and nan"),
    (["--img-size", "99999999"], "at most 100 megapixels"),
])
def test_bad_input_is_one_line(tmp_path, words, message, capsys):
    assert exit_code(lambda: main([str(tmp_path / "out"), *words])) == 2
    error = capsys.readouterr().err
    assert message in error and error.count("\n") == 1
    assert not (tmp_path / "out").exists()


def test_a_folder_with_something_in_it_stays_as_it_is(tmp_path):
    (tmp_path / "mine").touch()
    with pytest.raises(UsageError, match="new or an empty folder"):
        make_boxes(tmp_path, Boxes(("disc",)))


def test_split_photos_uses_each_once(sources):
    train, val = split_photos(sources / "photos", 0.2, seed=3)
    assert len(train) == 8 and len(val) == 2 and len({*train, *val}) == 10
