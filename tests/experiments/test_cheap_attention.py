"""The study of attention in few places: each placement begins with the plain weights, and complete runs are kept."""

import shutil

import pandas as pd
import pytest

from ea_vision.engine import run_folder
from ea_vision.engine.config import load_recipe
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
    for name in ("TIMES", "PILOT", "RATES", "RUNS"):
        monkeypatch.setattr(study, name, tmp_path / f"{name}.csv")
    monkeypatch.setattr(study, "PRETRAINING", TINY)
    monkeypatch.setattr(study, "TUNING", f"--recipe finetune_resnet {TINY}")
    monkeypatch.setattr(study, "PILOT_SEEDS", [100])
    monkeypatch.setattr(study, "SHORT", 1)
    return tmp_path


def test_the_pilots_and_the_study_keep_a_row_of_each_run(place, monkeypatch):
    folders = [str(place / name) for name in ("tiny", "scenes", "runs")]
    with refused("must be measured first"):
        study.main(["pilot", *folders])
    ways = [*study.PLACEMENTS, *(f"{name} uniform" for name in study.PLACEMENTS)]
    pd.DataFrame({"way": ways, "ratio": 1.5}).to_csv(study.TIMES)
    assert study.main(["pilot", *folders]) == 0
    rows = pd.read_csv(study.PILOT).set_index("way")
    assert rows["epochs"][["late", "last", "instead"]].tolist() == [1, 1, 1]
    longer = [f"plain as long as {name} 1" for name in study.PLACEMENTS]
    assert (rows["epochs"][longer] == 1.5).all()
    assert not list((place / "runs").glob("*-100/test")), "the pilot saw no test photo"
    assert study.main(["rates", *folders, "--rates", "3"]) == 0
    tuned = run_folder.read_config(place / "runs/instead rate 3-100")[0]
    assert tuned["lr"] == 3 * load_recipe("finetune_resnet")["lr"]
    assert tuned["attention_lr"] == 10
    monkeypatch.setattr(study, "STUDY", study.Study("instead", rate=1, plain_rate=3))
    command = ["study", *folders, "--seeds", "110", "111"]
    assert study.main(command) == 0
    plain = "plain as long as instead 1"
    ways = ["instead", "instead uniform", plain, f"{plain} rate 3"]
    tested = pd.read_csv(study.RUNS)
    assert tested["variant"].unique().tolist() == ways
    pairs = [("instead", plain), ("instead", "instead uniform"), ("instead", f"{plain} rate 3")]
    assert study.STUDY.questions() == pairs
    weights = [*(place / "runs").rglob("model.safetensors")]
    times = [path.stat().st_mtime_ns for path in weights]
    assert study.main(command) == 0
    assert [path.stat().st_mtime_ns for path in weights] == times
    assert study.main(["analyse"]) == 0
