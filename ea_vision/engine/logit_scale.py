"""Logits that the loss sees smaller: in training the classifier's output is multiplied by a power of two.

Small logits at the start let the rest of the network learn before the classifier saturates. In memory the classifier
has its own weights, and its rate and decay act on them; on disk, in checkpoints and exported weights, they are already
multiplied by the scale. By a power of two that is exact, so the plain network gives the very outputs of training.
"""

from __future__ import annotations

import math

import torch
from torch import nn

from ea_vision.base.errors import UsageError


def check_logit_scale(scale: float) -> None:
    """Raise UsageError unless `scale` is a power of two within 2**-20 and 2**20."""
    if scale <= 0 or math.frexp(scale)[0] != 0.5 or abs(math.log2(scale)) > 20:
        raise UsageError(f"logit_scale must be a power of two, such as 0.125, got {scale:g}")


def classifier_names(model: nn.Module) -> list[str]:
    """Names of weight and bias of the linear layer whose output are the logits.

    Raises:
        UsageError: the model's `get_classifier()` is no linear layer.
    """
    classifier = model.get_classifier() if hasattr(model, "get_classifier") else None
    if not isinstance(classifier, nn.Linear):
        raise UsageError(f"logit_scale needs a model with a linear classifier, {type(model).__name__} has "
                         f"{type(classifier).__name__}")
    own = {id(p) for p in classifier.parameters()}
    return [name for name, parameter in model.named_parameters() if id(parameter) in own]


def scaled(state: dict[str, torch.Tensor], names: list[str], scale: float) -> dict[str, torch.Tensor]:
    """A state dict in which the tensors `names` are multiplied by `scale`; the others are the same ones."""
    return {name: value * scale if name in names else value for name, value in state.items()}
