"""The names the model tests run over, and networks whose attention counts."""
import timm
import torch

import ea_vision  # noqa: F401  (registers the models)
from ea_vision.layers import AugmentedConv2d

RESNETS = timm.list_models(module="attn_resnet")
CIFAR = timm.list_models(module="conv_transformer")
NAMES = RESNETS + CIFAR
SMALL = ["aa_resnet34", "pa_aa_resnet34", "ea_aa_resnet50", *CIFAR]  # one of each kind, where depth adds nothing


def lively(name: str, **options):
    """A new model whose residual branches count: timm's initial zeros in their last norms would hide any mistake."""
    model = timm.create_model(name, **options)
    for module in model.modules():
        if isinstance(module, torch.nn.BatchNorm2d) and not module.weight.any():
            torch.nn.init.constant_(module.weight, 0.2)
    return model


def side(name: str) -> int:
    """Side of a small input, in pixels."""
    return 32 if name in CIFAR else 64


def layers_of(model) -> list[AugmentedConv2d]:
    return [m for m in model.modules() if isinstance(m, AugmentedConv2d)]
