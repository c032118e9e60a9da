"""Learning rate for every update, from timm's schedulers; update u of an epoch of U updates is at epoch u / U.

    one_cycle   linear from 0 to lr over the warm-up, linear to lr_min at the end
    cosine      linear warm-up, one cosine from lr to lr_min; or, with cycle_epochs, restarts (Loshchilov and Hutter
                2017, https://arxiv.org/abs/1608.03983; equation 7 of the PA paper): cycle i lasts
                T_i = cycle_epochs * cycle_mul**i epochs and lr = lr_min + (lr_max - lr_min) (1 + cos(pi t / T_i)) / 2
    step        linear warm-up, then times decay_rate from each of decay_epochs on
    exp         linear warm-up over the first updates of a staircase that falls from epoch 0 on: times decay_rate every
                decay_every epochs, which may be a fraction (tensorflow/tpu, mnasnet_utils.py)
    constant    lr, after the warm-up
"""

from __future__ import annotations

import torch
from timm.scheduler import CosineLRScheduler, MultiStepLRScheduler, PolyLRScheduler, StepLRScheduler

from ea_vision.engine.config import TrainConfig


def build_schedule(config: TrainConfig, optimizer: torch.optim.Optimizer, updates_per_epoch: int):
    """Return a timm scheduler; call `step_update(n)` after n updates, n = 0 included."""
    total = round(config.epochs * updates_per_epoch)
    warmup = round(config.warmup * total)
    common = {"warmup_t": warmup, "t_in_epochs": False}
    if config.schedule == "one_cycle":
        return PolyLRScheduler(optimizer, t_initial=max(total - warmup, 1), power=1.0, lr_min=config.lr_min,
                               warmup_prefix=True, **common)
    if config.schedule == "cosine":
        first = round(config.cycle_epochs * updates_per_epoch) or max(total - warmup, 1)
        # The cycle limit only has to exceed the number of cycles that fit.
        return CosineLRScheduler(optimizer, t_initial=first, lr_min=config.lr_min, cycle_mul=config.cycle_mul,
                                 cycle_limit=total // first + 1, warmup_prefix=True, **common)
    if config.schedule == "exp":
        return StepLRScheduler(optimizer, decay_t=config.decay_every * updates_per_epoch, decay_rate=config.decay_rate,
                               warmup_prefix=False, **common)
    milestones = config.decay_epochs if config.schedule == "step" else []
    # timm's milestone m acts from index m - 1 on, hence the + 1.
    return MultiStepLRScheduler(optimizer, decay_t=[round(e * updates_per_epoch) + 1 for e in milestones],
                                decay_rate=config.decay_rate, warmup_prefix=False, **common)
