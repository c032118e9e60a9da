"""The command of a trainer: from its options and data module to a complete run folder.

`put_together` builds a run in the same way for all trainers: model, loaders, training loop, checks before the first
step. Then the run begins or resumes (`engine.resume`), trains, and is tested.
"""

import copy
import logging
import math
import os
import socket
import sys
from argparse import SUPPRESS
from contextlib import closing
from dataclasses import asdict
from pathlib import Path
from types import SimpleNamespace

import torch
from timm.utils import random_seed
from torch import nn

from ea_vision.base.devices import choose_device, device_named
from ea_vision.base.errors import RunError, UsageError, as_usage_error, near_matches
from ea_vision.base.files import atomic_write, check_writable, write_json
from ea_vision.base.processes import World, join_world, workers_watched
from ea_vision.base.provenance import hardware, provenance
from ea_vision.base.units import duration
from ea_vision.engine import checkpoint, run_folder
from ea_vision.engine.config import TrainConfig, make_parser, parse, resolve
from ea_vision.engine.data_module import DataModule
from ea_vision.engine.evaluate import json_numbers
from ea_vision.engine.evaluation import evaluate_target
from ea_vision.engine.optimizer import check_optimizer_name
from ea_vision.engine.preflight import preflight
from ea_vision.engine.resume import begin_or_resume, is_complete
from ea_vision.engine.signals import StoppedAtOnce, StopRequest
from ea_vision.engine.step_log import log_to_stdout
from ea_vision.engine.train import Trainer
from ea_vision.zoo.source import check_model_name, source_of
from ea_vision.zoo.weights_file import read_weights

log = logging.getLogger(__name__)
# Options that may differ between nodes: paths, and the number of workers.
OWN_OF_A_NODE = (
    "data_dir",
    "train_beton",
    "val_beton",
    "output",
    "pretrained_path",
    "teacher",
    "workers",
    "recipe",
)


def main(module: type[DataModule], argv: list[str] | None = None) -> int:
    """Run the command of a trainer."""
    every = "--help-all" in (sys.argv if argv is None else argv)
    parser = make_parser(module.options, module.description, module.examples, every)
    modes = parser.add_argument_group("instead of training")
    modes.add_argument(
        "--evaluate",
        metavar="RUN|FILE|MODEL",
        help="test a run's best weights, a file of weights, or a model by name with its pretrained "
        "ones; report into --output (default: RUN/evaluation or runs/evaluation-NAME)",
    )
    about_check = "check that the options fit together and the data exists, and end"
    modes.add_argument(
        "--check-options", action="store_true", help=about_check if every else SUPPRESS
    )
    given = parse(parser, argv)
    target = given.pop("evaluate", None)
    only_checked = given.pop("check_options", False)
    if target is not None:
        if not target:  # a shell's variable without a value
            raise UsageError(
                "--evaluate needs a run folder, a file of weights or a model, got an empty text"
            )
        with workers_watched(RuntimeError):
            evaluate_target(module, target, given)
        return 0
    config = resolve(module.options, given)
    check_names(module, config)
    check_beginning(config, folder_of(module, config))
    if only_checked:
        log_to_stdout(0)
        choose_device(config.device)
        module.check_places(config)
        check_network(module, config)
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
    stop = StopRequest()
    try:
        with stop, join_world(config.device, config.dist_timeout) as world:
            stop.deferred = world.size > 1  # several processes leave together, after an update
            log_to_stdout(world.rank)
            check_writable(folder)
            with run_folder.locked(folder, world):
                _train(module, config, folder, world, stop)
    except StoppedAtOnce:
        raise RunError(
            f"stopped by signal {stop.signal} before an update of this start; nothing is lost, the "
            "same command goes on",
            128 + stop.signal,
        ) from None


def _train(
    module: type[DataModule], config: TrainConfig, folder: Path, world: World, stop: StopRequest
) -> None:
    """Train in `folder` as one process of `world`."""
    log.info("recipe      %s", config.recipe)
    module.check_places(config)
    data = module(config.for_processes(world.size), world, training=True)
    data.check()
    if is_complete(folder, data):
        log.info("%s is complete", folder)
        return
    trainer, about = put_together(data, folder, stop)
    with closing(trainer.train_loader), closing(trainer.eval_loader):
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
    train_loader = data.train_loader(**{**keywords, "batch_size": config.batch_size})
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


# ---- before a run -----------------------------------------------------------------------------------------------


def folder_of(module: type[DataModule], config: TrainConfig) -> Path:
    """Return the run folder of these options."""
    return Path(config.output or module.default_output.format(**vars(config)))


def check_names(module: type[DataModule], config: TrainConfig) -> None:
    """Raise UsageError for an unknown device, model or optimiser, or for a keyword that a classifier lacks."""
    device_named(config.device)
    check_model_name(config.model)
    check_optimizer_name(config.opt)
    if module.trainer.watches and config.model_kwargs:  # a classifier
        check_keywords(module, config)


def check_beginning(config: TrainConfig, folder: Path) -> None:
    """Raise UsageError if the weights, the teacher or the checkpoint with which a run begins do not exist. A stopped
    run creates its network with these weights again; a complete run needs none of them."""
    weights = config.pretrained_path
    complete = os.path.exists(folder / run_folder.RESULTS)
    if weights and not complete and not os.path.exists(weights):
        raise UsageError(f"--pretrained-path {weights} does not exist")
    if getattr(config, "teacher", "") and not complete:
        source_of(config.teacher).check_kind()
    source = config.resume
    if source in ("auto", "none") or os.path.exists(folder / run_folder.CONFIG):
        return
    if not os.path.exists(source):
        raise UsageError(f"--resume must be auto, none or a path, and {source} does not exist")
    holds_one = any(os.path.exists(Path(source, name)) for name in checkpoint.NAMES)
    if os.path.isdir(source) and not holds_one:
        raise UsageError(f"--resume {source}: no checkpoint in this folder")


def without_data(module: type[DataModule], config: TrainConfig) -> nn.Module:
    """Return the network without its weights, and perhaps with other classes than the data's, which are not read."""
    config = copy.copy(config)
    config.pretrained = False
    config.pretrained_path = ""
    count = getattr(config, "num_classes", 0) or config.model_kwargs.get("num_classes", 2)
    classes = [""] * (count if isinstance(count, int) else 2)
    model, _ = module.create_model(SimpleNamespace(config=config, classes=classes))
    return model


def check_keywords(module: type[DataModule], config: TrainConfig) -> None:
    """Raise UsageError for a keyword that the model lacks, before data is opened, which may take minutes."""
    try:
        with torch.device("meta"):
            without_data(module, config)
    except UsageError as error:
        # refused values are reported later, when the classes are known, and from the real device
        if "has no keyword" in str(error):
            raise


def check_network(module: type[DataModule], config: TrainConfig) -> None:
    """Raise UsageError for values that the network refuses, and for parts to freeze that it lacks."""
    try:
        with torch.device("meta"):
            model = without_data(module, config)
    except (RuntimeError, ValueError):  # some networks read values of tensors while they are built
        model = without_data(module, config)
    freeze(model, config)
    if config.grad_checkpointing:
        enable_checkpointing(model, config.model)


def enable_checkpointing(model: nn.Module, name: str) -> None:
    """Turn on gradient checkpointing; raise UsageError if the model does not support it."""
    problem = f"--grad-checkpointing needs a model that supports it, {name} does not"
    with as_usage_error(problem, (AttributeError, AssertionError, NotImplementedError)):
        model.set_grad_checkpointing(True)


def freeze(model: nn.Module, config: TrainConfig) -> None:
    """Freeze the modules and parameters that --freeze names; with --linear-probe freeze all but the classifier.

    Raises:
        UsageError: the model has no module or parameter of a name.
    """
    for name in filter(None, config.freeze.split(",")):
        matches = False
        for path, parameter in model.named_parameters():
            if f"{path}.".startswith(f"{name}."):
                parameter.requires_grad = False
                matches = True
        if not matches:
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


# ---- the end ----------------------------------------------------------------------------------------------------


def finish(trainer: Trainer, about: dict) -> None:
    """Test the best and the last weights, each image once; write model.md, and results.json, which marks the run
    complete.

    With --no-test the test images are not used, and the results are those on the images held out.
    """
    # the hub's library, which takes long to import
    from ea_vision.engine.card import card_of

    config = trainer.config
    progress = trainer.progress
    folder = trainer.folder
    data = trainer.data
    tested = config.test and data.eval_split == "held_out"
    split = "test" if tested else data.eval_split
    images = "images held out" if split == "held_out" else "images to evaluate on"
    if tested:
        images = "test images"
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
            f"{split}_last": json_numbers(last),
            f"{split}_best": json_numbers(best),
            "tta": "none",
            "hardware": about["hardware"],
        }
        card = card_of(trainer, about, best, f"{results[f'{split}_images']} {images}")
        atomic_write(folder / run_folder.CARD, card.encode("utf-8", "surrogateescape"))
        write_json(folder / run_folder.RESULTS, results)
        trainer.step_log.close()
    trainer.world.barrier()
    log.info(
        "%s on %s: best weights (epoch %d) %s, last weights %s",
        trainer.quality,
        images if split == "held_out" else f"the {images}",
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
    figures = {name: row[name] for name in ("epoch", *trainer.measures)}
    if not tested:
        return figures
    data = trainer.data
    first = trainer.measures[0]
    loader = data.test_loader(**data.loader_keywords(trainer.model))
    with closing(loader):
        result = trainer.evaluate(
            trainer.best_model, loader, len(data.classes), trainer.world, trainer.config
        )
    return figures | {f"held_out_{first}": row[first], **result.figures()}
