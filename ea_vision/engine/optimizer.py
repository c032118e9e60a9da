"""The optimiser of a run."""

from __future__ import annotations

import timm.optim
import torch
from torch import nn

from ea_vision.base.errors import UsageError, near_matches
from ea_vision.engine.config import TrainConfig


def build_optimizer(config: TrainConfig, model: nn.Module, images_per_update: int) -> torch.optim.Optimizer:
    """The timm optimiser of the config: no weight decay on norms, biases and what `model.no_weight_decay()` names."""
    known = timm.optim.list_optimizers()
    if config.opt not in known:
        raise UsageError(f"unknown optimiser {config.opt!r}; {near_matches(config.opt, known, 'optimisers')}")
    lr = config.lr * images_per_update / config.lr_base_batch if config.lr_base_batch else config.lr
    return timm.optim.create_optimizer_v2(
        model, opt=config.opt, lr=lr, weight_decay=config.weight_decay, momentum=config.momentum)
