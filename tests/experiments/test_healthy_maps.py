"""What the page of healthy maps says of its runs is what their files have."""
import csv
import re
from pathlib import Path

import pandas as pd
import pytest

from experiments.healthy_maps.analyse import effects_of
from tests.experiments.pages import page_says, points

FOLDER = Path(__file__).parents[2] / "experiments" / "healthy_maps"


def test_the_page_has_the_figures_of_the_trials():
    rows = list(csv.DictReader((FOLDER / "trials.csv").open()))
    page = " ".join((FOLDER / "README.md").read_text().split())
    first, second = (float(row["held_out_top1"]) for row in rows[:2])
    assert f"({first:.2f} to {second:.2f}%)" in page and second - first < 0.6
    entropies = sorted(float(row[f"entropy_{layer}"]) for row in rows for layer in range(1, 7))
    assert f"entropies are {entropies[0]} to {entropies[-1]} of log N" in page
    assert 0.55 <= second - first < 0.565 and "0.55 points" in page


def test_the_page_has_what_the_norm_costs_so_far():
    runs, effects = (pd.read_csv(FOLDER / f"norm-{name}.csv") for name in ("runs", "effects"))
    pd.testing.assert_frame_equal(effects_of(runs), effects)
    section = "Question 1: does the norm cost or bring accuracy?"
    for row in effects.to_dict("records"):
        page_says("experiments/healthy_maps/README.md", section, points(row, "+"))
    entropies = runs.filter(like="entropy").stack().sort_values()
    page_says("experiments/healthy_maps/README.md", section, f"{entropies.iloc[0]:.2f} to {entropies.iloc[-2]:.2f} of",
              f"{entropies.iloc[-1]:.2f}")
    assert runs.groupby("network")["seed"].apply(list).to_dict() == {"EA": [5, 6, 7], "none": [5, 6, 7]}


@pytest.mark.parametrize("name, in_recipe", [("ea_conv_transformer_cifar", "six views "),
                                             ("conv_transformer_cifar", "")])
def test_the_page_has_the_runs_with_the_norm(name, in_recipe):
    last = pd.read_csv(FOLDER / f"{name}.csv").iloc[-1]
    card = (FOLDER.parents[1] / "weights" / f"{name}.fast_norm_c10.md").read_text()
    stored, views = re.findall(r"(\d\d\.\d\d)%(?: top-1,|\. 10000)", card)
    maps = pd.read_csv(FOLDER.parent / "results" / "shipped-entropy.csv").query(f"model == '{name}.fast_norm_c10'")
    page_says("experiments/healthy_maps/README.md", "Question 3: which findings were the collapse's?",
              f"{last['top1']:.2f}% in bfloat16, {stored} as stored", f"with six views {views}",
              f"training loss {last['train_loss']:.4f}", ", ".join(f"{x:.2f}" for x in maps["entropy_share"][:5]))
    assert (maps["entropy_share"].min() < 0.25) == name.startswith("ea_"), "the rule"
    recipe = (FOLDER.parents[1] / "ea_vision" / "recipes" / "fast.yaml").read_text()
    assert f"{last['top1']:.2f}, {in_recipe}{views} ({name})" in recipe
