"""The folders and tars of a data folder's splits."""

from pathlib import Path

from ea_vision.base.errors import UsageError
from ea_vision.data.image_names import hidden_part, is_image_name

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
    raise UsageError(f"data folder {root} must have {names_required}{_what_was_meant(root)}")


def _split_in(root: Path, split: str) -> Path | None:
    for name in NAMES[split]:
        for folder in (root, root / KAGGLE):
            for path in (folder / name, folder / f"{name}.tar"):
                if path.exists():
                    return path
    return None


def _what_was_meant(root: Path) -> str:
    """Return the end of a message for a data folder without a split: it names a folder above or below that has the
    split, or says that this one holds class folders itself."""
    if not root.exists():
        return "; it does not exist"
    if root.is_file():
        return "; it is a file"
    below = []
    for path in sorted(root.glob("*")):
        if path.is_dir() and not hidden_part(path.name):
            below.append(path)
    is_split = any(root.name in names for names in NAMES.values())
    above = [root.absolute().parent] if is_split else []
    for folder in above + below:
        if _split_in(folder, "train"):
            return f"; {folder} has it: give that folder"
    classes = [path.name for path in below if _has_images(path)]
    if not classes:
        return ""
    return f"; it has the classes {', '.join(classes[:3])} itself: move them into train/ and test/"


def _has_images(folder: Path) -> bool:
    return any(is_image_name(file.name) for file in folder.iterdir())
