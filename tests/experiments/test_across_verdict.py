"""experiments/across/analyse.py on made-up runs: what is compared, what is corrected, and what is left out."""
import csv
import random
from pathlib import Path

import pytest
from scipy import stats

from ea_vision.base.errors import UsageError
from ea_vision.studies.evidence import Run, runs_text
from experiments.across import analyse
from experiments.across.plan import PARTS


def made(name: str, gains: dict[str, float]) -> list[Run]:
    """Runs of a part: 60% and the variant's gain, and a tenth of a point of noise, the seed's own."""
    noise = random.Random(name)
    part = PARTS[name]
    return [Run(variant, seed, 60 + gains.get(variant, 0.0) + noise.gauss(0, 0.1), 1.0, 100, 10_000, 1250, "d")
            for variant in sorted(part.own) for seed in part.seeds]


def write(folder: Path, runs: dict[str, list[Run]], split: str = "test") -> Path:
    for name, of_part in runs.items():
        (folder / f"{name}.csv").write_text(runs_text(of_part, split))
    return folder


def table(folder: Path) -> dict[tuple[str, str], dict[str, str]]:
    return {(row["part"], row["name"]): row for row in csv.DictReader((folder / "verdict.csv").open())}


def test_each_part_against_its_baseline_by_hand(tmp_path):
    gains = {"conv2d": 1.0, "residual": 0.05, "refiner": -2.0}
    runs = {name: made(name, gains) for name in PARTS}
    out = tmp_path / "out"
    assert analyse.main([str(write(tmp_path, runs)), "-o", str(out)]) == 0
    rows = table(out)
    assert len(rows) == 5 + 1 + 2 + 3 + 5
    top1 = {(run.variant, run.seed): run.top1 for run in runs["vit-rival"]}
    p_values = {}
    for name in PARTS["vit-rival"].tested:
        differences = [top1[name, seed] - top1["token_conv", seed] for seed in range(100, 108)]
        row = rows["vit-rival", name]
        assert float(row["difference"]) == pytest.approx(sum(differences) / 8)
        p_values[name] = stats.ttest_1samp(differences, 0).pvalue
        assert float(row["p"]) == pytest.approx(p_values[name])
    assert min(p_values, key=p_values.get) == "conv2d"
    assert float(rows["vit-rival", "conv2d"]["p_holm"]) == pytest.approx(5 * p_values["conv2d"])
    longer = {run.seed: run.top1 for run in runs["equal-time"]}
    assert float(rows["equal-time", "conv2d"]["difference"]) == pytest.approx(
        sum(top1["conv2d", seed] - longer[seed] for seed in range(100, 108)) / 8)
    assert float(rows["equal-time", "conv2d"]["p_holm"]) == float(rows["equal-time", "conv2d"]["p"]) < 0.05
    assert [name for (part, name), row in rows.items() if part == "cifar100" and not row["p_holm"]] == ["uniform"]
    assert rows["vit-dear", "refiner"]["p"] == "" and float(rows["vit-dear", "refiner"]["difference"]) < -1.5
    assert all(not row["p"] for (part, _), row in rows.items() if part in ("vit-dear", "vit-alone"))
    assert float(rows["cifar100", "conv2d"]["time_ratio"]) < 3
    assert (out / "verdict.png").read_bytes()[:4] == b"\x89PNG"
    again = tmp_path / "again"
    analyse.main([str(out), "-o", str(again)])
    assert (again / "verdict.csv").read_text() == (out / "verdict.csv").read_text()


def test_equal_time_is_tested_only_after_a_gain_at_equal_updates(tmp_path):
    folder = write(tmp_path, {"vit-rival": made("vit-rival", {}), "equal-time": made("equal-time", {})})
    analyse.main([str(folder), "-o", str(tmp_path / "out")])
    row = table(tmp_path / "out")["equal-time", "conv2d"]
    assert row["p"] == row["p_holm"] == "" and row["low"]


def test_an_incomplete_part_is_left_out_and_named(tmp_path, capsys):
    runs = {"vit-alone": made("vit-alone", {}), "cifar100": made("cifar100", {})[:-1]}
    analyse.main([str(write(tmp_path, runs)), "-o", str(tmp_path / "out")])
    assert {part for part, _ in table(tmp_path / "out")} == {"vit-alone"}
    said = capsys.readouterr().out
    assert "left out: cifar100: 1 runs are missing, the first is uniform, seed 105" in said
    assert "left out: vit-dear: runs of vit-dear and vit-rival are required" in said
    (tmp_path / "vit-alone.csv").unlink()
    with pytest.raises(UsageError, match="no part of the verdict is complete"):
        analyse.main([str(tmp_path), "-o", str(tmp_path / "out")])


def test_runs_that_were_not_tested_are_left_out(tmp_path, capsys):
    folder = write(tmp_path, {"vit-alone": made("vit-alone", {})}, "held_out")
    with pytest.raises(UsageError, match="no part"):
        analyse.main([str(folder), "-o", str(tmp_path / "out")])
    assert "left out: vit-alone: runs that were tested are required, got top-1 on held_out" in capsys.readouterr().out
