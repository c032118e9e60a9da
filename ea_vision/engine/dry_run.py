"""--dry-run: what a run is going to take, from a rehearsal of its parts; nothing of it is kept.

The parts are the run's own: updates on its images at each of their sizes, its evaluation, its checkpoint. Each is done
for some seconds, by all processes together, and multiplied by how often the run does it. What the first batch of an
epoch waits for (workers that start) is taken apart from what each further update takes.
"""

from __future__ import annotations

import logging
import math
import os
import tempfile
import time
from collections import Counter
from contextlib import closing, nullcontext
from dataclasses import dataclass
from itertools import islice
from pathlib import Path

import torch

from ea_vision.base.process_tree import PeakMemory
from ea_vision.base.processes import World
from ea_vision.base.units import counted, duration, memory_size
from ea_vision.engine import checkpoint, run_folder
from ea_vision.engine.preflight import describe_update, other_than_recipe
from ea_vision.engine.train import Trainer

log = logging.getLogger(__name__)
SECONDS = 20.0  # of each part, at most
FEWEST = 3  # updates or batches of each part, where there are so many
ROW_BYTES = 250  # of an epoch, in each checkpoint and in the tables


@dataclass
class Estimate:
    """What the whole run takes on `processes` processes; memory on this machine, times from its own speed."""

    processes: int
    seconds: float
    updates: int  # of an epoch
    update_seconds: dict[int, float]  # by side of the images in pixels
    epoch_start_seconds: float
    eval_seconds: float  # of one evaluation
    save_seconds: float  # of one checkpoint
    images_per_s: float  # of one process, while it trains, mean over the epochs
    loader_images_per_s: float  # of one process that does nothing else; nan: the epoch was too short to tell
    main_memory: int  # bytes, of all processes of this machine and their workers
    device_memory: int  # bytes, of one process; 0 on a CPU
    disk: int  # bytes of the finished run folder
    disk_peak: int  # bytes, while a checkpoint is written


class _First:
    """The first batches of a loader."""

    def __init__(self, loader, count: int):
        self.loader, self.count = loader, count
        self.source = getattr(loader, "source", None)  # what detections are compared with

    def batches(self):
        with closing(self.loader.batches()) as batches:
            yield from islice(batches, self.count)


def _sides(trainer: Trainer) -> Counter:
    """How many epochs have images of which side, in pixels; each with the first epoch of that side."""
    size_of = getattr(trainer.config, "size_of", None) or (lambda epoch: trainer.config.img_size)
    return Counter(size_of(epoch) for epoch in range(trainer.total_epochs))


def _slowest(world: World, value: float) -> float:
    return max(world.gather(value))


def _updates(trainer: Trainer, epoch: int) -> tuple[float, float, float]:
    """Rehearse an epoch: seconds to its first batch, seconds of an update after the first ones, and images per second
    of the loader alone (nan where the epoch is too short)."""
    config, world = trainer.config, trainer.world
    accum, available = config.grad_accum_steps, trainer.updates_per_epoch
    trainer.net.train()
    start = time.perf_counter()
    with closing(trainer.train_loader.batches(epoch, 0)) as source:
        def update() -> None:
            batches = [next(source) for _ in range(accum)]
            trainer.bad_images.new.clear()  # the run itself counts and lists them
            trainer._update(batches)
            check(trainer.results_after)

        def check(under_way: int = 0) -> None:
            for result in trainer.results.collect(under_way):
                fault = trainer.fault_of(result)
                if fault is not None:
                    raise fault

        batches = [next(source) for _ in range(accum)]
        waited = time.perf_counter() - start
        trainer.bad_images.new.clear()
        trainer._update(batches)
        check()
        done, first = 1, time.perf_counter()
        if available > 2:  # the second one shows the pace; a GPU has chosen its algorithms by then
            update()
            check()
            pace = _slowest(world, time.perf_counter() - first)
            done = 2
            first = time.perf_counter()
            wanted = min(available - done, max(FEWEST, math.ceil(SECONDS / max(pace, 1e-6))))
            for _ in range(wanted):
                update()
            check()
            done += wanted
            seconds = (time.perf_counter() - first) / wanted
        else:
            seconds = (time.perf_counter() - start) / done
        left = (available - done) * accum
        ready = 2 * max(config.workers, 1)  # batches that were made while updates ran
        alone = math.nan
        if left > ready:
            for _ in islice(source, ready):
                pass
            begun, images = time.perf_counter(), 0
            for batch in islice(source, left - ready):
                images += len(batch[0])
                if time.perf_counter() - begun > SECONDS / 2:
                    break
            alone = images / (time.perf_counter() - begun)
        trainer.bad_images.new.clear()
    return _slowest(world, waited), _slowest(world, seconds), alone


def _evaluation(trainer: Trainer) -> float:
    """Seconds of a whole evaluation, from its first batches."""
    config, world, batches = trainer.config, trainer.world, len(trainer.eval_loader)

    def timed(count: int) -> float:
        begun = time.perf_counter()
        trainer.evaluate(trainer.best_model, _First(trainer.eval_loader, count), trainer.num_classes, world, config)
        trainer.bad_images.new.clear()
        return _slowest(world, time.perf_counter() - begun)

    one = timed(1)
    if batches == 1:
        return one
    several = min(batches, max(FEWEST, math.ceil(SECONDS / max(one, 1e-6))))
    took = timed(several)
    if several == batches:
        return took
    return took + (batches - several) * max(took - one, 0.0) / (several - 1)


def _checkpoint(trainer: Trainer) -> tuple[float, float, dict[str, int]]:
    """Seconds to save a checkpoint, and with the best weights; bytes of the files. What is written goes again."""
    world, own = trainer.world, trainer.folder
    place = own.absolute()
    while not place.exists():
        place = place.parent
    with tempfile.TemporaryDirectory(dir=place) if world.is_main else nullcontext(str(own)) as folder:
        trainer.folder = Path(folder)
        times = []
        for best in (True, False):
            begun = time.perf_counter()
            trainer.save(best)
            times.append(_slowest(world, time.perf_counter() - begun))
        sizes = {path.name: path.stat().st_size for path in trainer.folder.iterdir()} if world.is_main else {}
        trainer.folder = own
    return times[1], times[0], world.gather(sizes)[0]


def rehearse(trainer: Trainer, processes: int = 0) -> Estimate:
    """Measure the parts of a run with a trainer that has not begun, which cannot be used afterwards.

    Args:
        processes: for how many the estimate is, each as fast as those here; 0: those here.
    """
    config, world = trainer.config, trainer.world
    processes = processes or world.size
    sides = _sides(trainer)
    size_of = getattr(config, "size_of", None) or (lambda epoch: config.img_size)
    epochs = {size_of(epoch): epoch for epoch in reversed(range(trainer.total_epochs))}  # the first one of each side
    on_gpu = world.device.type == "cuda"
    update_seconds, starts, alone = {}, [], []
    with PeakMemory(0.2) as memory:
        if on_gpu:
            torch.cuda.reset_peak_memory_stats(world.device)
        for side in sorted(sides):
            waited, update_seconds[side], rate = _updates(trainer, epochs[side])
            starts.append(waited)
            alone.append(rate)
        eval_seconds = _evaluation(trainer)
        save_seconds, best_seconds, sizes = _checkpoint(trainer)
    images = len(trainer.train_loader) * config.batch_size * world.size  # of an epoch, up to a batch
    planned = config.for_processes(processes)
    updates = max(1, images // planned.images_of_update(processes))
    own = planned.images_of_update(1)  # of a process, in an update
    longer = own / config.images_of_update(1)
    count = trainer.total_epochs
    evaluations = math.ceil(count / config.eval_epochs) + (2 if trainer.eval_split == "held_out" else 0)
    saves = count * (1 + (updates - 1) // config.checkpoint_steps if config.checkpoint_steps else 1) + 1
    epoch_start = sum(starts) / len(starts)
    made = round(config.epochs * updates)
    update_seconds = {side: longer * seconds for side, seconds in update_seconds.items()}
    training = made * sum(epochs * update_seconds[side] for side, epochs in sides.items()) / count
    seconds = (training + count * epoch_start + evaluations * eval_seconds * world.size / processes
               + saves * save_seconds + count * max(best_seconds - save_seconds, 0.0))  # each epoch may be best
    rows = count * ROW_BYTES
    snapshots = count // config.snapshot_epochs if config.snapshot_epochs else 0
    disk = sum(sizes.values()) + snapshots * sizes[run_folder.WEIGHTS] + 5 * rows
    return Estimate(
        processes=processes, seconds=seconds, updates=updates, update_seconds=update_seconds,
        epoch_start_seconds=epoch_start, eval_seconds=eval_seconds, save_seconds=save_seconds,
        images_per_s=made * own / training, loader_images_per_s=min(alone),
        main_memory=sum(world.gather(memory.peak)),
        device_memory=torch.cuda.max_memory_reserved(world.device) if on_gpu else 0,
        disk=disk, disk_peak=disk + sizes[checkpoint.LAST] + rows)


def report(estimate: Estimate, trainer: Trainer, image_bytes: float = 0.0) -> None:
    """Log an estimate. image_bytes: of a stored training image on average; 0: they lie in memory."""
    config, world, found = trainer.config, trainer.world, estimate
    cores, workers = os.cpu_count() or 1, max(config.workers, 1)
    log.info("dry run     %d processes: %s = %s of %d updates of %s, an evaluation of %.3g s each",
             found.processes, duration(found.seconds), counted(config.epochs, "epoch"), found.updates,
             ", ".join(f"{seconds:.3g} s ({side} pixels)" for side, seconds in found.update_seconds.items()),
             found.eval_seconds)
    planned = config.for_processes(found.processes)
    log.info("update      %s%s", describe_update(planned, found.processes), other_than_recipe(planned, found.processes))
    if found.processes != world.size:
        gradients = sum(p.numel() for p in trainer.model.parameters()) * 4 / 2**20
        log.info("            each taken to be as fast as one of the %d here; averaging %.1f MiB of gradients in each "
                 "update comes on top", world.size, gradients)
    rate = found.loader_images_per_s
    alone = ("the epoch is too short to tell what its loader makes" if math.isnan(rate) else
             f"its loader alone makes {rate:.0f}, {rate / workers:.0f} with each of {workers} worker(s)")
    log.info("data        %.0f images/s in each process, %.0f for each of the %d cores here; %s", found.images_per_s,
             found.images_per_s * world.size / cores, cores, alone)
    if image_bytes:
        log.info("            %.1f MiB/s to be read by all %d processes",
                 image_bytes * found.images_per_s * found.processes / 2**20, found.processes)
    log.info("memory      %s of main memory for %d process(es) and their workers%s",
             memory_size(found.main_memory), world.size,
             f", {memory_size(found.device_memory)} on each GPU" if found.device_memory else "")
    log.info("disk        %s at the end, %s while a checkpoint is written", memory_size(found.disk),
             memory_size(found.disk_peak))
    log.info("nothing was written to %s", trainer.folder)
