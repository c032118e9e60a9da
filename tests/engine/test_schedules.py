"""Learning rates, update by update, against the papers' formulas."""
from __future__ import annotations

import math

import pytest
import torch

from ea_vision.engine.config import load_recipe, resolve
from ea_vision.engine.optimizer import build_schedule
from ea_vision.engine.train_cifar import CifarConfig


def rates(updates_per_epoch: int, **options) -> list[float]:
    """The rate of every update of a run."""
    config = resolve(CifarConfig, options if "recipe" in options else {"recipe": "none", "warmup_epochs": 0,
                                                                          **options})
    optimizer = torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], lr=config.lr)
    schedule = build_schedule(config, optimizer, updates_per_epoch)
    result = []
    for update in range(config.epochs * updates_per_epoch):
        schedule.step_update(update)
        result.append(optimizer.param_groups[0]["lr"])
    return result


@pytest.mark.parametrize("recipe, first, cycles, epochs", [("pa_cifar10", 10, 6, 630), ("pa_cifar100", 20, 5, 620)])
def test_cosine_restarts_are_the_papers(recipe, first, cycles, epochs):
    """Equation 7, at every update; the rate jumps back to its maximum at each restart and nowhere else."""
    per_epoch = 91
    lr = rates(per_epoch, recipe=recipe)
    starts = [first * (2**i - 1) for i in range(cycles + 1)]
    assert starts[-1] == epochs and len(lr) == epochs * per_epoch
    for number, start in enumerate(starts[:-1]):
        length = first * 2**number * per_epoch
        begin = start * per_epoch
        assert lr[begin] == pytest.approx(0.05, abs=1e-15)
        for update in (1, length // 3, length // 2, length - 1):
            wanted = 1e-4 + 0.5 * (0.05 - 1e-4) * (1 + math.cos(math.pi * update / length))
            assert lr[begin + update] == pytest.approx(wanted, abs=1e-12)
    jumps = [u for u in range(1, len(lr)) if lr[u] > lr[u - 1]]
    assert jumps == [start * per_epoch for start in starts[1:-1]]


def test_one_cycle_rises_and_falls_in_straight_lines():
    lr = rates(10, sched="linear", epochs=10, lr=0.2, warmup_epochs="20%")
    assert lr[0] == 0 and lr[20] == pytest.approx(0.2) and max(lr) == pytest.approx(0.2)
    assert lr[10] == pytest.approx(0.1) and lr[60] == pytest.approx(0.1) and lr[99] == pytest.approx(0.2 / 80)


def test_warmup_then_one_cosine_is_the_aa_recipe():
    lr = rates(195, recipe="aa_cifar100")
    total, warmup = 500 * 195, 25 * 195  # the first 5%
    assert lr[0] == 0 and lr[warmup // 2] == pytest.approx(0.2 * (warmup // 2) / warmup)
    assert lr[warmup] == pytest.approx(0.2)
    middle = (total + warmup) // 2
    assert lr[middle] == pytest.approx(0.1 * (1 + math.cos(math.pi * (middle - warmup) / (total - warmup))))
    assert lr[-1] == pytest.approx(0, abs=1e-8)


def test_exponential_decay_is_mnasnets():
    """build_learning_rate of tensorflow/tpu's mnasnet_utils.py: 0.97 every 2.4 epochs from epoch 0, 5 of warm-up."""
    per_epoch = 1251
    lr = rates(per_epoch, sched="step", epochs=50, lr=0.064, warmup_epochs=5, decay_epochs=2.4, decay_rate=0.97)
    assert lr[0] == 0 and lr[2000] == pytest.approx(0.064 * 2000 / (5 * per_epoch))
    for update in (5 * per_epoch, 7 * per_epoch, 7 * per_epoch + 600, 30 * per_epoch + 1, 50 * per_epoch - 1):
        assert lr[update] == pytest.approx(0.064 * 0.97 ** math.floor(update / per_epoch / 2.4))
    assert len(set(lr[5 * per_epoch:])) == 19  # stairs 2 to 20


def test_half_the_rate_of_aa_ends_where_the_plain_recipe_does():
    ends = []
    for recipe in ("imagenet_semnasnet_100", "imagenet_aa_mnasnet_100"):
        options = load_recipe(recipe)
        assert (options["epochs"], options["decay_epochs"], options["sched"]) == (350, 2.4, "step")
        ends.append((options["lr"], options["lr"] * options["decay_rate"] ** (350 / 2.4)))
    assert ends[1][0] == ends[0][0] / 2 and ends[1][1] == pytest.approx(ends[0][1], rel=2e-3)
