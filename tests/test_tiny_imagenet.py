"""experiments/tiny_imagenet.py: the part of the data that it links, what it reads of a train.py that trains nothing."""
import runpy
from pathlib import Path

import pytest

from ea_vision.data.imagenet import ImageSource

script = runpy.run_path(str(Path(__file__).parents[1] / "experiments" / "tiny_imagenet.py"))

TRAIN = """
import sys
from pathlib import Path
given = dict(zip(sys.argv[1:], sys.argv[2:]))
assert given["--num-classes"] == "2" and given["--epochs"] == "1" and given["--warmup-epochs"] == "1", given
folder = Path(given["--output"]) / given["--experiment"]
folder.mkdir()
for epoch, rate in enumerate(RATES):
    print(f"Train: {epoch} [   0/3 ( 33%)]  Loss: 5.2 (5.2)  Time: 0.1s,  640.00/s  (0.1s,  640.00/s)  LR: 0.0")
    print(f"Train: {epoch} [   2/3 (100%)]  Loss: 5.1 (5.1)  Time: 0.524s,  122.14/s  (0.559s,  {rate:.2f}/s)  LR: 0.1")
(folder / "summary.csv").write_text("epoch,train_loss,eval_top1,eval_top5\\n1,4.5,8.25,24.5\\n")
"""


@pytest.fixture
def part(tmp_path) -> Path:
    """Two images of each of two classes of a folder as Tiny-ImageNet's, linked."""
    tiny = tmp_path / "tiny"
    for name in ("n01", "n02", "n03"):
        (tiny / "train" / name / "images").mkdir(parents=True)
        for number in range(3):
            (tiny / "train" / name / "images" / f"{name}_{number}.JPEG").write_bytes(b"x")
    (tiny / "val" / "images").mkdir(parents=True)
    labels = {"val_0.JPEG": "n02", "val_1.JPEG": "n03", "val_2.JPEG": "n01"}
    for name in labels:
        (tiny / "val" / "images" / name).write_bytes(b"x")
    (tiny / "val" / "val_annotations.txt").write_text("".join(f"{n}\t{c}\t0\t0\t9\t9\n" for n, c in labels.items()))
    assert script["classes_of"](tiny) == ["n01", "n02", "n03"]
    script["link_part"](tiny, tmp_path / "part", ["n01", "n02"], 2)
    return tmp_path / "part"


def test_a_part_is_linked_with_the_classes_of_the_annotations(part):
    train, val = (ImageSource("", part / split, split).files for split in ("train", "val"))
    assert train.names == [f"{name}/{name}_{number}.JPEG" for name in ("n01", "n02") for number in (0, 1)]
    assert val.names == ["n01/val_2.JPEG", "n02/val_0.JPEG"] and val.targets.tolist() == [0, 1]


def test_what_timms_script_prints_is_read(part, tmp_path):
    train = tmp_path / "train.py"
    train.write_text(TRAIN.replace("RATES", "(100, 300)"))
    found = script["timms"](tmp_path, train, part, 0, 2)
    assert (found["top1"], found["top5"], found["train_loss"]) == ("8.25", "24.5", "4.5")
    assert found["images_per_s"] == pytest.approx(150)  # of as many images at 100 and at 300 a second
    assert found["seconds"] > 0 and found["processor_seconds"] > 0
    train.write_text(TRAIN.replace("RATES", "(100,)"))
    with pytest.raises(SystemExit, match="must have 2 epochs, got 1"):
        script["timms"](tmp_path, train, part, 1, 2)
    train.write_text("raise SystemExit(3)")
    with pytest.raises(SystemExit, match="ended with 3: see .*timm-2.log"):
        script["timms"](tmp_path, train, part, 2, 2)
