"""Checks before the first step: memory and speed. Problems raise errors, the rest are a few lines of the log."""

import copy
import logging
import time

import torch

from ea_vision.base import devices
from ea_vision.base.errors import as_usage_error
from ea_vision.base.units import duration
from ea_vision.engine.evaluate import autocast
from ea_vision.engine.train import Trainer

log = logging.getLogger(__name__)
TRIAL_IMAGES_ON_CPU = 8


def trial_step(trainer: Trainer) -> float:
    """Make training steps on noise with a copy of the model; the run does not change.

    Returns:
        Seconds per batch, computation alone.

    Raises:
        UsageError: the batch does not fit into the device's memory, or the model refuses it.
    """
    config = trainer.config
    device = trainer.world.device
    side = config.img_size
    on_cpu = device.type == "cpu"
    count = min(config.batch_size, TRIAL_IMAGES_ON_CPU) if on_cpu else config.batch_size
    batches = f"batches of {count} images of {side} pixels"
    too_large = (
        f"{batches} do not fit into the memory of {device} (lower --batch-size, with --total-batch "
        f"{trainer.images_of_update} more batches are added up; or set --grad-checkpointing or --amp)"
    )
    refused = as_usage_error(f"model {config.model} cannot be trained on {batches}")
    fits = as_usage_error(too_large, torch.OutOfMemoryError)
    with devices.random_state_kept(device), refused, fits:
        model = copy.deepcopy(trainer.model).train()
        images = torch.randn(count, 3, side, side, device=device)
        if config.channels_last:
            images = images.contiguous(memory_format=torch.channels_last)
        # the last step is timed, since the first ones build kernels and choose algorithms
        for _ in range(2 if on_cpu else 3):
            start = time.perf_counter()
            with autocast(config.amp, device):
                loss = trainer.loss_on_noise(model, images)
            loss.backward()
            loss.item()
        seconds = time.perf_counter() - start
    return seconds * config.batch_size / count


def preflight(trainer: Trainer) -> None:
    """Check memory and speed, and log a description of the run.

    Raises:
        UsageError: something does not fit.
    """
    model = trainer.model
    config = trainer.config
    data = trainer.data
    world = trainer.world
    seconds = trial_step(trainer)
    whole = duration(seconds * len(trainer.train_loader) * config.epochs)
    parameters = sum(p.numel() for p in model.parameters())
    held_out = ", held out" if data.eval_split == "held_out" else ""
    lines = {
        "run": f"{trainer.folder}, seed {config.seed}",
        "data": f"{len(data.train)} training images{left_out(trainer)}, "
        f"{len(data.evaluated)} to evaluate on{held_out}, {len(data.classes)} classes",
        "model": f"{config.model}, {parameters:,} parameters, {config.img_size} pixels",
        "processes": f"{world.size} on {devices.device_name(world.device)}",
        "update": f"{trainer.images_of_update} images = {config.batch_size} x {config.grad_accum_steps} "
        f"batches x {world.size} processes, peak learning rate {config.peak_lr(trainer.images_of_update):g}",
        "time": f"about {whole} for {trainer.total_updates} updates, {trainer.updates_per_epoch} per epoch "
        "(computation alone, from one batch)",
    }
    for name, text in lines.items():
        log.info("%-11s %s", name, text)
    fused = any(getattr(module, "fused_attn", False) for module in model.modules())  # timm's layers
    if world.device.type == "cpu" and config.amp == "bfloat16" and fused:
        log.warning(
            "bfloat16 on a CPU makes torch's fused attention slower (1.5 to 2.5 times, "
            "measured): --amp none"
        )


def left_out(trainer: Trainer) -> str:
    """Return how many images an epoch leaves out, for the log; "" if that is at most one in a hundred."""
    images = len(trainer.data.train)
    count = images - trainer.updates_per_epoch * trainer.images_of_update
    if 100 * count <= images:
        return ""
    return f" (an epoch leaves out {count}, others each time)"
