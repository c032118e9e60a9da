"""What the page of healthy maps says of its trials is what trials.csv has."""
import csv
from pathlib import Path

FOLDER = Path(__file__).parents[2] / "experiments" / "healthy_maps"


def test_the_page_has_the_figures_of_the_trials():
    rows = list(csv.DictReader((FOLDER / "trials.csv").open()))
    page = " ".join((FOLDER / "README.md").read_text().split())
    first, second = (float(row["held_out_top1"]) for row in rows[:2])
    assert f"({first:.2f} to {second:.2f}%)" in page and second - first < 0.6
    entropies = sorted(float(row[f"entropy_{layer}"]) for row in rows for layer in range(1, 7))
    assert f"entropies are {entropies[0]} to {entropies[-1]} of log N" in page
    assert 0.55 <= second - first < 0.565 and "0.55 points" in page
