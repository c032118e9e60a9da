"""The command of a trainer: from its options and data module to a complete run folder, or to an evaluation.

A run is put together once, in `put_together`, for all trainers alike: model, loaders, training loop, checks before the
first step. Then it begins or resumes, trains, and is tested.
"""

from __future__ import annotations

import logging
import math
import random
import socket
import sys
from pathlib import Path
from typing import Any

import numpy as np
import safetensors.torch
import torch
from torch import nn

from ea_vision.base.errors import UsageError, near_matches
from ea_vision.base.figures import inches
from ea_vision.base.files import check_writable, write_json
from ea_vision.base.networks import check_model_name, create_classifier, lay_out
from ea_vision.base.processes import World, join_world
from ea_vision.base.provenance import hardware, provenance
from ea_vision.engine import checkpoint, run_folder
from ea_vision.engine.config import TrainConfig, describe_recipe, make_parser, parse, resolve
from ea_vision.engine.data_module import DataModule, with_statistics
from ea_vision.engine.preflight import preflight
from ea_vision.engine.report import write_results_row
from ea_vision.engine.signals import StopRequest
from ea_vision.engine.step_log import StepLog
from ea_vision.engine.train import Trainer
from ea_vision.engine.watch import FirstImages, MapsWatch

log = logging.getLogger(__name__)
# Options that may differ from node to node: where things lie, and how many hands a node has.
OWN_OF_A_NODE = ("data_dir", "train_beton", "val_beton", "output", "pretrained_path", "workers", "recipe")


def main(module: type[DataModule], argv: list[str] | None = None) -> int:
    """Run the command of a trainer."""
    parser = make_parser(module.options, module.description, module.examples)
    modes = parser.add_argument_group("instead of training")
    modes.add_argument("--evaluate", metavar="RUN|MODEL", help="test a run folder's best weights, or a model by name: "
                       "accuracy, per class too, a confusion picture and, for ImageNet, timm's results row, "
                       "into --output (default: RUN/evaluation)")
    modes.add_argument("--weights", metavar="FILE", default="", help="with --evaluate MODEL: safetensors weights "
                       "(default: the model's own pretrained ones)")
    modes.add_argument("--learning-curves", metavar="RUN", nargs="+", help="draw loss and accuracy of run folders "
                       "into --output, PNG, SVG or PDF by its suffix (default: learning_curves.png)")
    modes.add_argument("--width", type=inches, metavar="3.3|6.75|N", help="of the curves in inches; text keeps "
                       "its 7 to 9 points (default: 6.75)")
    modes.add_argument("--check-options", action="store_true", default=False, help="say whether the options hold "
                       "together, and end")
    given = parse(parser, argv)
    target, weights, runs = given.pop("evaluate", ""), given.pop("weights"), given.pop("learning_curves", [])
    width, only_checked = given.pop("width", None), given.pop("check_options")
    if width is not None and not runs:
        raise UsageError("--width is that of the picture of --learning-curves, got it without")
    if weights and not target:
        raise UsageError("--weights goes with --evaluate MODEL")
    if runs:
        from ea_vision.engine.curves import write_learning_curves  # matplotlib, which training does without

        output = Path(given.get("output", "learning_curves.png"))
        write_learning_curves([Path(run) for run in runs], output, width)
        print(f"written: {output}")
        return 0
    if target:
        return evaluate_target(module, target, weights, given)
    config, optional_kwargs = resolve(module.options, given)
    return 0 if only_checked else train(module, config, optional_kwargs)


def train(module: type[DataModule], config: TrainConfig, optional_kwargs: frozenset[str]) -> int:
    """Train to the end of the run that `config` describes, from where it stands; return 0.

    Args:
        optional_kwargs: model keywords that only the recipe asks for: a model that lacks them goes without.

    Raises:
        UsageError: something the user can mend; nothing was written.
        RunError: the run had to stop.
    """
    check_model_name(config.model)
    if module.trainer.watches:  # a classifier's
        check_keywords(config, optional_kwargs)
    config = with_statistics(config)
    folder = Path(config.output or module.default_output(config))
    with join_world(config.device, config.dist_timeout) as world, StopRequest() as stop:
        log_to_stdout(world.rank)
        uneven, config = config.small_parts(world.size), config.for_processes(world.size)
        complete = is_complete(folder, config, world.size)
        log.info("recipe      %s", describe_recipe(config.recipe))
        if uneven:
            log.warning(uneven)
        data = module(config, world, training=True)
        data.check()
        if complete:
            data.check_fingerprint(run_folder.read_config(folder)[1]["data_fingerprint"], folder)
            if world.is_main:
                print(f"{folder} is complete")
            return 0
        trainer, test_loader, about = put_together(data, optional_kwargs, folder, stop)
        with run_folder.locked(folder, world):
            begin_or_resume(trainer, data, about)
            if trainer.step_log is not None:
                trainer.step_log.begin(trainer.progress.updates)
            trainer.fit()
            finish(trainer, data, test_loader, about)
            if trainer.step_log is not None:
                trainer.step_log.close()
    return 0


def put_together(data: DataModule, optional_kwargs: frozenset[str], folder: Path,
                 stop: StopRequest) -> tuple[Trainer, Any, dict[str, Any]]:
    """Return the training loop of a run, the loader of its test images, and the `about` section of its config.yaml.

    Raises:
        UsageError: options, data, model and machine that do not go together.
    """
    config, world = data.config, data.world
    check_data(data)
    under = provenance()
    check_same_everywhere(world, {"data": data.fingerprint, "commit": under["git_commit"], **under["versions"],
                                  **{name: value for name, value in config.as_dict().items()
                                     if name not in OWN_OF_A_NODE}})
    seed_everything(config.seed)
    model, kwargs = data.create_model(optional_kwargs)
    model.to(world.device)
    freeze(model, [name for name in config.freeze.split(",") if name], getattr(config, "linear_probe", False))
    if config.grad_checkpointing:
        enable_checkpointing(model, config.model)
    keywords = data.loader_keywords(model)
    seed_everything(config.seed + 1 + world.rank)  # dropout must differ between processes
    train_loader, eval_loader = data.train_loader(**keywords), data.eval_loader(**keywords)
    if data.trainer.watches:
        eval_loader = FirstImages(eval_loader)
    test_loader = data.test_loader(**keywords) if data.eval_split == "held_out" else eval_loader
    step_log = None
    if world.is_main and (config.log_steps or config.tensorboard or config.wandb):
        step_log = StepLog(folder, tensorboard=config.tensorboard, wandb=config.wandb, tags=config.wandb_tags,
                           config=config.as_dict())
    trainer = data.trainer(config, model, train_loader, eval_loader, num_classes=len(data.classes), world=world,
                           folder=folder, stop=stop, data_fingerprint=data.fingerprint, describe=data.describe,
                           bad_images=data.bad_images, step_log=step_log, eval_split=data.eval_split)
    if getattr(config, "teacher", ""):
        trainer.teacher = data.teacher(keywords["mean"], keywords["std"])
    if world.is_main and trainer.watches:
        trainer.watch = MapsWatch(model, eval_loader, keywords["mean"], keywords["std"], folder, step_log,
                                  config.log_maps, trainer.total_epochs, data.classes)
    preflight(model, config, folder=folder, world=world, batches=len(train_loader),
              train_images=data.train_images, eval_images=data.eval_images, classes=len(data.classes),
              ahead=data.batches_ahead, loss_of=trainer.loss_on_noise)
    return trainer, test_loader, {
        "model_kwargs": kwargs, "classes": data.classes,
        "mean": list(keywords["mean"]), "std": list(keywords["std"]),
        "train_images": data.train_images, "eval_images": data.eval_images, "eval_split": data.eval_split,
        "measures": list(trainer.measures), **data.about, "data_fingerprint": data.fingerprint,
        "processes": world.size, "hardware": hardware(world.device, world.size), "command": " ".join(sys.argv), **under}


def check_data(data: DataModule) -> None:
    """Raise UsageError for data that an update or an evaluation of this run cannot be made of."""
    config, needed = data.config, data.config.images_of_update(data.world.size)
    if data.same_images:
        data.eval_split = "train"
        log.warning("the same images are trained and evaluated on: the figures say how well they are fitted")
    if not config.test and data.eval_split != "held_out":
        raise UsageError("--no-test needs training images held out (--holdout) to evaluate on, got none")
    if data.train_images < needed:
        fits = 2 ** int(math.log2(max(data.train_images // data.world.size, 1)))
        raise UsageError(f"an update needs {needed} training images (batch_size x grad_accum_steps x processes), and "
                         f"the data set has fewer, {data.train_images}: --batch-size {fits}")


def evaluate_target(module: type[DataModule], target: str, weights: str, given: dict[str, Any]) -> int:
    """Evaluate a run folder, or a model by name, on the test images.

    Args:
        weights: safetensors file for a model by name; empty: its own pretrained weights.
        given: options of the command line.
    """
    config, run = resolve_target(module.options, target, given)
    with join_world(config.device, config.dist_timeout) as world:
        log_to_stdout(world.rank)
        data = module(config, world, training=False)
        data.same_images = data.same_images if run is None else data.trained_on(run_folder.read_config(run)[1])
        data.check()
        model, output = data.model_to_evaluate(target, run, weights)
        check_writable(output)
        model.to(world.device)
        if config.channels_last:
            lay_out(model, torch.channels_last)
        loader = data.eval_loader(**data.loader_keywords(model))
        result, plain = evaluate_weights(module.trainer, model, run, loader, world, config)
        if world.is_main:
            about = {"target": target, "model": config.model, "weights": weights or None, **data.about,
                     "amp": config.amp, "tta": views_of(config),
                     **({"plain_weights": data.numbers_of(plain)} if plain is not None else {}),
                     **({"eval_split": "train"} if data.same_images else {}),
                     "data_fingerprint": data.fingerprint, **provenance()}
            written = data.write_evaluation(output, model, result, about)
            print(f"{'fit to the training images: ' if data.same_images else ''}{data.line_of(result)}")
            if plain is not None:
                print(f"not averaged: {data.line_of(plain)}")
            print("written:", *written)
        data.bad_images.collect(world, output)
    return 0


def evaluate_weights(trainer: type[Trainer], model: nn.Module, run: Path | None, loader, world: World,
                     config: TrainConfig) -> tuple[Any, Any | None]:
    """Evaluate `model`, and where it is a run's whose best weights are averaged ones, the plain weights beside them.

    Args:
        model: as `DataModule.model_to_evaluate` gives it; it has the plain weights afterwards.
        run: the folder of `resolve_target`.

    Raises:
        UsageError: the run's best checkpoint, which has the plain weights, cannot be read.
    """
    common = {"num_classes": model.num_classes, "world": world, "config": config, "tta": views_of(config)}
    result = trainer.evaluate(model, loader, **common)
    best = None if run is None or not config.model_ema_decay else run / checkpoint.BEST
    if best is None or not best.exists():
        return result, None
    model.load_state_dict(_read_named(best)["model"])
    return result, trainer.evaluate(model, loader, **common)


# ---- steps of a run -------------------------------------------------------------------------------------------------


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


def enable_checkpointing(model: nn.Module, name: str) -> None:
    """Let a model compute activations again in backward; raise UsageError where it cannot."""
    try:
        model.set_grad_checkpointing(True)
    except (AttributeError, AssertionError, NotImplementedError) as error:
        raise UsageError(f"--grad-checkpointing needs a model that has it, {name} has not") from error


def check_keywords(config: TrainConfig, optional_kwargs: frozenset[str]) -> None:
    """Raise UsageError for a keyword that the model lacks, before data is opened, which may take minutes."""
    kwargs = {key: value for key, value in config.model_kwargs.items() if key not in ("num_classes", "in_chans")}
    if not kwargs.keys() - optional_kwargs:
        return
    try:
        with torch.device("meta"):
            create_classifier(config.model, kwargs, optional_kwargs, num_classes=2,
                              img_size=kwargs.get("img_size", config.img_size), notice=lambda line: None)
    except UsageError as error:
        if "has no keyword" in str(error):  # values are refused when the classes are known, and not on this device
            raise


def freeze(model: nn.Module, names: list[str], all_but_classifier: bool) -> None:
    """Freeze the modules and parameters whose names begin so, or all but the classifier.

    Raises:
        UsageError: a name that none has.
    """
    known = dict(model.named_parameters())
    for name in names:
        found = [p for path, p in known.items() if path == name or path.startswith(f"{name}.")]
        if not found:
            near = {".".join(path.split(".")[:depth]) for path in known for depth in (1, 2)}
            raise UsageError(f"freeze: the model has no {name!r}; {near_matches(name, near, 'modules')}")
        for parameter in found:
            parameter.requires_grad_(False)
    if all_but_classifier:
        model.requires_grad_(False)
        model.get_classifier().requires_grad_(True)


def check_same_everywhere(world: World, own: dict[str, Any]) -> None:
    """Raise UsageError, on every process, unless all processes of a run, on whatever node, say the same of themselves.

    own: what this process says, as text or numbers by name.
    """
    first, *others = world.gather({**own, "": socket.gethostname()})
    for rank, other in enumerate(others, start=1):
        for name in own:
            if other[name] != first[name]:
                raise UsageError(f"all processes must have the same {name}: process {rank} on {other['']} has "
                                 f"{other[name]!r}, process 0 on {first['']} {first[name]!r}")


def is_complete(folder: Path, config: TrainConfig, processes: int = 1) -> bool:
    """Return whether `folder` holds this run, complete, and --resume is auto.

    Raises:
        UsageError: the folder holds a run and --resume none asks for a new one, or its name cannot be one.
    """
    try:
        holds_run = run_folder.holds_run(folder)
    except OSError as error:
        raise UsageError(f"--output {str(folder)[:60]}: {error.strerror}") from error
    if not holds_run:
        return False
    if config.resume == "none":
        raise UsageError(f"{folder} holds a run: continue it with --resume auto, choose another --output, or delete it")
    results = run_folder.read_results(folder)
    if config.resume != "auto" or results is None:
        return False
    if config.test and "held_out_last" in results:  # all but the test is done
        return False
    saved, about = run_folder.read_config(folder)
    _require_same(config.differences(saved, processes, about["processes"]), folder)
    return results["epochs"] >= config.epochs


def _require_same(changed: list[str], source: Path) -> None:
    if changed:
        raise UsageError(f"{source} holds a run with other options ({'; '.join(changed)}): choose another --output, or "
                         "continue it with the new options by --resume PATH")


def begin_or_resume(trainer: Trainer, data: DataModule, about: dict[str, Any]) -> None:
    """Load the checkpoint that --resume names or finds, write config.yaml.

    Raises:
        UsageError: a checkpoint that does not fit; the folder is as it was.
    """
    found = checkpoint_to_resume(trainer.config, trainer.folder, trainer.world)
    if found is not None:
        resume(trainer, data, *found)
    trainer.progress.begin(about)
    if trainer.world.is_main:
        (trainer.folder / run_folder.RESULTS).unlink(missing_ok=True)  # only a complete run has it
        run_folder.write_config(trainer.folder, trainer.config.as_dict(),
                                {**about, "starts": trainer.progress.starts})
    trainer.world.barrier()


def checkpoint_to_resume(config: TrainConfig, folder: Path, world: World) -> tuple[Path, dict[str, Any]] | None:
    """Return the path and state of the checkpoint that --resume names or finds.

    Raises:
        UsageError: the named one cannot be read, or processes find different ones.
    """
    if config.resume == "none":
        return None
    if config.resume != "auto":
        path = Path(config.resume)
        found = checkpoint.newest_checkpoint(path) if path.is_dir() else (path, _read_named(path))
        if found is None:
            raise UsageError(f"--resume {path}: no valid checkpoint in this folder")
        return found
    if world.is_main:
        checkpoint.put_damaged_aside(folder, log.warning)
    world.barrier()
    found = checkpoint.newest_checkpoint(folder)
    updates = world.gather(None if found is None else found[1]["progress"]["updates"])
    if len(set(updates)) > 1:
        raise UsageError(f"{folder} must be on a disk that all processes share: they find checkpoints after "
                         f"updates {', '.join(map(str, updates))}")
    return found


def resume(trainer: Trainer, data: DataModule, path: Path, state: dict[str, Any]) -> None:
    """Continue from a checkpoint.

    Raises:
        UsageError: one of other options (under --resume auto), other data, or from where --epochs cannot be reached.
    """
    config = trainer.config
    changes = config.differences(state["config"], trainer.world.size, state["world_size"])
    if config.resume == "auto":
        _require_same(changes, path)
    for change in changes:
        log.warning("continuing with a changed option: %s", change)
    data.check_fingerprint(state["data_fingerprint"], path)
    trainer.load(state, path)
    progress, epochs = trainer.progress, state["config"]["epochs"]
    if epochs < progress.epoch < epochs + 1 and config.epochs > epochs:
        raise UsageError(f"{path} stands at the end of a run of {epochs:g} epochs, inside an epoch, from where "
                         f"more cannot be added: epochs must be {epochs:g}, got {config.epochs:g}")
    evaluated = not progress.rows or not math.isnan(progress.rows[-1][trainer.measures[0]])
    if progress.epoch >= trainer.total_epochs and not evaluated:
        raise UsageError(f"{path} stands after epoch {progress.epoch}, which --eval-epochs left out, so --epochs "
                         f"must be more than {progress.epoch}, got {config.epochs}")
    if epochs != config.epochs:
        log.warning("epochs were %s, now %s: the learning rate follows the new length", epochs, config.epochs)
    log.info("resumed from %s: epoch %d, update %d", path, progress.epoch, progress.updates)


def _read_named(path: Path) -> dict[str, Any]:
    if not path.exists():
        raise UsageError(f"--resume {path}: no such checkpoint or run folder")
    try:
        return checkpoint.read_checkpoint(path)
    except checkpoint.DamagedCheckpoint as error:
        raise UsageError(str(error)) from error


def finish(trainer: Trainer, data: DataModule, test_loader, about: dict[str, Any]) -> None:
    """Test the best and the last weights, each image once; write results.json, which marks the run complete.

    With --no-test the test images are left alone, and the results are those on the images held out.
    """
    config, progress, folder = trainer.config, trainer.progress, trainer.folder
    last_row = progress.rows[-1]
    best_row = next(row for row in progress.rows if row["epoch"] == progress.best_epoch)
    tested = config.test and data.eval_split == "held_out"
    last = best = final_figures(trainer, last_row, test_loader if tested else None)
    if best_row is not last_row:
        if tested or views_of(config) != "none":
            trainer.world.barrier()
            trainer.best_model.load_state_dict(safetensors.torch.load_file(folder / run_folder.WEIGHTS))
        best = final_figures(trainer, best_row, test_loader if tested else None)
    split = "test" if tested else data.eval_split
    ends_inside_epoch = config.epochs < progress.epoch < config.epochs + 1
    results = {
        "model": config.model, "epochs": config.epochs if ends_inside_epoch else progress.epoch,
        "eval_split": data.eval_split, f"{split}_images": data.eval_images if split == "held_out" else data.test_images,
        f"{split}_best": _written(best), f"{split}_last": _written(last),
        "seconds_per_epoch": round(sum(r["seconds"] for r in progress.rows) / len(progress.rows), 3),
        "skipped_updates": progress.skipped, "hardware": about["hardware"],
    }
    if trainer.world.is_main:
        if split == "test" and data.preprocessing is not None:
            write_results_row(folder, config.model, trainer.model, best["top1"], best["top5"], data.preprocessing)
        write_json(folder / run_folder.RESULTS, results)
    trainer.world.barrier()
    said = {"test": f"test {trainer.quality}", "train": "fit to the training images",
            "held_out": f"{trainer.quality} on images held out"}
    log.info("%s: best weights (epoch %d) %s, last weights %s", said[split], best["epoch"], _shown(trainer, best),
             _shown(trainer, last))
    first = trainer.measures[0]
    if data.eval_split == "test" and sum(not math.isnan(row[first]) for row in progress.rows) > 1:
        log.info("the best epoch was chosen by the images that it is evaluated on: quote the last weights%s",
                 ", or hold images out (--holdout)" if hasattr(config, "holdout") else "")
    log.info("run folder: %s", folder)


def final_figures(trainer: Trainer, row: dict[str, float], test_loader) -> dict[str, Any]:
    """Return what results.json says of the trainer's present weights: epoch, measures in percent, top-1 by views.

    Args:
        row: of metrics.csv, of these weights' epoch.
        test_loader: the test images where others were held out and evaluated on, whose figures are named held_out_*.
    """
    views, first = views_of(trainer.config), trainer.measures[0]

    def evaluated(loader):
        return trainer.evaluate(trainer.best_model, loader, trainer.num_classes, trainer.world, trainer.config,
                                tta=views)

    figures = {"epoch": row["epoch"], **{name: row[name] for name in trainer.measures}}
    if views != "none":
        figures["views_top1"] = round(evaluated(trainer.eval_loader).views.top1, 4)
    if test_loader is None:
        return figures
    result = evaluated(test_loader)
    by_views = {"views_top1": round(result.views.top1, 4)} if views != "none" else {}
    return {"epoch": row["epoch"], **{name: round(x, 4) for name, x in result.figures().items()}, **by_views,
            **{f"held_out_{key}": figures[key] for key in (first, "views_top1") if key in figures}}


def views_of(config: TrainConfig) -> str:
    """Return the views of --tta, which classifiers have."""
    return getattr(config, "tta", "none")


def _shown(trainer: Trainer, figures: dict[str, Any]) -> str:
    views = f" ({views_of(trainer.config)} views {figures['views_top1']:.2f}%)" if "views_top1" in figures else ""
    return trainer.text_of(figures, " ") + views


def _written(figures: dict[str, float]) -> dict[str, float | None]:
    """Return figures as JSON can have them: null for those that do not exist, such as AP where no object is large."""
    return {name: None if math.isnan(value) else value for name, value in figures.items()}


def resolve_target(schema: type, target: str, given: dict[str, Any]) -> tuple[Any, Path | None]:
    """Return the options of an evaluation, and the run folder where `target` is one rather than a model's name.

    Args:
        schema: the trainer's config class.
        target: a run folder, whose options are the defaults, or the name of a model.
        given: options of the command line.

    Raises:
        UsageError: neither a run folder nor a model, or options that do not fit.
    """
    path = Path(target) / run_folder.CONFIG
    if path.is_file():
        saved, _ = run_folder.read_config(path.parent)
        for key in ("model", "model_kwargs"):
            if key in given and given[key] != saved.get(key):
                raise UsageError(f"--evaluate {target} is a run with {key} {saved.get(key)!r}, got {given[key]!r}")
        return resolve(schema, {"recipe": str(path), **given})[0], path.parent
    check_model_name(target, "or run folder ")
    if given.get("model", target) != target:
        raise UsageError(f"--evaluate {target} names the model, got --model {given['model']}")
    return resolve(schema, {**given, "model": target})[0], None
