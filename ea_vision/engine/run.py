"""From options to a complete run: begin or resume, train, test, write down what came out."""

from __future__ import annotations

import logging
import math
import random
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import safetensors.torch
import torch
from torch import nn

from ea_vision.base.errors import UsageError
from ea_vision.base.files import write_json
from ea_vision.base.networks import build_model, check_classes, check_model_name, load_weights, pretrained_model
from ea_vision.engine import checkpoint, run_folder
from ea_vision.engine.config import FREE_TO_CHANGE, TrainConfig, resolve
from ea_vision.engine.evaluate import evaluate
from ea_vision.engine.train import Trainer

log = logging.getLogger(__name__)


def log_to_stdout(world_rank: int = 0) -> None:
    """Show the package's messages on stdout, those of rank 0 only."""
    handler = logging.StreamHandler(sys.stdout)
    handler.setFormatter(logging.Formatter("%(message)s"))
    logger = logging.getLogger("ea_vision")
    logger.handlers = [handler]
    logger.setLevel(logging.INFO if world_rank == 0 else logging.CRITICAL)


def seed_everything(seed: int) -> None:
    """Seed torch (all devices), NumPy and Python."""
    torch.manual_seed(seed)
    np.random.seed(seed % 2**32)
    random.seed(seed)


def differences(saved: dict[str, Any], config: TrainConfig) -> list[str]:
    """The options that a run may not change on its way, where `config` differs from the saved ones, as text."""
    own = config.as_dict()
    return [f"{key} was {saved.get(key)!r}, got {own[key]!r}" for key in own
            if key not in FREE_TO_CHANGE and saved.get(key) != own[key]]


def is_complete(folder: Path, config: TrainConfig) -> bool:
    """Whether `folder` holds this very run with all its epochs done, and resuming is wanted.

    Raises:
        UsageError: the folder holds a run and --resume none asks for a new one.
    """
    if not run_folder.holds_run(folder):
        return False
    if config.resume == "none":
        raise UsageError(f"{folder} holds a run: continue it with --resume auto, choose another --output, or delete it")
    results = run_folder.read_results(folder)
    if config.resume != "auto" or results is None:
        return False
    saved, _ = run_folder.read_config(folder)
    _require_same(saved, config, folder)
    return results["epochs"] >= config.epochs


def _require_same(saved: dict[str, Any], config: TrainConfig, source: Path) -> None:
    changed = differences(saved, config)
    if changed:
        raise UsageError(f"{source} holds a run with other options ({'; '.join(changed)}): choose another --output, or "
                         "continue it with the new options by --resume PATH")


def begin_or_resume(trainer: Trainer, run: dict[str, Any]) -> None:
    """Load the checkpoint that --resume names or finds, write config.yaml.

    Raises:
        UsageError: a checkpoint that does not fit; the folder is as it was.
    """
    config, folder, world = trainer.config, trainer.folder, trainer.world
    found = None
    if config.resume == "auto":
        if world.is_main:
            checkpoint.put_damaged_aside(folder, log.warning)
        world.barrier()
        found = checkpoint.newest_checkpoint(folder)
        if found is not None:
            _require_same(found[1]["config"], config, found[0])
    elif config.resume != "none":
        path = Path(config.resume)
        found = checkpoint.newest_checkpoint(path) if path.is_dir() else (path, _read_named(path))
        if found is None:
            raise UsageError(f"--resume {path}: no valid checkpoint in this folder")
        for change in differences(found[1]["config"], config):
            log.warning("continuing with a changed option: %s", change)
    if found is not None:
        path, state = found
        saved_data = state["data_fingerprint"]
        if saved_data != run["data_fingerprint"]:
            raise UsageError(f"{path} was trained on other data: fingerprint {saved_data[:12]}, got "
                             f"{run['data_fingerprint'][:12]}")
        trainer.load(state, path)
        progress = trainer.progress
        if progress.epoch >= config.epochs and progress.rows and math.isnan(progress.rows[-1]["top1"]):
            raise UsageError(f"{path} stands after epoch {progress.epoch}, which --eval-epochs left out, so --epochs "
                             f"must be more than {progress.epoch}, got {config.epochs}")
        if state["config"]["epochs"] != config.epochs:
            log.warning("epochs were %d, now %d: the learning rate follows the new length", state["config"]["epochs"],
                        config.epochs)
        log.info("resumed from %s: epoch %d, update %d", path, trainer.progress.epoch, trainer.progress.updates)
    trainer.progress.begin(run)
    if world.is_main:
        (folder / run_folder.RESULTS).unlink(missing_ok=True)  # only a complete run has it
        run_folder.write_config(folder, config.as_dict(), {**run, "starts": trainer.progress.starts})
    world.barrier()


def _read_named(path: Path) -> dict[str, Any]:
    if not path.exists():
        raise UsageError(f"--resume {path}: no such checkpoint or run folder")
    try:
        return checkpoint.read_checkpoint(path)
    except checkpoint.DamagedCheckpoint as error:
        raise UsageError(str(error)) from error


def finish(trainer: Trainer, test_loader, test_images: int, eval_split: str, run: dict[str, Any],
           before: Callable[[dict[str, Any]], None] | None = None) -> None:
    """Test the best and the last weights, each image once; write results.json, which marks the run complete.

    before: writes what else a complete run has, from the results; on the first process.
    """
    config, progress, folder = trainer.config, trainer.progress, trainer.folder
    rows = {row["epoch"]: row for row in progress.rows}
    best_row, last_row = rows[progress.best_epoch], progress.rows[-1]
    tests = {}
    for name, row in (("last", last_row), ("best", best_row)):
        if eval_split == "test":  # the epoch's evaluation was the test
            tests[name] = {"epoch": row["epoch"], "top1": row["top1"], "top5": row["top5"]}
            continue
        if name == "best":
            trainer.world.barrier()
            trainer.best_model.load_state_dict(safetensors.torch.load_file(folder / run_folder.WEIGHTS))
        result = evaluate(trainer.best_model, test_loader, trainer.num_classes, trainer.world, config.amp,
                          config.channels_last)
        tests[name] = {"epoch": row["epoch"], "top1": round(result.top1, 4), "top5": round(result.top5, 4),
                       f"{eval_split}_top1": row["top1"]}
    results = {
        "model": config.model, "epochs": progress.epoch, "eval_split": eval_split,
        "test_images": test_images, "test_best": tests["best"], "test_last": tests["last"],
        "seconds_per_epoch": round(sum(r["seconds"] for r in progress.rows) / len(progress.rows), 3),
        "rollbacks": progress.rollbacks, "hardware": run["hardware"],
    }
    if trainer.world.is_main:
        if before is not None:
            before(results)
        write_json(folder / run_folder.RESULTS, results)
    trainer.world.barrier()
    log.info("test accuracy: best weights (epoch %d) top1 %.2f%% top5 %.2f%%, last weights top1 %.2f%% top5 %.2f%%",
             tests["best"]["epoch"], tests["best"]["top1"], tests["best"]["top5"], tests["last"]["top1"],
             tests["last"]["top5"])
    if eval_split == "test":
        log.info("the best epoch was chosen by the test images: quote the last weights, or hold images out")
    log.info("run folder: %s", folder)


def resolve_target(schema: type, target: str, given: dict[str, Any]) -> tuple[Any, Path | None]:
    """Options of an evaluation, and the run folder where `target` is one rather than a model's name.

    Args:
        schema: the trainer's config class.
        target: a run folder, whose options are the defaults, or the name of a model.
        given: options of the command line.

    Raises:
        UsageError: neither a run folder nor a model, or options that do not fit.
    """
    path = Path(target) / run_folder.CONFIG
    if path.is_file():
        given = {"recipe": str(path), **{k: v for k, v in given.items() if k != "model"}}
        return resolve(schema, given)[0], path.parent
    check_model_name(target, "or run folder ")
    return resolve(schema, {**given, "model": target})[0], None


def model_to_evaluate(target: str, run: Path | None, weights: str, config: Any,
                      classes: list[str]) -> tuple[nn.Module, Path]:
    """The model that `target` names, for data of these classes, and the folder for its results.

    Args:
        run: the folder of `resolve_target`.
        weights: safetensors file for a model by name; empty: its own pretrained weights.

    Raises:
        UsageError: weights that are missing or do not fit, or other classes than those of the data.
    """
    expected, output = None, Path("runs") / f"evaluation-{target}"
    if run is not None:
        model, _, about = run_folder.load_run(run)
        expected, output = about["classes"], run / "evaluation"
    elif weights:
        model, _ = build_model(target, config.model_kwargs, num_classes=len(classes), img_size=config.img_size)
        load_weights(model, Path(weights))
    else:
        model = pretrained_model(target, config.model_kwargs)
    check_classes(model, classes, expected, target)
    return model, Path(config.output or output)
