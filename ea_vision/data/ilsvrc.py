"""Labels of ILSVRC's validation images (one flat folder or tar) from the label files that come with them.

LOC_val_solution.csv                            Kaggle's: ImageId,PredictionString, which begins with a WordNet ID
ILSVRC2012_devkit_t12.tar.gz                    numbers of classes, and their names in a file that scipy reads
"""

import csv
import io
import re
import tarfile
from pathlib import Path

from ea_vision.base.errors import UsageError, as_usage_error, extra_required

NAME = re.compile(r"((?:.*/)?)ILSVRC2012_val_(\d{8})\.jpe?g", re.IGNORECASE)  # folder, number
FOLDERS_UP = 5  # ROOT/ILSVRC/Data/CLS-LOC/val, with Kaggle's file in ROOT


def is_flat(names: list[str]) -> bool:
    """Return whether these are ILSVRC's validation images, by name relative to their source, without class folders."""
    folders = set()
    for name in names:
        match = NAME.fullmatch(name)
        if not match:
            return False
        folders.add(match[1])
    if len(folders) != 1:
        return False
    in_class_folder = re.search(r"n\d{8}/$", folders.pop())
    return not in_class_folder


def labels_of(source: Path, names: list[str]) -> list[str]:
    """Return the WordNet IDs of flat validation images.

    Args:
        source: the folder or tar; the label files are looked for in it, beside it and in the folders above.

    Raises:
        UsageError: no label file, or one that is damaged or does not name every image.
    """
    folders = (source, *source.absolute().parents[:FOLDERS_UP])
    places = [folder / name for folder in folders for name in READERS]
    path = next(filter(Path.is_file, places), None)
    if path is None:
        raise UsageError(
            f"{source} has ILSVRC's validation images without class folders: {' or '.join(READERS)} is "
            "required in it, beside it or above it, got none of them"
        )
    problem = f"{path} cannot be read as labels of the {len(names)} images of {source}"
    with as_usage_error(problem, Exception):  # csv, scipy and tarfile raise many kinds
        class_of_number = READERS[path.name](path)
        numbers = [int(NAME.fullmatch(name)[2]) for name in names]
        return [class_of_number[number] for number in numbers]


def _solution(path: Path) -> dict[int, str]:
    """Read Kaggle's file."""
    rows = csv.DictReader(path.read_text(encoding="utf-8").splitlines())
    return {
        int(row["ImageId"].rpartition("_")[2]): row["PredictionString"].split()[0] for row in rows
    }


def _devkit(path: Path) -> dict[int, str]:
    """Read the packed devkit."""
    with extra_required(path.name, "scipy", "data"):
        from scipy.io import loadmat

    folder = "ILSVRC2012_devkit_t12/data"
    with tarfile.open(path) as tar:
        truth = tar.extractfile(f"{folder}/ILSVRC2012_validation_ground_truth.txt").read()
        meta = tar.extractfile(f"{folder}/meta.mat").read()
    synsets = loadmat(io.BytesIO(meta), squeeze_me=True)["synsets"]
    numbers = synsets["ILSVRC2012_ID"].tolist()
    wordnet = dict(zip(numbers, synsets["WNID"].tolist(), strict=True))
    labels = [wordnet[int(number)] for number in truth.split()]
    return dict(enumerate(labels, start=1))


READERS = {"LOC_val_solution.csv": _solution, "ILSVRC2012_devkit_t12.tar.gz": _devkit}
