"""The pages are what experiments/published.py writes; what is typed as the papers' stands in them."""

import re
import shlex
from importlib import resources
from pathlib import Path

import pytest
import yaml

from ea_vision.base.errors import UsageError
from ea_vision.detection.train import DetectionConfig
from ea_vision.engine.config import PUBLISHED
from ea_vision.engine.train_cifar import CifarConfig
from ea_vision.engine.train_imagenet import ImageNetConfig
from experiments import published
from experiments.published import command, counted, figures, section, tables
from tests.engine.test_config import parsed
from tests.models.zoo import ALL
from tests.slow import slow_but

TABLES = tables()
SMALL = ("wide-resnet", "conv-transformer", "attention-cost", "probe")


@pytest.mark.parametrize("name", slow_but(SMALL, TABLES))
def test_the_pages_are_what_the_script_writes(name):
    [(page, text)] = [
        (path.read_text(), text)
        for path, text in published.TEXT.items()
        if (path.name == "results.md") == (name in published.MAIN)
    ]
    [shown] = [
        f"## {part.rstrip()}"
        for part in page.split("\n## ")
        if part.startswith(f"{TABLES[name]['title']}:")
    ]
    assert section(TABLES[name], TABLES[name]["rows"]) == shown, (
        "run: python -m experiments.published"
    )
    assert page.startswith(text)


def test_commands_train_the_row_s_network_as_long_as_the_page_says():
    trainers = {
        "train-cifar": CifarConfig,
        "train-imagenet": ImageNetConfig,
        "train-detection": DetectionConfig,
    }
    rows = [
        (row, data) for table in TABLES.values() for row in table["rows"] for data in row["recipes"]
    ]
    for row, data in rows:
        trainer, options = re.fullmatch(
            r"(?:ea-vision|torchrun --nproc-per-node 8 -m ea_vision) (\S+) (.*)", command(row, data)
        ).groups()
        config = parsed(*shlex.split(options), cls=trainers[trainer])
        assert (
            config.model == row["model"] and row["kwargs"].items() <= config.model_kwargs.items()
        ), options
    named = {
        row["model"] for row, data in rows if row["recipes"][data] == f"imagenet_{row['model']}"
    }
    assert named == set(PUBLISHED), "each of the papers' ImageNet networks has a recipe of its name"


def test_rows_of_a_network_and_a_wrong_name(capsys):
    assert published.main(["conv_transformer_cifar"]) == 0
    out = capsys.readouterr().out
    assert (
        "| 93.48 (10 epochs of `fast`); 93.39 (10 epochs of `fast --model-kwargs qk_norm=true`); "
        "95.55 (60 epochs of `cifar_long`) |"
    ) in out
    assert out.endswith(
        "# conv_transformer_cifar, CIFAR-100: 620 epochs, 0.08 EFLOP\nea-vision train-cifar --dataset "
        "cifar100 --download --device cuda --recipe pa_cifar100 --model conv_transformer_cifar\n"
    )
    with pytest.raises(UsageError, match="called 'ea_aa_resnet5'; did you mean .*ea_aa_resnet50"):
        published.main(["ea_aa_resnet5"])


def test_every_published_figure_is_in_the_papers_tables(shared):
    """Where the transcription of the papers' tables is at hand: what is typed as theirs stands in it."""
    text = (shared / "PAPERS.md").read_text()
    of_papers = {
        f"{name} paper, table {number}": line
        for name, part in zip(("PA", "EA"), text.split("## EA paper"), strict=True)
        for number, line in re.findall(r"^Table ([\d/]+)[,:](.*?)(?=^Table |\Z)", part, re.M | re.S)
    }
    rows = [(table, row) for table in TABLES.values() for row in table["rows"]]
    assert {
        row["source"].partition(",")[0] for _, row in rows if row["source"] not in of_papers
    } == {"AA paper"}
    rows = [
        (table, row, of_papers[row["source"]]) for table, row in rows if row["source"] in of_papers
    ]
    assert len(rows) > 30
    for table, row, line in rows:
        typed = [*row["top1"].values(), *row["top5"].values(), *row.get("layers", {}).values()]
        typed += [value for value in (row["params_m"], row["gflops"]) if value is not None]
        assert set(map(float, typed)) <= set(map(float, re.findall(r"\d+(?:\.\d+)?", line))), row
        if row["top1"] and "imagenet" in table["name"]:  # top-1 and top-5 stand together
            assert (
                " ".join(f"{x:.2f}" for x in (row["top1"]["ImageNet"], *row["top5"].values()))
                in line
            ), row


@pytest.mark.parametrize("name", slow_but({"share"}, ["share", "position"]))
def test_published_positions_and_shares_are_built_as_the_paper_says(name):
    """They change the sizes as published, and positions that learn nothing add nothing."""
    rows = [row for row in TABLES[name]["rows"] if row["model"] == "aa_resnet50" or ALL]
    counts = [counted(row, "ImageNet") for row in rows]
    for row, of in zip(rows, counts, strict=True):
        if row["params_m"]:
            assert of.params / 1e6 == pytest.approx(row["params_m"], abs=0.06)
            assert of.flops_profiler / 1e9 == pytest.approx(row["gflops"], rel=0.02)
    if name == "position":
        none, sine, coord, relative = (of.params for of in counts[-4:])
        assert none == sine < relative and none < coord


@pytest.mark.parametrize(
    "recipe",
    sorted(
        (
            file
            for file in resources.files("ea_vision.recipes").iterdir()
            if file.name.startswith("imagenet_")
        ),
        key=lambda file: file.name,
    ),
    ids=lambda file: file.name,
)
def test_recipes_say_what_is_published(recipe):
    text = Path(recipe).read_text()
    row = figures(yaml.safe_load(text)["model"])
    assert float(re.search(r"(\d+\.\d+)M parameters", text)[1]) == row["params_m"]
    assert (
        row["gflops"] is None
        or f"{row['gflops']} GFLOPs" in text
        or f"{row['gflops']:.2f} GFLOPs" in text
    )
    assert float(re.search(r"top-1 (\d+\.\d+)", text)[1]) == row["top1"]["ImageNet"]
