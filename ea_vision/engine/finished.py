"""Read finished runs and check them: the one reader of `sweep`, `evidence`, `reproduce --runs`, `export`
and `gpu-check`."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ea_vision.base.errors import UsageError
from ea_vision.engine.run_folder import (
    CLASSIFICATION,
    CONFIG,
    METRICS,
    RESULTS,
    read_config,
    read_metrics,
    read_results,
)

# Options that do not belong to the experiment: where and how fast it runs, what it writes besides.
NOT_COMPARED = frozenset({
    "data_dir", "cache_dir", "output", "resume", "seed", "workers", "device", "download", "loader", "recipe",
    "channels_last", "compile", "compile_mode", "eval_batch_size", "eval_epochs", "checkpoint_steps", "snapshot_epochs",
    "log_steps", "tensorboard", "wandb", "on_nan", "verify_beton", "max_bad_images", "train_beton", "val_beton"})


@dataclass(frozen=True)
class FinishedRun:
    """A complete run of a classifier.

    split: what the last and best weights were judged on, "test" where the run was tested. images: how many these are;
    None: the run does not say. last, best: epoch, top1 and top5 (percent) of the last and of the best weights.
    best_top1: top-1 of the best weights on the images that they were chosen by.
    """

    folder: Path
    config: Mapping[str, Any]
    run: Mapping[str, Any]
    metrics: Mapping[str, list[float]]
    split: str
    eval_split: str
    images: int | None
    last: Mapping[str, float]
    best: Mapping[str, float]
    best_top1: float

    @property
    def seed(self) -> int:
        return self.config["seed"]

    @property
    def data(self) -> str:
        """Fingerprint of the data set."""
        return self.run["data_fingerprint"]

    @property
    def epochs(self) -> int:
        return int(self.metrics["epoch"][-1])

    @property
    def updates(self) -> int:
        return int(self.metrics["step"][-1])

    @property
    def seconds(self) -> float:
        """Of training, all epochs."""
        return sum(self.metrics["seconds"])

    @property
    def options(self) -> dict[str, Any]:
        """The options that make the experiment what it is."""
        return {key: value for key, value in self.config.items() if key not in NOT_COMPARED}


def read_finished(folder: Path) -> FinishedRun | None:
    """Return a run, checked, or None where it is not complete.

    Raises:
        UsageError: not the folder of a classifier's run, or results.json, metrics.csv or config.yaml is damaged.
    """
    results = read_results(folder)
    if results is None:
        return None
    config, run = read_config(folder, "data_fingerprint", "eval_split")
    if run.get("task", CLASSIFICATION) != CLASSIFICATION:
        raise UsageError(f"{folder} must be a run of {CLASSIFICATION}, got one of {run['task']}")
    try:
        json.dumps(config, default=str)
    except (TypeError, ValueError, RecursionError) as error:
        raise UsageError(f"{folder / CONFIG} is not that of a run: options must be plain values: {error}") from error
    seed = config.get("seed")
    if isinstance(seed, bool) or not isinstance(seed, int) or not 0 <= seed < 2**63:
        raise UsageError(f"{folder / CONFIG} is not that of a run: seed must be a whole number, got {seed!r:.60}")
    if not run["data_fingerprint"] or not all(isinstance(key, str) for key in config):
        raise UsageError(f"{folder / CONFIG} is not that of a run: it needs options by name and a data_fingerprint")
    metrics = read_metrics(folder)
    if not metrics["epoch"] or min(metrics["seconds"]) < 0 or not sum(metrics["seconds"]) < 1e12:
        raise UsageError(f"{folder / METRICS} is damaged: an epoch and its seconds are required in every row")
    path, eval_split = folder / RESULTS, results["eval_split"]
    split = "test" if {"test_last", "test_best"} & results.keys() else eval_split
    last, best = (_figures(path, results, f"{split}_{name}") for name in ("last", "best"))
    done = metrics["epoch"][-1]  # of --epochs 4.3 the last epoch is the fifth
    if not done - 1 < results["epochs"] <= done == last["epoch"]:
        raise UsageError(f"{path} is damaged: epochs must be the {metrics['epoch'][-1]:g} of {METRICS}, got "
                         f"{results['epochs']!r:.60} and {last['epoch']!r:.60}")
    if best["epoch"] not in metrics["epoch"]:
        raise UsageError(f"{path} is damaged: {METRICS} has no epoch {best['epoch']!r:.60}")
    by_epoch = dict(zip(metrics["epoch"], metrics["top1"], strict=True))
    if split == eval_split and any(not abs(by_epoch[row["epoch"]] - row["top1"]) < 0.01 for row in (last, best)):
        raise UsageError(f"{path} is damaged: its top1 is not that of {METRICS}")
    if not 0 <= by_epoch[best["epoch"]] <= 100:
        raise UsageError(f"{folder / METRICS} is damaged: the best epoch, {best['epoch']}, has no top1")
    images = results.get(f"{split}_images")
    if images is not None and (isinstance(images, bool) or not isinstance(images, int) or not 0 < images < 1e12):
        raise UsageError(f"{path} is damaged: {split}_images must be a number of images, got {images!r:.60}")
    return FinishedRun(folder, config, run, metrics, split, eval_split, images, last, best, by_epoch[best["epoch"]])


def _figures(path: Path, results: Mapping[str, Any], name: str) -> dict[str, float]:
    """Return an evaluation of results.json: epoch, top1 and top5.

    Raises:
        UsageError: it is missing, or a figure is not a number in percent.
    """
    found = results.get(name)
    if not isinstance(found, dict):
        raise UsageError(f"{path} is damaged: {name} must have epoch, top1 and top5, got {found!r:.60}")
    figures = {key: found.get(key) for key in ("epoch", "top1", "top5")}
    for key, value in figures.items():
        kinds, most = (int, 1e9) if key == "epoch" else ((int, float), 100)
        if isinstance(value, bool) or not isinstance(value, kinds) or not 0 <= value <= most:
            required = "a whole number" if key == "epoch" else "in percent"
            raise UsageError(f"{path} is damaged: {key} of {name} must be {required}, got {value!r:.60}")
    return figures


def difference(one: Mapping[str, Any], other: Mapping[str, Any]) -> dict[str, tuple[Any, Any]]:
    """Return the options that differ, with both values. An option that one of two releases lacks is not compared."""
    return {key: (one[key], other[key]) for key in one if key in other and one[key] != other[key]}
