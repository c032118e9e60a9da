"""The model card of a run's weights, model.md, in the format of Hugging Face's hub, where its name is README.md."""

import math
from collections.abc import Callable, Iterable, Mapping
from dataclasses import asdict
from itertools import groupby, pairwise
from operator import itemgetter
from pathlib import Path
from typing import Any

from huggingface_hub import EvalResult, ModelCardData

from ea_vision.engine import run_folder
from ea_vision.engine.evaluate import percents
from ea_vision.engine.train import Trainer

METRICS = {"top1": "accuracy", "AP": "map"}  # the hub's names of measures
TASKS = {"detection": "object-detection"}  # and of tasks
CLASSIFICATION = "image-classification"
LENGTH = ("epochs", "batch_size")


def front_matter(
    name: str, figures: Mapping[str, float], dataset: str, task: str = CLASSIFICATION, **entries
) -> str:
    """Return the YAML front matter that the hub reads from a card. entries: further ones, such as the license."""
    results = []
    for measure, value in figures.items():
        result = EvalResult(
            task_type=task,
            dataset_type=dataset,
            dataset_name=dataset,
            metric_type=METRICS.get(measure, measure),
            metric_name=measure,
            metric_value=round(value, 2),
        )
        results.append(result)
    data = ModelCardData(
        model_name=name,
        library_name="timm",
        pipeline_tag=task,
        tags=[task, "timm", "ea_vision"],
        eval_results=results,
        **entries,
    )
    return f"---\n{data.to_yaml()}\n---\n"


def by_update(starts: list[dict], describe: Callable[[dict], str]) -> str:
    """Describe the run's last start and, in brackets, the updates of earlier starts with another description."""
    descriptions = [(start["update"], describe(start)) for start in starts]
    if descriptions[0][0] > 1:
        descriptions.insert(0, (1, "not recorded"))
    changes = [next(same) for _, same in groupby(descriptions, key=itemgetter(1))]
    last = changes[-1][1]
    others = []
    for (first, text), (following, _) in pairwise(changes):
        if text != last:
            others.append(f"updates {first} to {following - 1}: {text}")
    return f"{last} ({'; '.join(others)})" if others else last


def facts(config: Mapping[str, Any], about: Mapping[str, Any], options: Iterable[str]) -> dict:
    """Return the rows of a card's table: left column -> right column.

    Args:
        config, about: of the run's config.yaml. options: names of those to show.
    """
    starts = about["starts"]
    shown = [f"{name} {config[name]}" for name in options if name in config]
    classes = about["classes"]
    rows = {
        "recipe": f"`{config['recipe']}`: {', '.join(shown)}",
        "model keywords": str(about["model_kwargs"]),
    }
    if config.get("pretrained_path"):
        rows["began with"] = f"`{Path(config['pretrained_path']).name}`"
    return rows | {
        "data": f"{about['train_images']} training images, {len(classes)} classes: {', '.join(classes)}; "
        f"SHA-256 `{about['data_fingerprint']}`",
        "seed, runs": f"{config['seed']}, one run",
        "commit": by_update(starts, lambda start: f"`{start['git_commit']}`"),
        "hardware": by_update(starts, lambda start: start["hardware"]),
        "versions": by_update(starts, _versions),
    }


def _versions(start: dict) -> str:
    return ", ".join(f"{package} {version}" for package, version in start["versions"].items())


def fact_table(rows: Mapping[str, str]) -> list[str]:
    """Return the lines of a table of two columns."""
    return ["| | |", "| --- | --- |", *(f"| {fact} | {value} |" for fact, value in rows.items())]


def log_table(metrics: Mapping[str, list[float]], measure: str) -> list[str]:
    """Return the lines of a run's table of epochs."""
    lines = [
        f"| epoch | loss | {measure} % | images/s | seconds |",
        "| --- | --- | --- | --- | --- |",
    ]
    digits = {"epoch": 0, "train_loss": 4, measure: 2, "images_per_s": 0, "seconds": 0}
    for values in zip(*(metrics[name] for name in digits), strict=True):
        cells = []
        for value, places in zip(values, digits.values(), strict=True):
            cells.append("" if math.isnan(value) else f"{value:.{places}f}")
        lines.append(f"| {' | '.join(cells)} |")
    return lines


def card_of(
    trainer: Trainer, about: Mapping[str, Any], results: Mapping[str, Any], split: str
) -> str:
    """Return the card of a complete run's best weights.

    Args:
        about: of config.yaml. results: of results.json. split: "test" or "held_out", whose results are shown.
    """
    config = asdict(trainer.config)
    best = results[f"{split}_best"]
    figures = {name: best[name] for name in trainer.measures if best[name] is not None}
    dataset = Path(config["data_dir"]).name or config.get("dataset") or "images"
    rules = trainer.config.rules()
    options = [
        name for name in rules if not rules[name].resume and config[name] != rules[name].default
    ]
    task = TASKS.get(about.get("task"), CLASSIFICATION)
    images = (
        f"{results[f'{split}_images']} {'test images' if split == 'test' else 'images held out'}"
    )
    rows = facts(config, {**about, "starts": trainer.progress.starts}, (*LENGTH, *options))
    lines = [
        front_matter(config["model"], figures, dataset, task) + f"# {config['model']}",
        "",
        f"{percents(figures)} on {images}, with the weights of epoch {best['epoch']}: "
        '`ea_vision.load("model.safetensors")`.',
        "",
        *fact_table(rows),
        "",
        "Log:",
        "",
        *log_table(run_folder.read_metrics(trainer.folder), trainer.measures[0]),
        "",
    ]
    return "\n".join(lines)
