"""The names the model tests run over, and networks whose attention counts."""
import timm
import torch

from ea_vision.layers import AugmentedConv2d
from ea_vision.models import get_network, list_networks

RESNETS = list_networks("attn_resnet")
CIFAR = list_networks("conv_transformer")
NAMES = [name for name in list_networks() if name in RESNETS + CIFAR]  # those with chains
EVERY = [name for name in list_networks() if name not in list_networks("vision_transformer")]  # these: a file of theirs


def _smallest_of_each(kind) -> list[str]:
    """Of the networks that agree in `kind(module, keywords)` the one with the fewest parameters."""
    with torch.device("meta"):
        sizes = {name: sum(p.numel() for p in timm.create_model(name).parameters()) for name in EVERY}
    smallest = {}
    for name in sorted(EVERY, key=sizes.get):
        smallest.setdefault(kind(timm.model_entrypoint(name).__module__, get_network(name).kwargs), name)
    return list(smallest.values())


# one of each kind, where depth adds nothing: of each family and evolution, and of each block
SMALL = list(dict.fromkeys([
    *_smallest_of_each(lambda module, kwargs: (module, kwargs.get("evolution"), kwargs.get("attention"))),
    *_smallest_of_each(lambda module, kwargs: (module, kwargs.get("block")))]))
CHAINED = [name for name in SMALL if name in NAMES]


def lively(name: str, **options):
    """A new model whose residual branches count: timm's initial zeros in their last norms would hide any mistake."""
    model = timm.create_model(name, **options)
    for module in model.modules():
        if isinstance(module, torch.nn.BatchNorm2d) and not module.weight.any():
            torch.nn.init.constant_(module.weight, 0.2)
    return model


def side(name: str) -> int:
    """Side of a small input, in pixels."""
    return min(64, timm.get_pretrained_cfg(name).input_size[-1])


def layers_of(model) -> list[AugmentedConv2d]:
    return [m for m in model.modules() if isinstance(m, AugmentedConv2d)]
