"""ImageNet as it comes: flat validation images with three kinds of label files, tars, Kaggle's archive."""
from __future__ import annotations

import shutil
import tarfile
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from ea_vision.base.errors import UsageError
from ea_vision.data.image_files import ImageFiles
from ea_vision.data.splits import KAGGLE, find_split

CLASSES = ["n01440764", "n01443537", "n02123045", "n03888257"]


@pytest.fixture(scope="module")
def photos(tmp_path_factory) -> Path:
    """20 images in class folders, named as ILSVRC's validation images."""
    root = tmp_path_factory.mktemp("photos") / "val"
    rng = np.random.default_rng(0)
    for number in range(1, 21):
        path = root / CLASSES[number * 7 % 4] / f"ILSVRC2012_val_{number:08d}.JPEG"
        path.parent.mkdir(parents=True, exist_ok=True)
        Image.fromarray(rng.integers(0, 255, (8, 8, 3), dtype=np.uint8)).save(path)
    return root


def labels_of(source: Path) -> dict[str, str]:
    """Class by name of the image."""
    files = ImageFiles(source)
    return {name.rpartition("/")[2]: files.classes[target] for name, target in
            zip(files.names, files.targets.tolist(), strict=True)}


def flat(photos: Path, folder: Path) -> Path:
    folder.mkdir(parents=True)
    for path in photos.rglob("*.JPEG"):
        shutil.copy(path, folder)
    return folder


def kaggle(photos: Path, path: Path) -> None:
    rows = [f"{name[:-5]},{label} 1 2 3 4 " for name, label in sorted(labels_of(photos).items(), reverse=True)]
    path.write_text("\n".join(["ImageId,PredictionString", *rows]) + "\n")


def devkit(photos: Path, path: Path) -> None:
    savemat, folder = pytest.importorskip("scipy.io").savemat, path.with_name("ILSVRC2012_devkit_t12")
    numbers = {label: number for number, label in enumerate(reversed(CLASSES), start=1)}
    (folder / "data").mkdir(parents=True)
    truth = [str(numbers[label]) for _, label in sorted(labels_of(photos).items())]
    (folder / "data" / "ILSVRC2012_validation_ground_truth.txt").write_text("\n".join(truth) + "\n")
    synsets = np.array([(number, label) for label, number in numbers.items()],
                       dtype=[("ILSVRC2012_ID", object), ("WNID", object)])
    savemat(folder / "data" / "meta.mat", {"synsets": synsets})
    with tarfile.open(path, "w:gz") as tar:
        tar.add(folder, folder.name)


def synsets(photos: Path, path: Path) -> None:
    path.write_text("\n".join(label for _, label in sorted(labels_of(photos).items())))


@pytest.mark.parametrize("write, name", [
    (kaggle, "LOC_val_solution.csv"), (kaggle, "val/LOC_val_solution.csv"),
    (devkit, "ILSVRC2012_devkit_t12.tar.gz"), (synsets, "imagenet_2012_validation_synset_labels.txt")],
    ids=lambda given: getattr(given, "__name__", given))
def test_flat_images_have_the_classes_of_the_files_beside_them(photos, tmp_path, write, name):
    wanted, val = labels_of(photos), flat(photos, tmp_path / "val")
    assert len(wanted) == 20 and set(wanted.values()) == set(CLASSES)
    with pytest.raises(UsageError, match="LOC_val_solution.csv or ILSVRC2012_devkit_t12.* is required .* got none"):
        ImageFiles(val)
    write(photos, tmp_path / name)
    assert labels_of(val) == wanted


def test_a_flat_tar_and_kaggles_archive_are_found_and_labelled(photos, tmp_path):
    wanted = labels_of(photos)
    root = tmp_path / "tars"
    val = flat(photos, root / "unpacked")
    with tarfile.open(root / "ILSVRC2012_img_val.tar", "w") as tar:
        for path in sorted(val.iterdir()):
            tar.add(path, path.name)
    shutil.rmtree(val)
    kaggle(photos, root / "LOC_val_solution.csv")
    place = find_split(root, "validation")
    assert place.name == "ILSVRC2012_img_val.tar" and labels_of(place) == wanted
    root = tmp_path / "kaggle"
    flat(photos, root / KAGGLE / "val")
    shutil.copytree(photos, root / KAGGLE / "train")
    kaggle(photos, root / "LOC_val_solution.csv")
    assert labels_of(find_split(root, "validation")) == labels_of(find_split(root, "train")) == wanted


def test_damaged_label_files_are_one_line(photos, tmp_path):
    val = flat(photos, tmp_path / "val")
    solution = tmp_path / "LOC_val_solution.csv"
    for text in ("ImageId\nx\n", "\0", "ImageId,PredictionString\nILSVRC2012_val_00000001,n01440764 1\n"):
        solution.write_text(text)
        with pytest.raises(UsageError, match="cannot be read as labels of the 20 images"):
            ImageFiles(val)
    kaggle(photos, solution)
    before = ImageFiles(val).fingerprint()
    solution.write_text(solution.read_text().replace("n03888257", "n99999999"))
    assert ImageFiles(val).fingerprint() != before, "labels are part of what tells this data from other data"
