"""Labels of ILSVRC's validation images, which come in one flat folder or tar, from the files that come beside them.

    LOC_val_solution.csv                            Kaggle's: ImageId,PredictionString, which begins with a WordNet ID
    ILSVRC2012_devkit_t12/ or its .tar.gz           data/ILSVRC2012_validation_ground_truth.txt and data/meta.mat
    *validation_synset_labels.txt                   a WordNet ID a line, in the order of the images' names
"""

from __future__ import annotations

import csv
import io
import re
import tarfile
from pathlib import Path

from ea_vision.base.errors import UsageError

NAME = re.compile(r"ILSVRC2012_val_(\d{8})\.jpe?g", re.IGNORECASE)
SOLUTION, DEVKIT, SYNSETS = "LOC_val_solution.csv", "ILSVRC2012_devkit_t12", "*validation_synset_labels.txt"
DEVKIT_FILES = ("data/ILSVRC2012_validation_ground_truth.txt", "data/meta.mat")
FOLDERS_UP = 5  # ROOT/ILSVRC/Data/CLS-LOC/val, with Kaggle's file in ROOT


def is_flat(names: list[str]) -> bool:
    """Return whether these are ILSVRC's validation images, by name relative to their source, without class folders."""
    folders = {name.rpartition("/")[0] for name in names}
    flat = len(folders) == 1 and not re.search(r"n\d{8}$", next(iter(folders)))
    return flat and all(NAME.fullmatch(name.rpartition("/")[2]) for name in names)


def labels_of(source: Path, names: list[str]) -> list[str]:
    """Return the WordNet IDs of flat validation images.

    Args:
        source: the folder or tar; the label files are looked for in it, beside it and in the folders above.

    Raises:
        UsageError: no label file, or one that is damaged or does not name every image.
    """
    folders = [source, *source.absolute().parents[:FOLDERS_UP]] if source.is_dir() else \
        list(source.absolute().parents[:FOLDERS_UP])
    for folder in folders:
        readers = {folder / SOLUTION: _solution, folder / DEVKIT: _devkit, folder / f"{DEVKIT}.tar.gz": _devkit,
                   **{path: _synsets for path in sorted(folder.glob(SYNSETS))}}
        for path, read in readers.items():
            if not path.exists():
                continue
            try:
                by_number = read(path)
            except UsageError:
                raise
            except (OSError, ValueError, KeyError, IndexError, TypeError, csv.Error, tarfile.TarError) as error:
                raise UsageError(f"{path} cannot be read as labels of ILSVRC's validation images: {error}") from error
            numbers = [int(NAME.fullmatch(name.rpartition("/")[2])[1]) for name in names]
            without = next((name for name, n in zip(names, numbers, strict=True) if n not in by_number), None)
            if without is not None:
                raise UsageError(f"{path} must name the class of every image of {source}, got none for {without}")
            return [by_number[number] for number in numbers]
    raise UsageError(f"{source} has ILSVRC's validation images without class folders: {SOLUTION}, {DEVKIT} (folder or "
                     f".tar.gz) or {SYNSETS} is required in it, beside it or above it, got none of them")


def _solution(path: Path) -> dict[int, str]:
    with open(path, newline="") as file:
        rows = list(csv.DictReader(file))
    return {int(row["ImageId"].rpartition("_")[2]): row["PredictionString"].split()[0] for row in rows}


def _synsets(path: Path) -> dict[int, str]:
    return dict(enumerate(path.read_text().split(), start=1))


def _devkit(path: Path) -> dict[int, str]:
    try:
        from scipy.io import loadmat
    except ImportError as error:
        raise UsageError(f"the labels of {path} are in a file of MATLAB, which scipy reads, not installed: "
                         f"pip install scipy, or give {SOLUTION}") from error
    if path.is_dir():
        truth, meta = ((path / name).read_bytes() for name in DEVKIT_FILES)
    else:
        with tarfile.open(path) as tar:
            truth, meta = (tar.extractfile(f"{DEVKIT}/{name}").read() for name in DEVKIT_FILES)
    synsets = loadmat(io.BytesIO(meta), squeeze_me=True)["synsets"]
    wordnet = {int(number): str(name) for number, name in zip(synsets["ILSVRC2012_ID"], synsets["WNID"], strict=True)}
    return {image: wordnet[int(number)] for image, number in enumerate(truth.split(), start=1)}
