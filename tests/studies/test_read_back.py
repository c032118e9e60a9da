"""Every file that the studies read back: whatever stands in it, one line or figures that a run can have."""
import copy
import csv
import json
import math
from pathlib import Path

import pytest
import yaml
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st

from ea_vision.base.errors import UsageError
from ea_vision.engine.finished import read_finished
from ea_vision.engine.run_folder import CONFIG, METRICS, RESULTS
from ea_vision.measure import reproduce
from ea_vision.studies import evidence, sweep
from tests.measure.test_reproduce import write_run

JUNK = [None, math.nan, math.inf, -1, 0, 900, 1e308, 10 ** 300, True, "", "high", "é|\n$", [], [90.0], {},
        {"top1": 90.0}]
TEXT = st.text(max_size=200) | st.sampled_from([
    "", "null", "[]", "{", "{}", "[" * 2000, '{"epochs": NaN}', "a: &a [*a]", "? [1]\n: 2\n", "model: !!int ''\n",
    "model: !!timestamp x\n", "model: m\nrun: {model_kwargs: {}}\nseed: 0x" + "f" * 6000, "a: *b", "\x00", "\ufeff{}"])
quick = settings(max_examples=25, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture],
                 phases=[Phase.explicit, Phase.generate])


def places(value, path=()):
    """The paths of all values inside a mapping."""
    yield path
    for key, inner in value.items() if isinstance(value, dict) else ():
        yield from places(inner, (*path, key))


@st.composite
def damaged(draw, value: dict):
    """The mapping with one value replaced or left out."""
    whole = copy.deepcopy(value)
    *path, last = draw(st.sampled_from([path for path in places(value) if path]))
    inner = whole
    for key in path:
        inner = inner[key]
    if draw(st.booleans()):
        inner[last] = draw(st.sampled_from(JUNK))
    else:
        del inner[last]
    return whole


@st.composite
def damaged_table(draw, text: str):
    """Comma-separated values with a cell or a line replaced, left out or repeated."""
    rows = list(csv.reader(text.splitlines()))
    row = draw(st.integers(0, len(rows) - 1))
    column = draw(st.integers(0, len(rows[row]) - 1))
    how = draw(st.sampled_from(["cell", "row", "short", "twice"]))
    if how == "cell":
        rows[row][column] = draw(st.sampled_from([str(junk) for junk in JUNK]) | st.text(max_size=5))
    elif how == "row":
        del rows[row]
    elif how == "short":
        del rows[row][column:]
    else:
        rows.insert(row, rows[row])
    return "\n".join(",".join(cells) for cells in rows)


@pytest.fixture
def folder(tmp_path, monkeypatch):
    """A sweep of two variants and seeds; pictures, which take most of the time, read no file."""
    monkeypatch.setattr(evidence, "figure_bytes", lambda figure: b"")
    monkeypatch.setattr(evidence, "plot_evidence", lambda *of, **how: None)
    for seed in (0, 1):
        write_run(tmp_path / f"variant=a,seed={seed}", 60.0 + seed)
        write_run(tmp_path / f"variant=b,seed={seed}", 61.0 + 2 * seed)
        for name in "ab":
            path = tmp_path / f"variant={name},seed={seed}" / CONFIG
            path.write_text(path.read_text().replace("seed: 0", f"seed: {seed}"))
    return tmp_path


def one_line_or_figures(folder: Path) -> None:
    """What all three commands do with a sweep's folder of which one file may be damaged."""
    damaged = folder / "variant=a,seed=0"
    try:
        run = read_finished(damaged)
    except UsageError:
        run = None
    if run is not None:
        assert all(0 <= figures[key] <= 100 for figures in (run.last, run.best) for key in ("top1", "top5"))
        assert 0 <= run.best_top1 <= 100 and run.seconds >= 0 and run.epochs >= 1 and run.data and run.seed >= 0
    accepted = False
    try:
        accepted = evidence.main([str(folder), "--question", "b,a", "-o", str(folder / "out")]) == 0
    except UsageError as error:
        assert str(error)
    assert run is not None or not accepted, "never accepted in silence"
    assert len(reproduce.runs_in(damaged)) <= (run is not None)
    row = sweep.row_of({"x": "1"}, "0", run) if run is not None else {}
    assert not row or 0 <= row["top1"] <= 100


def test_the_whole_folder_is_accepted(folder):
    assert evidence.main([str(folder), "--question", "b,a"]) == 0 and len(reproduce.runs_in(folder)) == 4


FILES = {
    RESULTS: lambda text: damaged(json.loads(text)).map(json.dumps),
    METRICS: damaged_table,
    CONFIG: lambda text: damaged(yaml.safe_load(text)).map(yaml.safe_dump),
}


@quick
@pytest.mark.parametrize("name", FILES)
@given(data=st.data())
def test_a_damaged_file(folder, name, data):
    path = folder / "variant=a,seed=0" / name
    original = path.read_text()
    path.write_text(data.draw(TEXT | FILES[name](original)), errors="replace")
    try:
        one_line_or_figures(folder)
    finally:
        path.write_text(original)


@quick
@given(data=st.data())
def test_the_file_of_runs(folder, data):
    evidence.main([str(folder), "--question", "b,a", "-o", str(folder / "out")])
    path = folder / "runs.csv"
    whole = (folder / "out" / "evidence-runs.csv").read_text()
    path.write_text(data.draw(TEXT | damaged_table(whole)), errors="replace")
    try:
        _, runs = evidence.read_runs([path])
    except UsageError as error:
        assert str(error)
    else:
        assert runs and all(0 <= run.top1 <= 100 and math.isfinite(run.train_loss) and run.seed >= 0 for run in runs)
        assert len({(run.variant, run.seed) for run in runs}) == len(runs)
        try:
            evidence.main([str(path), "--question", "b,a", "-o", str(folder / "again")])
        except UsageError as error:
            assert str(error)


@pytest.mark.parametrize("name, change, message", [
    (RESULTS, {"test_last": None}, "test_last must have epoch, top1 and top5"),
    (RESULTS, {"test_last": {"epoch": 630, "top1": None, "top5": 99.0}}, "test_last must be in percent, got None"),
    (RESULTS, {"test_last": {"epoch": 630, "top1": 900, "top5": 99.0}}, "must be in percent, got 900"),
    (RESULTS, {"test_last": {"epoch": 630, "top1": "90", "top5": 99.0}}, "must be in percent, got '90'"),
    (RESULTS, {"epochs": 3}, "epochs must be the 630 of metrics.csv, got 3"),
    (RESULTS, {"epochs": 629}, "epochs must be the 630 of metrics.csv, got 629"),
    (RESULTS, {"epochs": 630.5}, "epochs must be the 630 of metrics.csv, got 630.5"),
    (RESULTS, {"epochs": math.nan}, "epochs must be the 630 of metrics.csv, got nan"),
    (CONFIG, {"run": {"task": "detection"}}, "must be a run of classification, got one of detection"),
    (CONFIG, {"seed": None}, "seed must be a whole number, got None"),
])
def test_what_is_wrong_is_said(tmp_path, name, change, message):
    write_run(tmp_path / "r", 60.0)
    path = tmp_path / "r" / name
    load, dump = (json.loads, json.dumps) if name == RESULTS else (yaml.safe_load, yaml.safe_dump)
    value = load(path.read_text())
    for key, new in change.items():
        value[key] = {**value[key], **new} if key == "run" else new
    path.write_text(dump(value))
    with pytest.raises(UsageError, match=message):
        read_finished(tmp_path / "r")


def test_a_run_that_ends_inside_an_epoch_is_complete(tmp_path):
    """As the trainer writes it after --epochs 629.3."""
    write_run(tmp_path / "r", 60.0)
    path = tmp_path / "r" / RESULTS
    path.write_text(json.dumps(json.loads(path.read_text()) | {"epochs": 629.3}))
    assert read_finished(tmp_path / "r").epochs == 630
