"""Conversion of weights of timm's ResNets into weights of our networks."""

import logging

import torch
from torch import Tensor, nn

from ea_vision.layers import AugmentedConv2d

_logger = logging.getLogger(__name__)


def checkpoint_filter_fn(state_dict: dict[str, Tensor], model: nn.Module) -> dict[str, Tensor]:
    """Make a checkpoint fit `model`; our own checkpoints stay unchanged (loading fits their position tables).

    Where `model` augments a convolution of a plain ResNet, the augmented layer takes the checkpoint's convolution: all
    of it with fusion="add"; with "concat" the first output channels, which keep their place in the concatenation.
    Attention keeps the model's initial values. The log reports this in one line (level info).

    Args:
        state_dict: parameters by name, of our network or of timm's ResNet of the same depth.
        model: the network that will load them.

    Returns:
        parameters by our names.

    Raises:
        ValueError: the shape of a convolution does not fit the model's.
    """
    initial = model.state_dict()
    converted = dict(state_dict)
    layers = []
    for name, layer in model.named_modules():
        if isinstance(layer, AugmentedConv2d) and f"{name}.weight" in converted:
            _convert_conv(name, layer, initial, converted)
            layers.append(layer)
    if layers:
        _logger.info(
            "a plain network's checkpoint: %d tensors as they are, %d not used; %d augmented convolutions have new "
            "attention and %s of the checkpoint's output channels",
            len(converted.keys() & state_dict.keys()),
            len(converted.keys() - initial.keys()),
            len(layers),
            "all" if all(layer.fusion == "add" for layer in layers) else "the first",
        )
    return converted


def _convert_conv(
    name: str, layer: AugmentedConv2d, initial: dict[str, Tensor], converted: dict[str, Tensor]
) -> None:
    """Replace the weight of a plain convolution in `converted` by the tensors of the augmented one.

    Args:
        name: of the convolution and of the layer.
        initial: the model's initial parameters.
    """
    weight = converted.pop(f"{name}.weight")
    if layer.conv is not None:
        shape = initial[f"{name}.conv.weight"].shape
        _check_shape(f"{name}.weight", weight, shape, exactly=layer.fusion == "add")
        converted[f"{name}.conv.weight"] = weight[: shape[0]]
    prefix = f"{name}."
    for key in initial:
        if key.startswith(prefix) and key not in converted:
            converted[key] = initial[key]


def _check_shape(name: str, weight: Tensor, wanted: torch.Size, exactly: bool) -> None:
    """Raise ValueError if a plain weight lacks the wanted shape; it may have more output channels, unless `exactly`."""
    enough = len(weight) == wanted[0] if exactly else len(weight) >= wanted[0]
    if weight.shape[1:] == wanted[1:] and enough:
        return
    least = "" if exactly else "at least "
    others = ", ".join(str(size) for size in wanted[1:])
    raise ValueError(
        f"{name} must have {least}{wanted[0]} output channels and shape (*, {others}), "
        f"got {tuple(weight.shape)}"
    )
