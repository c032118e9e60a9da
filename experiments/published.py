"""Write the papers' image tables, published figures beside ours: docs/results.md and experiments/published.md.

    python -m experiments.published                   # writes both pages
    python -m experiments.published ea_aa_resnet50    # prints rows of networks or tables, and their commands

Published figures come from published.yaml. Parameters and GFLOPs are counted on this package's networks. Our accuracies
come from the runs in results/runs.yaml: last epoch, test images.
"""

import argparse
import sys
from collections.abc import Callable, Iterable, Sequence
from functools import cache
from pathlib import Path
from typing import Any

import pandas as pd
import timm
import torch
import yaml

import ea_vision  # noqa: F401  (registers the models)
from ea_vision.base.errors import UsageError, exit_code, near_matches
from ea_vision.detection.model import create_detector
from ea_vision.engine.config import load_recipe
from experiments.counting import PaperCounts, count_as_papers
from experiments.evidence import by_variant, markdown, paired, read_runs

HERE = Path(__file__).resolve().parent
TEXT = {  # page -> text above its tables
    HERE.parent / "docs" / "results.md": """\
# Results: published beside ours

The papers' main tables beside our networks. [More tables](../experiments/published.md) and
[our own experiments](experiments.md) have their own pages. `python -m experiments.published` writes both pages of
tables; with the name of a network or table it prints the commands that would train it, their epochs and exaFLOPs.

- **Published** figures come from the paper under each table; each network stands beside its own paper's baseline.
- **Parameters and GFLOPs** beside them are counted on our networks, as in the EA paper: 2 for a multiply-add of a
  convolution and 1 for one of the attention products.
- **Ours** is top-1 on the test images after the last epoch, at full size. Nothing has been run on ImageNet yet.
- BERT, RoBERTa, T5, GLUE, SST and translation: [what runs here](transformers.md#the-papers-text-systems).""",
    HERE / "published.md": """\
# More of the papers' tables, published beside ours

`python -m experiments.published` writes this page. The PA paper's rows are counted as on the page of
[results](../docs/results.md), the AA paper's as TensorFlow's profiler did: 2 for a multiply-add of a convolution or a
relative position, 6 for an element of the maps, 0 for other attention products. Not known to us: the AA paper's
ImageNet rows of other attention than squeeze-excite.""",
}
MAIN = ("imagenet", "conv-transformer")  # tables of docs/results.md
DATA = {  # the trainer and where its images are; classes; images for training
    "ImageNet": ("train-imagenet --data-dir DIR", 1000, 1_281_167),
    "CIFAR-10": ("train-cifar --dataset cifar10 --download --device cuda", 10, 50_000),
    "CIFAR-100": ("train-cifar --dataset cifar100 --download --device cuda", 100, 50_000),
    "COCO": ("train-detection --data-dir COCO --sync-bn", 90, 118_287),
}
Row = dict[str, Any]


@cache
def tables() -> dict[str, dict[str, Any]]:
    """Return the tables of published.yaml by name. Each row has a label, keywords, its source, recipes by data set, and
    its top1 and top5 in percent by data set."""
    tables_by_name = {}
    for table in yaml.safe_load((HERE / "published.yaml").read_text(encoding="utf-8")):
        table["rows"] = [_row(table, row) for row in table["rows"]]
        tables_by_name[table["name"]] = table
    return tables_by_name


def _row(table: dict[str, Any], row: Row) -> Row:
    row = {
        "kwargs": {},
        "note": "",
        "source": table["source"],
        "recipe": table.get("recipe", {}),
        "processes": table.get("processes", 1),
        "params_m": None,
        "gflops": None,
        "top1": {},
        "top5": {},
        **row,
    }
    for key in ("top1", "top5"):
        if not isinstance(row[key], dict):
            row[key] = {table["data"][0]: row[key]}
    recipes = row["recipe"]
    if not isinstance(recipes, dict):
        recipes = dict.fromkeys(table["data"], recipes)
    row["recipes"] = {data: recipe.format(model=row["model"]) for data, recipe in recipes.items()}
    row["label"] = f"{row['model']}, {row['name']}" if "name" in row else row["model"]
    return row


def _rows() -> list[Row]:
    """Return the rows of all tables."""
    rows = []
    for table in tables().values():
        rows.extend(table["rows"])
    return rows


def figures(model: str) -> Row | None:
    """Return the row of a network without keywords, from the first table that has its accuracy."""
    for row in _rows():
        if row["model"] == model and row["top1"] and not row["kwargs"]:
            return row
    return None


@cache
def runs() -> pd.DataFrame:
    """Return the runs of results/runs.yaml: model, data, recipe, epochs, top1."""
    rows = []
    for about in yaml.safe_load((HERE / "results" / "runs.yaml").read_text(encoding="utf-8")):
        last = pd.read_csv(HERE / "results" / about["metrics"]).iloc[-1]
        rows.append({**about, "epochs": int(last["epoch"]), "top1": float(last["top1"])})
    return pd.DataFrame(rows)


@cache
def _counted(model: str, kwargs: tuple[tuple[str, Any], ...], data: str) -> PaperCounts:
    classes = DATA[data][1]
    with torch.device("meta"):
        if data == "COCO":
            detector = create_detector(model, classes, 640, **dict(kwargs))

            def without_decoding(images):
                return detector.head(list(detector.backbone(images).values()))

            detector.forward = without_decoding
            return count_as_papers(detector, (3, 640, 640))
        network = timm.create_model(model, num_classes=classes, **dict(kwargs))
        return count_as_papers(network, network.pretrained_cfg["input_size"])


def counted(row: Row, data: str) -> PaperCounts:
    """Return parameters and arithmetic of a row's network or detector."""
    return _counted(row["model"], tuple(row["kwargs"].items()), data)


def command(row: Row, data: str) -> str:
    """Return the command that trains a row's network: its recipe, and the options that differ from the recipe."""
    start = "ea-vision"
    if row["processes"] > 1:
        start = f"torchrun --nproc-per-node {row['processes']} -m ea_vision"
    recipe = row["recipes"][data]
    words = [start, DATA[data][0], f"--recipe {recipe}"]
    if load_recipe(recipe).get("model") != row["model"]:
        words.append(f"--model {row['model']}")
    if row["kwargs"]:
        words.append("--model-kwargs")
        words += [f"{key}={value}" for key, value in row["kwargs"].items()]
    return " ".join(words)


def cost(row: Row, data: str) -> tuple[int, float]:
    """Return the epochs of a row's training, and its cost in exaFLOPs."""
    recipe = load_recipe(row["recipes"][data])
    epochs = recipe["epochs"]
    images = DATA[data][2] - recipe.get("holdout", 0)
    flops_per_image = (
        3 * 2 * counted(row, data).counts.macs
    )  # the backward pass costs twice the forward
    return epochs, flops_per_image * images * epochs / 1e18


def ours(row: Row, data: str) -> str:
    """Return the accuracies of the runs of a row."""
    if row["kwargs"]:
        return "not run"
    all_runs = runs()
    runs_of_row = all_runs[(all_runs["model"] == row["model"]) & (all_runs["data"] == data)]
    lines = []
    for run in runs_of_row.itertuples():
        lines.append(f"{run.top1:.2f} ({run.epochs} epochs of `{run.recipe}`)")
    return "; ".join(lines) or "not run"


def digits(values: Iterable[float | None]) -> int:
    """Return the number of decimals in a column of a paper's table; 1 for an empty column."""
    decimals = [len(f"{value:g}".partition(".")[2]) for value in values if value is not None]
    return max(decimals, default=1)


def cell(value: float | None, decimals: int) -> str:
    """Return a number as a cell, empty for None."""
    return "" if value is None else f"{value:,.{decimals}f}"


def classifiers(table: dict[str, Any], rows: Sequence[Row]) -> list[str]:
    """Return the lines of a table of classification networks, without empty columns."""
    decimals = _decimals(table)
    lines = []
    for row in rows:
        for data in row["recipes"]:
            top1_of_ours = ours(row, data)
            if data != table["data"][0] and data not in row["top1"] and top1_of_ours == "not run":
                continue  # the first line says the same
            count = counted(row, data)
            flops = count.paper if table["counting"] == "paper" else count.profiler
            lines.append(
                {
                    "network": row["label"],
                    "data": data if len(table["data"]) > 1 else "",
                    "params M": cell(count.counts.params / 1e6, decimals["params_m"] + 1),
                    "params M, published": cell(row["params_m"], decimals["params_m"]),
                    "GFLOPs": cell(flops / 1e9, decimals["gflops"] + 1),
                    "GFLOPs, published": cell(row["gflops"], decimals["gflops"]),
                    "top-1 %, published": cell(row["top1"].get(data), decimals["top1"]),
                    "top-5 %, published": cell(row["top5"].get(data), decimals["top5"]),
                    "top-1 %, ours": top1_of_ours,
                }
            )
    frame = pd.DataFrame(lines)
    empty = ({""}, {"not run"})
    shown = frame[[name for name in frame if set(frame[name]) not in empty]]
    return markdown(list(shown), shown.values.tolist())


def _decimals(table: dict[str, Any]) -> dict[str, int]:
    """Return the number of decimals of each published column."""
    decimals = {}
    for key in ("params_m", "gflops"):
        decimals[key] = digits(row[key] for row in table["rows"])
    for key in ("top1", "top5"):
        values = []
        for row in table["rows"]:
            values += row[key].values()
        decimals[key] = digits(values)
    return decimals


def detectors(table: dict[str, Any], rows: Sequence[Row]) -> list[str]:
    """Return the lines of the table of detectors."""
    lines = []
    for row in rows:
        count = counted(row, "COCO")
        lines.append(
            [
                row["label"],
                cell(count.counts.params / 1e6, 2),
                cell(row["params_m"], 1),
                cell(count.profiler / 1e9, 1),
                cell(row["gflops"], 0),
                *[cell(ap, 1) for ap in row["ap"]],
            ]
        )
    sizes = ["params M", "published", "GFLOPs", "published"]
    accuracies = ["mAP, published", "AP50, published", "AP75, published"]
    return markdown(["backbone", *sizes, *accuracies], lines)


@cache
def seeds_of(data: str) -> dict[str, pd.DataFrame]:
    """Return top-1 of the narrow networks by seed and variant, for seeds 0 to 4, seeds 5 to 9, and all ten."""
    first = by_variant(read_runs(HERE / "results" / "evidence" / f"{data}-runs.csv"))
    fresh = by_variant(read_runs(HERE / "factorial" / f"{data}-runs.csv"))
    return {
        "seeds 0 to 4": first,
        "5 to 9": fresh,
        "all ten": pd.concat([first, fresh], join="inner"),
    }


def parts_of_evolution(table: dict[str, Any], rows: Sequence[Row]) -> list[str]:
    """Return the lines of the ablation of evolution: published gains over AA, ours over no evolution."""
    ours = [seeds_of("cifar10")["all ten"], seeds_of("cifar100")["all ten"]]
    aa = table["rows"][0]["top1"]["ImageNet"]
    lines = []
    for row in rows:
        top1 = row["top1"]["ImageNet"]
        minus_aa = "" if row["label"] == "aa_resnet34" else f"{top1 - aa:+.2f}"
        gains = [_gain(by_seed, row.get("ours", "none")) for by_seed in ours]
        lines.append([row["label"], f"{top1:.2f}", minus_aa, *gains])
    heads = ["network", "top-1 %, published", "minus AA", "ours, CIFAR-10", "ours, CIFAR-100"]
    return [
        *markdown(heads, lines),
        "",
        "- Ours: minus the same network without evolution, 95% interval, narrow Conv-Transformers after 4 epochs, "
        "[ten seeds](../docs/experiments.md#does-evolving-attention-help).",
    ]


def _gain(top1: pd.DataFrame, variant: str) -> str:
    """Return the gain of a variant over none with its interval, or "" for none and variants that were not run."""
    if variant == "none" or variant not in top1:
        return ""
    gain = paired(top1[variant] - top1["none"])
    return f"{gain['difference']:+.2f} ({gain['low']:.2f} to {gain['high']:.2f})"


def _cost_of(name: str, count: PaperCounts) -> tuple[str, int, int | None, float | None]:
    """Return label, bytes of maps, parameters and FLOPs.

    name: a stage (one of its layers is counted), "training" or "inference" (all layers are counted).
    """
    branches = count.branches
    stage = [branch for branch in branches if branch.layer.startswith(f"{name}.")]
    if stage:
        label = f"{name}, one of {len(stage)} layers"
        return label, stage[0].map_bytes, stage[0].params, stage[0].flops
    if name == "training":
        maps = sum(branch.map_bytes for branch in branches)
        params = sum(branch.params for branch in branches)
        flops = sum(branch.flops for branch in branches)
        return "all, training", maps, params, flops
    # at the same time in memory: a layer's maps and, if they evolve, the previous layer's maps
    maps = max(branch.map_bytes * (1 + branch.evolves) for branch in branches)
    return "all, inference", maps, None, None


def attention_cost(table: dict[str, Any], rows: Sequence[Row]) -> list[str]:
    """Return the lines of the AA paper's table of attention costs, per stage and in total."""
    lines = []
    for row in rows:
        label, maps, params, flops = _cost_of(row["name"], counted(row, "ImageNet"))
        lines.append(
            [
                label,
                cell(maps / 1024, 2),
                cell(row["map_kb"], digits([row["map_kb"]])),
                cell(params, 0),
                cell(row.get("branch_params"), 0),
                cell(flops and flops / 1e6, 1),
                cell(row.get("mflops"), 0),
            ]
        )
    heads = ["", "maps, KiB", "published, KB", "parameters", "published", "MFLOPs", "published"]
    return [
        *markdown(heads, lines),
        "",
        "- Maps are those of dense attention in bfloat16; our kernels keep fewer.",
    ]


def probes(table: dict[str, Any], rows: Sequence[Row]) -> list[str]:
    """Return the lines of the EA paper's table of probes that classify by the maps of one layer."""
    layers = list(rows[0]["layers"])
    heads = ["network", *[f"layer {layer}, published" for layer in layers]]
    lines = []
    for row in rows:
        lines.append([row["label"], *[cell(top1, 2) for top1 in row["layers"].values()]])
    return [
        *markdown(heads, lines),
        "",
        "- Top-1 in percent. The command needs both networks trained on ImageNet; "
        "ours are of [CIFAR-10](maps.md#the-probe) and of [scenes](scenes/README.md#what-the-maps-tell).",
        "",
        "```sh",
        f"ea-vision probe --model RUN_OF_AA,RUN_OF_EA --layers "
        f"{','.join(map(str, layers))} --dataset folder --data-dir DIR --device cuda -o probe",
        "```",
    ]


LINES: dict[str, Callable[[dict[str, Any], Sequence[Row]], list[str]]] = {
    "detection": detectors,
    "attention-cost": attention_cost,
    "probe": probes,
    "evolution": parts_of_evolution,
}


def section(table: dict[str, Any], rows: Sequence[Row]) -> str:
    """Return a table, or some of its rows, under its heading, with notes on its sources."""
    lines = LINES.get(table["name"], classifiers)(table, rows)
    note = table.get("note", "")
    notes = [f"Source: {table['source']}." + (f" {note[0].upper()}{note[1:]}." if note else "")]
    elsewhere: dict[str, list[str]] = {}
    for row in rows:
        if row["source"] != table["source"]:
            elsewhere.setdefault(row["source"], []).append(f"`{row['label']}`")
    notes += [f"Source of {', '.join(labels)}: {source}." for source, labels in elsewhere.items()]
    notes += [f"`{row['label']}`: {row['note']}." for row in rows if row["note"]]
    heading = f"## {table['title']}: `{table['name']}`"
    return "\n".join([heading, "", *lines, "", *[f"- {note}" for note in notes]])


def pages() -> dict[Path, str]:
    """Return both pages by path."""
    texts = {}
    for path, text in TEXT.items():
        parts = [text]
        for name, table in tables().items():
            if (name in MAIN) == (path.name == "results.md"):
                parts.append(section(table, table["rows"]))
        texts[path] = "\n\n".join(parts) + "\n"
    return texts


def chosen(names: Sequence[str]) -> str:
    """Return the rows of some networks or tables, and the commands that would train them.

    Raises:
        UsageError: a name that is neither a network nor a table.
    """
    known_names = {*tables(), *[row["model"] for row in _rows()]}
    for name in set(names) - known_names:
        raise UsageError(
            f"no row of a paper's table is called {name!r}; {near_matches(name, known_names, 'names')}"
        )
    parts = []
    for table in tables().values():
        rows = table["rows"]
        if table["name"] not in names:
            rows = [row for row in rows if row["model"] in names]
        if rows:
            parts.append(section(table, rows))
        commands = []
        for row in rows:
            for data in row["recipes"]:
                epochs, eflop = cost(row, data)
                commands.append(f"# {row['label']}, {data}: {epochs} epochs, {eflop:.2g} EFLOP")
                commands.append(command(row, data))
        if commands:
            parts.append("\n".join(commands))
    return "\n\n".join(parts) + "\n"


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "names", nargs="*", metavar="NAME", help="networks or tables (default: write the pages)"
    )
    names = parser.parse_args(argv).names
    if names:
        print(chosen(names), end="")
    else:
        for path, text in pages().items():
            path.write_text(text, encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(exit_code(main))
