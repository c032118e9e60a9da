"""The training loop: updates, evaluation after each epoch, checkpoints, and what to do when something goes wrong.

Counting: an update is one change of the weights, from `grad_accum_steps` batches of every process; `progress.step`
counts the updates within the epoch. A run that was killed and continued makes the same updates as one that was not:
order and augmentation are functions of seed and epoch, and all random states are in the checkpoint.

The host gives the device one update after the other and never waits for the one that is computing: it reads the result
of an update (its loss, whether a process was asked to stop) `Trainer.results_after` updates later, at the end of an
epoch and before each checkpoint and row of the log at once. A loss or gradient that is not finite therefore stops the
run before spoilt weights are saved or evaluated. With `--on-nan skip` the host waits for each gradient, and leaves an
update out before it changes a weight.
"""

from __future__ import annotations

import copy
import dataclasses
import logging
import math
import time
from collections.abc import Callable, Mapping
from contextlib import closing, nullcontext
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, ClassVar

import torch
from timm.utils import ModelEmaV3, distribute_bn
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from tqdm import tqdm

from ea_vision.base.errors import RunError, UsageError
from ea_vision.base.files import atomic_write, write_json
from ea_vision.base.networks import check_state_fits, lay_out, non_finite
from ea_vision.base.processes import World
from ea_vision.data.bad_images import BadImages
from ea_vision.engine import checkpoint, run_folder
from ea_vision.engine.config import TrainConfig
from ea_vision.engine.evaluate import NonFiniteLoss
from ea_vision.engine.gates import by_gate, gate_values
from ea_vision.engine.optimizer import build_optimizer, build_schedule, hyperparameters, load_optimizer
from ea_vision.engine.signals import StopRequest
from ea_vision.engine.step_log import StepLog, memory_mib
from ea_vision.engine.step_results import StepResult, StepResults

log = logging.getLogger(__name__)
MAX_SKIPPED = 20
LEAST_SCALE = 1e-4  # of float16 gradients, as fairseq's --min-loss-scale


@dataclass
class Progress:
    """Where a run stands. Sums are over the current epoch and all processes."""

    epoch: int = 0  # complete epochs
    step: int = 0  # updates within the epoch
    updates: int = 0  # updates since the beginning
    loss_sum: float = 0.0  # sum of the losses of the images
    images: int = 0
    seconds: float = 0.0
    data_seconds: float = 0.0  # of these, waiting for images
    best_top1: float = -1.0  # of the trainer's first measure, top-1 or another
    best_epoch: int = 0
    skipped: int = 0  # updates that were left out for their loss or gradient
    rows: list[dict[str, float]] = field(default_factory=list)  # of metrics.csv
    gates: list[dict[str, float]] = field(default_factory=list)  # of gates.csv
    starts: list[dict[str, Any]] = field(default_factory=list)  # from which update on, under which commit and hardware

    def begin(self, run: dict[str, Any]) -> None:
        """Note who makes the updates from here on: the `run` section's command, hardware, versions and commit."""
        who = {key: run[key] for key in ("command", "hardware", "versions", "git_commit")}
        who = copy.deepcopy(who)  # what config.yaml shares with `run` it would write as references of YAML
        while self.starts and self.starts[-1]["update"] > self.updates:  # made no update that is left
            self.starts.pop()
        if not self.starts or {**self.starts[-1], **who} != self.starts[-1]:
            self.starts.append({"update": self.updates + 1, **who})

    def begin_epoch(self) -> None:
        self.step, self.loss_sum, self.images, self.seconds, self.data_seconds = 0, 0.0, 0, 0.0, 0.0


class Trainer:
    """A run: model, data and run folder, and everything a checkpoint holds.

    Args:
        model: on the device of `world`, with its initial weights.
        train_loader: `batches(epoch, first)` yields this process's (images, targets, ids) from batch `first` on;
            `len()` is the batches of an epoch, the same for all processes.
        eval_loader: same, all batches, every image once over all processes.
        num_classes: of the targets.
        data_fingerprint: goes into checkpoints, so that a run is not continued on other data.
        describe: sample id -> text, for the report on a non-finite loss.
        bad_images: where the loaders put what they cannot read, if they go on without it.
        step_log: where rows between the epochs go, on the first process.
        eval_split: of which images the eval_loader is, for messages: test, held_out, train.

    A subclass may have another loss (`_batch_loss`, `loss_on_noise`), and another `evaluate` with other measures.

    Class attributes:
        measures: what `evaluate`'s results give by `figures()`, in percent: columns of metrics.csv. The best epoch is
            that with the highest first one.
        quality: what they measure, for messages.
        results_after: updates after which the host reads the result of one.
    """

    measures: ClassVar[tuple[str, ...]] = run_folder.MEASURES
    quality: ClassVar[str] = "accuracy"
    results_after: ClassVar[int] = 4
    cuda_graphs = False  # whether the compiled model is replayed as CUDA graphs, where there is CUDA

    def __init__(self, config: TrainConfig, model: nn.Module, train_loader, eval_loader, *, num_classes: int,
                 world: World, folder: Path, stop: StopRequest, data_fingerprint: str, describe,
                 bad_images: BadImages | None = None, step_log: StepLog | None = None, eval_split: str = "test"):
        self.config, self.world, self.folder, self.stop = config, world, folder, stop
        self.eval_split = eval_split
        self.data_fingerprint, self.describe = data_fingerprint, describe
        self.bad_images, self.step_log = bad_images or BadImages(limit=0), step_log
        self.after_epoch: Callable[[nn.Module, int, int], None] | None = None  # of a network, epochs and updates
        self.train_loader, self.eval_loader, self.num_classes = train_loader, eval_loader, num_classes
        self.updates_per_epoch = len(train_loader) // config.grad_accum_steps
        if self.updates_per_epoch < 1:
            raise UsageError(f"an update needs {config.images_of_update(world.size)} training "
                             f"images (batch_size x grad_accum_steps x processes), and the data set has fewer")
        self.total_updates = round(config.epochs * self.updates_per_epoch)
        self.total_epochs = math.ceil(self.total_updates / self.updates_per_epoch)  # the last may be a part
        if self.total_updates < 1:
            raise UsageError(f"epochs must be enough for an update, of which an epoch has {self.updates_per_epoch}, "
                             f"got {config.epochs:g}")
        if config.warmup_updates(self.updates_per_epoch) > self.total_updates:
            raise UsageError(f"warmup_epochs must be at most the {config.epochs:g} epochs of the run, got "
                             f"{config.warmup_epochs:g}; --warmup-epochs 20% is a fifth of them")
        if config.sync_bn and world.device.type != "cuda":
            raise UsageError(f"--sync-bn needs CUDA, got {world.device.type}")
        if config.sync_bn:
            model = nn.SyncBatchNorm.convert_sync_batchnorm(model)
        if config.channels_last:
            model = lay_out(model, torch.channels_last)
        self.model = model
        self.eval_net = self.net = self._compiled(model)
        self.ema = None
        if config.model_ema_decay:
            self.ema = ModelEmaV3(model, decay=config.model_ema_decay, use_warmup=config.model_ema_warmup)
        if world.size > 1:
            # Not with static_graph: it fails where the first backward is in no_sync, and brings nothing measurable.
            # Around the compiled model: what is compiled inside DDP's forward torch splits at the borders of its
            # buckets, so that each is averaged while backward goes on with the next (dynamo's optimize_ddp).
            self.net = DistributedDataParallel(self.net, [world.device.index] if world.device.type == "cuda" else None,
                                               gradient_as_bucket_view=True)
        self.optimizer = build_optimizer(config, model, config.images_of_update(world.size))
        self.scheduler = build_schedule(config, self.optimizer, self.updates_per_epoch)
        self.begun = hyperparameters(self.optimizer)
        self.scaler = torch.amp.GradScaler(world.device.type, enabled=config.amp == "float16")
        self.results = StepResults()
        self._collected = 0  # bad images were, after this update
        self.progress = Progress()
        self.last_good: Path | None = None

    # ---- state ----------------------------------------------------------------------------------------------------

    @property
    def best_model(self) -> nn.Module:
        """The model that is evaluated and exported: the averaged weights where they are on."""
        return self.ema.module if self.ema is not None else self.model

    def state(self) -> dict[str, Any] | None:
        """All that resuming needs; None on all processes but the first."""
        random_states = self.world.gather(checkpoint.random_state(self.world.device))
        if not self.world.is_main:
            return None
        return {
            "config": self.config.as_dict(),
            "data_fingerprint": self.data_fingerprint,
            "world_size": self.world.size,
            "progress": dataclasses.asdict(self.progress),
            "model": self.model.state_dict(),
            "ema": self.ema.module.state_dict() if self.ema is not None else None,
            "optimizer": self.optimizer.state_dict(),
            "optimizer_began_as": self.begun,
            "scheduler": self.scheduler.state_dict(),
            "scaler": self.scaler.state_dict(),
            "random": random_states,
        }

    def load(self, state: dict[str, Any], source: Path) -> None:
        """Continue from a checkpoint's state.

        Raises:
            UsageError: its weights are another model's, or it lies inside an epoch of other batches.
        """
        try:
            saved = Progress(**state["progress"])
        except TypeError as error:
            raise UsageError(f"{source} is not a checkpoint of this trainer: {error}") from error
        config, own = state["config"], self.config.images_of_update(self.world.size)
        images = config.get("batch_size", 0) * config.get("grad_accum_steps", 1) * state["world_size"]
        if saved.step and (images, config.get("seed")) != (own, self.config.seed):
            raise UsageError(f"{source} lies inside an epoch, so images of an update and seed must be {images} and "
                             f"{config.get('seed')}, got {own} and {self.config.seed}")
        check_state_fits(self.model, state["model"], str(source))
        if (state["ema"] is None) != (self.ema is None):
            raise UsageError(f"{source} has {'no' if state['ema'] is None else 'the'} averaged weights of "
                             f"--model-ema-decay, got {self.config.model_ema_decay:g}")
        self.model.load_state_dict(state["model"])
        if self.ema is not None:
            check_state_fits(self.ema.module, state["ema"], str(source))
            self.ema.module.load_state_dict(state["ema"])
        load_optimizer(self.optimizer, state["optimizer"], state.get("optimizer_began_as"), self.config.opt,
                       str(source))
        try:
            self.scaler.load_state_dict(state["scaler"])
            if state["world_size"] == self.world.size:
                checkpoint.set_random_state(state["random"][self.world.rank], self.world.device)
        except (KeyError, IndexError, TypeError, ValueError, RuntimeError) as error:
            raise UsageError(f"{source} is not a checkpoint of this trainer: its random or scaler state does not fit "
                             f"({error!r})") from error
        self.progress = saved
        self.last_good = source
        self.scheduler.step_update(max(saved.updates - 1, 0))  # the rate that the epoch's row names

    def save(self, best: bool = False, snapshot: bool = False) -> None:
        """Write the checkpoint; the one it replaces is kept. All processes must call this.

        best, snapshot: write the weights as such, too.

        The order matters: the checkpoints come after everything that belongs to them, so that whatever a kill leaves
        undone is done again by the run that continues.
        """
        state = self.state()
        self.last_good = self.folder / checkpoint.LAST
        if state is None:
            return
        data = checkpoint.encode(state)
        run_folder.write_metrics(self.folder, self.progress.rows, self.measures)
        if self.progress.gates:
            run_folder.write_gates(self.folder, self.progress.gates)
        if snapshot:
            run_folder.write_snapshot(self.folder, self.best_model.state_dict(), self.progress.epoch,
                                      self.config.checkpoint_hist)
        if best:
            run_folder.write_weights(self.folder, self.best_model.state_dict())
            atomic_write(self.folder / checkpoint.BEST, data)
        atomic_write(self.last_good, data, keep_previous_as=self.folder / checkpoint.PREVIOUS)

    # ---- what differs between tasks ----------------------------------------------------------------------------------

    @staticmethod
    def loss_on_noise(model: nn.Module, images: torch.Tensor) -> torch.Tensor:
        """Return a loss on images of noise, for the trial step before the run."""
        raise NotImplementedError

    @staticmethod
    def evaluate(model: nn.Module, loader, num_classes: int, world: World, config: TrainConfig, *,
                 should_stop: Callable[[], bool] | None = None, tta: str = "none"):
        """Evaluate over `loader.batches()`; the result has `figures()`. Returns None where `should_stop` said so."""
        raise NotImplementedError

    @classmethod
    def text_of(cls, figures: Mapping[str, float], between: str = "  ") -> str:
        """The measures among `figures` that are numbers, for a line of the log."""
        return between.join(f"{name} {figures[name]:.2f}%" for name in cls.measures if not math.isnan(figures[name]))

    # ---- one update -----------------------------------------------------------------------------------------------

    def _batch_loss(self, images: torch.Tensor, targets: Any) -> torch.Tensor:
        """Return the mean loss of one batch, images (B, 3, H, W)."""
        raise NotImplementedError

    def _compiled(self, model: nn.Module) -> nn.Module:
        """Return what runs the model in training."""
        return model

    def _update(self, batches: list) -> None:
        """Make one update from `grad_accum_steps` batches; its result goes to `self.results`.

        With `--on-nan skip` an update whose mean loss over all processes or gradient is not finite changes no weights,
        statistics, averages or state of the optimiser. It counts all the same in the schedule.
        """
        progress, size, skips = self.progress, self.world.size, self.config.on_nan == "skip"
        self.scheduler.step_update(progress.updates)
        buffers = [(buffer, buffer.clone()) for buffer in self.model.buffers()] if skips else []
        self.optimizer.zero_grad(set_to_none=True)
        total = torch.zeros((), device=self.world.device)
        for index, (images, targets, _) in enumerate(batches):
            wait = size > 1 and index < len(batches) - 1  # gradients are averaged with the last batch
            if self.cuda_graphs:
                torch.compiler.cudagraph_mark_step_begin()  # what the last replay left is not needed any more
            with self.net.no_sync() if wait else nullcontext():
                loss = self._batch_loss(images, targets) / len(batches)
                self.scaler.scale(loss).backward()
            total += loss.detach().float()
        # One small sum over the processes: they all learn of a bad loss, a signal or a bad image in the same update.
        summed = self.world.sum(torch.stack([total, torch.full_like(total, self.stop.signal is not None),
                                             torch.full_like(total, len(self.bad_images.new))]))
        self.scaler.unscale_(self.optimizer)
        norm = self._gradient_norm()
        progress.updates += 1
        progress.step += 1
        if skips and not (summed[0].isfinite() & norm.isfinite()).item():
            for buffer, before in buffers:
                buffer.copy_(before)
        else:
            self.scaler.step(self.optimizer)  # of float16 alone it waits for the device
            if self.ema is not None:
                self.ema.update(self.model, step=progress.updates)
        self.scaler.update()
        if progress.step == self.updates_in(progress.epoch) and hasattr(self.optimizer, "sync_lookahead"):
            self.optimizer.sync_lookahead()  # the slow weights are those that are evaluated; here, as gradients exist
        summed[0] /= size
        rate, ids = self.optimizer.param_groups[0]["lr"], [ids for _, _, ids in batches]
        self.results.add(StepResult(progress.epoch, progress.step, progress.updates, rate, ids),
                         torch.cat([summed, norm[None]]))

    def _gradient_norm(self) -> torch.Tensor:
        """The norm of the whole gradient, float32 () on the device; the gradient is clipped where that is asked for."""
        if self.config.clip_grad:
            norm = nn.utils.clip_grad_norm_(self.model.parameters(), self.config.clip_grad)
        else:
            norm = nn.utils.get_total_norm([p.grad for p in self.model.parameters() if p.grad is not None])
        return norm.float()

    def fault_of(self, result: StepResult) -> NonFiniteLoss | None:
        """Return the error for a result that is not finite. An overflow in float16 is none: the scaler expects it, and
        lowers its scale, unless that is below `LEAST_SCALE` and the gradient is still not finite."""
        if not math.isfinite(result.loss):
            return NonFiniteLoss(f"the loss of {result.name} is {result.loss}")
        if math.isfinite(result.norm) or self.scaler.is_enabled() and self.scaler.get_scale() >= LEAST_SCALE:
            return None
        return NonFiniteLoss(f"the norm of the gradient of {result.name} is {result.norm}")

    def _check_weights(self, result: StepResult) -> None:
        """Raise NonFiniteLoss, on every process, for weights and buffers (batch statistics) no checkpoint should hold,
        after the update of `result`: steps and statistics can overflow where losses and gradients do not."""
        spoilt = non_finite(self.model.state_dict())
        if self.ema is not None:
            spoilt += [f"averaged {name}" for name in non_finite(self.ema.module.state_dict())]
        everywhere = [name for of_rank in self.world.gather(spoilt) for name in of_rank]  # statistics differ by rank
        if everywhere:
            error = NonFiniteLoss(f"a weight is not finite after {result.name}: {everywhere[0]}")
            self._report_non_finite(error, result)
            raise error

    # ---- epochs ---------------------------------------------------------------------------------------------------

    def updates_in(self, epoch: int) -> int:
        """Return the updates of an epoch, counted from 0; a fraction in --epochs makes the last one shorter."""
        return min(self.updates_per_epoch, max(self.total_updates - epoch * self.updates_per_epoch, 0))

    def train_epoch(self) -> None:
        """Make the updates of the current epoch that are still to make."""
        config, progress = self.config, self.progress
        self.net.train()
        self._logged = (progress.images, progress.seconds, progress.data_seconds)
        accum = config.grad_accum_steps
        source = self.train_loader.batches(progress.epoch, progress.step * accum)
        updates = self.updates_in(progress.epoch)
        bar = tqdm(total=updates, initial=progress.step, desc=f"epoch {progress.epoch + 1}", leave=False,
                   disable=None if self.world.is_main else True, unit="step")
        with bar, closing(source):  # ends the loader's processes and threads, whatever happens
            while progress.step < updates:
                start = time.perf_counter()
                batches = [next(source) for _ in range(accum)]
                progress.data_seconds += time.perf_counter() - start
                self._update(batches)
                done = progress.step == updates
                due = config.checkpoint_steps and progress.step % config.checkpoint_steps == 0
                logged = self._log_is_due()
                stop = self.world.size == 1 and self.stop.signal is not None  # else all processes hear of it together
                results = self.results.collect(0 if stop or done or due or logged else self.results_after)
                if any(result.stop for result in results):
                    stop, results = True, results + self.results.collect()
                for result in results:
                    self._take_in(result)
                if stop or done or due:
                    self._check_weights(results[-1])
                progress.seconds += time.perf_counter() - start
                if results:
                    bar.set_postfix(loss=f"{results[-1].loss:.3f}", refresh=False)
                bar.update()
                if logged:
                    self._log_step(results[-1].loss)
                if stop:
                    self._leave()
                if due and not done:
                    self.save()

    def _take_in(self, result: StepResult) -> None:
        """Add an update to the epoch's figures. All processes do so after the same update.

        Raises:
            NonFiniteLoss: its loss or gradient is not finite, and it may not be left out.
        """
        progress = self.progress
        if result.unreadable and result.updates > self._collected:
            self.bad_images.collect(self.world, self.folder)
            self._collected = progress.updates  # those under way have told of the same images
        fault = self.fault_of(result)
        if fault is None:
            images = self.config.images_of_update(self.world.size)
            progress.loss_sum += result.loss * images
            progress.images += images
            return
        self._report_non_finite(fault, result)
        if self.config.on_nan != "skip" or progress.skipped >= MAX_SKIPPED:
            raise fault
        progress.skipped += 1
        log.warning("%s: left out; its samples are in %s", fault, fault.report)

    def _log_is_due(self) -> bool:
        """Whether the step log has a row here, on every process: every so many updates, and at the end of an epoch."""
        config, step = self.config, self.progress.step
        if not config.logs_steps:
            return False
        return step == self.updates_in(self.progress.epoch) or bool(config.log_steps) and step % config.log_steps == 0

    def _log_step(self, loss: float) -> None:
        """Add a row to the step log."""
        progress = self.progress
        if self.step_log is None:
            return
        then, self._logged = self._logged, (progress.images, progress.seconds, progress.data_seconds)
        images, seconds, waiting = (now - before for now, before in zip(self._logged, then, strict=True))
        self.step_log.add({
            "step": progress.updates, "epoch": progress.epoch + progress.step / self.updates_per_epoch,
            "lr": self.optimizer.param_groups[0]["lr"], "train_loss": loss, "images_per_s": images / seconds,
            "data_wait_percent": 100 * waiting / seconds, "memory_mib": memory_mib(self.world.device)})

    def finish_epoch(self) -> None:
        """Evaluate where that is due, add the epoch's row, save."""
        progress = self.progress
        number = progress.epoch + 1
        if not progress.images:
            raise RunError(f"all {progress.step} updates of epoch {number} were left out, for a loss or gradient that "
                           f"is not finite (--on-nan skip): nothing was learnt; last good checkpoint: {self.last_good}")
        figures = dict.fromkeys(self.measures, math.nan)
        start = time.perf_counter()
        if self.world.size > 1:  # batch statistics are each process's own until here
            distribute_bn(self.best_model, self.world.size, reduce=self.config.dist_bn == "reduce")
        if number % self.config.eval_epochs == 0 or number == self.total_epochs:
            net = self.ema.module if self.ema is not None else self.eval_net
            result = self.evaluate(net, self.eval_loader, self.num_classes, self.world, self.config,
                                should_stop=self._stop_wanted)
            if result is None:
                self._leave()
            figures = result.figures()
        self.bad_images.collect(self.world, self.folder)
        trained = progress.seconds
        seconds = trained + time.perf_counter() - start
        progress.epoch = number
        row = {
            "epoch": progress.epoch, "step": progress.updates, "lr": self.optimizer.param_groups[0]["lr"],
            "train_loss": progress.loss_sum / progress.images, **figures,
            "images_per_s": progress.images / trained, "seconds": seconds,
        }
        row = {k: float(f"{v:.6g}") if isinstance(v, float) else v for k, v in row.items()}
        progress.rows.append(row)
        gates = {name: float(f"{value:.6g}") for name, value in gate_values(self.best_model).items()}
        if gates:
            progress.gates.append({"epoch": number, "step": progress.updates, **gates})
        measured = figures[self.measures[0]]
        best = measured > progress.best_top1
        if best:
            progress.best_top1, progress.best_epoch = measured, number
        progress.begin_epoch()
        every = self.config.snapshot_epochs
        self.save(best, snapshot=every > 0 and number % every == 0)
        if self.step_log is not None:
            self.step_log.add_epoch({**row, **gates})
        if self.after_epoch is not None:
            self.after_epoch(self.ema.module if self.ema is not None else self.eval_net, number, progress.updates)
        accuracy = "not evaluated" if math.isnan(measured) else self.text_of(figures)
        accuracy += " of the training images" if self.eval_split == "train" else ""
        log.info("epoch %d/%d  loss %.4f  %s  lr %.5f  %.0f images/s  %.1f s%s", number, self.total_epochs,
                 row["train_loss"], accuracy, row["lr"], row["images_per_s"], row["seconds"], "  best" if best else "")
        if gates:
            log.info("gates: %s", "  ".join(
                f"{name} {min(values):.3f} to {max(values):.3f}, mean {sum(values) / len(values):.3f}"
                for name, values in by_gate(gates).items()))

    def fit(self) -> None:
        """Train until `config.epochs` epochs are complete.

        Raises:
            RunError: stopped by a signal (code 128 + signal), a non-finite loss, an epoch without an update, or a full
                disk.
        """
        if self.last_good != self.folder / checkpoint.LAST:
            self.save()  # finds out now whether the folder can be written
        while self.progress.epoch < self.total_epochs:
            try:
                self.train_epoch()
                self.finish_epoch()
            except NonFiniteLoss as error:
                samples = f"; the samples of this update are in {error.report}" if error.report else ""
                raise RunError(f"{error}; last good checkpoint: {self.last_good}{samples}") from error
            except (torch.OutOfMemoryError, MemoryError) as error:
                raise RunError(f"out of memory in update {self.progress.step + 1} of epoch {self.progress.epoch + 1} "
                               f"({str(error).splitlines()[0] if str(error) else 'main memory'}): a smaller "
                               "--batch-size with --total-batch as it is adds up more batches, --grad-checkpointing "
                               "and --amp need less; last good checkpoint: "
                               f"{self.last_good}") from error
            except RuntimeError as error:
                if isinstance(error, RunError) or "DataLoader worker" not in str(error):
                    raise
                raise RunError(f"{str(error).strip()} The system kills processes when main memory runs out, fewer "
                               f"--workers need less; last good checkpoint: {self.last_good}") from error

    # ---- trouble --------------------------------------------------------------------------------------------------

    def _stop_wanted(self) -> bool:
        """Whether any process was asked to stop; all processes must ask together."""
        wanted = torch.tensor(float(self.stop.signal is not None), device=self.world.device)
        return self.world.sum(wanted).item() > 0

    def _leave(self) -> None:
        self.save()
        self.world.barrier()  # nobody leaves, and has the others ended, before the checkpoint is written
        number = self.stop.signal or 15
        raise RunError(f"stopped by signal {number} after update {self.progress.step} of epoch "
                       f"{self.progress.epoch + 1}; saved {self.last_good}", 128 + number)

    def _report_non_finite(self, error: NonFiniteLoss, result: StepResult) -> None:
        """Write which samples every process had in an update."""
        ids = self.world.gather([i for batch_ids in result.ids for i in batch_ids.tolist()])
        error.report = self.folder / f"nonfinite-epoch{result.epoch + 1:03d}-update{result.step:05d}.json"
        if self.world.is_main:
            write_json(error.report, {
                "error": str(error), "epoch": result.epoch + 1, "update": result.step, "lr": result.lr,
                "last_good_checkpoint": str(self.last_good), "sample_ids": ids,
                "samples": [[self.describe(i) for i in of_rank] for of_rank in ids]})
        self.world.barrier()  # nobody leaves, and has the others ended, before the report is written
