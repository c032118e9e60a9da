"""Runs of a sweep and the paired tests between its variants, compared with hand computation and with the kept files."""

import math
from pathlib import Path
from statistics import mean, stdev

import pandas as pd
import pytest

from ea_vision.base.errors import RunError
from ea_vision.base.files import write_json
from ea_vision.engine.run_folder import write_config
from experiments import sweep
from experiments.evidence import (
    by_variant,
    compare,
    factorial,
    holm,
    main,
    paired,
    read_run,
    read_runs,
    write_runs,
)
from experiments.factorial.analyse import FACTORS
from tests.experiments.pages import RESULTS
from tests.refused import refused

STORED = RESULTS / "evidence"
NONE = [70.1, 69.8, 71.0, 70.3, 69.9]
PA = [70.9, 70.1, 71.2, 71.3, 70.0]
EA = [71.0, 71.5, 72.1, 70.9, 71.6]


def write_run(folder, name, top1, split="test", data="photos", **options):
    """Write a run folder's results.json, metrics.csv and config.yaml as the trainers do: 2 epochs, 10,000 images."""
    path = folder / name
    path.mkdir(parents=True)
    results = {
        "eval_split": split,
        f"{split}_images": 10_000,
        f"{split}_best": {"top1": 99.0},
        f"{split}_last": {"top1": top1},
    }
    write_json(path / "results.json", results)
    rows = ["step,train_loss,top1,seconds", "2,2.0,99.0,1.25", f"4,1.5,{top1},1.25"]
    (path / "metrics.csv").write_text("\n".join(rows) + "\n")
    seed = int(name.rpartition("=")[2])
    config = {"model": "m", "seed": seed, "output": name, **options}
    write_config(path, config, {"data_fingerprint": data})


def test_differences_without_spread_are_no_proof():
    """Two equal differences prove nothing; they count as equal if they spread by less than one image."""
    assert math.isnan(paired([0.5, 0.5])["p"])
    assert math.isnan(paired([0.37, 0.37 + 1e-12], resolution=0.01)["low"])
    assert not math.isnan(paired([0.37, 0.36], resolution=0.01)["p"])
    with refused("at least 2 seeds, got 1"):
        paired([1.0])


def test_the_command_and_its_file_of_runs(tmp_path, capsys):
    """The p of the question is not corrected, those of other pairs are; file and folder give the same tables."""
    runs = tmp_path / "runs"
    question = ["--question", "EA without skip,none"]
    for name, figures in (("none", NONE), ("PA", PA), ("EA without skip", EA)):
        for seed, top1 in enumerate(figures):
            write_run(runs, f"variant={name},seed={seed}", top1)
    assert main([str(runs), *question]) == 0
    printed = capsys.readouterr().out
    values = ", ".join(f"{top1:.2f}" for top1 in NONE)
    assert f"| none | {values} | {mean(NONE):.2f} | {stdev(NONE):.2f} | model=m |" in printed
    assert (runs / "evidence.md").read_text() in printed
    assert (runs / "evidence.png").is_file()
    table = pd.read_csv(runs / "evidence.csv")
    assert table["difference"][0] == pytest.approx(mean(EA) - mean(NONE))
    assert math.isnan(table["p_holm"][0])
    assert table["p_holm"][1:].tolist() == pytest.approx(holm(table["p"][1:]))
    file = runs / "evidence-runs.csv"
    first = pd.read_csv(file).iloc[0]
    names = "variant seed test_top1 train_loss seconds images updates data options"
    assert list(first.index) == names.split()
    assert list(first) == ["EA without skip", 0, 71.0, 1.5, 2, 10_000, 4, "photos", "model=m"]
    assert main([str(file), *question, "-o", str(tmp_path / "again")]) == 0
    for name in ("evidence-runs.csv", "evidence.csv", "evidence.md"):
        assert (tmp_path / "again" / name).read_text() == (runs / name).read_text()
    with refused("takes two variants as A,B of"):
        main([str(file), "--question", "PA,nonne"])
    with refused("no runs"):
        main([str(file), "--question", "a,PA", "--variants", "a,PA"])
    with refused("collapse.csv must have the columns variant"):
        main([str(RESULTS / "collapse.csv"), *question])
    (runs / "variant=PA,seed=4" / "results.json").unlink()
    with refused("variant=PA,seed=4 is not complete"):
        main([str(runs), *question])


@pytest.mark.parametrize(
    "made, message",
    [
        ([("a", 0, {}), ("b", 0, {"data": "digits"})], "same data, got photos, digits"),
        ([("a", 0, {}), ("b", 0, {"split": "held_out"})], "same split, got test, held_out"),
        ([("a", 0, {"lr": 1}), ("a", 1, {"lr": 2})], "equal options: lr of a is 1 and 2"),
        ([("a", 0, {}), ("a", 1, {}), ("b", 0, {})], "seeds that are missing: b: 1"),
        ([], "in .*, got none"),
        ("a,0,1,1,1,9,4\na,0,1,1,1,9,4", "two of a, seed 0"),
        ("a,0,1,1,1,9,4\na,1,1,1,1,9,5", "got a with 4 and 5"),
        ("a,0,1,1,1,9,4\nb,0,1,1,1,8,4", "same number of images, got 9, 8"),
    ],
)
def test_runs_that_cannot_be_compared_are_refused(tmp_path, made, message):
    source = tmp_path
    if isinstance(made, str):
        source = tmp_path / "runs.csv"
        source.write_text(f"variant,seed,test_top1,train_loss,seconds,images,updates\n{made}\n")
    else:
        for variant, seed, options in made:
            write_run(tmp_path, f"variant={variant},seed={seed}", 60.0, **options)
    with refused(message):
        by_variant(read_runs(source))


@pytest.mark.parametrize("data", ["cifar10", "cifar100"])
def test_the_kept_files_follow_from_the_runs(data, tmp_path):
    runs = read_runs(STORED / f"{data}-runs.csv")
    write_runs(runs, tmp_path / "runs.csv")
    assert (tmp_path / "runs.csv").read_text() == (STORED / f"{data}-runs.csv").read_text()
    top1 = by_variant(runs)
    pairs = pd.read_csv(STORED / f"{data}-pairs.csv")
    effects = pd.read_csv(STORED / f"{data}-factors.csv")
    near = {"rtol": 1e-9, "atol": 1e-12}
    pd.testing.assert_frame_equal(compare(top1, ("EA", "none"), 0.01), pairs, **near)
    pd.testing.assert_frame_equal(factorial(top1, FACTORS, 0.01), effects, **near)


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
    pa = "none=--model pa_conv_transformer_cifar"
    ea = "EA=--model ea_conv_transformer_cifar"
    variants = ["--variant", pa, "--variant", ea, "--set", "alpha=0,0.5"]
    rest = ["--test", "--output", str(tmp_path / "s"), "--", "--epochs", "3"]
    argv = [*variants, *rest]
    for typo, message in (
        ("--lrr 1", "unknown argument '--lrr'"),
        (f"--data-dir {tmp_path}", f"data folder {tmp_path} must have train/"),
    ):
        with refused(f"variant EA: .*{message}"):
            sweep.main(["--variant", pa, "--variant", f"{ea} {typo}", *rest])
    assert commands == [], "nothing is trained before all variants are checked"
    assert sweep.main(argv) == 0
    folder = tmp_path / "s" / "variant=none alpha=0.5,seed=0"
    trainer = (
        "-m ea_vision train-cifar --epochs 3 --test --model pa_conv_transformer_cifar "
        "--model-kwargs alpha=0.5"
    )
    assert commands[1] == [*trainer.split(), "--output", str(folder), "--seed", "0"]
    rows = pd.read_csv(tmp_path / "s" / "sweep.csv")
    assert list(rows["variant"]) == ["none alpha=0", "none alpha=0.5", "EA alpha=0", "EA alpha=0.5"]
    assert list(rows["test_top1"]) == [51, 52, 53, 54]
    assert "best: EA alpha=0.5, seed 0: top1 54.00%" in capsys.readouterr().out
    with refused("alpha=0.5,seed=0 ended with exit code 3", RunError):
        sweep.main(argv)
    assert read_run(folder)["top1"] == 52.0
    for wrong, message in (
        (["--variant", "a/b=--model a"], "comma"),
        (["--set", "a=1,"], "KEY=V1"),
        ([], "neither"),
    ):
        with refused(message):
            sweep.main([*wrong, "--output", str(tmp_path / "wrong")])
