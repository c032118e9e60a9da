"""Variants of a sweep, and the paired tests between them."""
import csv
import json
import math
from pathlib import Path
from statistics import mean, stdev

import pytest
from matplotlib.image import imread

from ea_vision.base.errors import UsageError
from ea_vision.studies import sweep
from ea_vision.studies.evidence import Pair, by_variant, compare, holm, main, paired_difference, read_runs, to_markdown

NONE, PA, EA = [70.1, 69.8, 71.0, 70.3, 69.9], [70.9, 70.1, 71.2, 71.3, 70.0], [71.0, 71.5, 72.1, 70.9, 71.6]


def write_run(folder: Path, name: str, top1: float, split: str = "test") -> None:
    """A run folder's results.json, as the trainers write it."""
    figures = {"epoch": 3, "top1": top1, "top5": 99.0}
    path = folder / name / "results.json"
    path.parent.mkdir(parents=True)
    path.write_text(json.dumps({"model": "m", "epochs": 3, "eval_split": "held_out" if split == "test" else split,
                                f"{split}_best": {**figures, "top1": 99.0}, f"{split}_last": figures}))
    (path.parent / "metrics.csv").write_text("epoch,step,lr,train_loss,top1,top5,images_per_s,seconds\n"
                                             "1,2,0.1,2.0,50.0,90.0,10,1.25\n2,4,0.1,1.5,50.0,90.0,10,1.25\n")


@pytest.fixture
def runs(tmp_path):
    for name, figures in (("none", NONE), ("PA", PA), ("EA without skip", EA)):
        for seed, top1 in enumerate(figures):
            write_run(tmp_path, f"variant={name},seed={seed}", top1)
    return tmp_path


def test_paired_difference_is_student_s_by_hand():
    """Mean, and 2.776 standard errors for 4 degrees of freedom (any table of t); p by integrating t's density."""
    differences = [a - b for a, b in zip(EA, NONE, strict=True)]
    error = stdev(differences) / math.sqrt(5)
    centre, low, high, p = paired_difference(EA, NONE)
    assert centre == pytest.approx(mean(differences))
    assert (low, high) == pytest.approx((centre - 2.776445 * error, centre + 2.776445 * error), abs=1e-5)
    t, step = centre / error, 1e-3
    density = [(1 + (x * step) ** 2 / 4) ** -2.5 * 3 / 8 for x in range(int(t / step))]  # t's density, 4 degrees
    assert p == pytest.approx(1 - 2 * step * (sum(density) - density[0] / 2), abs=1e-3)
    assert paired_difference(NONE, EA)[:3] == pytest.approx((-centre, -high, -low))
    assert paired_difference([1.5, 2.5], [1.0, 2.0]) == (0.5, 0.5, 0.5, 0.0)


def test_holm_against_its_definition():
    """The smallest p is taken times m, the next times m - 1, ..., none smaller than the one before, none above 1."""
    assert holm([0.01, 0.04, 0.03]) == pytest.approx([0.03, 0.06, 0.06])
    assert holm([0.5, 0.9]) == [1.0, 1.0] and holm([]) == []


def test_question_is_not_corrected_the_other_pairs_are(runs):
    split, read = read_runs([runs])
    found = by_variant(read)
    assert split == "test" and found["PA"] == dict(zip("01234", PA, strict=True))
    first, *others = compare(found, ("EA without skip", "none"))
    assert (first.first, first.second, first.p_holm) == ("EA without skip", "none", None)
    assert {frozenset((p.first, p.second)) for p in others} == {frozenset(("PA", "none")),
                                                                frozenset(("PA", "EA without skip"))}
    assert [p.p_holm for p in others] == holm([p.p for p in others])


def test_command_writes_tables_and_picture_from_the_runs(runs, capsys):
    assert main([str(runs), "--question", "EA without skip,none"]) == 0
    said = capsys.readouterr().out
    assert f"| none | {', '.join(f'{v:.2f}' for v in NONE)} | {mean(NONE):.2f} | {stdev(NONE):.2f} |" in said
    rows = list(csv.DictReader((runs / "evidence.csv").open()))
    assert float(rows[0]["difference"]) == pytest.approx(mean(EA) - mean(NONE)) and len(rows) == 3
    assert (runs / "evidence.md").read_text() in said
    assert f"| {float(rows[0]['p']):.3f} | the question |" in said and float(rows[0]["p"]) > 0.001
    assert imread(runs / "evidence.png").shape[1] > 1000


def test_a_small_p_is_not_written_as_zero():
    text = to_markdown({"a": {"0": 1.0, "1": 2.0}}, [Pair("a", "b", 2, 1.0, 0.5, 1.5, 0.0001, 0.0007)], "test")
    assert "| a - b | +1.00 | +0.50 to +1.50 | < 0.001 | 0.001 |" in text


@pytest.mark.parametrize("question, message", [
    ("PA,nonne", "did you mean none?"), ("PA,PA", "two variants"), ("PA", "two variants as A,B")])
def test_a_wrong_question_is_one_error(runs, question, message):
    with pytest.raises(UsageError, match=message.replace("?", r"\?")):
        main([str(runs), "--question", question])
    assert not (runs / "evidence.csv").exists()


def test_the_file_of_runs_says_what_the_folder_said(runs, tmp_path, capsys):
    """And several folders and files are one sweep; --variants leaves the others out, complete or not."""
    question = ["--question", "EA without skip,none"]
    assert main([str(runs), *question, "-o", str(tmp_path / "all")]) == 0
    file = tmp_path / "all" / "evidence-runs.csv"
    rows = list(csv.DictReader(file.open()))
    assert rows[0] == {"variant": "EA without skip", "seed": "0", "test_top1": "71.0", "train_loss": "1.5",
                       "seconds": "2"}
    assert read_runs([file]) == read_runs([runs])
    said = capsys.readouterr().out.split("written")[0]
    assert main([str(file), *question]) == 0 and capsys.readouterr().out.split("written")[0] == said
    before = file.read_bytes()
    assert main([str(file), *question, "--variants", "none,EA without skip"]) == 0
    assert file.read_bytes() == before, "what was read is not replaced by a part of it"

    write_run(runs / "more", "variant=cnn,seed=0", 60.0)
    write_run(runs / "more", "variant=cnn,seed=1", 61.0)
    write_run(runs / "more", "variant=going on,seed=0", 60.0)
    (runs / "more" / "variant=going on,seed=0" / "results.json").unlink()
    few = file.with_name("few.csv")
    few.write_text("".join(line for line in file.read_text().splitlines(True) if ",0," in line or ",1," in line
                           or "variant" in line))
    assert main([str(runs / "more"), str(few), "--question", "cnn,PA", "--variants", "PA,cnn"]) == 0
    assert len(list(csv.DictReader((runs / "more" / "evidence-runs.csv").open()))) == 4
    assert len(list(csv.DictReader((runs / "more" / "evidence.csv").open()))) == 1  # one pair
    with pytest.raises(UsageError, match="no variant 'Pa'; did you mean PA"):
        read_runs([few], ["Pa"])
    with pytest.raises(UsageError, match=f"two of EA without skip, seed 0: in {few} and in {file}"):
        read_runs([few, file])


@pytest.mark.parametrize("text", ["", "a,b\n1,2\n", "variant,seed,test_top1,train_loss,seconds\nEA,0,high,1.0,2\n",
                                  "variant,seed,test_top1,train_loss,seconds\nEA,0,nan,1.0,2\n",
                                  "variant,seed,test_top1,train_loss,seconds\nEA,0,61.0\n"])
def test_a_file_that_is_not_of_runs_is_an_error(tmp_path, text):
    (tmp_path / "runs.csv").write_text(text)
    with pytest.raises(UsageError, match="is not a file of runs: it must have the columns variant, seed, test_top1"):
        read_runs([tmp_path / "runs.csv"])


def test_runs_that_cannot_be_compared_are_refused(runs, tmp_path):
    with pytest.raises(UsageError, match="no such file or folder: .*empty"):
        read_runs([tmp_path / "empty"])
    (tmp_path / "empty").mkdir()
    with pytest.raises(UsageError, match="there are none"):
        read_runs([tmp_path / "empty"])
    write_run(runs, "variant=cnn,seed=0", 60.0)
    with pytest.raises(UsageError, match="same seeds: EA without skip has 0, 1, 2, 3, 4; cnn has 0; --variants"):
        by_variant(read_runs([runs])[1])
    (runs / "variant=cnn,seed=0" / "results.json").unlink()
    with pytest.raises(UsageError, match="seed=0 is not complete"):
        read_runs([runs])
    write_run(runs / "more", "variant=a,seed=0", 60.0)
    write_run(runs / "more", "variant=b,seed=0", 60.0, "held_out")
    with pytest.raises(UsageError, match="same kind of images, got test .*held_out"):
        read_runs([runs / "more"])


def test_variants_of_a_sweep_are_arguments_of_the_trainer(tmp_path, monkeypatch):
    commands = []

    def train(trainer, folder, keywords, options, seed, arguments):
        commands.append((folder.name, keywords, options, seed, arguments))
        write_run(folder.parent, folder.name, 50.0 + len(commands))
        (folder / "metrics.csv").write_text("epoch,step,lr,train_loss,top1,top5,images_per_s,seconds\n"
                                            "1,2,0.1,2.0,50.0,90.0,10,1.0\n")
        return sweep.read_results(folder)

    monkeypatch.setattr(sweep, "run_setting", train)
    assert sweep.main(["--variant", "none=--model a", "--variant", "EA=--model b --model-kwargs alpha=0", "--test",
                       "--seeds", "0,1", "--output", str(tmp_path / "s"), "--", "--epochs", "3"]) == 0
    assert commands[0] == ("variant=none,seed=0", {}, {}, "0", ["--epochs", "3", "--test", "--model", "a"])
    assert commands[3] == ("variant=EA,seed=1", {}, {}, "1", ["--epochs", "3", "--test", "--model", "b",
                                                              "--model-kwargs", "alpha=0"])
    assert sweep.read_run_name(commands[3][0]) == {"variant": "EA", "seed": "1"}
    rows = list(csv.DictReader((tmp_path / "s" / "sweep.csv").open()))
    assert [(row["variant"], row["seed"]) for row in rows] == [("none", "0"), ("none", "1"), ("EA", "0"), ("EA", "1")]
    assert {run.variant for run in read_runs([tmp_path / "s"])[1]} == {"none", "EA"}


@pytest.mark.parametrize("word, message", [
    ("none", "NAME=ARGUMENTS"), ("=--model a", "NAME=ARGUMENTS"), ("a/b=--model a", "without comma and slash"),
    ("a='--model", "No closing quotation")])
def test_a_wrong_variant_is_an_error(tmp_path, word, message):
    with pytest.raises(UsageError, match=message):
        sweep.main(["--variant", word, "--output", str(tmp_path / "s")])
    assert not (tmp_path / "s").exists()
