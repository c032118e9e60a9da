"""No update waits for the device; a loss that is not finite never reaches what is saved; with skip no weight at all."""
from __future__ import annotations

import copy
import json
import math
import os
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
from ea_vision.engine import checkpoint, classification, run_folder, train
from ea_vision.engine.evaluate import NonFiniteLoss
from ea_vision.engine.train import Trainer, Update
from tests.engine.runner import SpoilLoss, arguments, assert_equal, make_trainer, run_world

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


def trainer_of(folder, loader, device=CPU, **given) -> Trainer:
    torch.manual_seed(0)
    model = timm.create_model("test_resnet", num_classes=3)
    averaged = ModelEmaV3(model, decay=0.9).to(device)  # timm's average cannot be made on the meta device
    trainer = make_trainer(folder, model.to(device), loader, Loader(1), world=World(0, 1, device), **{
        "batch_size": 8, "lr": 0.05, "warmup_epochs": 0, "sched": "constant", "model_ema_warmup": False,
        "model_ema_decay": 0.9 if device == CPU else 0.0, **given})
    trainer.ema = trainer.ema or averaged
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


@pytest.mark.parametrize("opt, more", [
    ("adamw", {}), ("muon", {}), ("lookahead_sgd", {}), ("sgd", {"grad_accum_steps": 2, "channels_last": True,
                                                                 "clip_grad": 1.0}),
])
def test_a_bad_update_leaves_every_tensor_as_it_was(tmp_path, opt, more):
    """Weights, batch statistics, averages, the optimiser's; the first update, which makes the optimiser's, too."""
    accum = more.get("grad_accum_steps", 1)
    for bad in (0, 5):  # the sixth is Lookahead's
        trainer = trainer_of(tmp_path, Loader(8 * accum, bad=bad * accum), opt=opt, on_nan="skip", **more)
        before = tensors_of(trainer)
        for step in updates(trainer):
            assert not trainer.check() and trainer.progress.skipped == (step > bad)
            after = tensors_of(trainer)
            if step == bad + 1:
                assert_equal(after, before, "state")
            else:
                assert all(tensor.isfinite().all() for tensor in after["model"].values())
                assert not torch.equal(after["model"]["conv1.0.weight"], before["model"]["conv1.0.weight"])
                assert after["model"]["bn1.num_batches_tracked"] == before["model"]["bn1.num_batches_tracked"] + accum
            before = after
        report = json.loads((tmp_path / f"nonfinite-epoch001-update{bad + 1:05d}.json").read_text())
        assert report["sample_ids"] == [list(range(8 * accum * bad, 8 * accum * (bad + 1)))]
        assert trainer.progress.images == 7 * 8 * accum and math.isfinite(trainer.progress.loss_sum)


def overflow_once(trainer):
    """Make an update whose gradient overflows, which must not change the weights.

    Returns:
        the steps of the following updates, whose gradients are as they should be, and the weights
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
    loss, norm, *_ = trainer.unchecked[-1].values
    assert loss.isfinite() and not norm.isfinite()
    return steps, weights


def test_a_gradient_that_overflows_while_the_loss_does_not(tmp_path):
    trainer = trainer_of(tmp_path, Loader(3), on_nan="skip")
    steps, _ = overflow_once(trainer)
    trainer.check()
    assert trainer.progress.skipped == 1
    report = json.loads((tmp_path / "nonfinite-epoch001-update00001.json").read_text())
    assert report["error"].startswith("the norm of the gradient of update 1 of epoch 1 is ")
    next(steps)
    trainer.check()
    assert trainer.progress.skipped == 1


@pytest.mark.parametrize("on_nan", ["stop", "skip"])
def test_an_overflow_in_float16_is_left_out_and_lowers_the_scale(tmp_path, monkeypatch, on_nan):
    """The gradient scaler's own business: no fault."""
    monkeypatch.setattr(classification, "autocast", lambda amp, device: nullcontext())
    trainer = trainer_of(tmp_path, Loader(3), amp="float16", on_nan=on_nan)
    steps, before = overflow_once(trainer)
    assert trainer.scaler.get_scale() == 2.0**15
    next(steps)
    assert not trainer.check() and trainer.progress.skipped == 0
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
    *({"opt": opt} for opt in ("sgd", "adamw", "muon", "lookahead_sgd", "lamb", "rmsproptf")),
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
    trainer = trainer_of(tmp_path, loader, meta, **given)
    trainer.net.train()
    batches = loader.batches(0)
    accum = trainer.config.grad_accum_steps
    trainer._update([next(batches) for _ in range(accum)])  # the optimiser and the loader make their tensors
    with Copies() as copies:
        for _ in range(len(loader) // accum - 1):
            trainer._update([next(batches) for _ in range(accum)])
    assert not copies.seen and trainer.progress.step == len(trainer.unchecked) == 6 // accum
    with pytest.raises((RuntimeError, NotImplementedError)):  # as it would if it asked
        trainer.check()


# ---- what comes of it ---------------------------------------------------------------------------------------------


def test_a_look_at_several_updates_names_the_first_bad_one_and_its_samples(tmp_path):
    """As on an accelerator: the host looks at every fourth update, and before anything is saved."""
    trainer = trainer_of(tmp_path, Loader(10, bad=2))
    trainer.check_every, trainer.last_good = 4, tmp_path / checkpoint.LAST
    with pytest.raises(NonFiniteLoss, match="the loss of update 3 of epoch 1 is nan") as error:
        trainer.train_epoch()
    assert trainer.progress.updates == 4 and not (tmp_path / checkpoint.LAST).exists()
    report = json.loads(error.value.report.read_text())
    assert report["sample_ids"] == [list(range(16, 24))] and report["samples"][0][3] == "image 19"
    assert (report["epoch"], report["update"], report["lr"]) == (1, 3, 0.05)
    sums = []
    for every in (1, 4):
        trainer = trainer_of(tmp_path, Loader(10))
        trainer.check_every = every
        trainer.train_epoch()
        sums.append((trainer.progress.loss_sum, trainer.progress.images))
    assert sums[0] == sums[1] and sums[0][1] == 80, "however often it looks"


def test_a_run_that_skips_ends_as_one_that_only_counts_that_update(tmp_path):
    trainer, other = (trainer_of(tmp_path, Loader(10, bad), on_nan="skip") for bad in (2, None))
    trainer.train_epoch()
    assert (trainer.progress.skipped, trainer.progress.images) == (1, 72)
    update = other._update

    def without(batches):
        if other.progress.step == 2:
            other.progress.step, other.progress.updates = 3, 3
            other.unchecked.append(Update(3, 0.0, [], 0, True, torch.zeros(4)))
            return
        update(batches)

    other._update = without
    other.train_epoch()
    assert_equal(tensors_of(trainer), tensors_of(other), "state")
    assert trainer.progress.loss_sum == other.progress.loss_sum


def test_skip_gives_up_when_too_many_are_left_out(tmp_path, monkeypatch):
    monkeypatch.setattr(train, "MAX_SKIPPED", 1)
    trainer = trainer_of(tmp_path, Loader(10, bad=2), on_nan="skip")
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
    trainer = trainer_of(tmp_path, Nothing(3, epoch), on_nan="skip", epochs=5)
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
    trainer = trainer_of(tmp_path, Loader(40), amp="float16")
    trainer.last_good = tmp_path / checkpoint.LAST
    next(trainer.model.parameters()).register_hook(lambda grad: grad * math.nan)
    with pytest.raises(NonFiniteLoss, match=r"the norm of the gradient of update \d+ of epoch 1 is nan"):
        trainer.train_epoch()
    assert 2.0**16 / 2**trainer.progress.updates < 1e-4 <= 2.0**16 / 2 ** (trainer.progress.updates - 5)


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
