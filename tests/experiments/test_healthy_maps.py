"""What the page of healthy maps says of its runs is what their files have."""
import re

import pandas as pd
import pytest

from experiments.healthy_maps.analyse import effects_of
from tests.experiments.pages import ROOT, page_says, points, section, span, table

FOLDER, PAGE = ROOT / "experiments" / "healthy_maps", "experiments/healthy_maps/README.md"


def test_the_page_has_the_figures_of_the_trials_and_what_the_norm_costs_so_far():
    trials, runs, effects = (pd.read_csv(FOLDER / f"{name}.csv") for name in ("trials", "norm-runs", "norm-effects"))
    first, second = trials["held_out_top1"][:2]
    entropies = trials[[f"entropy_{layer}" for layer in range(1, 7)]].stack()
    assert 0.55 <= second - first < 0.565
    page_says(PAGE, "", f"({first:.2f} to {second:.2f}%)", "0.55 points",
              f"entropies are {entropies.min()} to {entropies.max()} of log N")
    pd.testing.assert_frame_equal(effects_of(runs), effects)
    of_norm = runs.filter(like="entropy").stack().sort_values()
    page_says(PAGE, "Question 1: does the norm cost or bring accuracy?", of_norm.iloc[-1], f"{span(of_norm[:-1])} of",
              *(points(row, "+") for row in effects.to_dict("records")))
    assert runs.groupby("network")["seed"].apply(list).to_dict() == {"EA": [5, 6, 7], "none": [5, 6, 7]}


@pytest.mark.parametrize("name, in_recipe", [("ea_conv_transformer_cifar", "six views "),
                                             ("conv_transformer_cifar", "")])
def test_the_page_has_the_runs_with_the_norm(name, in_recipe):
    last = pd.read_csv(FOLDER / f"{name}.csv").iloc[-1]
    stored, views = re.findall(r"(\d\d\.\d\d)%(?: top-1,|\. 10000)", section(f"weights/{name}.fast_norm_c10.md"))
    shares = table("shipped-entropy.csv").query(f"model == '{name}.fast_norm_c10'")["entropy_share"]
    page_says(PAGE, "Question 3: which findings were the collapse's?",
              f"{last['top1']:.2f}% in bfloat16, {stored} as stored", f"with six views {views}",
              f"training loss {last['train_loss']:.4f}", ", ".join(f"{x:.2f}" for x in shares[:5]))
    assert (shares.min() < 0.25) == name.startswith("ea_"), "the rule"
    assert f"{last['top1']:.2f}, {in_recipe}{views} ({name})" in section("ea_vision/recipes/fast.yaml")
