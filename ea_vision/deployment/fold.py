"""`deploy`: a network for inference, its BatchNorms folded and its attention layers made ready for export."""
from __future__ import annotations

import copy

import timm
import torch
from timm.layers import BatchNormAct2d
from torch import Tensor, nn

from ea_vision.deployment.attention import DeployedConv2d, DeployedTokenAttention
from ea_vision.deployment.pairs import ATTENTION, watch
from ea_vision.layers import AugmentedConv2d, TokenAttention


def _fold_norm(conv: nn.Module, weight_of_norm: Tensor, bias_of_norm: Tensor) -> None:
    """Multiply a convolution's output channels and add to them, in its weights."""
    weight = conv.weight.detach().double()
    bias = bias_of_norm
    if conv.bias is not None:
        bias = bias + conv.bias.detach().double() * weight_of_norm
    weight = weight * weight_of_norm.view(-1, *[1] * (weight.dim() - 1))
    conv.weight = nn.Parameter(weight.to(conv.weight.dtype))
    conv.bias = nn.Parameter(bias.to(conv.weight.dtype))


def _constants(norm: nn.Module) -> tuple[Tensor, Tensor]:
    """(factor, summand) by channel of a BatchNorm in evaluation mode, in float64."""
    factor = (norm.running_var.double() + norm.eps).rsqrt()
    if norm.weight is not None:
        factor = factor * norm.weight.detach().double()
    summand = -norm.running_mean.double() * factor
    return factor, summand if norm.bias is None else summand + norm.bias.detach().double()


def _left_of(norm: nn.Module) -> nn.Module:
    """What remains of a folded norm: timm's activation in it, or nothing."""
    if isinstance(norm, BatchNormAct2d):
        return norm.act
    return nn.Identity()


def _foldable(maker: nn.Module, norm: nn.Module) -> bool:
    known = type(norm) in (nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d, nn.SyncBatchNorm, BatchNormAct2d)
    plain = type(maker) in (nn.Conv1d, nn.Conv2d, nn.Conv3d) or isinstance(maker, AugmentedConv2d)
    return known and plain and norm.running_mean is not None and not isinstance(maker, TokenAttention)


def _fold_pair(maker: nn.Module, norm: nn.Module) -> None:
    factor, summand = _constants(norm)
    if not isinstance(maker, AugmentedConv2d):
        return _fold_norm(maker, factor, summand)
    split = len(factor) - maker.proj.out_channels  # channels of the convolution, before those of the attention
    if maker.conv is not None:
        _fold_norm(maker.conv, factor[:split], summand[:split])
    _fold_norm(maker.proj, factor[split:], summand[split:])


def example_input(model: nn.Module) -> Tensor:
    """An image (1, C, H, W) of the size that a network is made for.

    Raises:
        ValueError: a network without a 2-D convolution, whose input has no known shape.
    """
    first = next((module for module in model.modules() if isinstance(module, nn.Conv2d)), None)
    if first is None:
        raise ValueError(f"a network that begins with a convolution is required, got {type(model).__name__}")
    sizes = (getattr(module, "img_size", None) for module in model.modules())
    size = next((size for size in sizes if size is not None), None)
    if size is None:
        size = timm.data.resolve_model_data_config(model)["input_size"][-2:]
    height, width = (size, size) if isinstance(size, int) else size
    return torch.zeros(1, first.in_channels, height, width, device=first.weight.device, dtype=first.weight.dtype)


def deploy(model: nn.Module) -> nn.Module:
    """Return a copy of a network for inference: the same outputs (to 1e-5 in float32) by fewer operations.

    BatchNorms are folded into the convolutions before them, those behind an augmented convolution into both of its
    branches; evolutions that change nothing fall away; scales and gates go into the weights of what is exported.
    Evolutions that are not known here, windows, and norms that something else reads past, stay as they are. The copy's
    weights are fixed: load weights, and choose the input size, before.

    Args:
        model: ours or any other, in evaluation mode.

    Raises:
        ValueError: no nn.Module, one that is (in part) in training mode, or one without a 2-D convolution.
    """
    if not isinstance(model, nn.Module):
        raise ValueError(f"a network (torch.nn.Module) is required, got {type(model).__name__}")
    training = [name or type(model).__name__ for name, module in model.named_modules() if module.training]
    if training:
        raise ValueError(f"a network in evaluation mode is required (model.eval()), got {training[0]} in training mode")
    model = copy.deepcopy(model).requires_grad_(False)
    for name, module in list(model.named_modules()):
        if isinstance(module, nn.modules.dropout._DropoutNd) and name:
            model.set_submodule(name, nn.Identity())
    seen = watch(model, example_input(model))
    names = {module: name for name, module in model.named_modules()}
    for maker, norm in seen.norms:
        if _foldable(maker, norm):
            _fold_pair(maker, norm)
            model.set_submodule(names[norm], _left_of(norm).eval())
    layers = [module for module in model.modules() if isinstance(module, ATTENTION)]
    for layer in layers:
        if layer.evolution is not None and layer.evolution.changes_nothing():
            layer.evolution = None
    for layer in layers:
        if layer in seen.readers:
            layer.need_logits = any(reader.evolution is not None for reader in seen.readers[layer])
    for layer in layers:
        convert = DeployedConv2d.of if isinstance(layer, AugmentedConv2d) else DeployedTokenAttention.of_layer
        convert(layer)
    return model.requires_grad_(False).eval()
