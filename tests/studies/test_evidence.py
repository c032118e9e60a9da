"""Variants of a sweep, and the paired tests between them."""
import csv
import math
from pathlib import Path
from statistics import mean, stdev

import numpy as np
import pytest
from matplotlib.image import imread

from ea_vision.base.errors import UsageError
from ea_vision.base.files import write_json
from ea_vision.engine.run_folder import METRICS, RESULTS, read_finished, write_config
from ea_vision.studies import sweep
from ea_vision.studies.evidence import (
    Pair,
    by_variant,
    compare,
    factorial,
    holm,
    main,
    paired_difference,
    pairs_table,
    parse_factors,
    read_runs,
    smallest_shown,
)

NONE, PA, EA = [70.1, 69.8, 71.0, 70.3, 69.9], [70.9, 70.1, 71.2, 71.3, 70.0], [71.0, 71.5, 72.1, 70.9, 71.6]


def write_run(folder: Path, name: str, top1: float, split: str = "test", data: str = "photos", **options) -> None:
    """A run folder's results.json, metrics.csv and config.yaml, as the trainers write them: 2 epochs, 10,000 images."""
    path = folder / name
    path.mkdir(parents=True)
    write_json(path / RESULTS, {
        "model": "m", "epochs": 2, "eval_split": "held_out" if split == "test" else split, f"{split}_images": 10_000,
        f"{split}_best": {"epoch": 1, "top1": 99.0, "top5": 99.0},
        f"{split}_last": {"epoch": 2, "top1": top1, "top5": 99.0}})
    (path / METRICS).write_text("epoch,step,lr,train_loss,top1,top5,images_per_s,seconds\n"
                                f"1,2,0.1,2.0,99.0,99.0,10,1.25\n2,4,0.1,1.5,{top1},99.0,10,1.25\n")
    seed = int(name.rpartition("=")[2])
    write_config(path, {"model": "m", "seed": seed, "epochs": 2, "output": name, **options},
                 {"model_kwargs": {}, "eval_split": "held_out", "data_fingerprint": data})


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


def test_without_spread_there_is_neither_interval_nor_p():
    """Two equal differences are no proof; differences are equal where they spread by less than one image."""
    assert paired_difference([1.5, 2.5], [1.0, 2.0]) == (0.5, None, None, None)
    assert paired_difference([85.27, 84.9], [84.9, 84.53], resolution=0.01)[1:] == (None, None, None)
    assert paired_difference([85.27, 84.9], [84.9, 84.54], resolution=0.01)[3] is not None
    [pair, other] = [pair for pair in compare({"a": {0: 1.0, 1: 2.0}, "b": {0: 0.5, 1: 1.5}, "c": {0: 1.0, 1: 3.0}},
                                              ("a", "b")) if "b" in (pair.first, pair.second)]
    assert (pair.p, pair.low, pair.p_holm) == (None, None, None) and other.p_holm is not None
    assert pairs_table([pair])[-1] == "| a - b | +0.50 | no spread |  | the question |"


def test_holm_against_its_definition():
    """The smallest p is taken times m, the next times m - 1, ..., none smaller than the one before, none above 1."""
    assert holm([0.01, 0.04, 0.03]) == pytest.approx([0.03, 0.06, 0.06])
    assert holm([0.5, 0.9]) == [1.0, 1.0] and holm([]) == []
    assert holm([None, 0.02, 0.3]) == [None, pytest.approx(0.06), pytest.approx(0.6)], "None counts as a test"


def test_question_is_not_corrected_the_other_pairs_are(runs):
    split, read = read_runs([runs])
    found = by_variant(read)
    assert split == "test" and found["PA"] == dict(enumerate(PA))
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
    text = pairs_table([Pair("a", "b", 2, 1.0, 0.5, 1.5, 0.0001, 0.0007)])
    assert text[-1] == "| a - b | +1.00 | +0.50 to +1.50 | < 0.001 | 0.001 |"


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
                       "seconds": "2", "images": "10000", "updates": "4", "data": "photos", "options": "model=m"}
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
        return read_finished(folder)

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
    ("none", "NAME=ARGUMENTS"), ("=--model a", "NAME=ARGUMENTS"), ("a/b=--model a", "without comma, slash"),
    ("a|b=--model a", "without comma, slash"), ("a\nb=--model a", "printable"), ("a" * 300 + "=--model a", "200 bytes"),
    ("\udc80=--model a", "printable"), ("é" * 150 + "=--model a", "200 bytes"),
    ("a='--model", "No closing quotation")])
def test_a_wrong_variant_is_an_error(tmp_path, word, message):
    with pytest.raises(UsageError, match=message):
        sweep.main(["--variant", word, "--output", str(tmp_path / "s")])
    assert not (tmp_path / "s").exists()


@pytest.mark.parametrize("seeds, message", [
    ("0,0,00", "each seed once"), ("0,x", "whole number"), ("-1", "whole number"), ("", "whole number"),
    ("²", "whole number"), ("1" * 400, "whole number")])
def test_seeds_count_once(tmp_path, seeds, message):
    with pytest.raises(UsageError, match=message):
        sweep.main(["--variant", "a=--model a", "--seeds", seeds, "--output", str(tmp_path / "s")])
    assert not (tmp_path / "s").exists()


def test_equal_seeds_count_once(runs, tmp_path):
    write_run(runs, "variant=PA,seed=00", 70.0)
    with pytest.raises(UsageError, match="two of PA, seed 0"):
        read_runs([runs])
    write_run(tmp_path / "copies", "variant=PA,seed=0", 70.0)
    (tmp_path / "copies" / "variant=PA,seed=0").rename(tmp_path / "copies" / "variant=PA,seed=1")
    with pytest.raises(UsageError, match="run of its name's seed, but its config.yaml says seed 0"):
        read_runs([tmp_path / "copies"])


def test_runs_of_other_data_are_refused_by_name(tmp_path):
    for seed in "01":
        write_run(tmp_path, f"variant=a,seed={seed}", 60.0, data="digits")
        write_run(tmp_path, f"variant=b,seed={seed}", 61.0, data="photos")
    with pytest.raises(UsageError, match=r"same data \(data_fingerprint\), got digits of a; photos of b"):
        read_runs([tmp_path])
    assert len(read_runs([tmp_path], ["a"])[1]) == 2


def test_options_that_differ_are_refused_in_a_variant_and_shown_between_variants(tmp_path, capsys):
    """A sweep repeated with other options in one folder compares runs of another length or schedule."""
    for seed, top1 in (("0", 60.0), ("1", 61.5)):
        write_run(tmp_path, f"variant=a,seed={seed}", top1, lr=0.1)
        write_run(tmp_path, f"variant=b,seed={seed}", top1 * 1.01, lr=0.2, workers=4)
    assert main([str(tmp_path), "--question", "b,a"]) == 0
    said = capsys.readouterr().out
    assert "| model=m lr=0.2 |" in said and "| model=m lr=0.1 |" in said and "workers" not in said
    write_run(tmp_path, "variant=a,seed=2", 62.0, lr=0.1, schedule="cosine", epochs=4)
    with pytest.raises(UsageError, match="runs of a variant must have equal options: epochs is 2 in .*4 in .*seed=2"):
        read_runs([tmp_path])
    file, header = tmp_path / "runs.csv", "variant,seed,test_top1,train_loss,seconds,images,updates,data,options\n"
    file.write_text(header + "a,0,60.0,1.0,2,10,100,d,\na,1,60.0,1.0,2,10,200,d,\n")
    with pytest.raises(UsageError, match="equally long: a has 100 updates with seed 0, 200 with seed 1"):
        read_runs([file])


def test_files_of_older_releases_are_read_and_the_table_says_what_they_lack(tmp_path, capsys):
    rows = "".join(f"{name},{seed},{60 + seed + 3 * (name == 'b') * seed},1.0,2\n" for name in "ab" for seed in (0, 1))
    (tmp_path / "old.csv").write_text("variant,seed,test_top1,train_loss,seconds\n" + rows)
    assert main([str(tmp_path / "old.csv"), "--question", "b,a"]) == 0
    said = capsys.readouterr().out
    assert "not recorded for runs of a, b" in said and "One image" not in said
    write_run(tmp_path / "new", "variant=c,seed=0", 60.0)
    write_run(tmp_path / "new", "variant=c,seed=1", 62.0)
    assert main([str(tmp_path / "old.csv"), str(tmp_path / "new"), "--question", "b,c"]) == 0
    said = capsys.readouterr().out
    assert "not recorded for runs of a, b:" in said and "One image of 10,000 is 0.01 points." in said


def slow_factorial(cells: dict[tuple[int, int], list[float]]) -> dict[str, list[float]]:
    """The effects seed by seed, as experiments/factorial/README.md writes them; keys (skip, convolution)."""
    found = {"skip": [], "convolution": [], "skip x convolution": []}
    for none, convolution, skip, both in zip(cells[0, 0], cells[0, 1], cells[1, 0], cells[1, 1], strict=True):
        found["skip"].append(((skip - none) + (both - convolution)) / 2)
        found["convolution"].append(((convolution - none) + (both - skip)) / 2)
        found["skip x convolution"].append((both - skip) - (convolution - none))
    return found


FACTORS = ["skip=none,EA without skip|EA without convolution,EA", "convolution=none,EA without convolution|EA without "
           "skip,EA"]


@pytest.mark.parametrize("dataset, skip, convolution", [
    ("cifar10", (0.37, 0.17, 0.57, 0.007), -0.02), ("cifar100", (1.05, 0.47, 1.63, 0.0075), -0.07)])
def test_factorial_by_hand_and_as_reported_of_the_stored_runs(dataset, skip, convolution):
    path = Path(__file__).parents[2] / "experiments" / "results" / "evidence" / f"{dataset}-runs.csv"
    runs = by_variant(read_runs([path])[1])
    found = {effect.name: effect for effect in factorial(runs, parse_factors(FACTORS))}
    cells = {(0, 0): "none", (0, 1): "EA without skip", (1, 0): "EA without convolution", (1, 1): "EA"}
    by_hand = slow_factorial({key: list(runs[name].values()) for key, name in cells.items()})
    for name, values in by_hand.items():
        error = 2.776445 * stdev(values) / math.sqrt(5)
        effect = found[name]
        assert effect.difference == pytest.approx(mean(values), abs=1e-9) and effect.seeds == 5
        assert (effect.low, effect.high) == pytest.approx((mean(values) - error, mean(values) + error), abs=1e-4)
    assert (found["skip"].difference, found["skip"].low, found["skip"].high) == pytest.approx(skip[:3], abs=0.005)
    assert found["skip"].p == pytest.approx(skip[3], abs=5e-4)
    assert found["convolution"].difference == pytest.approx(convolution, abs=0.005)
    assert [found[name].p_holm for name in FACTORS_NAMES] == holm([found[name].p for name in FACTORS_NAMES])
    assert found["skip x convolution"].p is None


FACTORS_NAMES = ("skip", "convolution")


def test_three_factors_and_the_order_of_their_cells():
    """Effects put in are the effects that come out, and the order within a side says nothing."""
    effects = {"a": 1.0, "b": -2.0, "c": 0.5}
    cells = {f"{a}{b}{c}": (a, b, c) for a in (0, 1) for b in (0, 1) for c in (0, 1)}
    runs = {name: {seed: 50 + seed * 0.3 + sum(e * on for e, on in zip(effects.values(), bits, strict=True))
                   + 4.0 * bits[0] * bits[2] + (0.1 if seed == sum(bits) else 0.0) for seed in range(3)}
            for name, bits in cells.items()}
    words = [f"{factor}={','.join(n for n in cells if not cells[n][i])}|"
             f"{','.join(reversed([n for n in cells if cells[n][i]]))}" for i, factor in enumerate("abc")]
    found = {effect.name: effect.difference for effect in factorial(runs, parse_factors(words))}
    assert list(found) == ["a", "b", "c", "a x b", "a x c", "b x c"]
    assert found["a"] == pytest.approx(1.0 + 2.0, abs=0.1) and found["b"] == pytest.approx(-2.0, abs=0.1)
    assert found["a x c"] == pytest.approx(4.0, abs=0.1) and found["a x b"] == pytest.approx(0.0, abs=0.1)


@pytest.mark.parametrize("words, message", [
    (["skip"], "NAME=WITHOUT"), (["skip=a,b|c"], "need 2 variants"), (["s=a|a"], "NAME=WITHOUT"), (["s=a,|b"], "WITH"),
    (["s=a|b", "s=a|b"], "NAME=WITHOUT"), (["s=a,b|c,d", "t=a,c|b,e"], "need 4 variants"),
    (["s=a,b|c,d", "t=a,b|c,d"], "own combination")])
def test_factors_must_be_crossed(words, message):
    with pytest.raises(UsageError, match=message):
        parse_factors(words)


def test_the_command_writes_a_factorial(runs, capsys):
    for seed, top1 in enumerate(PA):
        write_run(runs, f"variant=EA,seed={seed}", top1 + 0.5 + 0.1 * seed)
    argv = [str(runs), *(word for name in ("skip=none,EA without skip|PA,EA", "convolution=none,PA|EA without skip,EA")
                         for word in ("--factor", name))]
    assert main(argv) == 0
    said = capsys.readouterr().out
    rows = list(csv.DictReader((runs / "evidence-factors.csv").open()))
    assert [row["name"] for row in rows] == ["skip", "convolution", "skip x convolution"]
    assert f"| skip | {float(rows[0]['difference']):+.2f} |" in said and rows[2]["p"] == "" and "not tested" in said
    assert (runs / "evidence-factors.md").read_text() in said and imread(runs / "evidence-factors.png").shape[1] > 1000
    assert not (runs / "evidence.csv").exists()
    with pytest.raises(UsageError, match="required, got neither"):
        main([str(runs)])


def test_what_five_seeds_find_is_so_by_simulation():
    rng = np.random.default_rng(0)
    shift = smallest_shown(2.0, 5)
    drawn = rng.normal(shift, 2.0, (20_000, 5))
    t = drawn.mean(1) / (drawn.std(1, ddof=1) / math.sqrt(5))
    assert np.mean(np.abs(t) > 2.776445) == pytest.approx(0.8, abs=0.01)
    assert math.isfinite(smallest_shown(1.0, 2))
