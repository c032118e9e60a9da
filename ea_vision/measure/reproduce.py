"""The papers' tables of images, published beside ours, and their ablations. Without names this is docs/results.md.

    ea-vision reproduce                              # the page
    ea-vision reproduce ea_aa_resnet50               # the rows of a network, and the commands that would train them
    ea-vision reproduce share                        # a table, by the name in its heading
    ea-vision reproduce conv-transformer --runs runs # with the accuracies of your own complete runs

Published figures are those of ea_vision/models/published.yaml. Parameters and GFLOPs are counted on the networks as
this package builds them. Accuracies are read from the files of runs: those that come with the package, and those in
--runs.
"""

from __future__ import annotations

import argparse
import csv
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from statistics import mean
from typing import Any

import timm
import torch
import yaml

from ea_vision.base.errors import UsageError, near_matches
from ea_vision.base.tables import add_wide, markdown, shown
from ea_vision.detection.model import DetectorNetwork, create_detector
from ea_vision.engine.config import load_recipe
from ea_vision.engine.run_folder import CONFIG, read_finished
from ea_vision.measure.counts import Counts, count, inference_map_bytes, training_map_bytes
from ea_vision.measure.summary import count_network
from ea_vision.models import (
    PrintedTable,
    PublishedRow,
    PublishedTable,
    printed_tables,
    published_tables,
    shipped_weights,
)
from ea_vision.studies.evidence import by_variant, paired_difference, read_runs

TEXT = """\
# Results: published beside ours

`ea-vision reproduce` prints this page: the papers' tables of which we know the figures. Our own experiments are on the
page of [experiments](experiments.md).

- **Published** figures and their sources come from one file, `ea_vision/models/published.yaml`.
- **Parameters and GFLOPs** beside them are counted on the networks as this package builds them. GFLOPs are counted
  as the paper of the table counted: the EA paper takes 2 for a multiply-add of a convolution and 1 for one of the
  attention products; the AA paper's profiler takes 2 for a multiply-add of a convolution or a relative position, 6
  for an element of the maps, and nothing for the other attention products.
- **Ours** is an accuracy on the test images after the last epoch, of a network trained at full size on the same data.
  Where a table has no such column, nothing has been run: we have had no GPU.

`ea-vision reproduce NAME` prints, for a network or a table, the whole commands, their epochs and their cost in
exaFLOPs; `--runs DIR` puts the accuracies of your own runs beside the others. `ea-vision models --sizes` lists all
networks."""
MISSING = """\
## What is not here

- The AA paper compares attention with squeeze-excite, gather-excite, BAM, CBAM and GALA in one more table; of these
  only the squeeze-excite rows are known to us. Its times on a V100 are left out, since we have none to put beside
  them.
- The CSAN paper has no images. Its windows are in `csan_resnet50` and `csan_conv_transformer_cifar`.
- `ea-vision reproduce translation rationales pa-operations pa-imagenet` prints four more: text, operations, and
  the PA paper's baselines, which are not the EA paper's."""


@dataclass(frozen=True)
class DataSet:
    """command: the trainer and where its images are. classes: that networks tell apart. images: for training.
    img_size: of the networks, in pixels."""

    command: str
    classes: int
    images: int
    img_size: int


DATA = {
    "ImageNet": DataSet("train-imagenet --data-dir DIR", 1000, 1_281_167, 224),
    "CIFAR-10": DataSet("train-cifar --dataset cifar10 --download --device cuda", 10, 50_000, 32),
    "CIFAR-100": DataSet("train-cifar --dataset cifar100 --download --device cuda", 100, 50_000, 32),
    "COCO": DataSet("train-detection --data-dir COCO --sync-bn", 90, 118_287, 640),
}


@dataclass(frozen=True)
class Run:
    """A complete run: its network, data and recipe, epochs, and top-1 in percent of the test images after the last."""

    model: str
    kwargs: Mapping[str, Any]
    data: str
    recipe: str
    epochs: int
    top1: float


def shipped_runs() -> list[Run]:
    """The runs of experiments/results/runs.yaml, in a checkout or the installed package."""
    folder = results_folder()
    runs = []
    for about in yaml.safe_load((folder / "runs.yaml").read_text()):
        last = list(csv.DictReader((folder / about["metrics"]).open()))[-1]
        runs.append(Run(about["model"], about.get("kwargs", {}), about["data"], about["recipe"], int(last["epoch"]),
                        float(last["top1"])))
    return runs


@cache
def shipped_evidence(data: str) -> dict[str, dict[int, float]]:
    """Return top-1 by variant and seed of the comparison of narrow networks that comes with the package."""
    return by_variant(read_runs([results_folder() / "evidence" / f"{data}-runs.csv"])[1])


def results_folder() -> Path:
    """Return experiments/results, in a checkout or the installed package."""
    return Path(shipped_weights("conv_transformer_cifar.fast_c10")).parents[1] / "experiments" / "results"


def runs_in(folder: Path) -> list[Run]:
    """Return the complete runs of classifiers in a folder that were tested on a data set of DATA, at its size.

    The data set is told by the number of classes and of training images, the held-out ones included. A folder with a
    config.yaml that is not a whole run of a classifier is passed over, with a line on stderr that says why.

    Raises:
        UsageError: no such folder.
    """
    if not folder.is_dir():
        raise UsageError(f"--runs must be a folder with run folders in it, got {folder}")
    runs = []
    for path in sorted(folder.rglob(CONFIG)):
        try:
            runs += _run_in(path.parent)
        except UsageError as error:
            print(f"passed over: {' '.join(str(error).split())}", file=sys.stderr)
    return runs


def _run_in(folder: Path) -> list[Run]:
    """Return the run of a folder, or [] where it is not complete, not tested, or of other data.

    Raises:
        UsageError: not a run of a classifier, or a damaged one.
    """
    found = read_finished(folder)
    if found is None or found.split != "test":
        return []
    config, about = found.config, found.run
    kinds = {"classes": list, "train_images": int, "eval_images": int}
    if not all(type(about.get(key)) is kind for key, kind in kinds.items()):
        raise UsageError(f"{folder / CONFIG} is not that of a run: run must have {', '.join(kinds)}")
    if type(config.get("img_size")) is not int or not isinstance(config.get("recipe"), str):
        raise UsageError(f"{folder / CONFIG} is not that of a run: it must have img_size and recipe")
    held_out = about["eval_images"] if found.eval_split == "held_out" else 0
    sets = {(data.classes, data.images, data.img_size): name for name, data in DATA.items()}
    data = sets.get((len(about["classes"]), about["train_images"] + held_out, config["img_size"]))
    if data is None:
        return []
    usual = {"num_classes", "in_chans", "img_size", *(load_recipe(config["recipe"]).get("model_kwargs") or {})}
    kwargs = {key: value for key, value in about["model_kwargs"].items() if key not in usual}
    return [Run(config["model"], kwargs, data, config["recipe"], found.epochs, found.last["top1"])]


@cache
def _counted(model: str, kwargs: tuple[tuple[str, Any], ...], classes: int) -> Counts:
    if not kwargs and timm.get_pretrained_cfg(model).num_classes == classes:
        return count_network(model)[1]
    with torch.device("meta"):
        net = timm.create_model(model, num_classes=classes, **dict(kwargs))
    return count(net, net.pretrained_cfg["input_size"])


@cache
def _counted_detector(backbone: str, kwargs: tuple[tuple[str, Any], ...]) -> Counts:
    with torch.device("meta"):
        detector = create_detector(backbone, DATA["COCO"].classes, DATA["COCO"].img_size, **dict(kwargs))
    return count(DetectorNetwork(detector), (3, detector.img_size, detector.img_size))


def counted(row: PublishedRow, data: str) -> Counts:
    """Parameters and arithmetic of a row's network or detector, with as many classes as the data set has."""
    if data == "COCO":
        return _counted_detector(row.model, tuple(row.kwargs.items()))
    return _counted(row.model, tuple(row.kwargs.items()), DATA[data].classes)


def options(row: PublishedRow, data: str) -> str:
    """What a row adds to its trainer's command: the recipe, and what the recipe does not say."""
    recipe = row.recipes[data]
    words = [f"--recipe {recipe}"]
    if load_recipe(recipe).get("model") != row.model:
        words.append(f"--model {row.model}")
    if row.kwargs:
        words.append("--model-kwargs " + " ".join(f"{key}={value}" for key, value in row.kwargs.items()))
    return " ".join(words)


def trainer(row: PublishedRow, data: str) -> str:
    """The command that a row's options are for."""
    start = f"torchrun --nproc-per-node {row.processes} -m ea_vision" if row.processes > 1 else "ea-vision"
    return f"{start} {DATA[data].command}"


def cost(row: PublishedRow, data: str) -> tuple[int, float]:
    """Epochs of a row's training, and its arithmetic in exaFLOPs."""
    recipe = load_recipe(row.recipes[data])
    images = DATA[data].images - recipe.get("holdout", 0)
    return recipe["epochs"], 3 * 2 * counted(row, data).macs * images * recipe["epochs"] / 1e18


def ours(row: PublishedRow, data: str, runs: Iterable[Run]) -> str:
    """The accuracies of the runs of a row: a mean over those of one recipe and length."""
    found: dict[tuple[str, int], list[float]] = {}
    for run in runs:
        if (run.model, run.data) == (row.model, data) and dict(run.kwargs) == dict(row.kwargs):
            found.setdefault((run.recipe, run.epochs), []).append(run.top1)
    said = [f"{mean(top1):.2f} ({epochs} epochs of `{recipe}`{f', {len(top1)} runs' if len(top1) > 1 else ''})"
            for (recipe, epochs), top1 in found.items()]
    return "; ".join(said) or "not run"


def _digits(values: Iterable[float | None]) -> int:
    """Decimals of a column as the paper prints it."""
    return max((len(f"{value:g}".partition(".")[2]) for value in values if value is not None), default=1)


def _cell(value: float | None, digits: int) -> str:
    return "" if value is None else f"{value:,.{digits}f}"


def _eflop(value: float) -> str:
    return f"{value:.0f}" if value >= 10 else f"{value:.1f}" if value >= 1 else f"{value:.2f}"


def _notes(table: PublishedTable, rows: Sequence[PublishedRow]) -> list[str]:
    lines = [f"Source: {table.source}." + (f" {table.note[0].upper()}{table.note[1:]}." if table.note else "")]
    elsewhere: dict[str, list[str]] = {}
    for row in rows:
        if row.published.source != table.source:
            elsewhere.setdefault(row.published.source, []).append(f"`{row.label}`")
    lines += [f"Source of {', '.join(labels)}: {source}." for source, labels in elsewhere.items()]
    lines += [f"`{row.label}`: {row.published.note}." for row in rows if row.published.note]
    return [f"- {line}" for line in [*lines, *table.remarks]]


def classifiers(table: PublishedTable, rows: Sequence[PublishedRow], runs: Sequence[Run]) -> list[str]:
    """Return the lines of a table of networks that are trained to classify."""
    all_published = [row.published for row in table.rows]
    sizes, flops = _digits(p.params_m for p in all_published), _digits(p.gflops for p in all_published)
    first, second = (_digits(x for p in all_published for x in getattr(p, key).values()) for key in ("top1", "top5"))
    several, top5 = len(table.data) > 1, any(p.top5 for p in all_published)
    accuracies = {(row.label, data): ours(row, data, runs) for row in rows for data in row.recipes}
    run = set(accuracies.values()) != {"not run"}
    lines: list[Sequence[str]] = [(
        "network", *(["data"] if several else []), "params M", "published", "GFLOPs", "published", "top-1 %, published",
        *(["top-5 %, published"] if top5 else []), *(["top-1 %, ours"] if run else []))]
    for row in rows:
        for data in row.recipes:
            published, said = row.published, accuracies[row.label, data]
            if data != table.data[0] and data not in published.top1 and said == "not run":
                continue  # the first line says as much
            counts = counted(row, data)
            gflops = (counts.flops_paper if table.counting == "paper" else counts.flops_profiler) / 1e9
            lines.append((
                row.label, *([data] if several else []),
                _cell(counts.params / 1e6, sizes + 1), _cell(published.params_m, sizes), _cell(gflops, flops + 1),
                _cell(published.gflops, flops), _cell(published.top1.get(data), first),
                *([_cell(published.top5.get(data), second)] if top5 else []),
                *([said] if run else [])))
    return [markdown(lines), "", *_notes(table, rows)]


def detectors(table: PublishedTable, rows: Sequence[PublishedRow], runs: Sequence[Run]) -> list[str]:
    """Return the lines of the table of detectors."""
    lines: list[Sequence[str]] = [("backbone", "params M", "published", "GFLOPs", "published", "mAP, published",
                                   "AP50, published", "AP75, published")]
    for row in rows:
        counts = counted(row, "COCO")
        lines.append((row.label, _cell(counts.params / 1e6, 2), _cell(row.published.params_m, 1),
                      _cell(counts.flops_profiler / 1e9, 1), _cell(row.published.gflops, 0),
                      *(_cell(ap, 1) for ap in row.figures["ap"])))
    return [markdown(lines), "", *_notes(table, rows)]


def parts_of_evolution(table: PublishedTable, rows: Sequence[PublishedRow], runs: Sequence[Run]) -> list[str]:
    """Return the lines of the ablation of evolution: published gains over AA, ours over no evolution."""
    base = table.rows[0].published.top1["ImageNet"]
    lines: list[Sequence[str]] = [("network", "top-1 %, published", "minus AA", "top-5 %, published", "CIFAR-10, ours",
                                   "CIFAR-100, ours")]
    for row in rows:
        top1, top5, variant = row.published.top1["ImageNet"], row.published.top5, row.figures.get("ours", "none")
        evidence = [shipped_evidence("cifar10"), shipped_evidence("cifar100")] if variant != "none" else []
        gains = [paired_difference(list(of_data[variant].values()), list(of_data["none"].values()))
                 for of_data in evidence]
        shown = [f"{centre:+.2f} ({low:+.2f} to {high:+.2f})" for centre, low, high, _ in gains] or ["", ""]
        lines.append((row.label, f"{top1:.2f}", f"{top1 - base:+.2f}" if row is not table.rows[0] else "",
                      _cell(top5.get("ImageNet"), 2), *shown))
    return [markdown(lines), "", *_notes(table, rows)]


def attention_cost(table: PublishedTable, rows: Sequence[PublishedRow], runs: Sequence[Run]) -> list[str]:
    """Lines of the AA paper's table of what attention costs, by stage and in all."""
    lines: list[Sequence[str]] = [("", "maps, KiB", "published, KB", "parameters", "published", "MFLOPs", "published")]
    for row in rows:
        branches = counted(row, "ImageNet").branches
        stage = [branch for branch in branches if branch.layer.startswith(f"{row.name}.")]
        if stage:
            label, measured = f"{row.name}, one of {len(stage)} layers", [
                stage[0].map_bytes, stage[0].params, stage[0].flops_profiler]
        elif row.name == "training":
            label, measured = "all, training", [training_map_bytes(branches), sum(b.params for b in branches),
                                                sum(b.flops_profiler for b in branches)]
        else:
            label, measured = "all, inference", [inference_map_bytes(branches), None, None]
        maps, params, flops = measured
        published = row.figures
        lines.append((label, _cell(maps / 1024, 2), _cell(published["map_kb"], _digits([published["map_kb"]])),
                      _cell(params, 0), _cell(published.get("branch_params"), 0), _cell(flops and flops / 1e6, 1),
                      _cell(published.get("mflops"), 0)))
    return [markdown(lines), "", *_notes(table, rows),
            "- Maps are those of dense attention in bfloat16. Our kernels keep fewer: `ea-vision memory`.",
            "- `ea-vision models --sizes aa_resnet50 --layers` gives every branch."]


def probes(table: PublishedTable, rows: Sequence[PublishedRow], runs: Sequence[Run]) -> list[str]:
    """Return the lines of the EA paper's table of networks that see one map alone."""
    lines: list[Sequence[str]] = [("network", *(f"layer {layer}, published" for layer in rows[0].figures["layers"]))]
    for row in rows:
        lines.append((row.label, *(_cell(top1, 2) for top1 in row.figures["layers"].values())))
    layers = ",".join(map(str, rows[0].figures["layers"]))
    command = (f"ea-vision probe --model RUN_OF_AA,RUN_OF_EA --layers {layers} --dataset folder --data-dir DIR "
               "--device cuda -o probe")
    return [markdown(lines), "", *_notes(table, rows),
            "- Top-1 in percent. The command needs both networks trained on ImageNet; [ours](experiments.md#the-probe) "
            "are of CIFAR-10.", "", "```sh", command, "```"]


BY_NAME = ("translation", "rationales", "pa-operations", "pa-imagenet")  # printed tables that the page leaves out
RENDERERS: dict[str, Callable[[PublishedTable, Sequence[PublishedRow], Sequence[Run]], list[str]]] = {
    "detection": detectors, "attention-cost": attention_cost, "probe": probes, "evolution": parts_of_evolution}


def section(table: PublishedTable, rows: Sequence[PublishedRow], runs: Sequence[Run]) -> str:
    """A table, or some of its rows, under its heading."""
    lines = RENDERERS.get(table.name, classifiers)(table, rows, runs)
    return "\n".join([f"## {table.title}: `{table.name}`", "", *lines])


def printed(table: PrintedTable) -> str:
    """Return a table that is only printed, under its heading."""
    def cells(column: int) -> list[str]:
        values = [row[column] for row in table.rows.values()]
        digits = _digits(value for value in values if not isinstance(value, str))
        return [value if isinstance(value, str) else f"{value:.{digits}f}" for value in values]

    columns = [cells(column) for column in range(len(table.columns))]
    lines = [("", *table.columns), *zip(table.rows, *columns, strict=True)]
    return f"## {table.title}: `{table.name}`\n\n{markdown(lines)}\n\n- As published: {table.source}."


def page(runs: Sequence[Run]) -> str:
    """Return the whole page."""
    tables = published_tables().values()
    return "\n\n".join([TEXT, *(section(table, table.rows, runs) for table in tables),
                        *(printed(table) for table in printed_tables().values() if table.name not in BY_NAME),
                        MISSING]) + "\n"


def chosen(names: Sequence[str], runs: Sequence[Run]) -> str:
    """The rows of some networks or tables, and the commands that would train them.

    Raises:
        UsageError: a name of no network and no table.
    """
    tables = published_tables()
    known = {*tables, *printed_tables(), *(row.model for table in tables.values() for row in table.rows)}
    for name in names:
        if name not in known:
            raise UsageError(f"no row of a paper's table is called {name!r}; {near_matches(name, known, 'names')}")
    parts = []
    for table in tables.values():
        rows = [row for row in table.rows if table.name in names or row.model in names]
        if not rows:
            continue
        parts.append(section(table, rows, runs))
        commands = []
        for row in rows:
            for data in row.recipes:
                epochs, eflop = cost(row, data)
                commands += [f"# {row.label}, {data}: {epochs} epochs, {_eflop(eflop)} EFLOP",
                             f"{trainer(row, data)} {options(row, data)}"]
        if commands:
            parts.append("\n".join(commands))
    parts += [printed(table) for table in printed_tables().values() if table.name in names]
    return "\n\n".join(parts) + "\n"


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("names", nargs="*", metavar="NAME", help="networks or tables (default: the whole page)")
    parser.add_argument("--runs", type=Path, nargs="+", default=[], metavar="DIR",
                        help="folders with run folders, at any depth; complete runs on the papers' data are shown")
    add_wide(parser)
    args = parser.parse_args(argv)
    runs = [*shipped_runs(), *(run for folder in args.runs for run in runs_in(folder))]
    print(shown(chosen(args.names, runs) if args.names else page(runs), args.wide), end="")
    return 0
