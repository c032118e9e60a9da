"""Data sets by name: hfds/NAME from Hugging Face's datasets, and torch/NAME from torchvision, through timm."""

import io
from collections.abc import Sequence
from typing import Any

import numpy as np
import timm.data
from PIL import Image

from ea_vision.base.errors import UsageError
from ea_vision.data.decoding import BrokenImage, decode_image, to_rgb
from ea_vision.data.image_files import check_classes, fingerprint

# Names of a split on the hub; the first that exists counts.
HUB_SPLITS = {"train": ("train",), "validation": ("validation", "valid", "val", "dev", "test")}
STREAMS = ("hfids", "tfds", "wds")  # timm's prefixes of data sets that cannot be indexed
FOLDERS = ("torch/image_folder", "torch/folder")


def open_dataset(
    dataset: str,
    root: str,
    split: str,
    named: str = "",
    num_classes: int = 0,
    input_key: str = "",
    target_key: str = "",
) -> "NamedImages":
    """Return a split of a data set.

    Args:
        dataset: hfds/NAME | torch/NAME.
        root: folder of the data; for hfds "" means Hugging Face's own cache.
        split: train | validation. named: the split's name in the data set, if it is another.
        num_classes: that it must have; 0: any. input_key, target_key: columns of hfds; "": image and label.

    Raises:
        UsageError: no such data set, split or column, other than `num_classes` classes, or no known classes.
    """
    prefix, _, name = dataset.partition("/")
    columns = {"--input-key": input_key, "--target-key": target_key}
    if prefix == "hfds" and name:
        return HubImages(
            name,
            root,
            split,
            named,
            num_classes,
            input_key=input_key or "image",
            target_key=target_key or "label",
        )
    for option, value in columns.items():
        if value:
            raise UsageError(
                f"{option} names a column of --dataset hfds/NAME, got {value} with {dataset}"
            )
    check_dataset_name(dataset)
    if not root:
        raise UsageError(f"--dataset {dataset} needs --data-dir, the folder of its files")
    return TorchImages(dataset, root, named or split, num_classes)


def check_dataset_name(dataset: str) -> None:
    """Raise UsageError unless this is the name of a kind of data set that is read: torch/NAME or hfds/NAME."""
    prefix, _, name = dataset.partition("/")
    if dataset in FOLDERS:
        raise UsageError(
            f"--dataset {dataset} reads one folder for training and evaluation: leave --dataset out, and "
            "--data-dir with train and val is read"
        )
    if prefix in ("hfds", "torch") and name:
        return
    if prefix in STREAMS:
        raise UsageError(
            f"{dataset} is a stream; one that can be indexed is required (torch/NAME, hfds/NAME)"
        )
    raise UsageError(
        f"--dataset must be torch/NAME or hfds/NAME, got {dataset}; folders, tars and WebDataset's shards "
        "are read by --data-dir alone"
    )


class NamedImages:
    """A split of a named data set: its classes and its images.

    Attributes:
        items: sequence of (image, target, ...); an image is a PIL image or a file.
    """

    def __init__(self, name: str, items: Sequence[Any], classes: list[str], num_classes: int):
        self.name = name
        self.items = items
        self.classes = classes or [str(label) for label in range(num_classes)]
        if not self.classes:
            raise UsageError(f"{name} does not name its classes: --num-classes is required")
        check_classes(name, self.classes, num_classes)

    def __len__(self) -> int:
        return len(self.items)

    def describe(self, index: int) -> str:
        """Return a name for an image."""
        return f"{self.name} {index}"

    def read(self, index: int) -> tuple[Image.Image, int]:
        """Return an image in RGB and its target. Raises BrokenImage."""
        try:
            image, target = self.items[index][:2]
            image = to_rgb(image) if isinstance(image, Image.Image) else decode_image(image)
        except (OSError, SyntaxError, ValueError, TypeError) as error:
            raise BrokenImage(f"{type(error).__name__}: {error}") from error
        return image, int(target)

    def fingerprint(self) -> str:
        """Return SHA-256 over the classes, the labels if they are available, the number of images, and the first and
        the last image."""
        labels = getattr(self.items, "targets", None)
        pixels = [] if labels is None else [np.asarray(labels)]
        for index in {0, len(self) - 1}:
            try:
                pixels.append(np.asarray(self.read(index)[0]))
            except BrokenImage:  # reported when it is trained on
                pixels.append(np.zeros(1, np.uint8))
        return fingerprint([*self.classes, str(len(self))], *pixels)


class TorchImages(NamedImages):
    """A split of one of torchvision's data sets, by its name in timm."""

    def __init__(self, dataset: str, root: str, split: str, num_classes: int = 0):
        name = f"{dataset} {split}"
        try:
            items = timm.data.create_dataset(dataset, root, split=split, search_split=False)
        except (RuntimeError, AssertionError, OSError, ImportError, ValueError) as error:
            raise UsageError(f"no images in {name}: {error}") from error
        number = getattr(items, "class_to_idx", {})
        super().__init__(name, items, sorted(number, key=number.get), num_classes)


class HubImages(NamedImages):
    """A split of one of Hugging Face's data sets, or of a folder that its library reads."""

    def __init__(
        self,
        dataset: str,
        root: str,
        split: str,
        named: str = "",
        num_classes: int = 0,
        *,
        input_key: str,
        target_key: str,
    ):
        table, split = _hub_table(dataset, root, (named,) if named else HUB_SPLITS[split])
        name = f"hfds/{dataset} {split}"
        columns = ", ".join(table.features)
        if input_key not in table.features:
            raise UsageError(
                f"--input-key must name a column of {name}, got {input_key}: it has {columns}"
            )
        kind = table.features[input_key]
        if type(kind).__name__ != "Image":
            raise UsageError(
                f"--input-key: column {input_key} of {name} must hold images, got {kind}"
            )
        if target_key not in table.features or target_key == input_key:
            raise UsageError(
                f"--target-key must name a column of labels of {name}, got {target_key}: it has {columns}"
            )
        items = _Rows(table, input_key, target_key)
        classes = list(getattr(table.features[target_key], "names", None) or [])
        super().__init__(name, items, classes, num_classes)
        _check_targets(name, target_key, items.targets, len(self.classes))


class _Rows:
    """The images of a table, as files that are not decoded, and their targets."""

    def __init__(self, table, input_key: str, target_key: str):
        from datasets import Image as ImageColumn

        images = table.select_columns([input_key])
        self.images = images.cast_column(input_key, ImageColumn(decode=False))
        self.input_key = input_key
        self.targets = np.array(list(table.select_columns([target_key])[target_key]))

    def __len__(self) -> int:
        return len(self.images)

    def __getitem__(self, index: int) -> tuple[io.BytesIO | str, int]:
        image = self.images[int(index)][self.input_key]
        if image is None:
            raise ValueError("there is no image in this row")
        file = io.BytesIO(image["bytes"]) if image.get("bytes") else image["path"]
        return file, int(self.targets[index])


def _hub_table(dataset: str, root: str, splits: Sequence[str]) -> tuple[Any, str]:
    """Return the first of these splits that a data set has, and its name."""
    try:
        from datasets import load_dataset
    except ImportError as error:
        raise UsageError(
            f"--dataset hfds/NAME needs Hugging Face's datasets, not installed ({error}): pip install "
            "datasets"
        ) from error
    for split in splits:
        try:
            return load_dataset(dataset, split=split, cache_dir=root or None), split
        except Exception as error:  # of its library, of pyarrow, of the network
            text = " ".join(str(error).split())
            if not text.startswith("Unknown split") or split == splits[-1]:
                raise UsageError(f"hfds/{dataset} {split} cannot be loaded: {text}") from error
    raise AssertionError("no split was asked for")


def _check_targets(name: str, column: str, values: np.ndarray, classes: int) -> None:
    """Raise UsageError unless the targets are integers in the range of the classes."""
    if values.dtype.kind not in "iu" or values.ndim != 1:
        raise UsageError(
            f"--target-key: column {column} of {name} must hold whole numbers, got "
            f"{values.ravel()[:1].tolist()}"
        )
    if values.min() < 0 or values.max() >= classes:
        raise UsageError(
            f"labels of {name} must lie in 0..{classes - 1}, got {values.min()}..{values.max()}"
        )
