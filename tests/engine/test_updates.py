"""No update waits for the device; a non-finite loss never reaches a saved file and, with skip, never any weight.

Private names: the bits of single updates are compared, and a run shows its epochs alone.
"""

import copy
import json
import math
from contextlib import nullcontext

import pytest
import timm
import torch
from timm.utils import ModelEmaV3
from torch import nn
from torch.overrides import TorchFunctionMode

from ea_vision.base.processes import World
from ea_vision.data.augment import Augmentation
from ea_vision.data.batches import Batch
from ea_vision.data.on_device import TrainLoader
from ea_vision.data.small_images import Images
from ea_vision.engine import checkpoint, classification
from ea_vision.engine.evaluate import NonFiniteLoss
from tests.engine.runner import assert_equal, make_trainer

CPU = torch.device("cpu")


class Loader:
    """Batches of eight images of three classes; number `bad` has an image that is NaN in one pixel."""

    def __init__(self, count, bad=None):
        self.count = count
        self.bad = bad

    def __len__(self):
        return self.count

    def batches(self, epoch=0, first=0):
        for number in range(first, self.count):
            generator = torch.Generator().manual_seed(100 * epoch + number)
            images = torch.randn(8, 3, 16, 16, generator=generator)
            if number == self.bad:
                images[3, 0, 0, 0] = math.nan
            targets = torch.randint(3, (8,), generator=generator)
            yield Batch(images, targets, torch.arange(8) + 8 * number)


def trainer_of(folder, loader, device=CPU, **options):
    torch.manual_seed(0)
    model = timm.create_model("test_resnet", num_classes=3)
    # timm's average cannot be made on the meta device
    averaged = ModelEmaV3(model, decay=0.9).to(device)
    usual = {"batch_size": 8, "lr": 0.05, "warmup_epochs": 0, "sched": "constant"}
    usual |= {"model_ema_warmup": False, "model_ema_decay": 0.9 if device == CPU else 0.0}
    options = {**usual, **options, "world": World(0, 1, device)}
    trainer = make_trainer(folder, model.to(device), loader, Loader(1), **options)
    trainer.ema = trainer.ema or averaged
    return trainer


@pytest.fixture
def in_full(monkeypatch):
    """Without autocast, which the meta device lacks and a CPU has in bfloat16 alone."""
    monkeypatch.setattr(classification, "autocast", lambda amp, device: nullcontext())


def make_update(trainer, batches=None):
    """Make the next update of an epoch, of the next batches."""
    accum = trainer.config.grad_accum_steps
    batches = batches or trainer.train_loader.batches(0, trainer.progress.step * accum)
    trainer._update([next(batches) for _ in range(accum)])


def test_clipping_reads_the_gradients_norm_once(tmp_path, monkeypatch):
    """And scales by it as torch's clip_grad_norm_ does."""
    norms = []
    foreach_norm = torch._foreach_norm
    monkeypatch.setattr(
        torch, "_foreach_norm", lambda *args, **kw: norms.append(1) or foreach_norm(*args, **kw)
    )
    gradients = []
    for limit in (0.0, 0.01):
        trainer = trainer_of(tmp_path, Loader(1), clip_grad=limit)
        norms.clear()
        make_update(trainer)
        assert len(norms) == 1
        gradients.append([p.grad for p in trainer.model.parameters()])
    norm = nn.utils.get_total_norm(gradients[0])
    for whole, clipped in zip(*gradients, strict=True):
        torch.testing.assert_close(clipped, whole * 0.01 / (norm + 1e-6))


def overflow_once(trainer):
    """Make an update whose gradient overflows, while its loss does not."""
    hook = next(trainer.model.parameters()).register_hook(lambda grad: grad * math.inf)
    make_update(trainer)
    hook.remove()
    loss, norm, *_ = trainer.unchecked[-1].values
    assert loss.isfinite()
    assert not norm.isfinite()


def test_an_overflow_in_float16_is_left_out_and_lowers_the_scale(tmp_path, in_full):
    """The gradient scaler handles it, so it is not a fault. Statistics of finite losses may change."""
    trainer = trainer_of(tmp_path, Loader(3), amp="float16")
    before = copy.deepcopy(dict(trainer.model.named_parameters()))
    overflow_once(trainer)
    assert_equal(dict(trainer.model.named_parameters()), before)
    assert trainer.scaler.get_scale() == 2.0**15
    make_update(trainer)
    assert not trainer.check()
    assert not torch.equal(trainer.model.conv1[0].weight, before["conv1.0.weight"])


def test_a_gradient_that_overflows_while_the_loss_does_not(tmp_path):
    trainer = trainer_of(tmp_path, Loader(3))
    overflow_once(trainer)
    with pytest.raises(NonFiniteLoss, match="the norm of the gradient of update 1 of epoch 1 is "):
        trainer.check()
    assert (tmp_path / "nonfinite-epoch001-update00001.json").exists()


# ---- the host does not wait -----------------------------------------------------------------------------------------


class NoCopies(TorchFunctionMode):
    """Refuses copies between main memory and the device, for which the host waits if it is not told otherwise."""

    def __torch_function__(self, func, types, args=(), kwargs=None):
        result = func(*args, **(kwargs or {}))
        assert func is not torch.Tensor.to or result.device == args[0].device
        return result


MIXED = {"clip_grad": 1.0, "grad_accum_steps": 2, "mixup": 0.4, "reprob": 0.5}
MIXED["channels_last"] = True


@pytest.mark.parametrize(
    "options",
    [
        {"opt": "sgd"},
        {"opt": "adamw"},
        {"opt": "muon"},
        {"opt": "lookahead_sgd"},
        {"opt": "lamb"},
        {"opt": "rmsproptf"},
        MIXED,
        {"bce_loss": True, "cutmix": 1.0},
    ],
    ids=str,
)
def test_an_update_asks_nothing_of_the_device(tmp_path, in_full, options):
    """On the meta device every call that would wait for the device (item, tolist, bool, cpu) is an error."""
    meta = torch.device("meta")
    pixels = torch.zeros(32, 3, 16, 16, dtype=torch.uint8)
    images = Images(pixels, torch.arange(32) % 3, list("x" * 32))
    statistics = {"mean": (0.5,) * 3, "std": (0.2,) * 3}
    cutout = Augmentation(cutout=4)
    loader = TrainLoader(
        images, augmentation=cutout, seed=0, device=meta, batch_size=8, **statistics
    )
    trainer = trainer_of(tmp_path, loader, meta, **options)
    batches = loader.batches(0)
    updates = 4 // trainer.config.grad_accum_steps
    make_update(trainer, batches)  # the optimiser and the loader make their tensors
    with NoCopies():
        for _ in range(updates - 1):
            make_update(trainer, batches)
    assert trainer.progress.step == len(trainer.unchecked) == updates
    with pytest.raises((RuntimeError, NotImplementedError)):  # as it would if it asked
        trainer.check()


# ---- what comes of it ---------------------------------------------------------------------------------------------


def test_a_look_at_several_updates_names_the_first_bad_one_and_its_samples(tmp_path):
    """As on an accelerator: the host looks at every fourth update, and before anything is saved."""
    last = tmp_path / checkpoint.LAST
    trainer = trainer_of(tmp_path, Loader(10, bad=2))
    trainer.check_every = 4
    trainer.last_good = last
    with pytest.raises(NonFiniteLoss, match="the loss of update 3 of epoch 1 is nan"):
        trainer.train_epoch()
    assert trainer.progress.updates == 4
    assert not last.exists()
    path = tmp_path / "nonfinite-epoch001-update00003.json"
    report = json.loads(path.read_text())
    assert report["sample_ids"] == [list(range(16, 24))]
    assert report["samples"][0][3] == "image 19"
    assert (report["epoch"], report["update"], report["lr"]) == (1, 3, 0.05)
    often = trainer_of(tmp_path, Loader(10))
    seldom = trainer_of(tmp_path, Loader(10))
    seldom.check_every = 4
    often.train_epoch()
    seldom.train_epoch()
    assert often.progress.loss_sum == seldom.progress.loss_sum, "however often it looks"


def test_a_gradient_in_float16_that_no_scale_makes_finite_is_a_fault(tmp_path, in_full):
    """The scaler skips overflows until its scale fits; it would skip a NaN gradient for ever."""
    trainer = trainer_of(tmp_path, Loader(40), amp="float16")
    trainer.last_good = tmp_path / checkpoint.LAST
    next(trainer.model.parameters()).register_hook(lambda grad: grad * math.nan)
    message = r"the norm of the gradient of update \d+ of epoch 1 is nan"
    with pytest.raises(NonFiniteLoss, match=message):
        trainer.train_epoch()
    scale = 2.0 ** (16 - trainer.progress.updates)
    assert scale < 1e-4 <= scale * 2**5
