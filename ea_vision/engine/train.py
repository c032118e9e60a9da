"""The training loop: updates, evaluation after each epoch, checkpoints, and what to do when something goes wrong.

Counting: an update is one change of the weights, from `grad_accum_steps` batches of every process; `progress.step`
counts the updates within the epoch. A run that was killed and continued makes the same updates as one that was not:
order and augmentation are functions of seed and epoch, and all random states are in the checkpoint.

An update does not wait for the device. Its results (loss, norm of the gradient, requests to stop, unreadable images)
stay there and are read every `Trainer.check_every` updates, with each row of the log, and before each checkpoint and
evaluation. So weights that a non-finite loss spoilt are never saved or evaluated.
"""

import copy
import dataclasses
import logging
import math
import time
from contextlib import closing, nullcontext
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from timm.utils import ModelEmaV3, distribute_bn
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from tqdm import tqdm

from ea_vision.base.devices import random_state, set_random_state
from ea_vision.base.errors import RunError, UsageError
from ea_vision.base.files import atomic_write, write_json
from ea_vision.base.processes import WorkerLost, mean_in_order, workers_watched
from ea_vision.base.units import duration
from ea_vision.engine import checkpoint, run_folder
from ea_vision.engine.data_module import DataModule
from ea_vision.engine.evaluate import NonFiniteLoss, percents
from ea_vision.engine.optimizer import build_optimizer, build_schedule, load_optimizer
from ea_vision.engine.signals import StopRequest
from ea_vision.engine.step_log import memory_mib, rounded
from ea_vision.engine.watch import MapsPictures, MapsWatch
from ea_vision.layers import learnable_gates
from ea_vision.models.modes import lay_out
from ea_vision.zoo.weights_file import load_state, non_finite

log = logging.getLogger(__name__)
LEAST_SCALE = 1e-4  # of float16 gradients, as fairseq's --min-loss-scale
LOOK_EVERY = 10  # updates between two readings of their results, on an accelerator
STARTED_BY = ("command", "hardware", "versions", "git_commit")
SIGTERM = 15


@dataclass
class Update:
    """An update of the weights whose results may still be on the device.

    values: (4,): mean loss, norm of the gradient, number of processes asked to stop, number of unreadable images.
    """

    step: int  # within the epoch
    rate: float  # learning rate
    ids: list[Tensor]  # this process's samples, by batch
    strict: bool  # whether an infinite gradient is an error
    values: Tensor


@dataclass
class Progress:
    """The progress of a run. Sums are over the current epoch and all processes."""

    epoch: int = 0  # complete epochs
    step: int = 0  # updates within the epoch
    updates: int = 0  # updates since the beginning
    loss_sum: float = 0.0  # of the updates' mean losses
    seconds: float = 0.0
    data_seconds: float = 0.0  # of these, waiting for images
    best_top1: float = -1.0  # best value of the trainer's first measure, top-1 or another
    best_epoch: int = 0
    rows: list[dict[str, float]] = field(default_factory=list)  # of metrics.csv
    # For each start: its first update, command, hardware, versions and commit.
    starts: list[dict] = field(default_factory=list)

    def begin(self, about: dict) -> None:
        """Record the command, hardware, versions and commit (of an `about` section) that make the next updates."""
        who = {name: copy.copy(about[name]) for name in STARTED_BY}
        # The updates of later starts are lost.
        self.starts = [start for start in self.starts if start["update"] <= self.updates]
        if not self.starts or self.starts[-1] | who != self.starts[-1]:
            self.starts.append({"update": self.updates + 1, **who})


def is_multiple(count: int, of: int) -> bool:
    """Return whether count is a multiple of `of`; False if `of` is 0."""
    return of > 0 and count % of == 0


def gates(model: nn.Module) -> dict[str, float]:
    """Return learnable gates (alpha and beta of evolutions) by their names in the state dict; a gate with one value per
    head becomes NAME[0], NAME[1]."""
    values = {}
    for name, gate in learnable_gates(model).items():
        if gate.ndim == 0:
            values[name] = gate.item()
            continue
        for number, value in enumerate(gate.detach().flatten().tolist()):
            values[f"{name}[{number}]"] = value
    return values


def buffers_of(model: nn.Module) -> dict[str, Tensor]:
    """Return copies, in main memory, of the buffers that a state dict holds: batch statistics."""
    saved = model.state_dict()
    return {name: saved[name].cpu() for name, _ in model.named_buffers() if name in saved}


@dataclass(eq=False, repr=False)
class Trainer:
    """A run: model, data and run folder, and everything a checkpoint holds.

    Attributes:
        data: the data module of the run, with its options and processes.
        model: on the device of the processes; an argument has its initial weights.
        train_loader: `batches(epoch, first)` yields this process's (images, targets, ids) from batch `first` on;
            `len()` is the number of batches in an epoch, the same for all processes.
        eval_loader: `batches()` yields the same of all batches, every image once over all processes.

    A subclass has:
        _batch_loss(images, targets): the mean loss of one batch, images (B, 3, H, W).
        loss_on_noise(model, images), static: a loss on images of noise, for the trial step before the run.
        evaluate(model, loader, num_classes, world, config, between=no_stop, tta="none"), static: a result over
            `loader.batches()` that has `figures()`; `between` is called before each batch.

    Class attributes:
        measures: names in the results' `figures()`, in percent: columns of metrics.csv. The best epoch is the one with
            the highest first measure.
        quality: what they measure, for messages.
        watches: whether its networks take images alone, so that their attention maps can be watched and give further
            columns of metrics.csv.

    `check_every` is the number of updates between two readings of their results; it is 1 on a CPU, where reading never
    waits. `best_model` is evaluated and exported: the averaged weights if there are any, else the model.
    """

    data: DataModule
    model: nn.Module
    train_loader: Any
    eval_loader: Any
    folder: Path
    stop: StopRequest

    measures = run_folder.MEASURES
    quality = "accuracy"
    watches = False

    def __post_init__(self):
        self.config = config = self.data.config
        self.world = world = self.data.world
        model = self.model
        self.watch = MapsWatch()
        self._count_updates()
        if config.sync_bn:
            if world.device.type != "cuda":
                raise UsageError(f"--sync-bn needs CUDA, got {world.device.type}")
            model = nn.SyncBatchNorm.convert_sync_batchnorm(model)
        if config.channels_last:
            model = lay_out(model, torch.channels_last)
        self.model = self.best_model = model
        self.net = self.eval_net = self._compiled(model)
        self.ema = None
        if config.model_ema_decay:
            self.ema = ModelEmaV3(
                model, decay=config.model_ema_decay, use_warmup=config.model_ema_warmup
            )
            self.best_model = self.eval_net = self.ema.module
        # Statistics that are averaged must be each process's own; a broadcast would replace them by the first one's.
        self.own_statistics = config.dist_bn == "reduce"
        if world.size > 1:
            self.net = self._parallel(self.net)
        self.images_of_update = config.images_of_update(world.size)
        self.optimizer = build_optimizer(config, model, self.images_of_update)
        self.scheduler = build_schedule(config, self.optimizer, self.updates_per_epoch)
        self.scaler = torch.amp.GradScaler(world.device.type, enabled=config.amp == "float16")
        self.progress = Progress()
        self.pictures: MapsPictures | None = None  # of --draw-maps
        self.columns: dict[str, float] = {}  # further ones of metrics.csv, the same in each row
        self.step_log = None  # a StepLog, once the run begins
        self.last_good = None  # path of a checkpoint, likewise
        self.check_every = 1 if world.device.type == "cpu" else LOOK_EVERY
        self.unchecked: list[Update] = []  # updates since the last `check`

    def _count_updates(self) -> None:
        """Set the numbers of updates of an epoch and of the run; raise UsageError if there is none."""
        config = self.config
        self.updates_per_epoch = len(self.train_loader) // config.grad_accum_steps
        self.total_updates = round(config.epochs * self.updates_per_epoch)
        if self.total_updates < 1:
            raise UsageError(
                f"epochs must cover at least one of the {self.updates_per_epoch} updates of an epoch, "
                f"got {config.epochs:g}"
            )
        # The last epoch may be incomplete.
        self.total_epochs = math.ceil(self.total_updates / self.updates_per_epoch)

    def _parallel(self, net: nn.Module) -> DistributedDataParallel:
        """Return the network wrapped in DistributedDataParallel, which averages gradients over the processes.

        static_graph is off: it fails if the first backward is in no_sync, and has no measurable benefit.
        DDP wraps the compiled model: torch then splits the graph at the boundaries of DDP's buckets, so that one bucket
        is averaged while backward computes the next (dynamo's optimize_ddp).
        """
        device = self.world.device
        parallel = DistributedDataParallel(
            net, None if device.index is None else [device], gradient_as_bucket_view=True
        )
        # the argument of this name is deprecated from torch 2.15 on, and older releases lack its successor
        parallel.broadcast_buffers = not self.own_statistics
        # With two processes the order of summation does not matter.
        if self.world.size > 2 and device.type == "cpu":
            parallel.register_comm_hook(None, mean_in_order)
        return parallel

    # ---- state ----------------------------------------------------------------------------------------------------

    def load(self, state: dict, source: Path) -> None:
        """Continue from a checkpoint's state.

        Raises:
            UsageError: its weights or its optimiser's state belong to another model.
        """
        averaged = state["ema"]
        if (averaged is None) != (self.ema is None):
            raise UsageError(
                f"{source} has {'no' if averaged is None else 'the'} averaged weights of "
                f"--model-ema-decay, got {self.config.model_ema_decay:g}"
            )
        load_state(self.model, state["model"], str(source))
        if averaged is not None:
            load_state(self.best_model, averaged, str(source))
        load_optimizer(
            self.optimizer, state["optimizer"], self.config, str(source), state["config"]
        )
        if state["scaler"]:  # a run in another precision has none
            self.scaler.load_state_dict(state["scaler"])
        if state["world_size"] == self.world.size:
            self._load_own(state)
        self.progress = Progress(**state["progress"])
        self.last_good = source
        # Restores the rate that the epoch's row reports.
        self.scheduler.step_update(max(self._place() - 1, 0))

    def _load_own(self, state: dict) -> None:
        """Load this process's own part of a state: random generators and, if processes differ, batch statistics."""
        rank = self.world.rank
        set_random_state(state["random"][rank], self.world.device)
        buffers = state.get("buffers")  # None if processes do not differ
        if buffers is None:
            return
        self.model.load_state_dict(buffers[rank]["model"], strict=False)
        self.best_model.load_state_dict(buffers[rank]["best_model"], strict=False)

    def save(self, best: bool = False, snapshot: bool = False) -> None:
        """Write the checkpoint; the one it replaces is kept if this start has read or written it: it may be damaged.
        All processes must call this.

        best, snapshot: also write the weights as the best ones, as a snapshot.

        The order matters: checkpoints are written after all files that belong to them, so that a resumed run repeats
        whatever a kill left undone.
        """
        random_states = self.world.gather(random_state(self.world.device))
        buffers = None  # all processes have the first one's
        if self.world.size > 1 and self.own_statistics:
            local = {"model": buffers_of(self.model), "best_model": buffers_of(self.best_model)}
            buffers = self.world.gather(local)
        last = self.folder / checkpoint.LAST
        is_good = self.last_good == last
        self.last_good = last
        if not self.world.is_main:
            return
        weights = self.best_model.state_dict()
        data = checkpoint.encode(
            {
                "config": dataclasses.asdict(self.config),
                "data_fingerprint": self.data.fingerprint,
                "world_size": self.world.size,
                "progress": dataclasses.asdict(self.progress),
                "random": random_states,
                "buffers": buffers,
                "ema": None if self.ema is None else weights,
                "model": self.model.state_dict(),
                "optimizer": self.optimizer.state_dict(),
                "scaler": self.scaler.state_dict(),
            }
        )
        run_folder.write_metrics(self.folder, self.progress.rows, self.measures)
        if snapshot:
            run_folder.write_snapshot(self.folder, weights, self.progress.epoch)
        if best:
            run_folder.write_weights(self.folder, weights)
            atomic_write(self.folder / checkpoint.BEST, data)
        previous = self.folder / checkpoint.PREVIOUS
        atomic_write(last, data, keep_previous_as=previous if is_good else None)

    # ---- what differs between tasks ----------------------------------------------------------------------------------

    def text_of(self, figures: dict[str, float]) -> str:
        """Write the measures among `figures`, for a line of the log."""
        return percents({name: figures[name] for name in self.measures})

    def _compiled(self, model: nn.Module) -> nn.Module:
        """Return the model, compiled if the options say so."""
        config = self.config
        if not config.compile:
            return model
        # A CUDA graph has one shape, so each shape is compiled separately.
        return self._compile(
            model, mode=config.compile_mode, dynamic=False if config.cuda_graphs else None
        )

    @staticmethod
    def _compile(model: nn.Module, **options: Any) -> nn.Module:
        """Return the compiled model; options are torch.compile's."""
        return torch.compile(model, **options)

    # ---- one update -----------------------------------------------------------------------------------------------

    def _update(self, batches: list) -> None:
        """Make one update from `grad_accum_steps` batches."""
        progress = self.progress
        self.scheduler.step_update(self._place())
        self.optimizer.zero_grad(set_to_none=True)
        loss = self._backward(batches)
        # One small sum over the processes: they all learn of a bad loss, a signal or a bad image in the same update.
        stops = torch.full_like(loss, self.stop.signal is not None)
        unread = torch.full_like(loss, len(self.data.bad_images.new))
        summed = self.world.sum(torch.stack([loss, stops, unread]))
        norm = self._step()
        progress.updates += 1
        progress.step += 1
        if self.ema is not None:
            self.ema.update(self.model, step=progress.updates)
        ends_epoch = progress.step == self.updates_in_epoch
        if ends_epoch and hasattr(self.optimizer, "sync_lookahead"):
            # Lookahead's slow weights are evaluated; this needs gradients, so it is done here.
            self.optimizer.sync_lookahead()
        # An overflow in float16 is not an error: the scaler lowers its scale.
        strict = not self.scaler.is_enabled() or self.scaler.get_scale() < LEAST_SCALE
        rate = self.optimizer.param_groups[0]["lr"]
        ids = [batch_ids for _, _, batch_ids in batches]
        values = torch.stack([summed[0] / self.world.size, norm.float(), summed[1], summed[2]])
        self.unchecked.append(Update(progress.step, rate, ids, strict, values))
        self.stop.deferred = True

    def _backward(self, batches: list) -> Tensor:
        """Add up the gradients of the batches; return their mean loss, on the device."""
        total = torch.zeros((), device=self.world.device)
        for number, (images, targets, _) in enumerate(batches, start=1):
            # Gradients are averaged over the processes with the last batch.
            waits = self.world.size > 1 and number < len(batches)
            if self.config.cuda_graphs:
                # The outputs of the last replay are no longer needed.
                torch.compiler.cudagraph_mark_step_begin()
            with self.net.no_sync() if waits else nullcontext():
                loss = self._batch_loss(images, targets) / len(batches)
                self.scaler.scale(loss).backward()
            total += loss.detach().float()
        return total

    def _step(self) -> Tensor:
        """Change the weights by their gradients; return the gradients' norm before clipping, on the device."""
        self.scaler.unscale_(self.optimizer)
        config = self.config
        trained = [p for p in self.model.parameters() if p.grad is not None]
        norm = nn.utils.get_total_norm([p.grad for p in trained])
        if config.clip_grad:
            nn.utils.clip_grads_with_norm_(trained, config.clip_grad, norm)
        self.scaler.step(self.optimizer)  # waits for the device in float16 only
        self.scaler.update()
        return norm

    # ---- results of updates ----------------------------------------------------------------------------------------

    def check(self, weights: bool = False) -> bool:
        """Read the results of the updates since the last call; return whether a process was asked to stop. All
        processes must call this after the same update.

        weights: also check that weights and buffers (batch statistics) are finite: steps and statistics can overflow
            while losses and gradients do not. This is always checked if a process was asked to stop.

        Raises:
            NonFiniteLoss: a loss, a gradient or a weight is not finite.
            RunError: more images cannot be read than are allowed.
        """
        unchecked = self.unchecked
        self.unchecked = []
        values = torch.stack([update.values for update in unchecked]).tolist()
        if any(unread for _, _, _, unread in values):
            self.data.bad_images.collect(self.world, self.folder)
        for update, (loss, norm, _, _) in zip(unchecked, values, strict=True):
            self.loss = loss
            self.progress.loss_sum += loss
            if not math.isfinite(loss):
                raise self._reported("the loss of", f"is {loss}", update)
            if update.strict and not math.isfinite(norm):
                raise self._reported("the norm of the gradient of", f"is {norm}", update)
        stops = any(stopped for _, _, stopped, _ in values)
        if weights or stops:
            self._check_weights(unchecked[-1])
        return stops

    def _check_weights(self, update: Update) -> None:
        """Raise NonFiniteLoss on every process if any of them has a weight or statistic that is not finite."""
        spoilt = non_finite(self.model.state_dict())
        if self.ema is not None:
            averaged = non_finite(self.best_model.state_dict())
            spoilt += [f"averaged {name}" for name in averaged]
        everywhere = sum(self.world.gather(spoilt), [])  # statistics differ between processes
        if everywhere:
            raise self._reported("a weight is not finite after", f"({everywhere[0]})", update)

    def _reported(self, before: str, after: str, update: Update) -> NonFiniteLoss:
        """Write a file with the samples that every process had in an update; return the error that names the file."""
        everywhere = self.world.gather(torch.cat(update.ids).tolist())
        epoch = self.progress.epoch + 1
        path = self.folder / f"nonfinite-epoch{epoch:03d}-update{update.step:05d}.json"
        error = NonFiniteLoss(
            f"{before} update {update.step} of epoch {epoch} {after}; its samples are in {path}"
        )
        if self.world.is_main:
            names = [list(map(self.data.describe, ids)) for ids in everywhere]
            report = {
                "error": str(error),
                "epoch": epoch,
                "update": update.step,
                "lr": update.rate,
                "last_good_checkpoint": str(self.last_good),
                "sample_ids": everywhere,
                "samples": names,
            }
            write_json(path, report)
        self.world.barrier()  # a process that leaves ends the others, so all wait until the report is written
        return error

    # ---- epochs ---------------------------------------------------------------------------------------------------

    @property
    def updates_in_epoch(self) -> int:
        """The number of updates in the current epoch; a fraction in --epochs shortens the last one."""
        left = self.total_updates - self.progress.epoch * self.updates_per_epoch
        return min(self.updates_per_epoch, left)

    def _place(self) -> int:
        """Return how many updates of this run's batch size lead here, which sets the learning rate. If the run began
        with another batch size, this differs from the updates that were made."""
        return self.progress.epoch * self.updates_per_epoch + self.progress.step

    def train_epoch(self) -> None:
        """Make the remaining updates of the current epoch."""
        config = self.config
        progress = self.progress
        self._train_mode()
        self._logged = copy.copy(progress)
        source = self.train_loader.batches(progress.epoch, progress.step * config.grad_accum_steps)
        updates = self.updates_in_epoch
        bar = tqdm(
            total=updates,
            initial=progress.step,
            desc=f"epoch {progress.epoch + 1}",
            leave=False,
            disable=None if self.world.is_main else True,
            unit="step",
        )
        with bar, closing(source):  # worker processes stay for the next epoch
            while progress.step < updates:
                start = time.perf_counter()
                batches = [next(source) for _ in range(config.grad_accum_steps)]
                progress.data_seconds += time.perf_counter() - start
                self._update(batches)
                done = progress.step == updates
                due = done or is_multiple(progress.step, config.checkpoint_steps)
                logged = is_multiple(progress.step, config.log_steps)
                logged |= done and config.log_steps > 0
                # Several processes learn of a signal together, from `check`.
                stop = self.world.size == 1 and self.stop.signal is not None
                if stop or due or logged or is_multiple(progress.step, self.check_every):
                    stop |= self.check(weights=due or stop)
                    bar.set_postfix(loss=f"{self.loss:.3f}", refresh=False)
                progress.seconds += time.perf_counter() - start
                bar.update()
                if logged:
                    self._log_step(done)
                if stop:
                    self._leave()
                if due and not done:
                    self.save()

    def _train_mode(self) -> None:
        """Set the network to training mode, except for frozen modules, so that their statistics stay the same, too."""
        self.net.train()
        for module in self.model.modules():
            trained = [parameter.requires_grad for parameter in module.parameters()]
            if trained and not any(trained):
                module.eval()

    def _log_step(self, done: bool) -> None:
        """Add a row to the step log. If the epoch is `done`, no line is logged, since the epoch has its own."""
        if self.step_log is None:
            return
        progress = self.progress
        before = self._logged
        self._logged = copy.copy(progress)
        seconds = progress.seconds - before.seconds
        images = (progress.step - before.step) * self.images_of_update
        waited = progress.data_seconds - before.data_seconds
        left = (self.total_updates - self._place()) * progress.seconds / progress.step
        row = {
            "step": progress.updates,
            "epoch": progress.epoch + progress.step / self.updates_per_epoch,
            "lr": self.optimizer.param_groups[0]["lr"],
            "train_loss": self.loss,
            "images_per_s": images / seconds,
            "data_wait_percent": 100 * waited / seconds,
            "memory_mib": memory_mib(self.world.device),
        }
        self.step_log.add(row, None if done else left)

    def finish_epoch(self) -> None:
        """Evaluate if that is due, add the epoch's row, save."""
        progress = self.progress
        start = time.perf_counter()
        number = progress.epoch + 1
        trained = progress.seconds
        if self.world.size > 1:  # batch statistics are each process's own until here
            distribute_bn(self.best_model, self.world.size, reduce=self.own_statistics)
        figures = self._evaluated(number)
        self.data.bad_images.collect(self.world, self.folder)
        row = {
            "epoch": number,
            "step": progress.updates,
            "lr": self.optimizer.param_groups[0]["lr"],
            "train_loss": progress.loss_sum / progress.step,
            **figures,
            "images_per_s": progress.step * self.images_of_update / trained,
            "seconds": trained + time.perf_counter() - start,
            **self.columns,
            **gates(self.best_model),
        }
        row = rounded(row)
        picture = None
        if self.pictures is not None and self.world.is_main:
            picture = self.pictures.draw(self.best_model, self.config.model, number)
        measured = row[self.measures[0]]
        best = measured > progress.best_top1
        if best:
            progress.best_top1 = measured
            progress.best_epoch = number
        progress.rows.append(row)
        progress.epoch = number
        progress.step = 0
        progress.loss_sum = progress.seconds = progress.data_seconds = 0.0
        self.save(best, snapshot=is_multiple(number, self.config.snapshot_epochs))
        if self.step_log is not None:
            self.step_log.send("epoch", row)
            if picture is not None:
                self.step_log.send_maps(picture, row["step"])
        self._log_epoch(row)

    def _evaluated(self, number: int) -> dict[str, float]:
        """Evaluate after epoch `number` if that is due; return the loss and the measures, nan if the epoch is not
        evaluated, and the columns of attention maps."""
        figures = dict.fromkeys(("eval_loss", *self.measures), math.nan)
        if number % self.config.eval_epochs and number != self.total_epochs:
            return figures
        result = self.evaluate(
            self.eval_net,
            self.eval_loader,
            len(self.data.classes),
            self.world,
            self.config,
            between=self._leave_if_asked,
        )
        figures["eval_loss"] = getattr(result, "loss", math.nan)
        figures.update(result.figures())
        if self.watches and self.world.is_main and len(result.sample):
            figures.update(self.watch(self.eval_net, result.sample))
        return figures

    def _log_epoch(self, row: dict[str, float]) -> None:
        """Log one line with the epoch's results."""
        progress = self.progress
        seconds = [other["seconds"] for other in progress.rows]
        left = (self.total_epochs - progress.epoch) * sum(seconds) / len(seconds)
        best = f"best {progress.best_top1:.2f}%, epoch {progress.best_epoch}"
        if math.isnan(row[self.measures[0]]):
            best = "not evaluated"
        elif progress.best_epoch == progress.epoch:
            best = "best so far"
        parts = (
            f"epoch {progress.epoch}/{self.total_epochs}",
            f"training loss {row['train_loss']:.4f}",
            "" if math.isnan(row["eval_loss"]) else f"evaluation loss {row['eval_loss']:.4f}",
            self.text_of(row),
            best,
            f"lr {row['lr']:.3g}",
            f"{row['images_per_s']:.0f} images/s",
            f"{row['seconds']:.1f} s",
            f"{duration(left)} left" if left else "",
        )
        log.info("  ".join(filter(None, parts)))

    def fit(self) -> None:
        """Train until `config.epochs` epochs are complete.

        Raises:
            RunError: stopped by a signal (code 128 + signal), a non-finite loss, a full disk, lack of memory, or the
                end of a process that decodes images.
        """
        if self.last_good != self.folder / checkpoint.LAST:
            self.save()  # fails now if the folder cannot be written
        while self.progress.epoch < self.total_epochs:
            try:
                with workers_watched(RuntimeError):
                    self.train_epoch()
                    self.finish_epoch()
            except (NonFiniteLoss, WorkerLost) as error:
                raise RunError(f"{error}; last good checkpoint: {self.last_good}") from error
            except (torch.OutOfMemoryError, MemoryError) as error:
                what = str(error).partition("\n")[0] or "main memory"
                raise RunError(
                    f"out of memory in update {self.progress.step + 1} of epoch "
                    f"{self.progress.epoch + 1} ({what}): a smaller --batch-size with "
                    f"--total-batch {self.images_of_update} adds up more batches, "
                    "--grad-checkpointing and --amp need less; last good checkpoint: "
                    f"{self.last_good}"
                ) from error

    def _leave_if_asked(self) -> None:
        """Leave if any process was asked to stop; all processes must call this together."""
        requests = torch.tensor(float(self.stop.signal is not None), device=self.world.device)
        if self.world.sum(requests).item():
            self._leave()

    def _leave(self) -> None:
        """Save, and end the run because of a signal."""
        self.save()
        self.world.barrier()  # a process that leaves ends the others, so all wait until the checkpoint is written
        number = self.stop.signal or SIGTERM
        raise RunError(
            f"stopped by signal {number} after update {self.progress.step} of epoch "
            f"{self.progress.epoch + 1}; saved {self.last_good}",
            128 + number,
        )
