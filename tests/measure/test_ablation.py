"""The AA paper's ablations: sizes beside the published ones, and a table from the files of runs that may be killed."""
import csv
import dataclasses
import itertools
from pathlib import Path

import pytest
import timm
import torch

from ea_vision.engine import run_folder
from ea_vision.measure import ablation
from ea_vision.models import published_figures
from ea_vision.studies import sweep
from tests.engine.runner import make_folder, run

ROOT = Path(__file__).resolve().parents[2]
DOCS, RESULTS = ROOT / "docs" / "experiments.md", ROOT / "experiments" / "results" / "ablation"


def test_shares_of_attention_are_the_published_ones(tmp_path, capsys):
    table = tmp_path / "new" / "share.csv"
    assert ablation.main(["share", "--csv", str(table)]) == 0
    rows = list(csv.DictReader(table.open()))
    assert [row["share"] for row in rows] == ["0.25", "0.5", "0.75", "1"]
    for row in rows:
        assert float(row["params_m"]) == pytest.approx(float(row["published_params_m"]), abs=0.06)
        assert float(row["gflops_profiler"]) == pytest.approx(float(row["published_gflops"]), rel=0.02)
    printed = capsys.readouterr().out
    assert "| aa_resnet50 | 1     | 19.40    | 19.4 " in printed


def test_positions_have_the_published_sizes_and_no_others_weights():
    rows = {(name, position): ablation.size_row("position", position, name, keywords, published)
            for position, name, keywords, published in ablation.ABLATIONS["position"].rows
            if name == "aa_resnet50" or position == "relative"}
    none, sine, coord, relative = (rows["aa_resnet50", position] for position in ("none", "sine", "coord", "relative"))
    assert (none["params_m"], sine["params_m"], coord["params_m"]) == (25.802, 25.802, 25.815)
    assert none["gflops_profiler"] < relative["gflops_profiler"]
    assert len(ablation.size_table("position", list(rows.values())).splitlines()) == 2 + len(rows)
    for row in (relative, rows["aa_resnet34", "relative"]):
        assert row["params_m"] == pytest.approx(row["published_params_m"], abs=0.06)
        assert row["gflops_profiler"] == pytest.approx(row["published_gflops"], rel=0.02)
    assert relative["published_params_m"] == published_figures("aa_resnet50").params_m


@pytest.mark.parametrize("varied", list(ablation.ABLATIONS))
def test_the_narrow_network_takes_every_setting(varied):
    for keywords in ablation.ABLATIONS[varied].trials.values():
        with torch.device("meta"):
            model = timm.create_model(ablation.TRIAL_MODEL, **ablation.TRIAL_KEYWORDS, **keywords)
        convs = [group[0].conv1 for group in (model.group1, model.group2, model.group3)]
        assert all((conv.conv is None) == (keywords["v_ratio"] == 1) for conv in convs)
        assert all(conv.position == keywords["position"] for conv in convs)


def test_the_table_is_made_of_runs_and_an_interrupted_one_continues(tmp_path, monkeypatch, capsys):
    """Real runs, in processes forked from one that has torch loaded instead of started anew."""
    started, fails = [], [False, True, False, False]  # the second run fails at first

    class Process:
        def __init__(self, command):
            started.append(command)
            self.code = 7 if fails[len(started) - 1] else run(command[4:], tmp_path / "log")

        def wait(self):
            return self.code

        def poll(self):
            return self.code

    monkeypatch.setattr(sweep.subprocess, "Popen", Process)
    monkeypatch.setattr(ablation, "TRIAL_KEYWORDS", {"depth": 10, "width": 1, "num_heads": 2, "min_head_qk": 2})
    whole = ablation.ABLATIONS["share"]
    two = dataclasses.replace(whole, rows=whole.rows[:1], trials=dict(itertools.islice(whole.trials.items(), 2)))
    monkeypatch.setitem(ablation.ABLATIONS, "share", two)
    data = make_folder(tmp_path / "data", train=40)
    argv = ["share", "--output", str(tmp_path / "runs"), "--seed", "3", "--", "--recipe", "none", "--dataset", "folder",
            "--data-dir", str(data), "--cache-dir", "none", "--img-size", "8", "--epochs", "1", "--batch-size", "16",
            "--crop-padding", "1", "--cutout", "2", "--holdout", "8", "--device", "cpu"]
    with pytest.raises(sweep.RunError, match="v_ratio=0.5.*exit code 7; mend it"):
        ablation.main(argv)
    table = tmp_path / "runs" / "share.csv"
    assert len(list(csv.DictReader(table.open()))) == 1
    first = next(path for path in (tmp_path / "runs").iterdir() if "qk_ratio=0.25" in path.name)
    written = (first / "model.safetensors").stat().st_mtime_ns
    assert ablation.main(argv) == 0, (tmp_path / "log").read_text()
    assert (first / "model.safetensors").stat().st_mtime_ns == written, "a finished run is not trained again"
    rows = list(csv.DictReader(table.open()))
    assert [row["share"] for row in rows] == ["0.25", "0.5"]
    assert {(row["seed"], row["held_out_images"]) for row in rows} == {("3", "8")}
    for row in rows:
        folder = next(path for path in (tmp_path / "runs").iterdir() if f"v_ratio={row['share']}," in path.name)
        config, about = run_folder.read_config(folder)
        assert not config["test"] and about["model_kwargs"]["v_ratio"] == float(row["share"])
        assert float(row["held_out_top1"]) == pytest.approx(run_folder.read_metrics(folder)["top1"][-1], abs=0.01)
        model, _, _ = run_folder.load_run(folder)
        assert float(row["params_m"]) == round(sum(p.numel() for p in model.parameters()) / 1e6, 4)
    text = capsys.readouterr().out
    assert "one run each, seed 3; 8 images" in text and "top-1 %, held out" in text


@pytest.mark.parametrize("path", sorted(RESULTS.glob("*.csv")), ids=lambda path: path.stem)
def test_docs_have_the_figures_of_the_runs(path):
    rows, text = list(csv.DictReader(path.open())), DOCS.read_text()
    for row in rows:
        assert row["held_out_top1"] in text and row["seed"] == "0"
    if path.stem in ablation.ABLATIONS:
        assert [row[path.stem] for row in rows] == list(ablation.ABLATIONS[path.stem].trials)
        numbers = ("params_m", "mflops_profiler", "held_out_top1", "train_loss", "epochs")
        rows = [{**row, **{key: float(row[key]) for key in numbers}} for row in rows]
        table = ablation.trial_table(path.stem, rows)
        assert f"<!-- experiments/results/ablation/{path.name} -->\n{table.rpartition(chr(10))[0]}\n\n" in text


def test_arguments_of_the_trainer_need_a_folder(capsys):
    with pytest.raises(ablation.UsageError, match="need --output, got --epochs 3 without it"):
        ablation.main(["share", "--", "--epochs", "3"])
    with pytest.raises(SystemExit):
        ablation.main(["heads"])
