"""The day on a GPU, tried in tiny sizes on a CPU: every part runs and writes its rows; none stops the next."""

import pandas as pd
import pytest

from experiments import gpu_day

FILES = {
    "1-machine",
    "2-tests",
    "3-compilation",
    "4-table",
    "4-aa",
    "5-profile",
    "6-layers",
    "7-cifar-steps",
    "8-trainer",
    "parts",
}


def test_a_dry_run(tmp_path):
    """Without what takes a process of its own, the tests."""
    assert gpu_day.main(["--dry-run", "--output", str(tmp_path), "--parts", *"1345678"]) == 0
    made = {path.stem for path in tmp_path.glob("*.csv")}
    assert made == FILES - {"2-tests"}
    assert all(len(pd.read_csv(tmp_path / f"{name}.csv")) for name in made)


@pytest.mark.slow
def test_a_dry_run_of_the_tests(tmp_path):
    assert gpu_day.main(["--dry-run", "--output", str(tmp_path), "--parts", "2"]) == 0
    assert list(pd.read_csv(tmp_path / "2-tests.csv").exit_code) == [0]


def test_a_part_that_fails_is_a_row_and_stops_no_other(tmp_path):
    def fails(day):
        raise ValueError("no such kernel")

    def works(day):
        day.save("rows", [{"a": 1}])

    rows = gpu_day.run_parts(gpu_day.Day(tmp_path, dry=True), (fails, works))
    assert [row["result"] for row in rows] == ["ValueError: no such kernel", "done"]
    assert (tmp_path / "rows.csv").exists() and (tmp_path / "fails.error").exists()
