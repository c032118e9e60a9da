"""The study of attention in few places: each placement begins with the plain weights, and complete runs are kept."""

import shutil

import pandas as pd
import pytest

from experiments.cheap_attention import run as study
from tests.data.photos import make_photos
from tests.refused import refused

TINY = "--warmup-epochs 0 --img-size 32 --eval-resize 32 --epochs 1 --batch-size 4 --seed 0"


@pytest.fixture
def place(tmp_path, monkeypatch):
    """A folder with small photos; the study's files of rows stand there, and its trainings are short."""
    tiny = make_photos(tmp_path / "tiny", train=8, val=4, classes=2)
    scenes = tmp_path / "scenes"
    shutil.copytree(tiny / "train", scenes / "train")
    shutil.copytree(tiny / "val", scenes / "validation")
    shutil.copytree(tiny / "val", scenes / "test")
    for name in ("TIMES", "PILOT", "RUNS"):
        monkeypatch.setattr(study, name, tmp_path / f"{name}.csv")
    monkeypatch.setattr(study, "PRETRAINING", TINY)
    monkeypatch.setattr(study, "TUNING", f"--recipe finetune_resnet {TINY}")
    monkeypatch.setattr(study, "PILOT_SEEDS", [100])
    monkeypatch.setattr(study, "SHORT", 1)
    return tmp_path


def test_the_pilot_and_the_study_keep_a_row_of_each_run(place):
    folders = [str(place / name) for name in ("tiny", "scenes", "runs")]
    with refused("must be measured first"):
        study.main(["pilot", *folders])
    ways = [*study.PLACEMENTS, *(f"{name} uniform" for name in study.PLACEMENTS)]
    pd.DataFrame({"way": ways, "ratio": 1.5}).to_csv(study.TIMES)
    assert study.main(["pilot", *folders]) == 0
    rows = pd.read_csv(study.PILOT).set_index("way")
    assert rows["epochs"][["late", "last", "instead"]].tolist() == [1, 1, 1]
    assert rows["epochs"][[f"plain as long as {name} 1" for name in study.PLACEMENTS]].eq(1.5).all()
    assert not list((place / "runs").glob("*-100/test")), "the pilot saw no test photo"
    command = ["study", *folders, "--placement", "instead", "--seeds", "110", "111"]
    assert study.main(command) == 0
    tested = pd.read_csv(study.RUNS)
    assert tested["variant"].unique().tolist() == [
        "instead",
        "instead uniform",
        "plain as long as instead 1",
    ]
    weights = [*(place / "runs").rglob("model.safetensors")]
    times = [path.stat().st_mtime_ns for path in weights]
    assert study.main(command) == 0
    assert [path.stat().st_mtime_ns for path in weights] == times
    assert study.main(["analyse"]) == 0
