"""ImageNet as distributed: flat validation images with two kinds of label files, tars, Kaggle's archive."""

import tarfile
from pathlib import Path

import numpy as np
import pytest

from ea_vision.data.image_files import ImageFiles
from ea_vision.data.splits import KAGGLE, find_split
from tests.refused import refused

CLASSES = ["n01440764", "n01443537", "n02123045", "n03888257"]
LABELS = {f"ILSVRC2012_val_{number:08d}.JPEG": CLASSES[number * 7 % 4] for number in range(1, 21)}


def put(folder, in_classes=False):
    """Make files of the images' names, flat or in class folders."""
    for name, label in LABELS.items():
        path = folder / (label if in_classes else "") / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.touch()
    return folder


def labels_of(source):
    """Class by name of the image."""
    files = ImageFiles(source)
    pairs = zip(files.names, files.targets, strict=True)
    return {Path(name).name: files.classes[target] for name, target in pairs}


def kaggle(path):
    rows = [f"{name[:-5]},{label} 1 2 3 4 " for name, label in sorted(LABELS.items(), reverse=True)]
    path.write_text("\n".join(["ImageId,PredictionString", *rows]) + "\n", encoding="utf-8")


def devkit(path):
    savemat = pytest.importorskip("scipy.io").savemat
    folder = path.with_name("ILSVRC2012_devkit_t12")
    numbers = {label: number for number, label in enumerate(reversed(CLASSES), start=1)}
    (folder / "data").mkdir(parents=True)
    lines = [f"{numbers[label]}\n" for label in LABELS.values()]
    truth = folder / "data" / "ILSVRC2012_validation_ground_truth.txt"
    truth.write_text("".join(lines), encoding="utf-8")
    columns = [("ILSVRC2012_ID", object), ("WNID", object)]
    rows = [(number, label) for label, number in numbers.items()]
    synsets = np.array(rows, dtype=columns)
    savemat(folder / "data" / "meta.mat", {"synsets": synsets})
    with tarfile.open(path, "w:gz") as tar:
        tar.add(folder, folder.name)


@pytest.mark.parametrize(
    "write, name",
    [
        (kaggle, "LOC_val_solution.csv"),
        (kaggle, "val/LOC_val_solution.csv"),
        (devkit, "ILSVRC2012_devkit_t12.tar.gz"),
    ],
)
def test_flat_images_have_the_classes_of_the_files_beside_them(tmp_path, write, name):
    val = put(tmp_path / "val")
    with refused("LOC_val_solution.csv or ILSVRC2012_devkit_t12.* is required .* got none"):
        ImageFiles(val)
    write(tmp_path / name)
    assert labels_of(val) == LABELS


def test_a_flat_tar_and_kaggles_archive_are_found_and_labelled(tmp_path):
    flat = put(tmp_path / "flat")
    root = tmp_path / "kaggle"
    with tarfile.open(tmp_path / "ILSVRC2012_img_val.tar", "w") as tar:
        tar.add(flat, ".")
    put(root / KAGGLE / "val")
    put(root / KAGGLE / "train", in_classes=True)
    kaggle(tmp_path / "LOC_val_solution.csv")
    assert find_split(tmp_path, "validation").name == "ILSVRC2012_img_val.tar"
    for place in (tmp_path, root):
        assert labels_of(find_split(place, "validation")) == LABELS
    assert labels_of(find_split(root, "train")) == LABELS


def test_damaged_label_files_are_one_line(tmp_path):
    val = put(tmp_path / "val")
    solution = tmp_path / "LOC_val_solution.csv"
    for text in (
        "ImageId\nx\n",
        "\0",
        "ImageId,PredictionString\nILSVRC2012_val_00000001,n01440764 1\n",
    ):
        solution.write_text(text, encoding="utf-8")
        with refused("cannot be read as labels of the 20 images"):
            ImageFiles(val)
    kaggle(solution)
    before = ImageFiles(val).fingerprint()
    solution.write_bytes(solution.read_bytes().replace(b"n03888257", b"n99999999"))
    assert ImageFiles(val).fingerprint() != before, "labels tell this data from other data"
