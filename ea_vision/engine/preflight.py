"""What can be known before the first step: memory and pace. Problems are errors, the rest a few lines to read."""

import copy
import logging
import time

import torch
from torch import nn

from ea_vision.base.errors import UsageError
from ea_vision.base.networks import REFUSALS
from ea_vision.base.units import duration, memory_size
from ea_vision.engine.config import TrainConfig, load_recipe, resolve
from ea_vision.engine.evaluate import autocast
from ea_vision.engine.train import Trainer

log = logging.getLogger(__name__)
TRIAL_IMAGES_ON_CPU = 8


def describe_update(config: TrainConfig, processes: int, has_norms: bool = False) -> str:
    """Return, for a line of the log, how so many processes make an update, its peak learning rate, and where the recipe
    means another number of images, or BatchNorm (`has_norms`) other batches."""
    images, accum = config.images_of_update(processes), config.grad_accum_steps
    said = (
        f"{images} images = {config.batch_size} x {processes} processes"
        f"{f' x {accum} batches' if accum > 1 else ''}, peak learning rate {config.peak_lr(images):g}"
    )
    recipe = load_recipe(config.recipe)
    total, batch = recipe.get("total_batch") or images, recipe.get("batch_size", config.batch_size)
    if total != images:
        meant = resolve(type(config), {"recipe": config.recipe}).peak_lr(total)
        said += f"; recipe {config.recipe} means {total} images, rate {meant:g}"
    if has_norms and batch != config.batch_size and not config.sync_bn:
        said += f"; BatchNorm sees {config.batch_size} images a process, the recipe's has {batch}"
    return said


def trial_step(trainer: Trainer) -> float:
    """Make training steps on noise with a copy of the model, by which nothing of the run is changed.

    Returns:
        Seconds per batch, computation alone.

    Raises:
        UsageError: the batch does not fit into the device's memory, or the model refuses it.
    """
    config, device, size = trainer.config, trainer.world.device, trainer.config.img_size
    on_gpu = device.type == "cuda"
    count = config.batch_size if on_gpu else min(config.batch_size, TRIAL_IMAGES_ON_CPU)
    with torch.random.fork_rng([device] if on_gpu else []):
        trial = copy.deepcopy(trainer.model).train()
        images = torch.randn(count, 3, size, size, device=device)
        if config.channels_last:
            images = images.contiguous(memory_format=torch.channels_last)
        if on_gpu:
            torch.cuda.reset_peak_memory_stats(device)
        try:
            for _ in range(
                3 if on_gpu else 2
            ):  # the last is timed: the first ones build kernels and choose algorithms
                start = time.perf_counter()
                with autocast(config.amp, device):
                    loss = trainer.loss_on_noise(trial, images)
                loss.backward()
                loss.item()
            seconds = time.perf_counter() - start
        except torch.OutOfMemoryError as error:
            raise UsageError(
                f"a batch of {count} images of {size} pixels does not fit into the memory of {device} "
                f"({memory_size(torch.cuda.get_device_properties(device).total_memory)}): lower "
                "--batch-size (with --total-batch more batches are added up), or set "
                "--grad-checkpointing or --amp"
            ) from error
        except REFUSALS as error:
            raise UsageError(
                f"model {config.model} cannot be trained on batches of {count} images of {size} "
                f"pixels: {error}"
            ) from error
    return seconds * config.batch_size / count


def preflight(trainer: Trainer) -> None:
    """Check memory and pace, and log what the run is going to be.

    Raises:
        UsageError: something does not fit.
    """
    model, config, data, world = trainer.model, trainer.config, trainer.data, trainer.world
    seconds = trial_step(trainer)
    norms = any(isinstance(module, nn.modules.batchnorm._BatchNorm) for module in model.modules())
    split = data.eval_split.replace("_", " ")
    where = "CPU"
    if world.device.type == "cuda":
        where = (
            f"{torch.cuda.get_device_name(world.device)}, "
            f"{memory_size(torch.cuda.max_memory_allocated(world.device))} used each"
        )
    for name, said in {
        "run": f"{trainer.folder}, seed {config.seed}",
        "data": f"{len(data.train)} training images, {len(data.evaluated)} to evaluate on ({split}), "
        f"{len(data.classes)} classes",
        "model": f"{config.model}, {sum(p.numel() for p in model.parameters()):,} parameters, {config.img_size} pixels",
        "processes": f"{world.size} on {where}",
        "update": describe_update(config, world.size, norms),
        "time": f"about {duration(seconds * len(trainer.train_loader) * config.epochs)} for "
        f"{trainer.total_updates} updates, {trainer.updates_per_epoch} an epoch (computation alone, from one "
        "batch)",
    }.items():
        log.info("%-11s %s", name, said)
