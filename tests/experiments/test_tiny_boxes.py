"""experiments/tiny_boxes.py: Tiny-ImageNet's files as COCO JSON, as `CocoFolder` reads it."""

import pandas as pd
import pytest
from PIL import Image

from ea_vision.detection.coco import CocoFolder
from experiments.tiny_boxes import main

TRAIN = {
    "n01": ["0\t0\t63\t63", "3\t4\t10\t20"],
    "n02": ["9\t9\t8\t30", "5\t5\t5\t9"],
    "n03": ["1\t2\t3\t4"] * 2,
}
VAL = ["val_0.JPEG\tn02\t0\t32\t44\t62", "val_1.JPEG\tn01\t2\t3\t4\t5"]


@pytest.fixture
def tiny(tmp_path):
    root = tmp_path / "tiny"

    def write(folder, list_of_boxes, lines, mode):
        (folder / "images").mkdir(parents=True)
        (folder / list_of_boxes).write_text("".join(f"{line}\n" for line in lines))
        for line in lines:
            Image.new(mode, (64, 64)).save(folder / "images" / line.split("\t")[0])

    for label, boxes in TRAIN.items():
        lines = [f"{label}_{i}.JPEG\t{box}" for i, box in enumerate(boxes)]
        write(root / "train" / label, f"{label}_boxes.txt", lines, "RGB")
    write(root / "val", "val_annotations.txt", VAL, "L")
    words = "n00\tentity\nn01\tgoldfish, Carassius\nn02\tcrane\nn03\tcrane, bird\n"
    (root / "words.txt").write_text(words)
    return root


def test_boxes_and_names(tiny, tmp_path):
    out = tmp_path / "out"
    assert main([str(tiny), str(out)]) == 0
    train = CocoFolder(out, "train")
    val = CocoFolder(out, "val")
    assert train.classes == val.classes == ["goldfish", "crane (n02)", "crane (n03)"]
    assert [target["boxes"].tolist() for _, target in train] == [
        [[0, 0, 64, 64]],
        [[3, 4, 11, 21]],
        [],
        [[5, 5, 6, 10]],
        [[1, 2, 4, 5]],
        [[1, 2, 4, 5]],
    ]
    assert [(target["labels"].tolist(), target["boxes"].tolist()) for _, target in val] == [
        ([1], [[0, 32, 45, 63]]),
        ([0], [[2, 3, 5, 6]]),
    ]


def test_a_subset_as_one_class_and_its_mean_box_by_hand(tiny):
    """The mean of (0, 0, 64, 64) and (3, 4, 8, 17) has an IoU of 0.96 with n01's true box, 37 x 41 pixels."""
    options = ["--classes", "n03,n01", "--as-one", "object", "--per-class", "1"]
    assert main([str(tiny), str(tiny), *options]) == 0
    train = CocoFolder(tiny, "train")
    assert train.classes == ["object"]
    files = [image["file_name"] for image in train.images]
    assert files == ["n03/images/n03_0.JPEG", "n01/images/n01_0.JPEG"]
    truth = "val_0.JPEG\tn02\t5\t5\t5\t9\nval_1.JPEG\tn01\t1\t2\t37\t42\n"
    (tiny / "val" / "val_annotations.txt").write_text(truth)
    assert main([str(tiny), str(tiny), "--classes", "2", "--mean-box"]) == 0
    # scores are equal, so the first image's count first: of n02 the right box (100%), of n01 a wrong one (50%)
    metrics = pd.read_csv(tiny / "mean_box.csv")
    assert metrics[["AP", "AP50"]].values.tolist() == [[75, 75]]
