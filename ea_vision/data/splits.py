"""The folders and tars of a data folder's splits."""

from pathlib import Path

from ea_vision.base.errors import UsageError

# Names of a split's folder or tar; the first that exists counts.
NAMES = {
    "train": ("train", "training", "ILSVRC2012_img_train"),
    "validation": ("val", "validation", "valid", "ILSVRC2012_img_val", "test"),
    "test": ("test", "val", "validation", "valid"),
}
KAGGLE = "ILSVRC/Data/CLS-LOC"  # of Kaggle's archive of ImageNet, below the data folder


def find_split(root: Path, split: str, or_root: bool = False) -> Path:
    """Return the folder, else the tar, of a split in a data folder.

    Args:
        split: train | validation (val before test) | test (test before val).
        or_root: return the data folder itself if it has no splits, so that it holds class folders.

    Raises:
        UsageError: the data folder or the split does not exist.
    """
    place = _split_in(root, split)
    if place:
        return place
    has_splits = any(_split_in(root, name) for name in NAMES)
    if or_root and root.exists() and not has_splits:
        return root
    names = NAMES[split][: 1 if split == "train" else 2]
    names_required = " or ".join(f"{name}/ or {name}.tar" for name in names)
    missing = "" if root.exists() else "; it does not exist"
    raise UsageError(f"data folder {root} must have {names_required}{missing}")


def _split_in(root: Path, split: str) -> Path | None:
    for name in NAMES[split]:
        for folder in (root, root / KAGGLE):
            for path in (folder / name, folder / f"{name}.tar"):
                if path.exists():
                    return path
    return None
