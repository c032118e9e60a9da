"""Learning rates, update by update, against the papers' formulas."""
from __future__ import annotations

import math

import pytest
import torch

from ea_vision.engine.config import resolve
from ea_vision.engine.schedules import build_schedule
from ea_vision.engine.train_cifar import CifarConfig


def rates(updates_per_epoch: int, **options) -> list[float]:
    """The rate of every update of a run."""
    config, _ = resolve(CifarConfig, options if "recipe" in options else {"recipe": "none", "warmup": 0, **options})
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
    per_epoch = 900
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


def test_restarts_where_the_epoch_has_an_odd_number_of_updates():
    lr = rates(351, schedule="cosine", epochs=70, lr=0.05, lr_min=1e-4, cycle_epochs=10, cycle_mul=2)
    assert [u for u in range(1, len(lr)) if lr[u] > lr[u - 1]] == [3510, 3510 * 3]


def test_one_cycle_rises_and_falls_in_straight_lines():
    lr = rates(10, schedule="one_cycle", epochs=10, lr=0.2, warmup=0.2)
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


def test_steps_fall_at_the_first_update_of_their_epoch():
    """The ImageNet schedule of DESIGN section 5."""
    lr = rates(20, schedule="step", epochs=100, lr=0.128, warmup=0.05, decay_epochs=[30, 60, 80, 90])
    assert lr[0] == 0 and lr[50] == pytest.approx(0.064) and lr[100] == pytest.approx(0.128)
    for epoch, before, after in ((30, 0, 1), (60, 1, 2), (80, 2, 3), (90, 3, 4)):
        assert lr[epoch * 20 - 1] == pytest.approx(0.128 * 0.1**before)
        assert lr[epoch * 20] == pytest.approx(0.128 * 0.1**after)


def test_constant():
    assert rates(5, schedule="constant", epochs=3, lr=0.1) == [0.1] * 15
