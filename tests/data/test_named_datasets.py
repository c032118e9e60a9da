"""Named data sets: Hugging Face's, by the names of their columns, torchvision's, and invalid names."""

import numpy as np
import pytest
import torchvision
from PIL import Image

from ea_vision.data.named_datasets import NamedImages, open_dataset
from tests.data.photos import grey_jpeg
from tests.refused import refused


@pytest.fixture
def hub(tmp_path):
    """Write a data set of two splits, as Parquet, and return its name."""
    datasets = pytest.importorskip("datasets", reason="needs datasets: pip install datasets")

    def write(image="image", label="label", kind=None, **more):
        kind = kind or datasets.ClassLabel(names=["cat", "dog", "ship"])
        features = datasets.Features({image: datasets.Image(), label: kind, **more})
        for split, count in (("train", 6), ("test", 3)):
            labels = [number % 3 for number in range(count)]
            if kind.dtype == "string":
                labels = [f"name {label}" for label in labels]
            images = [{"bytes": grey_jpeg(40 * n), "path": None} for n in range(count)]
            rows = {image: images, label: labels, **{name: images for name in more}}
            table = datasets.Dataset.from_dict(rows, features=features)
            folder = tmp_path / "data set"
            folder.mkdir(exist_ok=True)
            table.to_parquet(folder / f"{split}.parquet")
        return f"hfds/{tmp_path / 'data set'}"

    write.datasets = datasets
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


def test_the_fingerprint_is_of_the_labels_too():
    class Rows(list):
        targets = [0, 1, 0]

    images = [(Image.new("RGB", (4, 4)), label) for label in Rows.targets]
    first = NamedImages("x", Rows(images), ["cat", "dog"], 2)
    before = first.fingerprint()
    assert before == NamedImages("y", Rows(images), ["cat", "dog"], 2).fingerprint()
    Rows.targets = [0, 0, 0]
    assert first.fingerprint() != before


@pytest.mark.parametrize("columns", [("image", "label"), ("jpg", "cls"), ("img", "fine_label")])
def test_columns_are_named_or_image_and_label(hub, columns):
    name = hub(*columns)
    classes = ["cat", "dog", "ship"]
    keys = (
        {}
        if columns == ("image", "label")
        else dict(zip(("input_key", "target_key"), columns, strict=True))
    )
    for root in (hub.cache, ""):
        check(open_dataset(name, root, "train", **keys), 6, classes)
    evaluated = open_dataset(name, hub.cache, "validation", **keys)
    check(evaluated, 3, classes)
    assert evaluated.name.endswith(" test"), "there is no validation"
    check(open_dataset(name, hub.cache, "validation", "train", **keys), 6, classes)


def test_numbers_are_classes_where_their_count_is_given(hub):
    name = hub(kind=hub.datasets.Value("int64"))
    with refused("--num-classes is required"):
        open_dataset(name, hub.cache, "train")
    images = open_dataset(name, hub.cache, "train", "", 3)
    check(images, 6, ["0", "1", "2"])
    with refused(r"must lie in 0\.\.1, got 0\.\.2"):
        open_dataset(name, hub.cache, "train", "", 2)


def test_texts_are_refused_as_classes(hub):
    name = hub(label="kind", kind=hub.datasets.Value("string"))
    with refused("--target-key.* kind .*whole numbers, got .*name 0"):
        open_dataset(name, hub.cache, "train", "", 3, target_key="kind")


@pytest.mark.parametrize(
    "given, message",
    [
        ({"input_key": "img"}, "--input-key .* got img: it has image, label"),
        ({"target_key": "cls"}, "--target-key .* got cls: it has image, label"),
        ({"input_key": "label"}, "--input-key: column label "),
        (
            {"target_key": "image", "num_classes": 3},
            "--target-key .* got image: it has image, label",
        ),
        ({"named": "extra"}, " extra .*Unknown split"),
        ({"num_classes": 4}, "must have 4 classes"),
    ],
)
def test_other_columns_and_splits_are_one_line(hub, given, message):
    name = hub()
    with refused(message):
        open_dataset(name, hub.cache, "train", **given)


def test_a_missing_data_set_is_one_line(hub, tmp_path):
    with refused("hfds/.*nowhere.* cannot be loaded: "):
        open_dataset(f"hfds/{tmp_path / 'nowhere'}", hub.cache, "train")


def test_splits_of_one_length_have_fingerprints_of_their_own(hub):
    name = hub()
    train = open_dataset(name, hub.cache, "train", "train")
    other = open_dataset(name, hub.cache, "train", "test")
    assert train.fingerprint() == open_dataset(name, hub.cache, "train").fingerprint()
    train.items.images = train.items.images.select(range(3, 6))
    assert len(train) == len(other)
    assert train.fingerprint() != other.fingerprint()


def test_torchvisions_are_read(tmp_path, monkeypatch):
    def cifar(self, root, train=True, **_):
        self.data = np.full((5 if train else 2, 32, 32, 3), 9, np.uint8)
        self.targets = [0, 1, 2, 3, 4][: len(self.data)]
        self.class_to_idx = {f"class {n}": n for n in range(10)}
        self.transform = self.target_transform = None

    monkeypatch.setattr(torchvision.datasets.CIFAR10, "__init__", cifar)
    train = open_dataset("torch/cifar10", str(tmp_path), "train")
    test = open_dataset("torch/cifar10", str(tmp_path), "validation")
    assert len(train) == 5
    assert len(test) == 2
    assert train.read(3)[1] == 3
    assert len(train.classes) == 10


@pytest.mark.parametrize(
    "name, message",
    [
        ("nonsense", "--dataset must be torch/NAME or hfds/NAME, got nonsense"),
        ("hfds:cifar10", "--dataset must be torch/NAME or hfds/NAME, got hfds:cifar10"),
        ("hfds/", "--dataset must be torch/NAME or hfds/NAME, got hfds/"),
        ("wds/x", "wds/x is a stream; one that can be indexed"),
        ("torch/image_folder", "reads one folder for training and evaluation: leave --dataset out"),
        ("torch/nonsense", "no images in torch/nonsense train: Unknown torchvision dataset"),
    ],
)
def test_other_names_are_one_line(tmp_path, name, message):
    with refused(message):
        open_dataset(name, str(tmp_path), "train")


def test_options_that_need_other_options_say_so(tmp_path):
    with refused("--target-key names a column of --dataset hfds/NAME, got"):
        open_dataset("torch/cifar10", str(tmp_path), "train", target_key="label")
    with refused("--dataset torch/cifar10 needs --data-dir"):
        open_dataset("torch/cifar10", "", "train")
