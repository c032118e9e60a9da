"""The pages equal what experiments/published.py writes, and their published figures equal those in the papers."""

import re
from importlib import resources
from pathlib import Path

import pytest
import yaml

from ea_vision.detection.train import DetectionConfig
from ea_vision.engine.config import PUBLISHED
from ea_vision.engine.train_cifar import CifarConfig
from ea_vision.engine.train_imagenet import ImageNetConfig
from experiments import published
from experiments.published import command, figures, section, tables
from tests.engine.test_config import parsed
from tests.refused import refused
from tests.slow import slow_but

TABLES = tables()
SMALL = ("wide-resnet", "conv-transformer", "attention-cost", "probe")


@pytest.mark.parametrize("name", slow_but(SMALL, TABLES))
def test_the_pages_are_what_the_script_writes(name):
    on_results = name in published.MAIN
    [path] = [path for path in published.TEXT if (path.name == "results.md") == on_results]
    page = path.read_text(encoding="utf-8")
    table = TABLES[name]
    sections = page.split("\n## ")
    [shown] = [part.rstrip() for part in sections if part.startswith(f"{table['title']}:")]
    written = section(table, table["rows"])
    assert written == f"## {shown}", "run: python -m experiments.published"
    assert page.startswith(published.TEXT[path])


COMMAND = r"(?:ea-vision|torchrun --nproc-per-node 8 -m ea_vision) (\S+) (.*)"
TRAINERS = {
    "train-cifar": CifarConfig,
    "train-imagenet": ImageNetConfig,
    "train-detection": DetectionConfig,
}


def rows_of_tables():
    rows = []
    for table in TABLES.values():
        rows.extend(table["rows"])
    return rows


def test_commands_train_the_row_s_network_as_long_as_the_page_says():
    named = set()
    for row in rows_of_tables():
        for data, recipe in row["recipes"].items():
            trainer, options = re.fullmatch(COMMAND, command(row, data)).groups()
            config = parsed(options, cls=TRAINERS[trainer])
            assert config.model == row["model"], options
            assert row["kwargs"].items() <= config.model_kwargs.items(), options
            if recipe == f"imagenet_{row['model']}":
                named.add(row["model"])
    assert named == set(PUBLISHED), "each of the papers' ImageNet networks has a recipe of its name"


def test_rows_of_a_network_and_a_wrong_name(capsys):
    assert published.main(["conv_transformer_cifar"]) == 0
    out = capsys.readouterr().out
    assert ("| 93.48 (10 epochs of `fast`); 95.55 (60 epochs of `cifar_long`) |") in out
    assert out.endswith(
        "# conv_transformer_cifar, CIFAR-100: 620 epochs, 0.08 EFLOP\nea-vision train-cifar --dataset "
        "cifar100 --download --device cuda --recipe pa_cifar100 --model conv_transformer_cifar\n"
    )
    with refused("called 'ea_aa_resnet5'; did you mean .*ea_aa_resnet50"):
        published.main(["ea_aa_resnet5"])


def tables_of_papers(text):
    """Return the papers' tables, under the names that our rows use."""
    pa, ea = text.split("## EA paper")
    lines_of_tables = {}
    for paper, part in (("PA", pa), ("EA", ea)):
        for number, line in re.findall(
            r"^Table ([\d/]+)[,:](.*?)(?=^Table |\Z)", part, re.M | re.S
        ):
            lines_of_tables[f"{paper} paper, table {number}"] = line
    return lines_of_tables


def figures_of(row):
    """Return the figures of a row that its paper must contain."""
    typed = [*row["top1"].values(), *row["top5"].values(), *row.get("layers", {}).values()]
    sizes = [row["params_m"], row["gflops"]]
    return {float(figure) for figure in [*typed, *sizes] if figure is not None}


def test_every_published_figure_is_in_the_papers_tables(shared):
    """If the transcription of the papers' tables is present, it must contain every figure that we attribute to them."""
    paper_figures = tables_of_papers((shared / "PAPERS.md").read_text(encoding="utf-8"))
    others = [row["source"] for row in rows_of_tables() if row["source"] not in paper_figures]
    assert {source.partition(",")[0] for source in others} == {"AA paper"}
    rows = [row for row in rows_of_tables() if row["source"] in paper_figures]
    assert len(rows) > 30
    for row in rows:
        line = paper_figures[row["source"]]
        in_paper = {float(figure) for figure in re.findall(r"\d+(?:\.\d+)?", line)}
        assert figures_of(row) <= in_paper, row
        for data, top5 in row["top5"].items():
            assert f"{row['top1'][data]:.2f} {top5:.2f}" in line, row


RECIPES = sorted(Path(resources.files("ea_vision.recipes")).glob("imagenet_*"))


@pytest.mark.parametrize("recipe", RECIPES, ids=lambda file: file.name)
def test_recipes_say_what_is_published(recipe):
    text = recipe.read_text(encoding="utf-8")
    row = figures(yaml.safe_load(text)["model"])
    assert float(re.search(r"(\d+\.\d+)M parameters", text)[1]) == row["params_m"]
    if row["gflops"] is not None:
        spellings = (f"{row['gflops']} GFLOPs", f"{row['gflops']:.2f} GFLOPs")
        assert any(spelling in text for spelling in spellings)
    assert float(re.search(r"top-1 (\d+\.\d+)", text)[1]) == row["top1"]["ImageNet"]
