"""Data sets of Hugging Face's by name: hfds/NAME is one of the hub, or a folder that its library reads."""

import io
from collections.abc import Sequence
from typing import Any

import numpy as np
from PIL import Image

from ea_vision.base.errors import UsageError, extra_required
from ea_vision.data.decoding import BrokenImage, decode_image
from ea_vision.data.image_files import fingerprint

# Names of a split; the first that exists counts.
SPLITS = {"train": ("train",), "validation": ("validation", "valid", "val", "dev", "test")}


def name_on_hub(dataset: str) -> str:
    """Return NAME of hfds/NAME; raise UsageError for other names."""
    prefix, _, name = dataset.partition("/")
    if prefix != "hfds" or not name:
        raise UsageError(
            f"--dataset must be hfds/NAME, got {dataset}; folders (as torchvision's), tars and WebDataset's "
            "shards are read by --data-dir alone"
        )
    return name


class HubImages:
    """A split of a data set.

    Args:
        dataset: hfds/NAME.
        root: cache of its library; "": its own.
        split: train | validation. named: the split's name in the data set, if it is another.
        num_classes: number of its classes, if it does not name them.
        input_key, target_key: columns of the images and of the classes.

    Attributes:
        name: the data set and the split. classes: their names. targets: int (N,), numbers of `classes`.

    Raises:
        UsageError: no such data set, split or column, labels out of range, or no known classes.
    """

    def __init__(
        self,
        dataset: str,
        root: str,
        split: str,
        named: str = "",
        num_classes: int = 0,
        *,
        input_key: str = "image",
        target_key: str = "label",
    ):
        table, split = _table(name_on_hub(dataset), root, (named,) if named else SPLITS[split])
        self.name = f"{dataset} {split}"
        kinds = {column: type(kind).__name__ for column, kind in table.features.items()}
        columns = ", ".join(f"{column} ({kind})" for column, kind in kinds.items())
        if kinds.get(input_key) != "Image":
            raise UsageError(
                f"--input-key must name a column of images of {self.name}, got {input_key}: it has {columns}"
            )
        if target_key not in kinds or target_key == input_key:
            raise UsageError(
                f"--target-key must name a column of labels of {self.name}, got {target_key}: it has {columns}"
            )
        from datasets import Image as ImageColumn

        images = table.select_columns([input_key])
        self.images = images.cast_column(input_key, ImageColumn(decode=False))
        self.input_key = input_key
        self.targets = np.array(list(table.select_columns([target_key])[target_key]))
        names = getattr(table.features[target_key], "names", None)
        self.classes = list(names or map(str, range(num_classes)))
        self._check_targets(target_key)

    def _check_targets(self, column: str) -> None:
        """Raise UsageError unless the targets are integers in the range of the classes."""
        values = self.targets
        if values.dtype.kind not in "iu" or values.ndim != 1:
            raise UsageError(
                f"--target-key: column {column} of {self.name} must hold whole numbers, got "
                f"{values.ravel()[:1].tolist()}"
            )
        if not self.classes:
            raise UsageError(f"{self.name} does not name its classes: --num-classes is required")
        most = len(self.classes) - 1
        if values.min() < 0 or values.max() > most:
            raise UsageError(
                f"labels of {self.name} must lie in 0..{most}, got {values.min()}..{values.max()}"
            )

    def __len__(self) -> int:
        return len(self.images)

    def describe(self, index: int) -> str:
        """Return a name for an image."""
        return f"{self.name} {index}"

    def read(self, index: int) -> tuple[Image.Image, int]:
        """Return an image in RGB and its target. Raises BrokenImage."""
        try:
            image = self.images[int(index)][self.input_key]
        except (OSError, ValueError, TypeError) as error:  # of pyarrow, as on a failing disk
            raise BrokenImage(f"{type(error).__name__}: {error}") from error
        if image is None:
            raise BrokenImage("there is no image in this row")
        file = io.BytesIO(image["bytes"]) if image.get("bytes") else image["path"]
        return decode_image(file), int(self.targets[index])

    def fingerprint(self) -> str:
        """Return SHA-256 over the classes, the labels, the number of images, and the first and the last image."""
        pixels = []
        for index in {0, len(self) - 1}:
            try:
                pixels.append(np.asarray(self.read(index)[0]))
            except BrokenImage:  # reported when it is trained on
                pixels.append(np.zeros(1, np.uint8))
        return fingerprint([*self.classes, str(len(self))], self.targets, *pixels)


def _table(dataset: str, root: str, splits: Sequence[str]) -> tuple[Any, str]:
    """Return the first of these splits that a data set has, and its name."""
    with extra_required("--dataset hfds/NAME", "datasets"):
        from datasets import load_dataset

    for split in splits:
        try:
            return load_dataset(dataset, split=split, cache_dir=root or None), split
        except Exception as error:  # of its library, of pyarrow, of the network
            text = " ".join(str(error).split())
            if not text.startswith("Unknown split") or split == splits[-1]:
                raise UsageError(f"hfds/{dataset} {split} cannot be loaded: {text}") from error
    raise AssertionError("no split was asked for")
