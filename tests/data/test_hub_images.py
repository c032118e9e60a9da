"""Data sets of Hugging Face's, by the names of their columns, and invalid names."""

import datasets
import numpy as np
import pytest

from ea_vision.data.hub_images import HubImages
from tests.data.photos import grey_jpeg
from tests.refused import refused

CLASSES = datasets.ClassLabel(names=["cat", "dog", "ship"])


@pytest.fixture
def hub(tmp_path):
    """Write a data set of two splits, as Parquet, and return its name."""

    def write(image="image", label="label", kind=CLASSES, label_of=int):
        features = datasets.Features({image: datasets.Image(), label: kind})
        folder = tmp_path / "data set"
        folder.mkdir()
        for split, count in (("train", 6), ("test", 3)):
            images = [{"bytes": grey_jpeg(40 * n), "path": None} for n in range(count)]
            rows = {image: images, label: [label_of(n % 3) for n in range(count)]}
            table = datasets.Dataset.from_dict(rows, features=features)
            table.to_parquet(folder / f"{split}.parquet")
        return f"hfds/{folder}"

    write.cache = str(tmp_path / "cache")
    return write


def check(images, count, classes):
    assert len(images) == count
    assert images.classes == classes
    for index in range(count):
        image, target = images.read(index)
        assert target == index % 3
        assert image.size == (12, 10)
        assert image.mode == "RGB"
        level = np.asarray(image).mean()
        assert abs(level - 40 * index) < 3


@pytest.mark.parametrize("keys", [{}, {"input_key": "img", "target_key": "fine_label"}])
def test_columns_are_named_or_image_and_label(hub, keys):
    name = hub(*keys.values())
    for root in (hub.cache, ""):
        check(HubImages(name, root, "train", **keys), 6, CLASSES.names)
    evaluated = HubImages(name, hub.cache, "validation", **keys)
    check(evaluated, 3, CLASSES.names)
    assert evaluated.name.endswith(" test"), "there is no validation"
    check(HubImages(name, hub.cache, "validation", "train", **keys), 6, CLASSES.names)


def test_numbers_are_classes_where_their_count_is_given(hub):
    name = hub(kind=datasets.Value("int64"))
    with refused("--num-classes is required"):
        HubImages(name, hub.cache, "train")
    images = HubImages(name, hub.cache, "train", "", 3)
    check(images, 6, ["0", "1", "2"])
    with refused(r"must lie in 0\.\.1, got 0\.\.2"):
        HubImages(name, hub.cache, "train", "", 2)


def test_texts_are_refused_as_classes(hub):
    name = hub(label="kind", kind=datasets.Value("string"), label_of="name {}".format)
    with refused("--target-key.* kind .*whole numbers, got .*name 0"):
        HubImages(name, hub.cache, "train", "", 3, target_key="kind")


@pytest.mark.parametrize(
    "given, message",
    [
        ({"input_key": "img"}, "--input-key .* got img: it has image .*, label"),
        ({"target_key": "cls"}, "--target-key .* got cls: it has image .*, label"),
        ({"input_key": "label"}, "--input-key .* got label: "),
        (
            {"target_key": "image", "num_classes": 3},
            "--target-key .* got image: it has image .*, label",
        ),
        ({"named": "extra"}, " extra .*Unknown split"),
    ],
)
def test_other_columns_and_splits_are_one_line(hub, given, message):
    name = hub()
    with refused(message):
        HubImages(name, hub.cache, "train", **given)


def test_a_missing_data_set_is_one_line(hub, tmp_path):
    with refused("hfds/.*nowhere.* cannot be loaded: "):
        HubImages(f"hfds/{tmp_path / 'nowhere'}", hub.cache, "train")


def test_splits_of_one_length_have_fingerprints_of_their_own(hub):
    name = hub()
    train = HubImages(name, hub.cache, "train", "train")
    other = HubImages(name, hub.cache, "train", "test")
    assert train.fingerprint() == HubImages(name, hub.cache, "train").fingerprint()
    train.images = train.images.select(range(3, 6))
    train.targets = train.targets[3:]
    assert len(train) == len(other)
    assert train.targets.tolist() == other.targets.tolist()
    before = train.fingerprint()
    assert before != other.fingerprint()
    train.targets[1] = 0
    assert before != train.fingerprint(), "labels count too"


@pytest.mark.parametrize("name", ["nonsense", "hfds/", "wds/x"])
def test_other_names_are_one_line(tmp_path, name):
    with refused(f"--dataset must be hfds/NAME, got {name}"):
        HubImages(name, str(tmp_path), "train")
