"""The command of a trainer: from its options and data module to a complete run folder, or to an evaluation.

`put_together` builds a run in the same way for all trainers: model, loaders, training loop, checks before the first
step. Then the run begins or resumes, trains, and is tested.
"""

import logging
import math
import os
import socket
import sys
from contextlib import suppress
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
from timm.utils import random_seed
from torch import nn

from ea_vision.base.devices import device_named
from ea_vision.base.errors import UsageError, near_matches
from ea_vision.base.files import atomic_write, check_writable, write_json
from ea_vision.base.networks import (
    DATA_KEYWORDS,
    check_model_name,
    create_classifier,
    lay_out,
    read_made_with,
    read_weights,
)
from ea_vision.base.processes import World, join_world, workers_watched
from ea_vision.base.provenance import hardware, provenance
from ea_vision.base.units import duration
from ea_vision.engine import checkpoint, run_folder
from ea_vision.engine.config import TrainConfig, make_parser, parse, resolve, trainer_of
from ea_vision.engine.data_module import DataModule
from ea_vision.engine.optimizer import check_optimizer_name
from ea_vision.engine.preflight import preflight
from ea_vision.engine.signals import StopRequest
from ea_vision.engine.step_log import StepLog
from ea_vision.engine.train import Trainer

log = logging.getLogger(__name__)
# Options that may differ between nodes: paths, and the number of workers.
OWN_OF_A_NODE = (
    "data_dir",
    "train_beton",
    "val_beton",
    "output",
    "pretrained_path",
    "workers",
    "recipe",
)


def main(module: type[DataModule], argv: list[str] | None = None) -> int:
    """Run the command of a trainer."""
    parser = make_parser(module.options, module.description, module.examples)
    modes = parser.add_argument_group("instead of training")
    modes.add_argument(
        "--evaluate",
        metavar="RUN|MODEL",
        help="test a run's best weights, or a model by name with its pretrained weights or "
        "those of --pretrained-path; report into --output (default: RUN/evaluation)",
    )
    modes.add_argument(
        "--learning-curves",
        metavar="RUN",
        nargs="+",
        help="draw loss and accuracy into --output (default: learning_curves.png)",
    )
    only_check = modes.add_argument(
        "--check-options",
        action="store_true",
        help="check that the options fit together and the data exists, and end",
    )
    parser.hide(only_check)
    given = parse(parser, argv)
    target = given.pop("evaluate", None)
    runs = given.pop("learning_curves", None)
    only_checked = given.pop("check_options", False)
    if runs:
        # matplotlib, which training does without
        from ea_vision.engine.pictures import write_learning_curves

        output = Path(given.get("output", "learning_curves.png"))
        write_learning_curves(list(map(Path, runs)), output)
        return 0
    if target is not None:
        if not target:  # a shell's variable without a value
            raise UsageError("--evaluate needs a run folder or a model, got an empty text")
        with workers_watched(RuntimeError):
            evaluate_target(module, target, given)
        return 0
    config = resolve(module.options, given)
    check_names(module, config)
    check_beginning(config, folder_of(module, config))
    if only_checked:
        module.check_places(config)
    else:
        with workers_watched(RuntimeError):
            train(module, config)
    return 0


def train(module: type[DataModule], config: TrainConfig) -> None:
    """Begin or continue the run that `config` describes, and train it to its end.

    Raises:
        UsageError: something that the user can correct; nothing was written.
        RunError: the run had to stop.
    """
    folder = folder_of(module, config)
    with join_world(config.device, config.dist_timeout) as world, StopRequest() as stop:
        log_to_stdout(world.rank)
        check_writable(folder)
        run_folder.check_free(folder, world)
        log.info("recipe      %s", config.recipe)
        data = module(config.for_processes(world.size), world, training=True)
        data.check()
        if is_complete(folder, data):
            log.info("%s is complete", folder)
            return
        trainer, about = put_together(data, folder, stop)
        with run_folder.locked(folder, world):
            begin_or_resume(trainer, about)
            trainer.fit()
            finish(trainer, about)


def put_together(data: DataModule, folder: Path, stop: StopRequest) -> tuple[Trainer, dict]:
    """Return the training loop of a run, and the `about` section of its config.yaml.

    Raises:
        UsageError: options, data, model and machine do not fit together.
    """
    config = data.config
    world = data.world
    about = provenance()
    options = {name: value for name, value in asdict(config).items() if name not in OWN_OF_A_NODE}
    same = {"data": data.fingerprint, "commit": about["git_commit"], **about["versions"]}
    check_same_everywhere(world, same | options)
    random_seed(config.seed)
    model, kwargs = data.create_model()
    model.to(world.device)
    freeze(model, config)
    if config.grad_checkpointing:
        enable_checkpointing(model, config.model)
    keywords = data.loader_keywords(model)
    random_seed(config.seed + 1, world.rank)  # dropout must differ between processes
    train_loader = data.train_loader(**keywords)
    eval_loader = data.eval_loader(**keywords)
    trainer = data.trainer(data, model, train_loader, eval_loader, folder, stop)
    preflight(trainer)
    return trainer, {
        "model_kwargs": kwargs,
        "classes": data.classes,
        "mean": list(keywords["mean"]),
        "std": list(keywords["std"]),
        "train_images": len(data.train),
        "eval_images": len(data.evaluated),
        "eval_split": data.eval_split,
        "measures": list(trainer.measures),
        **data.about,
        "data_fingerprint": data.fingerprint,
        "processes": world.size,
        "hardware": hardware(world.device, world.size),
        "command": " ".join(sys.argv),
        **about,
    }


# ---- evaluation -------------------------------------------------------------------------------------------------


def evaluate_target(module: type[DataModule], target: str, given: dict) -> None:
    """Evaluate a run folder, or a model by name, on the test images; `given` are options of the command line."""
    config, run = resolve_target(module.options, target, given)
    with join_world(config.device, config.dist_timeout) as world:
        log_to_stdout(world.rank)
        data = module(config, world, training=False)
        data.check()
        model, output = data.model_to_evaluate(target, run)
        check_writable(output)
        model.to(world.device)
        if config.channels_last:
            lay_out(model, torch.channels_last)
        loader = data.eval_loader(**data.loader_keywords(model))
        tta = getattr(config, "tta", "none")  # an option of classifiers
        result = module.trainer.evaluate(model, loader, model.num_classes, world, config, tta=tta)
        if world.is_main:
            about = {
                "target": target,
                "model": config.model,
                **data.about,
                "amp": config.amp,
                "tta": tta,
                "data_fingerprint": data.fingerprint,
                **provenance(),
            }
            written = data.write_evaluation(output, result, about)
            print(result.line())
            print("written:", *written)
        data.bad_images.collect(world, output)


def resolve_target(schema: type, target: str, given: dict) -> tuple[Any, Path | None]:
    """Return the options of an evaluation, and the run folder if `target` is one, else None.

    Args:
        schema: the trainer's config class.
        target: a run folder, whose options are the defaults; a model's name; or a file of weights that names its
            network.
        given: options of the command line.

    Raises:
        UsageError: `target` is neither a run folder nor a model, or the options do not fit it.
    """
    path = Path(target) / run_folder.CONFIG
    if path.is_file():
        saved, _ = run_folder.read_config(path.parent)
        _check_trainer(schema, saved, target)
        for key in ("model", "model_kwargs"):
            if key in given and given[key] != saved.get(key):
                raise UsageError(
                    f"--evaluate {target} is a run with {key} {saved.get(key)!r}, got "
                    f"{given[key]!r}"
                )
        return resolve(schema, {"recipe": str(path), **given}), path.parent
    made = read_made_with(Path(target))
    if made is not None:
        kwargs = made["model_kwargs"].items()
        kwargs = {key: value for key, value in kwargs if key not in DATA_KEYWORDS}
        of_file = {"model": made["model"], "model_kwargs": kwargs, "pretrained_path": target}
        run = run_folder.run_of_file(Path(target))
        if run is not None:
            _check_trainer(schema, run_folder.read_config(run)[0], target)
            of_file["recipe"] = str(run / run_folder.CONFIG)
        elif "img_size" in made["model_kwargs"]:
            of_file["img_size"] = made["model_kwargs"]["img_size"]
        return resolve(schema, {**of_file, **given}), None
    check_model_name(target, "or run folder ")
    if given.get("model", target) != target:
        raise UsageError(f"--evaluate {target} names the model, got --model {given['model']}")
    return resolve(schema, {**given, "model": target}), None


def _check_trainer(schema: type, saved: dict, target: str) -> None:
    """Raise UsageError if the options `saved` of a run are those of another trainer than the one with `schema`."""
    made_by = trainer_of(saved)
    if made_by and made_by != trainer_of(schema.rules()):
        raise UsageError(
            f"--evaluate {target} needs the trainer of this run: ea-vision {made_by} --evaluate {target}"
        )


# ---- before a run -----------------------------------------------------------------------------------------------


def folder_of(module: type[DataModule], config: TrainConfig) -> Path:
    """Return the run folder of these options."""
    return Path(config.output or module.default_output.format(**vars(config)))


def log_to_stdout(rank: int) -> None:
    """Show the package's messages on stdout, those of rank 0 only."""
    handler = logging.StreamHandler(sys.stdout)
    handler.setFormatter(logging.Formatter("%(asctime)s  %(message)s", "%m-%d %H:%M:%S"))
    logger = logging.getLogger("ea_vision")
    logger.handlers = [handler]
    logger.setLevel(logging.INFO if rank == 0 else logging.CRITICAL)


def check_names(module: type[DataModule], config: TrainConfig) -> None:
    """Raise UsageError for an unknown device, model or optimiser, or for a keyword that a classifier lacks."""
    device_named(config.device)
    check_model_name(config.model)
    check_optimizer_name(config.opt)
    if module.trainer.watches and config.model_kwargs:  # a classifier
        check_keywords(config)


def check_beginning(config: TrainConfig, folder: Path) -> None:
    """Raise UsageError if the weights or the checkpoint with which a run begins do not exist. A stopped run creates its
    network with these weights again; a complete run needs neither."""
    weights = config.pretrained_path
    complete = os.path.exists(folder / run_folder.RESULTS)
    if weights and not complete and not os.path.exists(weights):
        raise UsageError(f"--pretrained-path {weights} does not exist")
    source = config.resume
    begun = os.path.exists(folder / run_folder.CONFIG)
    if source not in ("auto", "none") and not begun and not os.path.exists(source):
        raise UsageError(f"--resume must be auto, none or a path, and {source} does not exist")


def check_keywords(config: TrainConfig) -> None:
    """Raise UsageError for a keyword that the model lacks, before data is opened, which may take minutes."""
    try:
        with torch.device("meta"):
            create_classifier(
                config.model,
                config.model_kwargs,
                config.optional_kwargs,
                num_classes=2,
                img_size=config.img_size,
                notice=lambda line: None,
            )
    except UsageError as error:
        # refused values are reported later, when the classes are known, and from the real device
        if "has no keyword" in str(error):
            raise


def enable_checkpointing(model: nn.Module, name: str) -> None:
    """Turn on gradient checkpointing; raise UsageError if the model does not support it."""
    try:
        model.set_grad_checkpointing(True)
    except (AttributeError, AssertionError, NotImplementedError) as error:
        raise UsageError(
            f"--grad-checkpointing needs a model that supports it, {name} does not"
        ) from error


def freeze(model: nn.Module, config: TrainConfig) -> None:
    """Freeze the modules and parameters that --freeze names; with --linear-probe freeze all but the classifier.

    Raises:
        UsageError: the model has no module or parameter of a name.
    """
    for name in filter(None, config.freeze.split(",")):
        known = False
        for path, parameter in model.named_parameters():
            if f"{path}.".startswith(f"{name}."):
                parameter.requires_grad = False
                known = True
        if not known:
            near = near_matches(name, dict(model.named_modules()), "modules")
            raise UsageError(f"freeze: the model has no {name!r}; {near}")
    if getattr(config, "linear_probe", False):  # an option of classifiers
        model.requires_grad_(False)
        model.get_classifier().requires_grad_(True)


def check_same_everywhere(world: World, own: dict) -> None:
    """Raise UsageError on every process if the values of any two processes of the run differ.

    own: the values of this process by name, as text or numbers.
    """
    first, *others = world.gather({**own, "": socket.gethostname()})
    for rank, other in enumerate(others, start=1):
        for name in own:
            if other[name] == first[name]:
                continue
            raise UsageError(
                f"all processes must have the same {name}: process {rank} on {other['']} has "
                f"{other[name]!r}, process 0 on {first['']} {first[name]!r}"
            )


# ---- begin or resume --------------------------------------------------------------------------------------------


def is_complete(folder: Path, data: DataModule) -> bool:
    """Return whether --resume is auto and `folder` holds this run, complete.

    Raises:
        UsageError: the folder holds a run with other options or data, or it holds a run and --resume is none.
    """
    config = data.config
    begun = (folder / run_folder.CONFIG).exists() or (folder / checkpoint.LAST).exists()
    if config.resume == "none" and begun:
        raise UsageError(
            f"{folder} holds a run: continue it with --resume auto, choose another --output, or "
            "delete it"
        )
    if config.resume != "auto":
        return False
    results = run_folder.read_results(folder)
    if results is None or config.test and "held_out_last" in results:  # all but the test is done
        return False
    saved, about = run_folder.read_config(folder)
    _require_same(config.differences(saved, data.world.size, about["processes"]), folder)
    data.check_fingerprint(about["data_fingerprint"], folder)
    return results["epochs"] >= config.epochs


def _require_same(changed: dict[str, str], source: Path) -> None:
    if changed:
        raise UsageError(
            f"{source} holds a run with other options ({'; '.join(changed.values())}): choose "
            "another --output, or continue it with the new options by --resume PATH"
        )


def begin_or_resume(trainer: Trainer, about: dict) -> None:
    """Load the checkpoint that --resume names or finds, write config.yaml.

    Raises:
        UsageError: the checkpoint does not fit, or a log cannot be opened; the folder is unchanged.
    """
    config = trainer.config
    folder = trainer.folder
    world = trainer.world
    found = checkpoint_to_resume(config, folder, world)
    branches_off = False
    if found is not None:
        path, state = found
        resume(trainer, path, state)
        is_own = path.parent == folder and _same_command(config, world, state)
        branches_off = config.resume != "auto" and not is_own
    trainer.progress.begin(about)
    if world.is_main:
        trainer.step_log = StepLog(folder, config, trainer.progress.updates)
        (folder / run_folder.RESULTS).unlink(missing_ok=True)  # only a complete run has it
        run_folder.write_config(
            folder, asdict(config), {**about, "starts": trainer.progress.starts}
        )
    if branches_off:
        take_best(trainer, path, state)
    world.barrier()


def checkpoint_to_resume(
    config: TrainConfig, folder: Path, world: World
) -> tuple[Path, dict] | None:
    """Return the path and state of the checkpoint that --resume names or finds.

    If the same command has begun a run from the named checkpoint before, that run continues from its own.

    Raises:
        UsageError: the named checkpoint cannot be read, or processes find different ones.
    """
    if config.resume == "none":
        return None
    named = config.resume != "auto"
    notices = world.is_main and not named
    with world.main_first():
        found = checkpoint.newest_checkpoint(folder, log.warning if notices else None)
    if named and found is not None and not _same_command(config, world, found[1]):
        found = None
    updates = world.gather(None if found is None else found[1]["progress"]["updates"])
    if len(set(updates)) > 1:
        raise UsageError(
            f"{folder} must be on a disk that all processes share: they find checkpoints after "
            f"updates {', '.join(map(str, updates))}"
        )
    return _named_checkpoint(Path(config.resume)) if named and found is None else found


def _same_command(config: TrainConfig, world: World, state: dict) -> bool:
    """Return whether a checkpoint's run has the same options, including --resume and --epochs."""
    saved = state["config"]
    same = config.resume == saved.get("resume") and config.epochs == saved["epochs"]
    return same and not config.differences(saved, world.size, state["world_size"])


def _named_checkpoint(path: Path) -> tuple[Path, dict]:
    """Return the path and state of a checkpoint, or of a run folder's.

    Raises:
        UsageError: it cannot be read.
    """
    if not path.is_dir():
        return path, checkpoint.read_run_state(path)
    found = checkpoint.newest_checkpoint(path)
    if found is None:
        raise UsageError(f"--resume {path}: no valid checkpoint in this folder")
    return found


def take_best(trainer: Trainer, path: Path, state: dict) -> None:
    """Write the best weights so far into the folder of a run that continues from the checkpoint `path`. All processes
    must call this.

    They are the checkpoint's own or those of best.ckpt beside it. If neither has them, the best epoch is chosen among
    those that follow.
    """
    progress = trainer.progress
    if trainer.world.is_main and progress.best_epoch:
        best = _best_state(path, state)
        if best is None:
            log.warning(
                "the weights of the best epoch so far, %d, are not beside %s: the best epoch is chosen anew",
                progress.best_epoch,
                path,
            )
            progress.best_epoch = 0
            progress.best_top1 = -1.0
        else:
            run_folder.write_weights(trainer.folder, best["ema"] or best["model"])
            atomic_write(trainer.folder / checkpoint.BEST, checkpoint.encode(best))
    of_main = trainer.world.gather((progress.best_epoch, progress.best_top1))[0]
    progress.best_epoch, progress.best_top1 = of_main


def _best_state(path: Path, state: dict) -> dict | None:
    """Return the state of the best epoch so far of a checkpoint's run: the checkpoint itself, best.ckpt beside it, or
    None."""
    wanted = state["progress"]
    best = path.with_name(checkpoint.BEST)
    states = [state]
    if best.is_file():
        with suppress(checkpoint.DamagedCheckpoint):
            states.append(checkpoint.read_run_state(best))
    for found in states:
        progress = found["progress"]
        at_its_end = progress["epoch"] == wanted["best_epoch"] and not progress["step"]
        if at_its_end and progress["best_top1"] == wanted["best_top1"]:
            return found
    return None


def resume(trainer: Trainer, path: Path, state: dict) -> None:
    """Continue from a checkpoint.

    Raises:
        UsageError: the checkpoint has other options (with --resume auto) or other data, or --epochs cannot be reached
            from it.
    """
    config = trainer.config
    changes = config.differences(state["config"], trainer.world.size, state["world_size"])
    if config.resume == "auto":
        _require_same(changes, path)
    order = [changes[name] for name in ("seed", "total_batch") if name in changes]
    if order and state["progress"]["step"]:
        raise UsageError(
            f"{path} lies inside an epoch, whose order this would change: {'; '.join(order)}"
        )
    for change in changes.values():
        log.warning("continuing with a changed option: %s", change)
    trainer.data.check_fingerprint(state["data_fingerprint"], path)
    trainer.load(state, path)
    progress = trainer.progress
    epochs = state["config"]["epochs"]
    if epochs < progress.epoch < epochs + 1 and config.epochs > epochs:
        raise UsageError(
            f"{path} stands at the end of a run of {epochs:g} epochs, inside an epoch, so "
            f"more cannot be added: epochs must be {epochs:g}, got {config.epochs:g}"
        )
    evaluated = not progress.rows or not math.isnan(progress.rows[-1][trainer.measures[0]])
    if progress.epoch >= trainer.total_epochs and not evaluated:
        raise UsageError(
            f"{path} stands after epoch {progress.epoch}, which --eval-epochs left out, so "
            f"--epochs must be more than {progress.epoch}, got {config.epochs}"
        )
    if epochs != config.epochs:
        log.warning(
            "epochs were %s, now %s: the learning rate follows the new length",
            epochs,
            config.epochs,
        )
    log.info("resumed from %s: epoch %d, update %d", path, progress.epoch, progress.updates)


# ---- the end ----------------------------------------------------------------------------------------------------


def finish(trainer: Trainer, about: dict) -> None:
    """Test the best and the last weights, each image once; write results.json, which marks the run complete.

    With --no-test the test images are not used, and the results are those on the images held out.
    """
    config = trainer.config
    progress = trainer.progress
    folder = trainer.folder
    data = trainer.data
    tested = config.test and data.eval_split == "held_out"
    split = "test" if tested else data.eval_split
    last = best = _final_figures(trainer, progress.rows[-1], tested)
    if 0 < progress.best_epoch < len(progress.rows):
        trainer.best_model.load_state_dict(read_weights(folder / run_folder.WEIGHTS))
        best = _final_figures(trainer, progress.rows[progress.best_epoch - 1], tested)
    if trainer.world.is_main:
        results = {
            "model": config.model,
            "epochs": config.epochs,
            "eval_split": data.eval_split,
            f"{split}_images": len(data.test if tested else data.evaluated),
            f"{split}_last": _without_nan(last),
            f"{split}_best": _without_nan(best),
            "hardware": about["hardware"],
        }
        write_json(folder / run_folder.RESULTS, results)
        trainer.step_log.close()
    trainer.world.barrier()
    held_out = split == "held_out"
    log.info(
        "%s: best weights (epoch %d) %s, last weights %s",
        f"{trainer.quality} on images held out" if held_out else f"test {trainer.quality}",
        progress.best_epoch,
        trainer.text_of(best),
        trainer.text_of(last),
    )
    measure = trainer.measures[0]
    evaluated = [row for row in progress.rows if not math.isnan(row[measure])]
    if data.eval_split == "test" and len(evaluated) > 1:
        log.info(
            "the best epoch was chosen by the images that it is evaluated on: quote the last "
            "weights%s",
            ", or hold images out (--holdout)" if hasattr(config, "holdout") else "",
        )
    seconds = sum(row["seconds"] for row in progress.rows)
    log.info("run folder: %s, %d updates in %s", folder, progress.updates, duration(seconds))


def _final_figures(trainer: Trainer, row: dict[str, float], tested: bool) -> dict[str, float]:
    """Return an epoch's measures. If `tested`, return the loaded weights' measures on the test images instead, and the
    first measure on the images held out."""
    figures = {"epoch": row["epoch"]}
    for measure in trainer.measures:
        figures[measure] = row[measure]
    if not tested:
        return figures
    data = trainer.data
    first = trainer.measures[0]
    loader = data.test_loader(**data.loader_keywords(trainer.model))
    result = trainer.evaluate(
        trainer.best_model, loader, len(data.classes), trainer.world, trainer.config
    )
    return figures | {f"held_out_{first}": row[first], **result.figures()}


def _without_nan(figures: dict[str, float]) -> dict[str, float | None]:
    """Return rounded figures for JSON, which has no nan: AP of large objects becomes None if there are none."""
    shown = {}
    for name, value in figures.items():
        shown[name] = None if math.isnan(value) else round(value, 4)
    return shown
