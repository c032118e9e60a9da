"""The study of attention in few places: each placement begins with the plain weights, and complete runs are kept."""

import re

import pandas as pd
import pytest
from scipy.stats import ttest_1samp

from ea_vision.engine import run_folder
from ea_vision.engine.config import load_recipe
from experiments.cheap_attention import run as study
from experiments.pages import MINUS
from tests.data.photos import make_photos
from tests.refused import refused

TINY = "--warmup-epochs 0 --img-size 32 --eval-resize 32 --epochs 1 --batch-size 4 --seed 0"


@pytest.fixture
def place(tmp_path, monkeypatch):
    """A folder with small photos; the study's files of rows stand there, and its trainings are short."""
    make_photos(tmp_path / "tiny", train=8, val=4, classes=2)
    make_photos(tmp_path / "scenes", train=8, val=0, validation=4, test=4, classes=2)
    for name in ("TIMES", "PILOT", "RATES", "LENGTH_RUNS", "RUNS"):
        monkeypatch.setattr(study, name, tmp_path / f"{name}.csv")
    monkeypatch.setattr(study, "PRETRAINING", TINY)
    monkeypatch.setattr(study, "TUNING", f"--recipe finetune_resnet {TINY}")
    monkeypatch.setattr(study, "PILOT_SEEDS", [100])
    monkeypatch.setattr(study, "SHORT", 1)
    return tmp_path


def measured(machine, ratio):
    """Rows of TIMES."""
    return pd.DataFrame({"way": [*study.PLACEMENTS], "ratio": ratio, "hardware": machine})


def test_the_pilots_and_the_study_keep_a_row_of_each_run(place, monkeypatch):
    folders = [str(place / name) for name in ("tiny", "scenes", "runs")]
    with refused("must be measured first"):
        study.main(["pilot", *folders])
    elsewhere = measured("another machine", 9)
    elsewhere.to_csv(study.TIMES)
    with refused(re.escape(f"has none of {study.machine()}")):
        study.main(["pilot", *folders])
    pd.concat([elsewhere, measured(study.machine(), 1.5)]).to_csv(study.TIMES)
    assert study.main(["pilot", *folders]) == 0
    rows = pd.read_csv(study.PILOT).set_index("way")
    assert rows["epochs"][["late", "last", "instead"]].tolist() == [1, 1, 1]
    longer = [f"plain as long as {name} 1" for name in study.PLACEMENTS]
    assert (rows["epochs"][longer] == 1.5).all()
    monkeypatch.setattr(study, "STUDY", study.Study("instead"))
    assert study.main(["rates", *folders, "--rates", "3"]) == 0
    tuned = run_folder.read_config(place / "runs/instead rate 3-100")[0]
    assert tuned["lr"] == 3 * load_recipe("finetune_resnet")["lr"]
    assert tuned["attention_lr"] == 10
    lengths = ["lengths", *folders, "--epochs", "1"]
    with refused("rate must be chosen"):
        study.main(lengths)
    monkeypatch.setattr(study, "STUDY", study.Study("instead", rate=1, plain_rate=3))
    assert study.main(lengths) == 0
    assert pd.read_csv(study.LENGTH_RUNS)["way"].tolist() == ["plain 1 rate 3"]
    assert not list((place / "runs").glob("*-100/test")), "the pilots saw no test photo"
    command = ["study", *folders, "--seeds", "110", "111"]
    former = (
        "variant,seed,test_top1,train_loss,seconds,alpha,beta\nfrom elsewhere,1,83.70,0.9,354,,\n"
    )
    study.RUNS.write_text(former)
    with refused("runs of question 2 first"):
        study.main([*command, "--questions", "2"])
    assert study.main([*command, "--questions", "4"]) == 0
    assert study.RUNS.read_text().startswith(former)
    plain = "plain as long as instead 1"
    ways = ["from elsewhere", "instead", f"{plain} rate 3"]
    assert pd.read_csv(study.RUNS)["variant"].unique().tolist() == ways
    assert study.main(command) == 0
    tested = pd.read_csv(study.RUNS)
    assert set(tested["variant"]) == {*ways, "instead uniform", plain}
    assert not tested.duplicated(["variant", "seed"]).any()
    weights = [*(place / "runs").rglob("model.safetensors")]
    times = [path.stat().st_mtime_ns for path in weights]
    assert study.main(command) == 0
    assert [path.stat().st_mtime_ns for path in weights] == times
    assert study.main(["analyse"]) == 0


def test_each_question_has_its_runs(place):
    measured(study.machine(), 1.5).to_csv(study.TIMES)
    chosen = study.Study("instead", rate=3, plain_rate=10, long=24)
    plain = "plain as long as instead"
    assert chosen.parts() == {
        1: {"instead": 1, "instead uniform": 1, f"{plain} 1": 1.5},
        4: {"instead rate 3": 1, f"{plain} 1 rate 10": 1.5},
        5: {"instead uniform rate 3": 1},
        2: {"instead long rate 3": 24, f"{plain} 24 rate 10": 36},
    }
    assert tuple(chosen.parts()) == study.ANSWERED
    assert chosen.questions() == [
        ("instead", f"{plain} 1"),
        ("instead", "instead uniform"),
        ("instead rate 3", f"{plain} 1 rate 10"),
        ("instead rate 3", "instead uniform rate 3"),
        ("instead long rate 3", f"{plain} 24 rate 10"),
    ]
    assert len(chosen.questions()) == study.HYPOTHESES


def test_questions_that_lack_runs_do_not_hide_the_others(place, monkeypatch):
    """Each is answered by the seeds of both ways, and corrected for five questions whatever has been run."""
    monkeypatch.setattr(study, "STUDY", study.Study("instead", rate=3, plain_rate=3))
    plain = "plain as long as instead 1"
    top1 = {
        "instead": [83.0, 84.0, 84.5],
        "instead uniform": [82.0, 83.5, 83.0],
        plain: [80.0, 80.0, 80.5],
        "instead rate 3": [86.0, 87.0],
        f"{plain} rate 3": [86.5, 86.5, 87.5],
    }
    rows = []
    for way, values in top1.items():
        for seed, value in enumerate(values):
            rows.append({"variant": way, "seed": seed, "test_top1": value})
    pd.DataFrame(rows).to_csv(study.RUNS, index=False)
    *_, first, looks, tuned = study.answers()
    assert "| 3 | +3.67" in first
    assert "| 3 | +1.00" in looks
    assert f"instead rate 3 {MINUS} {plain} rate 3 | 2 | +0.00" in tuned
    p = ttest_1samp([3, 4, 4], 0).pvalue
    assert f"| {5 * p:.3f} |" in first
