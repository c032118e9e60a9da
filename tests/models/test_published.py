"""What papers print of the networks stands once, in published.yaml: recipes and tables repeat it truly."""
import re
from importlib import resources

import pytest
import timm
import yaml

from ea_vision.measure import summary
from ea_vision.models import Published, published_figures, published_names

RECIPES = sorted((file for file in resources.files("ea_vision.recipes").iterdir() if file.name.startswith("imagenet_")),
                 key=lambda file: file.name)


def test_every_published_network_can_be_made_and_has_a_source():
    assert published_names() and all(timm.is_model(name) for name in published_names())
    assert all(published_figures(name).source for name in published_names())
    assert published_figures("ea_aa_resnet50.some_tag") is published_figures("ea_aa_resnet50")


@pytest.mark.parametrize("recipe", RECIPES, ids=lambda file: file.name)
def test_recipes_say_what_is_published(recipe):
    text = recipe.read_text()
    figures = published_figures(yaml.safe_load(text)["model"])
    assert float(re.search(r"(\d+\.\d+)M parameters", text)[1]) == figures.params_m
    assert figures.gflops is None or f"{figures.gflops} GFLOPs" in text or f"{figures.gflops:.2f} GFLOPs" in text
    assert float(re.search(r"top-1 (\d+\.\d+)", text)[1]) == figures.top1["ImageNet"]


@pytest.mark.parametrize("name", ["aa_resnet34", "cnn_cifar", "aa_wrn28_10_cifar", "aa_mnasnet_100", "csan_resnet50"])
def test_the_table_of_sizes_has_every_published_figure(name, capsys):
    assert summary.main([name]) == 0
    header, _, row = ([cell.strip() for cell in line.strip("|\n").split("|")]
                      for line in capsys.readouterr().out.strip().splitlines())
    figures = published_figures(name) or Published()
    params, gflops = (index for index, title in enumerate(header) if title == "(published)")
    assert row[header.index("published top-1 %")] == " / ".join(f"{x:.2f}" for x in figures.top1.values())
    assert float(row[params] or 0) == pytest.approx(figures.params_m or 0, abs=0.0501)
    assert float(row[gflops] or 0) == (figures.gflops or 0)
