"""The model card of a run's weights, model.md, in the format of Hugging Face's hub, where its name is README.md."""

import math
from collections.abc import Iterable, Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any

from huggingface_hub import EvalResult, ModelCardData

from ea_vision.engine.train import Trainer

CLASSIFICATION = "image-classification"
LOG = {"epoch": "", "train_loss": "loss", "images_per_s": "images/s", "seconds": ""}  # titles


def front_matter(
    name: str, measure: str, value: float, dataset: str, task: str = CLASSIFICATION, **entries
) -> str:
    """Return the YAML front matter that the hub reads. entries: further ones, such as the license."""
    result = EvalResult(
        task_type=task,
        dataset_type=dataset,
        dataset_name=dataset,
        metric_type="accuracy" if task == CLASSIFICATION else "map",
        metric_name=measure,
        metric_value=round(value, 2),
    )
    data = ModelCardData(
        model_name=name,
        library_name="timm",
        pipeline_tag=task,
        tags=[task, "timm", "ea_vision"],
        eval_results=[result],
        **entries,
    )
    return f"---\n{data.to_yaml()}\n---\n"


def without_folder(name: str) -> str:
    """Return the name of a model or data set; of a local folder (local-dir:FOLDER, hfds//FOLDER) the last part."""
    place = name.removeprefix("local-dir:").removeprefix("hfds/")
    return Path(place).name if place != name and Path(place).is_absolute() else name


def facts(config: Mapping[str, Any], about: Mapping[str, Any], options: Iterable[str]) -> dict:
    """Return the rows of a card's table: left column -> right column. Of paths only the last part is shown.

    Args:
        config, about: of the run's config.yaml. options: names of those to show.
    """
    shown = []
    for name in options:
        if name in config and name != "teacher":
            value = without_folder(config[name]) if name in ("model", "dataset") else config[name]
            shown.append(f"{name} {value}")
    classes = about["classes"]
    rows = {
        "recipe": f"`{Path(config['recipe']).name}`: {', '.join(shown)}",
        "model keywords": str(about["model_kwargs"]),
        "began with": Path(config["pretrained_path"]).name,
        "teacher": Path(config.get("teacher", "")).name,
        "data": f"{about['train_images']} training images, {len(classes)} classes: {', '.join(classes)}; "
        f"SHA-256 `{about['data_fingerprint']}`",
        "seed, runs": f"{config['seed']}, one run",
    }
    starts = [
        {**start, "versions": ", ".join(map(" ".join, start["versions"].items()))}
        for start in about["starts"]
    ]
    for name in ("git_commit", "hardware", "versions"):  # of every start, in their order
        values = dict.fromkeys(start[name] for start in starts if start[name] is not None)
        rows[name] = "; then ".join(values)
    return {fact: value for fact, value in rows.items() if value}


def tables(rows: Mapping[str, str], metrics: Mapping[str, list[float]], measure: str) -> str:
    """Return a card's table of facts, and its log: the columns of metrics.csv in LOG and `measure`, by epoch."""
    lines = ["| | |", "| --- | --- |", *(f"| {fact} | {value} |" for fact, value in rows.items())]
    titles = [LOG[name] or name for name in LOG]
    lines += ["", "Log:", "", f"| {' | '.join(titles)} | {measure} % |", "| --- " * 5 + "|"]
    for values in zip(*(metrics[name] for name in (*LOG, measure)), strict=True):
        cells = ["" if math.isnan(value) else f"{value:.5g}" for value in values]
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines)


def card_of(
    trainer: Trainer, about: Mapping[str, Any], best: Mapping[str, Any], images: str
) -> str:
    """Return the card of a complete run.

    Args:
        about: of config.yaml.
        best: measures and epoch of its best weights, as in results.json.
        images: on which they were measured, in words.
    """
    config = asdict(trainer.config)
    measure = trainer.measures[0]
    rules = trainer.config.rules()
    options = [
        name for name in rules if not rules[name].resume and config[name] != rules[name].default
    ]
    rows = facts(
        config, {**about, "starts": trainer.progress.starts}, ("epochs", "batch_size", *options)
    )
    named = without_folder(config.get("dataset", ""))
    dataset = (named if named not in ("", "folder") else Path(config["data_dir"]).name) or "images"
    task = CLASSIFICATION if trainer.watches else "object-detection"
    epochs = trainer.progress.rows
    metrics = {name: [epoch[name] for epoch in epochs] for name in (*LOG, measure)}
    model = without_folder(config["model"])
    return (
        f"{front_matter(model, measure, best[measure], dataset, task)}# {model}\n\n"
        f"{trainer.text_of(best)} on {images}, with the weights of epoch {best['epoch']}: "
        f'`ea_vision.load("model.safetensors")`.\n\n{tables(rows, metrics, measure)}\n'
    )
