"""Runs of a sweep and the paired tests between its variants, by hand and as they are kept."""
import math
from pathlib import Path
from statistics import mean, stdev

import numpy as np
import pandas as pd
import pytest
from matplotlib.image import imread

from ea_vision.base.errors import RunError, UsageError
from ea_vision.base.files import write_json
from ea_vision.engine.run_folder import write_config
from experiments import sweep
from experiments.evidence import (
    by_variant,
    compare,
    effects_table,
    factorial,
    holm,
    main,
    paired,
    read_run,
    read_runs,
    smallest_shown,
    write_runs,
)
from experiments.factorial.analyse import FACTORS
from tests.experiments.pages import RESULTS

STORED = RESULTS / "evidence"
NONE, PA, EA = [70.1, 69.8, 71.0, 70.3, 69.9], [70.9, 70.1, 71.2, 71.3, 70.0], [71.0, 71.5, 72.1, 70.9, 71.6]


def write_run(folder: Path, name: str, top1: float, split: str = "test", data: str = "photos", **options) -> None:
    """Write a run folder's results.json, metrics.csv and config.yaml as the trainers do: 2 epochs, 10,000 images."""
    path = folder / name
    path.mkdir(parents=True)
    write_json(path / "results.json", {
        "model": "m", "epochs": 2, "eval_split": "held_out" if split == "test" else split, f"{split}_images": 10_000,
        f"{split}_best": {"epoch": 1, "top1": 99.0, "top5": 99.0},
        f"{split}_last": {"epoch": 2, "top1": top1, "top5": 99.0}})
    (path / "metrics.csv").write_text(f"epoch,step,train_loss,top1,seconds\n1,2,2.0,99.0,1.25\n2,4,1.5,{top1},1.25\n")
    write_config(path, {"model": "m", "seed": int(name.rpartition("=")[2]), "epochs": 2, "output": name, **options},
                 {"model_kwargs": {}, "eval_split": "held_out", "data_fingerprint": data})


def test_paired_differences_are_student_s_by_hand():
    """Mean, and 2.776 standard errors for 4 degrees of freedom (any table of t); what five seeds find at 80% power, by
    simulation. Two equal differences are no proof; they are equal where they spread by less than one image."""
    differences = np.subtract(EA, NONE)
    error = 2.776445 * stdev(differences) / math.sqrt(5)
    found = paired(differences)
    assert [found[name] for name in ("seeds", "difference", "low", "high")] == pytest.approx(
        [5, mean(differences), mean(differences) - error, mean(differences) + error], abs=1e-5)
    drawn = np.random.default_rng(0).normal(smallest_shown(2.0, 5), 2.0, (20_000, 5))
    t = drawn.mean(1) / (drawn.std(1, ddof=1) / math.sqrt(5))
    assert np.mean(np.abs(t) > 2.776445) == pytest.approx(0.8, abs=0.01)
    assert math.isnan(paired([0.5, 0.5])["p"]) and math.isnan(paired([0.37, 0.37 + 1e-12], resolution=0.01)["low"])
    assert not math.isnan(paired([0.37, 0.36], resolution=0.01)["p"])
    with pytest.raises(UsageError, match="at least 2 seeds, got 1"):
        paired([1.0])
    table = compare(pd.DataFrame({"a": [1.0, 2.0], "b": [0.5, 1.5], "c": [1.0, 3.0]}), ("a", "b"))
    assert table["p"].isna().tolist() == table["p_holm"].isna().tolist() == [True, False, False]
    assert [effects_table(of)[2] for of in (table, table.assign(p=1e-4, low=0.1, high=0.9))] == [
        "| a - b | +0.50 | no spread |  |  |", "| a - b | +0.50 | +0.10 to +0.90 | < 0.001 |  |"]


def test_holm_against_its_definition():
    """The smallest p is taken times m, the next times m - 1, ..., none smaller than the one before, none above 1."""
    assert holm([0.01, 0.04, 0.03]) == pytest.approx([0.03, 0.06, 0.06])
    assert holm([0.5, 0.9]).tolist() == [1.0, 1.0] and holm([0.02], 4) == pytest.approx([0.08])
    assert holm([math.nan, 0.02, 0.3]) == pytest.approx([math.nan, 0.06, 0.6], nan_ok=True), "NaN counts as a test"


def test_the_command_and_its_file_of_runs(tmp_path, capsys):
    """The question is not corrected, the other pairs are; the file says what the folder said."""
    runs, question = tmp_path / "runs", ["--question", "EA without skip,none"]
    for name, figures in (("none", NONE), ("PA", PA), ("EA without skip", EA)):
        for seed, top1 in enumerate(figures):
            write_run(runs, f"variant={name},seed={seed}", top1)
    assert main([str(runs), *question]) == 0
    said, table = capsys.readouterr().out, pd.read_csv(runs / "evidence.csv")
    assert f"| none | {', '.join(f'{v:.2f}' for v in NONE)} | {mean(NONE):.2f} | {stdev(NONE):.2f} | model=m |" in said
    assert (runs / "evidence.md").read_text() in said and imread(runs / "evidence.png").shape[1] > 1000
    assert table["difference"][0] == pytest.approx(mean(EA) - mean(NONE)) and math.isnan(table["p_holm"][0])
    assert table["p_holm"][1:].tolist() == pytest.approx(holm(table["p"][1:]))
    file = runs / "evidence-runs.csv"
    assert pd.read_csv(file).iloc[0].to_dict() == {
        "variant": "EA without skip", "seed": 0, "test_top1": 71.0, "train_loss": 1.5, "seconds": 2, "images": 10000,
        "updates": 4, "data": "photos", "options": "model=m"}
    assert main([str(file), *question, "-o", str(tmp_path / "again")]) == 0
    for name in ("evidence-runs.csv", "evidence.csv", "evidence.md"):
        assert (tmp_path / "again" / name).read_text() == (runs / name).read_text()
    for name in ("cnn", "going on"):
        write_run(runs / "more", f"variant={name},seed=0", 60.0)
    (runs / "more" / "variant=going on,seed=0" / "results.json").unlink()
    both = read_runs(runs / "more", file, variants=["none", "cnn"])
    assert both["variant"].tolist() == ["none"] * 5 + ["cnn"]
    with pytest.raises(UsageError, match="going on,seed=0 is not complete"):
        read_runs(runs / "more")
    for more, message in ((["PA,nonne"], "takes two variants as A,B of"), (["a,PA", "--variants", "a,PA"], "no runs")):
        with pytest.raises(UsageError, match=message):
            main([str(file), "--question", *more])


@pytest.mark.parametrize("made, message", [
    ([("a", 0, {}), ("b", 0, {"data": "digits"})], "same data, got photos, digits"),
    ([("a", 0, {}), ("b", 0, {"split": "held_out"})], "same split, got test, held_out"),
    ([("a", 0, {"lr": 1}), ("a", 1, {"lr": 2})], "equal options: lr of a is 1 and 2"),
    ([("a", 0, {}), ("a", 1, {}), ("b", 0, {})], "seeds that are missing: b: 1"), ([], "in .*, got none"),
    ("a,0,1,1,1,9,4\na,0,1,1,1,9,4", "two of a, seed 0"), ("a,0,1,1,1,9,4\na,1,1,1,1,9,5", "got a with 4 and 5"),
    ("a,0,1,1,1,9,4\nb,0,1,1,1,8,4", "same number of images, got 9, 8")])
def test_runs_that_cannot_be_compared_are_refused(tmp_path, made, message):
    if isinstance(made, str):
        (tmp_path / "runs.csv").write_text(f"variant,seed,test_top1,train_loss,seconds,images,updates\n{made}\n")
    for variant, seed, options in made if isinstance(made, list) else ():
        write_run(tmp_path, f"variant={variant},seed={seed}", 60.0, **options)
    with pytest.raises(UsageError, match=message):
        by_variant(read_runs(tmp_path / "runs.csv" if isinstance(made, str) else tmp_path))


@pytest.mark.parametrize("data", ["cifar10", "cifar100"])
def test_what_is_kept_is_what_the_runs_give(data, tmp_path):
    """The effects by hand, too: seed by seed, as experiments/factorial/README.md writes them."""
    runs = read_runs(STORED / f"{data}-runs.csv")
    write_runs(runs, tmp_path / "runs.csv")
    assert (tmp_path / "runs.csv").read_text() == (STORED / f"{data}-runs.csv").read_text()
    top1 = by_variant(runs)
    effects = factorial(top1, FACTORS, 0.01)
    for made, kept in ((compare(top1, ("EA", "none"), 0.01), "pairs"), (effects, "factors")):
        pd.testing.assert_frame_equal(made, pd.read_csv(STORED / f"{data}-{kept}.csv"), rtol=1e-9, atol=1e-12)
    none, convolution, skip, both = (top1[name] for name in ("none", "EA without skip", "EA without convolution", "EA"))
    by_hand = [((skip - none) + (both - convolution)) / 2, ((convolution - none) + (both - skip)) / 2,
               (both - skip) - (convolution - none)]
    for values, effect in zip(by_hand, effects.itertuples(), strict=True):
        error = 2.776445 * stdev(values) / math.sqrt(5)
        assert (effect.difference, effect.low, effect.high) == pytest.approx(
            (mean(values), mean(values) - error, mean(values) + error), abs=1e-4)


def test_a_sweep_trains_its_variants_and_goes_on(tmp_path, monkeypatch, capsys):
    commands = []

    class Process:
        def __init__(self, command):
            commands.append(command[1:])
            folder = Path(command[command.index("--output") + 1])
            if not folder.exists():
                write_run(folder.parent, folder.name, 50.0 + len(commands))

        def wait(self):
            return 3 if len(commands) > 5 else 0

        poll = wait

    monkeypatch.setattr(sweep.subprocess, "Popen", Process)
    argv = ["--variant", "none=--model a", "--variant", "EA=--model b", "--set", "alpha=0,0.5", "--test", "--output",
            str(tmp_path / "s"), "--", "--epochs", "3"]
    assert sweep.main(argv) == 0
    folder = tmp_path / "s" / "variant=none alpha=0.5,seed=0"
    assert commands[1] == ["-m", "ea_vision", "train-cifar", "--epochs", "3", "--test", "--model", "a",
                           "--model-kwargs", "alpha=0.5", "--output", str(folder), "--seed", "0"]
    rows = pd.read_csv(tmp_path / "s" / "sweep.csv")
    assert rows[["variant", "test_top1"]].values.tolist() == [["none alpha=0", 51], ["none alpha=0.5", 52],
                                                              ["EA alpha=0", 53], ["EA alpha=0.5", 54]]
    assert "best: EA alpha=0.5, seed 0: top1 54.00%" in capsys.readouterr().out
    assert by_variant(read_runs(tmp_path / "s")).shape == (1, 4)
    with pytest.raises(RunError, match="alpha=0.5,seed=0 ended with exit code 3"):
        sweep.main(argv)
    assert read_run(folder)["top1"] == 52.0
    for wrong, message in ((["--variant", "a/b=--model a"], "comma"), (["--set", "a=1,"], "KEY=V1"), ([], "neither")):
        with pytest.raises(UsageError, match=message):
            sweep.main([*wrong, "--output", str(tmp_path / "wrong")])
    assert not (tmp_path / "wrong").exists()
