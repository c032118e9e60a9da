"""Labels of ILSVRC's validation images, which come in one flat folder or tar, from the files that come beside them.

LOC_val_solution.csv                            Kaggle's: ImageId,PredictionString, which begins with a WordNet ID
ILSVRC2012_devkit_t12.tar.gz                    numbers of classes, and their names in a file that scipy reads
*validation_synset_labels.txt                   a WordNet ID a line, in the order of the images' names
"""

import csv
import io
import re
import tarfile
from itertools import takewhile
from pathlib import Path

from ea_vision.base.errors import UsageError

NAME = re.compile(r"((?:.*/)?)ILSVRC2012_val_(\d{8})\.jpe?g", re.IGNORECASE)  # folder, number
FOLDERS_UP = 5  # ROOT/ILSVRC/Data/CLS-LOC/val, with Kaggle's file in ROOT


def is_flat(names: list[str]) -> bool:
    """Return whether these are ILSVRC's validation images, by name relative to their source, without class folders."""
    found = list(takewhile(bool, map(NAME.fullmatch, names)))
    folders = {match[1] for match in found}
    return (
        len(found) == len(names) and len(folders) == 1 and not re.search(r"n\d{8}/$", folders.pop())
    )


def labels_of(source: Path, names: list[str]) -> list[str]:
    """Return the WordNet IDs of flat validation images.

    Args:
        source: the folder or tar; the label files are looked for in it, beside it and in the folders above.

    Raises:
        UsageError: no label file, or one that is damaged or does not name every image.
    """
    path, read = next(
        (
            (path, read)
            for folder in (source, *source.absolute().parents[:FOLDERS_UP])
            for pattern, read in READERS.items()
            for path in sorted(folder.glob(pattern))
        ),
        (None, None),
    )
    if path is None:
        raise UsageError(
            f"{source} has ILSVRC's validation images without class folders: {' or '.join(READERS)} is "
            "required in it, beside it or above it, got none of them"
        )
    try:
        by_number = read(path)
        return [by_number[int(NAME.fullmatch(name)[2])] for name in names]
    except Exception as error:  # csv, scipy, tarfile and what they meet have theirs
        raise UsageError(
            f"{path} cannot be read as labels of the {len(names)} images of {source}: "
            f"{type(error).__name__} {error}"
        ) from error


def _solution(path: Path) -> dict[int, str]:
    rows = csv.DictReader(path.read_text(encoding="utf-8").splitlines())
    return {
        int(row["ImageId"].rpartition("_")[2]): row["PredictionString"].split()[0] for row in rows
    }


def _synsets(path: Path) -> dict[int, str]:
    return dict(enumerate(path.read_text(encoding="utf-8").split(), start=1))


def _devkit(path: Path) -> dict[int, str]:
    from scipy.io import loadmat

    with tarfile.open(path) as tar:
        truth, meta = (
            tar.extractfile(f"ILSVRC2012_devkit_t12/data/{name}").read()
            for name in ("ILSVRC2012_validation_ground_truth.txt", "meta.mat")
        )
    synsets = loadmat(io.BytesIO(meta), squeeze_me=True)["synsets"]
    wordnet = dict(zip(synsets["ILSVRC2012_ID"].tolist(), synsets["WNID"].tolist(), strict=True))
    return {image: wordnet[int(number)] for image, number in enumerate(truth.split(), start=1)}


READERS = {
    "LOC_val_solution.csv": _solution,
    "ILSVRC2012_devkit_t12.tar.gz": _devkit,
    "*validation_synset_labels.txt": _synsets,
}
