"""No update waits for the device, whose results the host reads later; with skip one that is not finite is left out."""
from __future__ import annotations

import copy
import json
import math
import os
import signal
from contextlib import nullcontext

import pytest
import timm
import torch
from timm.utils import ModelEmaV3
from torch.overrides import TorchFunctionMode

from ea_vision.base.errors import RunError
from ea_vision.base.processes import World
from ea_vision.data.augment import Augmentation
from ea_vision.data.batches import Batch
from ea_vision.data.on_device import TrainLoader
from ea_vision.data.small_images import Images
from ea_vision.engine import checkpoint, classification, run_folder, step_results, train
from ea_vision.engine.classification import ClassificationTrainer
from ea_vision.engine.config import resolve
from ea_vision.engine.evaluate import NonFiniteLoss
from ea_vision.engine.signals import StopRequest
from ea_vision.engine.train import Trainer
from ea_vision.engine.train_cifar import CifarConfig
from tests.engine.runner import (
    SignalAfterUpdate,
    SpoilLoss,
    arguments,
    assert_equal,
    make_folder,
    run,
    run_world,
    same_result,
)

CPU = torch.device("cpu")


class Loader:
    """Batches of eight images of three classes; number `bad` has an image that is NaN in one pixel."""

    def __init__(self, count: int, bad: int | None = None):
        self.count, self.bad = count, bad

    def __len__(self) -> int:
        return self.count

    def batches(self, epoch: int = 0, first: int = 0):
        for number in range(first, self.count):
            generator = torch.Generator().manual_seed(100 * epoch + number)
            images = torch.randn(8, 3, 16, 16, generator=generator)
            if number == self.bad:
                images[3, 0, 0, 0] = math.nan
            yield Batch(images, torch.randint(3, (8,), generator=generator), torch.arange(8) + 8 * number)


def make_trainer(folder, loader, device=CPU, **given) -> Trainer:
    torch.manual_seed(0)
    config, _ = resolve(CifarConfig, {"recipe": "none", "model": "test_resnet", "batch_size": 8, "lr": 0.05,
                                      "warmup_epochs": 0, "sched": "constant", "model_ema_decay": 0.9,
                                      "model_ema_warmup": False, **given})
    model = timm.create_model("test_resnet", num_classes=3)
    averaged = ModelEmaV3(model, decay=config.model_ema_decay).to(device)
    config.model_ema_decay = config.model_ema_decay if device == CPU else 0.0  # timm's average cannot be made there
    trainer = ClassificationTrainer(config, model.to(device), loader, Loader(1), num_classes=3, world=World(0, 1,
                                                                                                            device),
                      folder=folder, stop=StopRequest(), data_fingerprint="", describe=lambda index: f"image {index}")
    if device != CPU:
        trainer.ema = averaged
    return trainer


def tensors_of(trainer: Trainer) -> dict:
    """What an update changes, copied."""
    return copy.deepcopy({"model": trainer.model.state_dict(), "averaged": trainer.ema.module.state_dict(),
                          "optimizer": {key: {name: value for name, value in entry.items() if torch.is_tensor(value)}
                                        for key, entry in trainer.optimizer.state_dict()["state"].items()}})


def updates(trainer: Trainer):
    """Make the updates of an epoch, one at each step of the iterator."""
    trainer.net.train()
    batches = trainer.train_loader.batches()
    while trainer.progress.step < trainer.updates_per_epoch:
        trainer._update([next(batches) for _ in range(trainer.config.grad_accum_steps)])
        yield trainer.progress.step


OPTIMIZERS = ["sgd", "adamw", "muon", "lookahead_sgd", "lamb", "rmsproptf"]


@pytest.mark.parametrize("opt, more", [
    *((opt, {}) for opt in OPTIMIZERS), ("sgd", {"grad_accum_steps": 2}), ("sgd", {"channels_last": True,
                                                                                   "clip_grad": 1.0}),
])
def test_a_bad_update_leaves_every_tensor_as_it_was(tmp_path, opt, more):
    """Weights, batch statistics, averages, the optimiser's; the first update, which makes the optimiser's, too."""
    accum = more.get("grad_accum_steps", 1)
    for bad in (0, 5):  # the sixth is Lookahead's
        trainer = make_trainer(tmp_path, Loader(8 * accum, bad=bad * accum), opt=opt, on_nan="skip", **more)
        before = tensors_of(trainer)
        results = []
        for step in updates(trainer):
            results += trainer.results.collect()
            after = tensors_of(trainer)
            if step == bad + 1:
                assert_equal(after, before, "state")
            else:
                assert all(tensor.isfinite().all() for tensor in after["model"].values())
                assert not torch.equal(after["model"]["conv1.0.weight"], before["model"]["conv1.0.weight"])
                assert after["model"]["bn1.num_batches_tracked"] == before["model"]["bn1.num_batches_tracked"] + accum
            before = after
        assert [trainer.fault_of(result) is None for result in results] == [step != bad for step in range(8)]
        ids = torch.cat(results[bad].ids)
        assert torch.equal(ids, torch.arange(8 * accum) + 8 * accum * bad)


def overflow_once(trainer):
    """Make an update whose gradient overflows, which must not change the weights.

    Returns:
        its report, the steps of the following updates, whose gradients are as they should be, and the weights
    """
    weights = tensors_of(trainer)["model"]
    hook = next(trainer.model.parameters()).register_hook(lambda grad: grad * math.inf)
    steps = updates(trainer)
    next(steps)
    hook.remove()
    changed = tensors_of(trainer)["model"]
    parameters = dict(trainer.model.named_parameters())
    names = parameters if trainer.config.on_nan == "stop" else weights  # statistics of finite losses may change
    assert_equal({name: changed[name] for name in names}, {name: weights[name] for name in names}, "weights")
    result, = trainer.results.collect()
    return result, steps, weights


def test_a_gradient_that_overflows_while_the_loss_does_not(tmp_path):
    trainer = make_trainer(tmp_path, Loader(3), on_nan="skip")
    result, steps, _ = overflow_once(trainer)
    assert math.isfinite(result.loss)
    assert str(trainer.fault_of(result)).startswith("the norm of the gradient of update 1 of epoch 1 is ")
    next(steps)
    assert trainer.fault_of(trainer.results.collect()[0]) is None


@pytest.mark.parametrize("on_nan", ["stop", "skip"])
def test_an_overflow_in_float16_is_left_out_and_lowers_the_scale(tmp_path, monkeypatch, on_nan):
    """The gradient scaler's own business: no fault."""
    monkeypatch.setattr(classification, "autocast", lambda amp, device: nullcontext())
    trainer = make_trainer(tmp_path, Loader(3), amp="float16", on_nan=on_nan)
    result, steps, before = overflow_once(trainer)
    assert not math.isfinite(result.norm) and trainer.fault_of(result) is None
    assert trainer.scaler.get_scale() == 2.0**15
    next(steps)
    assert math.isfinite(trainer.results.collect()[0].norm)
    assert not torch.equal(trainer.model.conv1[0].weight, before["conv1.0.weight"])


# ---- the host does not wait -----------------------------------------------------------------------------------------


class Copies(TorchFunctionMode):
    """Notes each copy between main memory and the device: those the host waits for, if it is not told otherwise."""

    def __init__(self):
        super().__init__()
        self.seen = []

    def __torch_function__(self, func, types, args=(), kwargs=None):
        result = func(*args, **(kwargs or {}))
        if func is torch.Tensor.to and isinstance(result, torch.Tensor) and result.device != args[0].device:
            self.seen.append(func)
        return result


@pytest.mark.parametrize("given", [
    *({"opt": opt} for opt in OPTIMIZERS),
    {"clip_grad": 1.0, "grad_accum_steps": 2, "mixup": 0.4, "reprob": 0.5, "channels_last": True},
    {"bce_loss": True, "cutmix": 1.0},
], ids=lambda given: "-".join(map(str, given.values())))
def test_an_update_asks_nothing_of_the_device(tmp_path, monkeypatch, given):
    """On the meta device whatever would wait for the device (item, tolist, bool, cpu) is an error."""
    meta = torch.device("meta")
    monkeypatch.setattr(classification, "autocast", lambda amp, device: nullcontext())
    images = Images(torch.zeros(48, 3, 16, 16, dtype=torch.uint8), torch.arange(48) % 3, [str(i) for i in range(48)])
    loader = TrainLoader(images, augmentation=Augmentation(cutout=4), seed=0, mean=(0.5,) * 3, std=(0.2,) * 3,
                         device=meta, batch_size=8)
    trainer = make_trainer(tmp_path, loader, meta, **given)
    sent = []

    def to_host(numbers):  # the meta device has no numbers; every update went well
        assert numbers.shape == (4,) and numbers.device.type == "meta"
        sent.append(numbers)
        return torch.tensor([1.0, 0.0, 0.0, 1.0]), None

    monkeypatch.setattr(step_results, "to_host", to_host)
    trainer.net.train()
    batches = loader.batches(0)
    accum = trainer.config.grad_accum_steps
    trainer._update([next(batches) for _ in range(accum)])  # the optimiser and the loader make their tensors
    with Copies() as copies:
        for _ in range(len(loader) // accum - 1):
            trainer._update([next(batches) for _ in range(accum)])
            trainer.results.collect(trainer.results_after)
    assert not copies.seen and len(sent) == trainer.progress.step == 6 // accum
    assert len(trainer.results) == min(trainer.results_after, 6 // accum)
    monkeypatch.undo()
    with pytest.raises((RuntimeError, NotImplementedError)):  # as it would if it asked
        step_results.to_host(torch.ones(4, device=meta))


def test_results_come_in_order_and_the_latest_are_not_waited_for():
    results = step_results.StepResults()
    for number in (1, 2, 3):
        results.add(step_results.StepResult(0, number, number, 0.1, []), torch.tensor([float(number), 0, 1, 2]))
    first, = results.collect(2)
    assert (first.step, first.loss, first.stop, first.unreadable, first.norm) == (1, 1.0, False, True, 2.0)
    assert [result.step for result in results.collect()] == [2, 3] and not results.collect() and len(results) == 0
    results.add(first, torch.zeros(4))
    results.clear()
    assert not results.collect()


# ---- what comes of it ---------------------------------------------------------------------------------------------


def test_the_report_follows_some_updates_later_and_names_the_samples(tmp_path):
    """The updates under way are made on good weights; with skip the run ends as one that only counts that update."""
    trainer = make_trainer(tmp_path, Loader(10, bad=2), on_nan="skip")
    trainer.last_good = tmp_path / checkpoint.LAST
    path, update, seen = tmp_path / "nonfinite-epoch001-update00003.json", trainer._update, []

    def watched(batches):
        seen.append((trainer.progress.step, path.exists(), trainer.progress.images))
        update(batches)

    trainer._update = watched
    trainer.train_epoch()
    assert trainer.results_after == 4
    assert seen == [(step, step >= 7, 8 * max(0, step - 4 - (step >= 7))) for step in range(10)]
    report = json.loads(path.read_text())
    assert report["sample_ids"] == [list(range(16, 24))] and report["samples"][0][3] == "image 19"
    assert (report["epoch"], report["update"], report["lr"]) == (1, 3, 0.05)
    assert report["error"] == "the loss of update 3 of epoch 1 is nan"
    assert (trainer.progress.skipped, trainer.progress.images) == (1, 72)

    other = make_trainer(tmp_path, Loader(10), on_nan="skip")
    update = other._update

    def without(batches):
        if other.progress.step == 2:
            other.progress.step, other.progress.updates = 3, 3
            return
        update(batches)

    other._update = without
    other.train_epoch()
    assert_equal(tensors_of(trainer), tensors_of(other), "state")
    assert trainer.progress.loss_sum == other.progress.loss_sum


def test_skip_gives_up_when_too_many_are_left_out(tmp_path, monkeypatch):
    monkeypatch.setattr(train, "MAX_SKIPPED", 1)
    trainer = make_trainer(tmp_path, Loader(10, bad=2), on_nan="skip")
    trainer.last_good = tmp_path / checkpoint.LAST
    trainer.progress.skipped = 1
    with pytest.raises(NonFiniteLoss):
        trainer.train_epoch()


class Nothing(Loader):
    """Batches whose images are all NaN, in every epoch from `first_bad` on."""

    def __init__(self, count: int, first_bad: int = 0):
        super().__init__(count)
        self.first_bad = first_bad

    def batches(self, epoch: int = 0, first: int = 0):
        for images, targets, ids in super().batches(epoch, first):
            yield Batch(images * math.nan if epoch >= self.first_bad else images, targets, ids)


@pytest.mark.parametrize("epoch", [0, 1])
def test_an_epoch_without_an_update_ends_the_run(tmp_path, epoch):
    """It learnt nothing, so there is nothing to evaluate, to save or to call complete."""
    trainer = make_trainer(tmp_path, Nothing(3, epoch), on_nan="skip", epochs=5)
    with pytest.raises(RunError) as error:
        trainer.fit()
    assert str(error.value) == (
        f"all 3 updates of epoch {epoch + 1} were left out, for a loss or gradient that is not finite (--on-nan skip): "
        f"nothing was learnt; last good checkpoint: {tmp_path / checkpoint.LAST}")
    assert error.value.code == 1
    assert checkpoint.read_checkpoint(tmp_path / checkpoint.LAST)["progress"]["updates"] == 3 * epoch
    assert (tmp_path / run_folder.WEIGHTS).exists() == bool(epoch) and not (tmp_path / run_folder.RESULTS).exists()
    assert len(list(tmp_path.glob("nonfinite-*.json"))) == 3, "and each update has its report"


def test_a_gradient_in_float16_that_no_scale_makes_finite_is_a_fault(tmp_path, monkeypatch):
    """The scaler leaves out overflows until its scale fits; a gradient of NaN it would leave out for ever."""
    monkeypatch.setattr(classification, "autocast", lambda amp, device: nullcontext())
    trainer = make_trainer(tmp_path, Loader(40), amp="float16")
    trainer.last_good = tmp_path / checkpoint.LAST
    next(trainer.model.parameters()).register_hook(lambda grad: grad * math.nan)
    with pytest.raises(NonFiniteLoss, match=r"the norm of the gradient of update \d+ of epoch 1 is nan"):
        trainer.train_epoch()
    assert 2.0**16 / 2**trainer.progress.updates < 1e-4 <= 2.0**16 / 2 ** (trainer.progress.updates - 5)


@pytest.fixture(scope="module")
def data(tmp_path_factory):
    return make_folder(tmp_path_factory.mktemp("data"))


class Both:
    """A loss that is not finite in update 2, and a signal in update 4, before the host has heard of that."""

    def __init__(self, number: int | None = None):
        self.number = number

    def __call__(self):
        SpoilLoss(2)()
        if self.number is not None:
            SignalAfterUpdate(self.number, 4)()


SKIP = ["--checkpoint-steps", "0", "--on-nan", "skip", "--model-ema-decay", "0.9"]


@pytest.fixture(scope="module")
def skipped(data, tmp_path_factory):
    """A run that left an update out and was not killed."""
    folder = tmp_path_factory.mktemp("runs") / "skipped"
    assert run(arguments(data, folder, *SKIP), folder.with_suffix(".log"), Both()) == 0
    return folder


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGKILL])
def test_a_kill_between_the_bad_update_and_its_report(data, skipped, tmp_path, number):
    """SIGTERM: what is under way is heard before the checkpoint. SIGKILL: it is done again. Either ends as no kill."""
    broken, log, report = tmp_path / "broken", tmp_path / "log", "nonfinite-epoch001-update00002.json"
    code = run(arguments(data, broken, *SKIP), log, Both(number))
    saved = checkpoint.read_checkpoint(broken / checkpoint.LAST)["progress"]
    if number == signal.SIGTERM:
        assert (code, saved["updates"], saved["skipped"], saved["images"]) == (128 + number, 4, 1, 24)
        assert (broken / report).exists()
    else:
        assert (code, saved["updates"], saved["skipped"]) == (-number, 0, 0) and not (broken / report).exists()
    assert run(arguments(data, broken, *SKIP), log, Both()) == 0, log.read_text()
    same_result(broken, skipped)
    assert (broken / report).exists() and run_folder.read_results(broken)["skipped_updates"] == 1


def test_a_signal_between_them_stops_with_the_report_and_saves_nothing(data, tmp_path):
    folder, log = tmp_path / "run", tmp_path / "log"
    assert run(arguments(data, folder, "--checkpoint-steps", "0"), log, Both(signal.SIGTERM)) == 1
    assert "error: the loss of update 2 of epoch 1 is nan; last good checkpoint" in log.read_text()
    assert checkpoint.read_checkpoint(folder / checkpoint.LAST)["progress"]["updates"] == 0
    assert (folder / "nonfinite-epoch001-update00002.json").exists()


class WatchRanks:
    """Spoil a loss on the second process; in the end each process writes its weights."""

    def __call__(self):
        SpoilLoss(3, rank=1)()
        fit = Trainer.fit

        def watched(trainer):
            fit(trainer)
            torch.save(trainer.model.state_dict(), trainer.folder / f"rank{os.environ['RANK']}.pt")

        Trainer.fit = watched


def test_all_processes_leave_the_update_out(data, tmp_path):
    folder, log = tmp_path / "run", tmp_path / "log"
    more = ["--batch-size", "4", "--on-nan", "skip", "--model-ema-decay", "0.9"]
    assert run_world(2, arguments(data, folder, *more), log, WatchRanks()) == [0, 0], log.read_text()
    report = json.loads((folder / "nonfinite-epoch001-update00003.json").read_text())
    assert [len(ids) for ids in report["sample_ids"]] == [4, 4]
    assert run_folder.read_results(folder)["skipped_updates"] == 1
    states = [torch.load(folder / f"rank{rank}.pt") for rank in (0, 1)]
    parameters = [name for name in states[0] if "running" not in name]
    assert all(torch.equal(states[0][name], states[1][name]) for name in parameters)
    assert all(value.isfinite().all() for state in states for value in state.values())
