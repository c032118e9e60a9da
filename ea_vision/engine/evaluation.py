"""Evaluate a run, a file of weights, or a model by its name, on a trainer's test images: --evaluate."""

import re
from contextlib import closing
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from ea_vision.base.errors import UsageError
from ea_vision.base.files import check_writable
from ea_vision.base.processes import join_world
from ea_vision.base.provenance import provenance
from ea_vision.engine.config import resolve, trainer_of
from ea_vision.engine.data_module import DataModule
from ea_vision.engine.step_log import log_to_stdout
from ea_vision.models.modes import lay_out
from ea_vision.zoo.create import DATA_KEYWORDS, load_network
from ea_vision.zoo.source import CONFIG, Source, source_of


def evaluate_target(module: type[DataModule], target: str, given: dict) -> None:
    """Evaluate a run, a file of weights, or a model by its name; `given` are options of the command line.

    Raises:
        UsageError: `target` names none of these, or options, data and network do not fit together.
    """
    source = source_of(target)
    config = options_of(module.options, source, given)
    source.check_kind(module.kind)
    if source.weights is None:
        kwargs = {**source.kwargs, **config.model_kwargs}
        source = replace(source, kwargs=kwargs, pretrained=True)
    with join_world(config.device, config.dist_timeout) as world:
        log_to_stdout(world.rank)
        data = module(config, world, training=False)
        data.check()
        model, _ = load_network(source)
        data.take_network(model, source.note, target)
        name = re.sub(r"[/\\:]", "_", target)
        folder = source.run / "evaluation" if source.is_run else Path("runs", f"evaluation-{name}")
        output = Path(config.output or folder)
        check_writable(output)
        model.to(world.device)
        if config.channels_last:
            lay_out(model, torch.channels_last)
        if not source.options:
            data.follow(model, given)
        loader = data.eval_loader(**data.loader_keywords(model))
        tta = getattr(config, "tta", "none")  # an option of classifiers
        with closing(loader):
            result = module.trainer.evaluate(
                model, loader, model.num_classes, world, config, tta=tta
            )
        if world.is_main:
            about = {
                "target": target,
                "model": config.model,
                **data.about,
                "amp": config.amp,
                "data_fingerprint": data.fingerprint,
                **provenance(),
            }
            written = data.write_evaluation(output, result, about)
            print(result.line())
            print("written:", *written)
        data.bad_images.collect(world, output)


def options_of(schema: type, source: Source, given: dict) -> Any:
    """Return the options of an evaluation: those of the command line, else the run's or the weights' own.

    Args:
        schema: the trainer's config class.
        given: options of the command line.

    Raises:
        UsageError: the run or the weights are another trainer's, or the options do not fit the source.
    """
    target = source.target
    trainer = trainer_of([*source.options, *source.note])
    if trainer and trainer != trainer_of(schema.rules()):
        origin = "these weights" if source.run is None else "this run"
        raise UsageError(
            f"--evaluate {target} needs the trainer of {origin}: ea-vision {trainer} --evaluate {target}"
        )
    options = {"model": source.name, **source.options}
    if source.run is not None:
        options.setdefault("model_kwargs", {})
    elif source.weights is not None:
        kwargs = {key: value for key, value in source.kwargs.items() if key not in DATA_KEYWORDS}
        options.setdefault("model_kwargs", kwargs)
        if "img_size" in source.kwargs:  # all that some weights say
            options.setdefault("img_size", source.kwargs["img_size"])
    for key in options.keys() & {"model", "model_kwargs"}:
        if given.get(key, options[key]) != options[key]:
            flag = f"--{key}".replace("_", "-")
            raise UsageError(
                f"--evaluate {target} has {key} {options[key]!r}, got {flag} {given[key]!r}"
            )
    if source.run is not None:
        options = {"recipe": str(source.run / CONFIG)}
    config = resolve(schema, {**options, **given})
    begins_with = given.get("pretrained_path")
    if source.weights is None:
        begins_with = config.pretrained_path  # perhaps the recipe's
    if begins_with:
        raise UsageError(
            f"--evaluate takes a file of weights itself, got {target} and --pretrained-path {begins_with}"
        )
    return config
