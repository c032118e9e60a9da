"""Learning rates, update by update, against the papers' formulas."""

import math

import numpy as np
import pytest
import torch

from ea_vision.engine.optimizer import build_schedule
from tests.engine.recipes import resolved


def rates(updates_per_epoch, recipe="none", **options):
    """The rate of every update of a run."""
    config = resolved(recipe, **options)
    optimizer = torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], lr=config.lr)
    schedule = build_schedule(config, optimizer, updates_per_epoch)
    result = []
    for update in range(config.epochs * updates_per_epoch):
        schedule.step_update(update)
        result.append(optimizer.param_groups[0]["lr"])
    return result


@pytest.mark.parametrize(
    "recipe, first, cycles, epochs", [("pa_cifar10", 10, 6, 630), ("pa_cifar100", 20, 5, 620)]
)
def test_cosine_restarts_are_the_papers(recipe, first, cycles, epochs):
    """Equation 7, at every update."""
    expected = []
    for number in range(cycles):
        length = 91 * first * 2**number
        falling = 1 + np.cos(math.pi * np.arange(length) / length)
        expected += list(1e-4 + 0.5 * (0.05 - 1e-4) * falling)
    assert len(expected) == 91 * epochs
    np.testing.assert_allclose(rates(91, recipe), expected, rtol=0, atol=1e-12)


LINEAR = dict(sched="linear", epochs=10, lr=0.2, warmup_epochs="20%")
# build_learning_rate of tensorflow/tpu's mnasnet_utils.py: 0.97 every 2.4 epochs from epoch 0, 5 of warm-up.
MNASNET = dict(
    sched="step", epochs=50, lr=0.064, warmup_epochs=5, decay_epochs=2.4, decay_rate=0.97
)
# after 5 and 7 epochs, within stairs, the last
STAIRS = {}
for update in (6255, 8757, 9357, 37531, 62549):
    STAIRS[update] = 0.064 * 0.97 ** math.floor(update / 1251 / 2.4)
# by epoch: a tenth at each of four; the last update before them has the rate of before
FACTORS = {0: 0, 4: 0.8, 5: 1, 29: 1, 30: 0.1, 60: 0.01, 80: 0.001, 90: 0.0001, 99: 0.0001}
IMAGENET = {50 * epoch: 0.128 * factor for epoch, factor in FACTORS.items()}
for epoch in (30, 60, 80, 90):
    IMAGENET[50 * epoch - 1] = 1.28 * FACTORS[epoch]
# the first 5% of warm-up, then one cosine
CIFAR = {0: 0, 2437: 0.2 * 2437 / 4875, 4875: 0.2, 97499: 0}
CIFAR[51187] = 0.1 * (1 + math.cos(math.pi * (51187 - 4875) / (97500 - 4875)))


@pytest.mark.parametrize(
    "per_epoch, options, wanted",
    [
        (10, LINEAR, {0: 0, 10: 0.1, 20: 0.2, 60: 0.1, 99: 0.2 / 80}),
        (195, {"recipe": "aa_cifar100"}, CIFAR),
        (1251, MNASNET, {0: 0, 2000: 0.064 * 2000 / 6255, **STAIRS}),
        (50, {"recipe": "imagenet"}, IMAGENET),
    ],
    ids=["linear", "cosine", "step", "multistep"],
)
def test_rates_are_the_formulas(per_epoch, options, wanted):
    lr = rates(per_epoch, **options)
    assert {update: lr[update] for update in wanted} == pytest.approx(wanted, rel=1e-9, abs=1e-8)
    if options is LINEAR:
        assert max(lr) == pytest.approx(0.2)
    if options is MNASNET:
        assert len(set(lr[5 * per_epoch :])) == 19  # stairs 2 to 20
