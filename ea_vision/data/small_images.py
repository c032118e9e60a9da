"""Small images, decoded once: scikit-learn's digits, CIFAR-10, CIFAR-100, and folders or tars of class/name.png."""

from __future__ import annotations

import hashlib
import io
import logging
import zipfile
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from PIL import Image

from ea_vision.base.errors import RunError, UsageError
from ea_vision.base.files import atomic_write, cache_root
from ea_vision.data.image_files import BrokenImage, ImageFiles, check_scaled, decode_image
from ea_vision.data.splits import find_split

log = logging.getLogger(__name__)
DATASETS = ("digits", "cifar10", "cifar100", "folder")


@dataclass
class Images:
    """One split. `names` are paths where the images have them."""

    images: torch.Tensor  # uint8 (N, 3, H, W)
    targets: torch.Tensor  # int64 (N,)
    names: list[str]

    def __len__(self) -> int:
        return len(self.targets)

    def select(self, index: torch.Tensor) -> Images:
        return Images(self.images[index], self.targets[index], [self.names[i] for i in index.tolist()])


@dataclass
class DataSet:
    """Training and test images and the names of the classes."""

    name: str
    train: Images
    test: Images
    classes: list[str]

    def fingerprint(self) -> str:
        """SHA-256 over pixels, targets and class names: the same for the same data, wherever it lay."""
        digest = hashlib.sha256("\n".join(self.classes).encode())
        for split in (self.train, self.test):
            digest.update(split.images.numpy())
            digest.update(split.targets.numpy())
        return digest.hexdigest()


def hold_out(images: Images, count: int, seed: int) -> tuple[Images, Images]:
    """Split off `count` images, chosen by `seed`; return (kept, held out), both in their old order.

    Raises:
        UsageError: `count` leaves nothing to train on.
    """
    if not 0 < count < len(images):
        raise UsageError(f"holdout must lie between 1 and {len(images) - 1} of {len(images)} images, got {count}")
    order = torch.randperm(len(images), generator=torch.Generator().manual_seed(seed))
    return images.select(order[count:].sort().values), images.select(order[:count].sort().values)


def load_dataset(name: str, data_dir: str = "", cache_dir: str = "", img_size: int = 32, download: bool = False,
                 workers: int = 2, exif_rotation: bool = False) -> DataSet:
    """Load a data set as uint8 tensors of `img_size` x `img_size` RGB pixels.

    Args:
        name: digits | cifar10 | cifar100 (torchvision's files in `data_dir`) | folder (`data_dir` has train and test,
            or val, each a folder or a .tar of class/name.png).
        cache_dir: where decoded folders are kept; empty: $XDG_CACHE_HOME/ea_vision; "none": nowhere. A cache that
            cannot be written is done without.
        workers: decoding threads; 0: this one alone.
        exif_rotation: turn the images of folders and tars as their EXIF data says.

    Raises:
        UsageError: missing data, broken images (all of them are found, the first named), classes that differ.
    """
    if name == "digits":
        return _load_digits(img_size)
    if name in ("cifar10", "cifar100"):
        root = Path(data_dir) if data_dir else cache_folder("") / "torchvision"
        return _load_torchvision(name, root, img_size, download)
    if name == "folder":
        if not data_dir:
            raise UsageError("--dataset folder needs --data-dir: a folder with train and test (or val)")
        return _load_folder(Path(data_dir), cache_folder(cache_dir), img_size, workers, exif_rotation)
    raise UsageError(f"dataset must be one of {', '.join(DATASETS)}, got {name!r}")


def cache_folder(cache_dir: str) -> Path | None:
    """The folder of decoded images, or None for "none"."""
    if cache_dir == "none":
        return None
    if cache_dir:
        return Path(cache_dir)
    return cache_root()


def _load_digits(img_size: int) -> DataSet:
    """scikit-learn's 1,797 handwritten digits of 8x8 pixels, enlarged; every fifth image of a class is for testing."""
    from sklearn.datasets import load_digits

    digits = load_digits()
    grey = np.rint(digits.images * (255 / 16)).astype(np.uint8)  # (1797, 8, 8), values were 0..16
    images = _resized(grey[..., None].repeat(3, axis=-1), img_size)
    targets = torch.from_numpy(digits.target.astype(np.int64))
    rank_in_class = torch.zeros_like(targets)
    for target in range(10):
        of_class = targets == target
        rank_in_class[of_class] = torch.arange(int(of_class.sum()))
    is_test = rank_in_class % 5 == 4
    all_images = Images(images, targets, [f"digit {i}" for i in range(len(targets))])
    return DataSet("digits", all_images.select((~is_test).nonzero()[:, 0]), all_images.select(is_test.nonzero()[:, 0]),
                   [str(d) for d in range(10)])


def _load_torchvision(name: str, root: Path, img_size: int, download: bool) -> DataSet:
    """CIFAR-10 or -100 in torchvision's layout under `root`."""
    from torchvision import datasets

    kind = {"cifar10": datasets.CIFAR10, "cifar100": datasets.CIFAR100}[name]
    splits = {}
    for train in (True, False):
        try:
            found = kind(str(root), train=train, download=download)
        except (RuntimeError, OSError) as error:
            raise UsageError(f"{name} cannot be read from {root}: {error} (--download fetches it; --dataset folder "
                             "reads tars and folders)") from error
        split = "train" if train else "test"
        splits[split] = Images(_resized(np.asarray(found.data), img_size),
                               torch.tensor(found.targets, dtype=torch.int64),
                               [f"{name} {split} {i}" for i in range(len(found.targets))])
    return DataSet(name, splits["train"], splits["test"], list(found.classes))


def _resized(pixels: np.ndarray, img_size: int) -> torch.Tensor:
    """uint8 (N, H, W, 3) -> (N, 3, img_size, img_size), bicubic where the size differs."""
    if pixels.shape[1:3] != (img_size, img_size):
        pixels = np.stack([_fit(Image.fromarray(p), img_size) for p in pixels])
    return torch.from_numpy(pixels).permute(0, 3, 1, 2).contiguous()


def _fit(image: Image.Image, img_size: int) -> np.ndarray:
    """RGB uint8 (img_size, img_size, 3): another size is scaled by its short side and cut around its middle.

    Raises:
        BrokenImage: scaled, it would be too large.
    """
    check_scaled(image.size, img_size)
    if image.size != (img_size, img_size):
        scale = img_size / min(image.size)
        image = image.resize([max(img_size, round(side * scale)) for side in image.size], Image.Resampling.BICUBIC)
        left, top = (image.width - img_size) // 2, (image.height - img_size) // 2
        image = image.crop((left, top, left + img_size, top + img_size))
    return np.asarray(image)


def _load_folder(root: Path, cache: Path | None, img_size: int, workers: int, exif_rotation: bool) -> DataSet:
    train_source = find_split(root, "train")
    test_source = find_split(root, "test")
    train, train_classes = _load_split(train_source, cache, img_size, workers, exif_rotation)
    test, test_classes = _load_split(test_source, cache, img_size, workers, exif_rotation)
    if train_classes != test_classes:
        differ = sorted(set(train_classes) ^ set(test_classes))
        raise UsageError(f"{train_source} and {test_source} must have the same classes; "
                         f"only one of them has {', '.join(differ[:5])}{' ...' if len(differ) > 5 else ''}")
    return DataSet("folder", train, test, train_classes)


def _load_split(source: Path, cache: Path | None, img_size: int, workers: int,
                exif_rotation: bool) -> tuple[Images, list[str]]:
    """Decode a split, or take it from the cache if it has not changed since."""
    cached = None if cache is None else cache / f"{_source_key(source, img_size, exif_rotation)}.npz"
    if cached is not None and cached.exists():
        try:
            with np.load(cached, allow_pickle=False) as file:
                return (Images(torch.from_numpy(file["images"]), torch.from_numpy(file["targets"]),
                               file["names"].tolist()), file["classes"].tolist())
        except (OSError, ValueError, KeyError, TypeError, EOFError, zipfile.BadZipFile) as error:  # decoded anew below
            log.warning("cache file %s cannot be read (%s): decoding again", cached, error)
    split, classes = _decode(source, img_size, workers, exif_rotation)
    if cached is not None:
        data = io.BytesIO()
        np.savez(data, images=split.images.numpy(), targets=split.targets.numpy(), names=np.array(split.names),
                 classes=np.array(classes))
        try:
            cached.parent.mkdir(parents=True, exist_ok=True)
            atomic_write(cached, data.getbuffer())
        except (OSError, RunError) as error:
            log.warning("decoded images are not kept: %s", error)
    return split, classes


def _source_key(source: Path, img_size: int, exif_rotation: bool) -> str:
    """Names a state of a source, and what is made of it: its path and the size and time of its files."""
    digest = hashlib.sha256(f"2 {source.resolve()} {img_size} {exif_rotation}".encode())
    for path in [source / name for name in ImageFiles(source).names] if source.is_dir() else [source]:
        if path.exists():  # not a link that leads nowhere
            status = path.stat()
            digest.update(f"{path} {status.st_size} {status.st_mtime_ns}".encode())
    return digest.hexdigest()[:32]


def _decode(source: Path, img_size: int, workers: int, exif_rotation: bool = False) -> tuple[Images, list[str]]:
    """Decode all images of a folder or tar on `workers` threads, in the order of their names.

    Raises:
        UsageError: what `ImageFiles` does not take, or broken images, by path.
    """
    files = ImageFiles(source)

    def decode(index: int) -> tuple[np.ndarray | None, str]:
        try:
            with files.open(index) as file:
                return _fit(decode_image(file, exif_rotation), img_size), ""
        except (OSError, BrokenImage) as error:
            return None, str(error)

    with ThreadPoolExecutor(max(workers, 1)) as pool:
        decoded = list((pool.map if workers else map)(decode, range(len(files))))
    broken = [f"{files.describe(index)} ({error})" for index, (pixels, error) in enumerate(decoded) if pixels is None]
    if broken:
        raise UsageError(f"{len(broken)} of {len(decoded)} images cannot be decoded: {'; '.join(broken[:5])}"
                         f"{' ...' if len(broken) > 5 else ''}")
    images = torch.from_numpy(np.stack([pixels for pixels, _ in decoded])).permute(0, 3, 1, 2).contiguous()
    return Images(images, torch.from_numpy(files.targets), [files.describe(index) for index in range(len(files))]), \
        files.classes
