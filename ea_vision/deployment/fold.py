"""`deploy`: a network for inference, its BatchNorms folded and its attention layers made ready for export."""

import copy
import warnings
from collections.abc import Sequence
from numbers import Number
from typing import Any

import timm
import torch
from torch import Tensor, nn
from torch.nn.utils import fuse_conv_bn_weights
from torch.utils._pytree import tree_leaves

from ea_vision.base.errors import RunError, UsageError
from ea_vision.deployment.attention import make_portable
from ea_vision.deployment.pairs import ATTENTION, look, parts_of, watched
from ea_vision.layers import AugmentedConv2d
from ea_vision.models.any_transformer import evolves, keep_logits_that_are_read

LARGEST = 1e-3  # difference of a deployed network's outputs, in parts of the largest


def _fold_pair(maker: nn.Module, norm: nn.Module) -> None:
    """Fold a BatchNorm into a convolution, or into both branches of an augmented one, in float64."""
    first = 0
    added = isinstance(maker, AugmentedConv2d) and maker.fusion == "add"
    for conv in parts_of(maker):
        channels = slice(first, first + conv.out_channels)
        mean, var, scale, shift = (
            None if tensor is None else tensor.detach().double()[channels]
            for tensor in (norm.running_mean, norm.running_var, norm.weight, norm.bias)
        )
        if added and conv is maker.proj:  # the convolution has the mean and the shift of the sum
            mean = torch.zeros_like(mean)
            shift = torch.zeros_like(mean)
        if not added:
            first += conv.out_channels
        bias = None if conv.bias is None else conv.bias.detach().double()
        folded = fuse_conv_bn_weights(
            conv.weight.detach().double(), bias, mean, var, norm.eps, scale, shift
        )
        conv.weight, conv.bias = (nn.Parameter(tensor.to(conv.weight.dtype)) for tensor in folded)
    norm.__class__ = (
        nn.Sequential
    )  # of timm's activation in it, or of nothing; by every name that it has
    norm._parameters, norm._buffers = {}, {}


def example_images(model: nn.Module) -> Tensor:
    """Return noise (1, C, H, W) of the size that a network is made for.

    Raises:
        UsageError: a network without a 2-D convolution, whose input has no known shape.
    """
    first = next((module for module in model.modules() if isinstance(module, nn.Conv2d)), None)
    if first is None:
        raise UsageError(
            f"a network that begins with a convolution is required, got {type(model).__name__}"
        )
    own = [
        size
        for module in model.modules()
        if (size := getattr(module, "img_size", None)) is not None
    ]
    size = own[0] if own else timm.data.resolve_model_data_config(model)["input_size"][-2:]
    sides = (size, size) if isinstance(size, int) else size
    noise = torch.randn(1, first.in_channels, *sides, generator=torch.Generator().manual_seed(0))
    return noise.to(first.weight)


def _tensors(outputs: Any) -> list[Tensor]:
    """Return the tensors of a network's outputs, to compare.

    Raises:
        UsageError: it gives something that is neither a tensor nor a constant nor a container of such.
    """
    leaves = tree_leaves(outputs)
    for leaf in leaves:
        if not isinstance(leaf, (Tensor, Number, str, type(None))):
            raise UsageError(
                f"a network that gives tensors is required, whose outputs can be compared, got "
                f"{type(leaf).__name__}"
            )
    return [leaf for leaf in leaves if isinstance(leaf, Tensor)]


def _difference(wanted: Sequence[Tensor], got: Sequence[Tensor]) -> float:
    """Return the largest difference of two networks' outputs, in parts of an output's largest number."""
    if [tensor.shape for tensor in wanted] != [tensor.shape for tensor in got]:
        return float("inf")
    parts = [
        (other.double() - own.double()).abs().max() / own.double().abs().max().clamp(min=1e-6)
        for own, other in zip(wanted, got, strict=True)
        if own.numel()
    ]
    return float(torch.stack(parts).max()) if parts else 0.0


@torch.no_grad()
def deploy(model: nn.Module) -> nn.Module:
    """Return a copy of a network for inference: the same outputs (to 1e-5 in float32) by fewer operations.

    BatchNorms are folded into the convolutions before them, those behind an augmented convolution into both of its
    branches; evolutions that change nothing fall away; scales and gates go into the weights of what is exported.
    Evolutions that are not known here, windows, and norms of which something is unsure (see `look`), stay as they are;
    a warning names those. Copy and network are run on an image of noise and compared. The copy's weights are fixed:
    load weights, and choose the input size, before.

    Args:
        model: ours or any other, in evaluation mode.

    Raises:
        UsageError: no nn.Module, one that is (in part) in training mode, or none that gives tensors for an image.
        RunError: the copy's outputs differ by more than 1e-3 of the largest number.
    """
    if not isinstance(model, nn.Module):
        raise UsageError(f"a network (torch.nn.Module) is required, got {type(model).__name__}")
    training = [
        name or type(model).__name__ for name, module in model.named_modules() if module.training
    ]
    if training:
        raise UsageError(
            f"a network in evaluation mode is required (model.eval()), got {training[0]} in training mode"
        )
    images = example_images(model)
    try:
        outputs = model(images)
    except Exception as error:
        raise UsageError(
            f"a network for images {tuple(images.shape)} is required, and {type(model).__name__} fails on "
            f"one: {error}"
        ) from error
    wanted = _tensors(outputs)
    computed = {
        id(value): value.detach().clone()
        for module in model.modules()
        for value in vars(module).values()
        if isinstance(value, Tensor) and not value.is_leaf
    }  # pruned weights, which deepcopy refuses
    original, model = model, copy.deepcopy(model, computed)
    pairs, left, readers = look(model)
    for maker, norm in pairs:
        _fold_pair(maker, norm)
    if left:
        warnings.warn(
            "deploy leaves BatchNorms as they are: "
            + ", ".join(f"{name} ({reason})" for name, reason in left.items()),
            stacklevel=3,
        )
    layers = [module for module in model.modules() if isinstance(module, ATTENTION)]
    for layer in layers:
        if layer.evolution is not None and layer.evolution.changes_nothing():
            layer.evolution = None
    for layer, takers in readers.items():
        layer.need_logits = any(taker.evolution is not None for taker in takers)
    for module in model.modules():
        if evolves(module):
            keep_logits_that_are_read(module)
    for layer in layers:
        if not any(map(watched, layer.modules())):
            make_portable(layer)
    model.requires_grad_(False).eval()
    difference = _difference(wanted, _tensors(model(images)))
    most = max(LARGEST, 16 * torch.finfo(images.dtype).eps)
    if not difference <= most:
        again = _difference(wanted, _tensors(original(images)))
        raise RunError(
            f"{type(model).__name__} cannot be deployed: on noise its copy's outputs differ by "
            f"{difference:.1e} of the largest, at most {most:.0e} required (the network's own, run twice, "
            f"by {again:.1e})"
        )
    return model
