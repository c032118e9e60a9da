"""Small images, decoded once: scikit-learn's digits, CIFAR-10, CIFAR-100, and folders or tars of class/name.png."""

from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from PIL import Image
from torch import Tensor

from ea_vision.base.errors import UsageError, as_usage_error, extra_required
from ea_vision.base.files import cache_root
from ea_vision.data.decoding import BrokenImage
from ea_vision.data.image_files import ImageFiles, fingerprint
from ea_vision.data.scaling import Scaling
from ea_vision.data.splits import find_split

DATASETS = ("digits", "cifar10", "cifar100", "folder")


@dataclass
class Images:
    """One split. `names` are paths if the images have them."""

    images: Tensor  # uint8 (N, 3, H, W)
    targets: Tensor  # int64 (N,)
    names: list[str]

    def __len__(self) -> int:
        return len(self.targets)

    def select(self, index: Tensor) -> "Images":
        """Return the images at these places, int64 (M,)."""
        names = [self.names[place] for place in index.tolist()]
        return Images(self.images[index], self.targets[index], names)


@dataclass
class DataSet:
    """Training and test images and the names of the classes."""

    train: Images
    test: Images
    classes: list[str]

    def fingerprint(self) -> str:
        """Return SHA-256 over pixels, targets and class names: the same for the same data, wherever it is stored."""
        train = self.train
        test = self.test
        return fingerprint(self.classes, train.images, train.targets, test.images, test.targets)


def hold_out(images: Images, count: int, seed: int) -> tuple[Images, Images]:
    """Split off `count` images, chosen by `seed`; return (kept, held out), both in their old order.

    Raises:
        UsageError: `count` leaves nothing to train on.
    """
    if not 0 < count < len(images):
        raise UsageError(
            f"holdout must lie between 1 and {len(images) - 1} of {len(images)} images, got {count}"
        )
    generator = torch.Generator().manual_seed(seed)
    order = torch.randperm(len(images), generator=generator)
    kept = order[count:].sort().values
    held_out = order[:count].sort().values
    return images.select(kept), images.select(held_out)


def load_dataset(
    name: str,
    data_dir: str = "",
    scaling: Scaling = Scaling.filled(32),
    download: bool = False,
    workers: int = 2,
) -> DataSet:
    """Load a data set as tensors of RGB pixels.

    Args:
        name: digits | cifar10 | cifar100 (torchvision's files in `data_dir`) | folder (`data_dir` has train and test,
            or val, each a folder or a .tar of class/name.png).
        scaling: its `pixels` scales the images; a network's preparation may be given.
        workers: decoding threads.

    Raises:
        UsageError: missing data, broken images (all are counted, the first five named), classes that differ.
    """
    if name == "digits":
        return _load_digits(scaling)
    if name in ("cifar10", "cifar100"):
        root = Path(data_dir) if data_dir else cache_root() / "torchvision"
        return _load_torchvision(name, root, scaling, download)
    train, test = [ImageFiles(place) for place in places_of(data_dir)]
    check_same_classes(train, test)
    decoded = [_decoded(files, scaling, workers) for files in (train, test)]
    return DataSet(*decoded, train.classes)


def places_of(data_dir: str) -> tuple[Path, Path]:
    """Return the folder or tar of the training images, and that of the test images.

    Raises:
        UsageError: the data folder is not given, does not exist, or lacks one of them.
    """
    if not data_dir:
        raise UsageError("--dataset folder needs --data-dir: a folder with train and test (or val)")
    return find_split(Path(data_dir), "train"), find_split(Path(data_dir), "test")


def _load_digits(scaling: Scaling) -> DataSet:
    """Load scikit-learn's 1,797 digits of 8x8 pixels, enlarged; every fifth image of a class is for testing."""
    with extra_required("--dataset digits", "scikit-learn", "data"):
        from sklearn.datasets import load_digits

    digits = load_digits()
    grey = np.rint(digits.images * (255 / 16)).astype(np.uint8)  # (1797, 8, 8), values were 0..16
    pixels = _resized(grey[..., None].repeat(3, axis=-1), scaling)
    targets = torch.from_numpy(digits.target.astype(np.int64))
    same_class = targets[:, None] == targets
    number = same_class.tril(-1).sum(1)  # of each image in its class
    is_test = number % 5 == 4
    images = Images(pixels, targets, [f"digit {i}" for i in range(len(targets))])
    train = images.select((~is_test).nonzero()[:, 0])
    test = images.select(is_test.nonzero()[:, 0])
    return DataSet(train, test, [str(digit) for digit in range(10)])


def _load_torchvision(name: str, root: Path, scaling: Scaling, download: bool) -> DataSet:
    """Load CIFAR-10 or -100 in torchvision's layout under `root`."""
    from torchvision import datasets

    read = getattr(datasets, name.upper())
    problem = (
        f"{name} cannot be read from {root} (--download fetches it, folder reads tars and folders)"
    )
    splits = []
    for split in ("train", "test"):
        with as_usage_error(problem, (RuntimeError, OSError)):
            files = read(str(root), train=split == "train", download=download)
        names = [f"{name} {split} {i}" for i in range(len(files))]
        targets = torch.tensor(files.targets)
        splits.append(Images(_resized(files.data, scaling), targets, names))
    return DataSet(*splits, files.classes)


def _resized(pixels: np.ndarray, scaling: Scaling) -> Tensor:
    """Scale uint8 (N, H, W, 3) images; return (N, 3, *scaling.size)."""
    if scaling.keeps(pixels.shape[1:3]):
        scaled = torch.from_numpy(pixels)
    else:
        scaled = torch.stack([scaling.pixels(Image.fromarray(image)) for image in pixels])
    return scaled.permute(0, 3, 1, 2).contiguous()


def check_same_classes(train, test, attribute: str = "classes") -> None:
    """Raise UsageError, naming the two sources, unless both have the same classes in the same order.

    Args:
        train, test: images with a `name` and their classes in an attribute.
    """
    classes, test_classes = (list(map(str, getattr(split, attribute))) for split in (train, test))
    if classes != test_classes:
        differ = sorted(set(classes) ^ set(test_classes)) or ["their order"]
        raise UsageError(
            f"{train.name} ({len(classes)} classes) and {test.name} ({len(test_classes)}) must have the same "
            f"classes; they differ in {', '.join(differ[:5])}"
        )


def _decoded(files: ImageFiles, scaling: Scaling, workers: int) -> Images:
    """Decode all images on `workers` threads.

    Raises:
        UsageError: broken images, by path.
    """

    def decode(index: int) -> Tensor | str:
        try:
            return scaling.pixels(files.read(index)[0])
        except BrokenImage as error:
            return f"{files.describe(index)} ({error})"

    with ThreadPoolExecutor(max(workers, 1)) as pool:
        decoded = list(pool.map(decode, range(len(files))))
    broken = [found for found in decoded if isinstance(found, str)]
    if broken:
        raise UsageError(
            f"{len(broken)} of {len(decoded)} images cannot be decoded: {'; '.join(broken[:5])}"
        )
    pixels = torch.stack(decoded).permute(0, 3, 1, 2).contiguous()
    names = [files.describe(index) for index in range(len(files))]
    return Images(pixels, torch.from_numpy(files.targets), names)
