"""experiments/gpu_day.py in tiny sizes on a CPU: every part runs and writes its rows; a failed part stops no other."""

import pandas as pd
import pytest

from experiments import gpu_day
from tests.data.photos import make_folder

FILES = {
    "machine",
    "table",
    "table-resnet50-chosen",
    "table-aa_resnet50-chosen",
    "table-aa_resnet50-sdpa",
    "table-ea_aa_resnet50-reference",
    "table-pa_aa_resnet50-chosen",
    "table-ea_aa_resnet50-chosen",
    "profile-ea_aa_resnet50",
    "elements-ea_aa_resnet50",
    "cifar",
    "cifar-128",
    "cifar-512",
    "profile-cifar-128-eager",
    "profile-cifar-512-eager",
    "layers",
    "fused-errors",
    "fused-times",
    "accuracy-epochs",
    "parts",
}


def test_a_dry_run(tmp_path):
    """All parts but the tests, which need a separate process."""
    images = make_folder(tmp_path / "images", 64, 16, classes=4)
    parts = [name for name in gpu_day.PARTS if name != "tests"]
    output = tmp_path / "day"
    command = ["--dry-run", "--output", str(output), "--cifar100", str(images), "--parts"]
    assert gpu_day.main([*command, *parts]) == 0
    made = {path.stem for path in output.glob("*.csv")}
    assert made == FILES
    assert all(len(pd.read_csv(output / f"{name}.csv")) for name in made)


@pytest.mark.slow
def test_a_dry_run_of_the_tests(tmp_path):
    assert gpu_day.main(["--dry-run", "--output", str(tmp_path), "--parts", "tests"]) == 0
    assert list(pd.read_csv(tmp_path / "tests.csv").outcome)[-1] == "exit code 0"


def test_a_part_that_fails_is_a_row_and_stops_no_other(tmp_path):
    def fails(day):
        raise ValueError("no such kernel")

    def works(day):
        day.save("rows", [{"a": 1}])

    rows = gpu_day.run_parts(gpu_day.Day(tmp_path, dry=True), (fails, works))
    assert [row["result"] for row in rows] == ["ValueError: no such kernel", "done"]
    assert (tmp_path / "rows.csv").exists()
    assert (tmp_path / "fails.error").exists()
