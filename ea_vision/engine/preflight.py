"""What can be known before the first step: memory, disk, pace. Problems are errors, the rest a few lines to read."""

from __future__ import annotations

import copy
import dataclasses
import logging
import shutil
import time
from collections.abc import Callable
from pathlib import Path

import psutil
import torch
import torch.nn.functional as F
from torch import nn

from ea_vision.base.errors import UsageError
from ea_vision.base.networks import REFUSALS, lay_out
from ea_vision.base.processes import World
from ea_vision.base.units import counted, duration, memory_size
from ea_vision.engine.config import TrainConfig, load_recipe
from ea_vision.engine.evaluate import autocast

log = logging.getLogger(__name__)
TRIAL_IMAGES_ON_CPU = 8


def available_memory() -> int:
    """Return bytes of main memory that are free for new processes."""
    return psutil.virtual_memory().available


def checkpoint_bytes(model: nn.Module, config: TrainConfig) -> int:
    """Return the bytes that a run folder grows to, at most: three checkpoints, one being written, weights."""
    weights = sum(t.numel() * t.element_size() for t in model.state_dict().values())
    averages = sum(p.numel() * 4 for p in model.parameters())  # momentum; Adam's second one is counted with the rest
    copies = weights + 2 * averages + (weights if config.model_ema_decay else 0)
    return 4 * copies + 2 * weights


def check_disk(folder: Path, needed: int) -> int:
    """Return the free bytes where `folder` is, or will be; raise UsageError where they are fewer than `needed`."""
    place = next(place for place in (folder.absolute(), *folder.absolute().parents) if place.exists())
    free = shutil.disk_usage(place).free
    if free < needed:
        raise UsageError(f"checkpoints need {memory_size(needed)} in {folder}, {memory_size(free)} are free")
    return free


def loss_on_noise(model: nn.Module, images: torch.Tensor) -> torch.Tensor:
    """Return a classifier's loss on images (B, 3, H, W), all of the first class."""
    return F.cross_entropy(model(images).float(), torch.zeros(len(images), dtype=torch.int64, device=images.device))


def describe_update(config: TrainConfig, processes: int) -> str:
    """Return how so many processes make an update, and its peak learning rate, for a line of the log."""
    images, accum = config.images_of_update(processes), config.grad_accum_steps
    return (f"{images} images = {config.batch_size} x {processes} processes"
            f"{f' x {accum} batches' if accum > 1 else ''}, peak learning rate {config.peak_lr(images):g}")


def other_than_recipe(config: TrainConfig, processes: int) -> str:
    """Return the end of that line where the recipe means another number of images; else nothing."""
    recipe = {} if config.recipe == "none" else load_recipe(config.recipe)
    wanted = recipe.get("total_batch", 0)
    if not wanted or wanted == config.images_of_update(processes):
        return ""
    base, rate = recipe.get("lr_base_size", 0), recipe.get("lr", config.lr)
    meant = dataclasses.replace(config, lr=rate, lr_base_size=base, min_lr=0.0).peak_lr(wanted)
    return f"; recipe {config.recipe} means {wanted} images, rate {meant:g}"


def norms_of_batches(model: nn.Module, config: TrainConfig) -> str:
    """Return the end of that line where BatchNorm sees other batches than the recipe's authors had; else nothing."""
    authors = {} if config.recipe == "none" else load_recipe(config.recipe)
    if authors.get("batch_size", config.batch_size) == config.batch_size or config.sync_bn or not any(
            isinstance(module, nn.modules.batchnorm._BatchNorm) for module in model.modules()):
        return ""
    return f"; BatchNorm sees {config.batch_size} images a process, the recipe's has {authors['batch_size']}"


def trial_step(model: nn.Module, config: TrainConfig, img_size: int, device: torch.device,
               loss_of: Callable[[nn.Module, torch.Tensor], torch.Tensor] = loss_on_noise) -> tuple[float, int]:
    """Make training steps on noise with a copy of the model; nothing of the run is changed by it.

    loss_of: the loss of a model and images.

    Returns:
        Seconds per batch, computation alone, and the peak device memory in bytes (0 on a CPU).

    Raises:
        UsageError: the batch does not fit into the device's memory, or the model refuses it.
    """
    on_gpu = device.type == "cuda"
    count = config.batch_size if on_gpu else min(config.batch_size, TRIAL_IMAGES_ON_CPU)
    with torch.random.fork_rng([device] if on_gpu else []):
        trial = copy.deepcopy(model).train()
        memory_format = torch.channels_last if config.channels_last else torch.contiguous_format
        lay_out(trial, memory_format)
        images = torch.randn(count, 3, img_size, img_size, device=device).contiguous(memory_format=memory_format)
        if on_gpu:
            torch.cuda.reset_peak_memory_stats(device)
        try:
            for _ in range(3 if on_gpu else 2):  # the last is timed: the first ones build kernels and choose algorithms
                start = time.perf_counter()
                with autocast(config.amp, device):
                    loss = loss_of(trial, images)
                loss.backward()
                loss.item()
            seconds = time.perf_counter() - start
        except torch.OutOfMemoryError as error:
            raise UsageError(f"a batch of {count} images of {img_size} pixels does not fit into the memory of {device} "
                             f"({memory_size(torch.cuda.get_device_properties(device).total_memory)}): lower "
                             "--batch-size (with --total-batch more batches are added up), or set "
                             "--grad-checkpointing or --amp") from error
        except REFUSALS as error:
            raise UsageError(f"model {config.model} cannot be trained on batches of {count} images of {img_size} "
                             f"pixels: {error}") from error
    peak = torch.cuda.max_memory_allocated(device) if on_gpu else 0
    return seconds * config.batch_size / count, peak


def preflight(model: nn.Module, config: TrainConfig, *, folder: Path, world: World, batches: int, train_images: int,
              eval_images: int, classes: int, ahead: int,
              loss_of: Callable[[nn.Module, torch.Tensor], torch.Tensor]) -> None:
    """Check memory, disk and pace, and log what the run is going to be.

    Args:
        batches: of one process and epoch. ahead: batches that one process keeps ready in main memory.
        loss_of: as `trial_step` takes it.

    Raises:
        UsageError: something does not fit.
    """
    img_size, needed = config.img_size, checkpoint_bytes(model, config)
    free = check_disk(folder, needed)
    buffers = ahead * config.batch_size * 3 * img_size**2
    if buffers > available_memory():
        raise UsageError(f"{ahead} batches kept ready (workers x 2) need {memory_size(buffers)}, "
                         f"{memory_size(available_memory())} are free: lower --workers or --batch-size")
    seconds, peak = trial_step(model, config, img_size, world.device, loss_of)
    where = torch.cuda.get_device_name(world.device) if world.device.type == "cuda" else "CPU"
    log.info("data        %d training images, %d for evaluation, %d classes", train_images, eval_images, classes)
    log.info("model       %s, %.1fM parameters, %d pixels", config.model,
             sum(p.numel() for p in model.parameters()) / 1e6, img_size)
    log.info("processes   %d on %s%s", world.size, where, f", {memory_size(peak)} used each" if peak else "")
    log.info("update      %s%s%s", describe_update(config, world.size), other_than_recipe(config, world.size),
             norms_of_batches(model, config))
    log.info("disk        up to %s for checkpoints in %s, %s free", memory_size(needed), folder, memory_size(free))
    log.info("time        about %s for %s of %d updates (computation alone, from one batch)",
             duration(seconds * batches * config.epochs), counted(config.epochs, "epoch"),
             batches // config.grad_accum_steps)
