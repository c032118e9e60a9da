"""`deploy`: a network for inference, whose attention layers are ready for export."""

import copy
import math
from collections.abc import Sequence
from numbers import Number
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

from ea_vision.base.errors import RunError, UsageError
from ea_vision.deployment.attention import make_portable
from ea_vision.deployment.evolution import exact
from ea_vision.layers import AugmentedConv2d, MapsAttention
from ea_vision.layers.evolution import is_altered
from ea_vision.models.any_transformer import evolves, keep_logits_that_are_read
from ea_vision.models.inputs import built_size, input_channels
from ea_vision.ops import Size

USUAL_SIDES = (224, 32, 64, 128, 256, 384)
LARGEST = 1e-3  # difference of a deployed network's outputs, relative to the largest


def example_images(model: nn.Module, size: Size) -> Tensor:
    """Return noise (1, C, height, width) with the dtype and device of a network's weights."""
    generator = torch.Generator().manual_seed(0)
    noise = torch.randn(1, input_channels(model), *size, generator=generator)
    weights = [weight for weight in model.parameters() if weight.is_floating_point()]
    return noise.to(weights[0]) if weights else noise


def _outputs_by_images(model: nn.Module) -> list[tuple[Tensor, list[Tensor]]]:
    """Run a network on noise of two sizes; return images and outputs.

    The first size is the network's own or, if it states none, the first square of USUAL_SIDES that it takes. The second
    is smaller, with another aspect ratio, and left out if the network does not take it.

    Raises:
        UsageError: the network takes no size, or does not return tensors.
    """
    config = getattr(model, "pretrained_cfg", None) or {}
    stated = built_size(model) or (config.get("input_size") or ())[-2:]
    for size in [stated] if stated else [(side, side) for side in USUAL_SIDES]:
        images = example_images(model, size)
        try:
            outputs = model(images)
            break
        except Exception as error:
            failure = error
    else:
        raise UsageError(
            f"a network for images {tuple(images.shape)} is required, and {type(model).__name__} fails on "
            f"one: {failure}"
        ) from failure
    results = [(images, _tensors(outputs))]
    height, width = size
    smaller = example_images(model, (_reduced(height, 3 / 4), _reduced(width, 7 / 8)))
    if smaller.shape == images.shape:
        return results
    try:
        outputs = _tensors(model(smaller))
    except Exception:  # it takes only its own size
        return results
    if all(output.isfinite().all() for output in outputs):
        results.append((smaller, outputs))
    return results


def _reduced(side: int, share: float) -> int:
    """Return about a share of a side in pixels: a multiple of 32, or for small or odd sides of 8 or 1."""
    step = 1
    if side % 8 == 0:
        step = 32 if side >= 64 and side % 32 == 0 else 8
    return max(step, int(side * share / step) * step)


def _tensors(outputs: Any) -> list[Tensor]:
    """Return the tensors of a network's outputs, for comparison.

    Raises:
        UsageError: an output is not a tensor, a constant or a container of these.
    """
    leaves = tree_leaves(outputs)
    for leaf in leaves:
        if not isinstance(leaf, (Tensor, Number, str, type(None))):
            raise UsageError(
                f"a network that returns tensors is required, got {type(leaf).__name__}"
            )
    return [leaf for leaf in leaves if isinstance(leaf, Tensor)]


def difference_of(expected: Sequence[Tensor], got: Sequence[Tensor]) -> float:
    """Return the largest difference of two networks' outputs, relative to the largest number of each output. It is
    infinity if their shapes differ, and NaN if one has NaN."""
    if [tensor.shape for tensor in expected] != [tensor.shape for tensor in got]:
        return math.inf
    parts = [torch.zeros((), dtype=torch.float64)]
    for output, other in zip(expected, got, strict=True):
        if output.numel():
            output = exact(output)
            gap = (exact(other) - output).abs().max()
            largest = output.abs().max().clamp(min=1e-6)
            parts.append(gap / largest)
    return float(torch.stack(parts).max())


def _check_same(
    original: nn.Module, copied: nn.Module, expected: Sequence[tuple[Tensor, list[Tensor]]]
) -> None:
    """Raise RunError if a copy's outputs differ from those expected by more than 1e-3 of the largest number."""
    for images, outputs in expected:
        difference = difference_of(outputs, _tensors(copied(images)))
        most = max(LARGEST, 16 * torch.finfo(images.dtype).eps)
        if not difference <= most:
            again = difference_of(outputs, _tensors(original(images)))
            height, width = images.shape[-2:]
            raise RunError(
                f"{type(original).__name__} cannot be deployed: on noise of {height}x{width} pixels its copy's "
                f"outputs differ by {difference:.1e} of the largest, at most {most:.0e} required (the network's "
                f"own, run twice, by {again:.1e})"
            )


def _copy(model: nn.Module) -> nn.Module:
    """Return a deep copy of a network, even if it has pruned weights, which deepcopy refuses."""
    computed = {}
    for module in model.modules():
        for value in vars(module).values():
            if isinstance(value, Tensor) and not value.is_leaf:
                computed[id(value)] = value.detach().clone()
    return copy.deepcopy(model, computed)


def _is_watched(module: nn.Module) -> bool:
    """Return whether a call of a module does more than its class's `forward`: by hooks (such as those of pruning and
    weight_norm), a `forward` of its own, or parametrisations."""
    return is_altered(module) or nn.utils.parametrize.is_parametrized(module)


def _prepare_attention(model: nn.Module) -> None:
    """Drop evolutions that change nothing and logits that no block reads; make the layers ready for export."""
    modules = list(model.modules())
    layers = [module for module in modules if isinstance(module, (AugmentedConv2d, MapsAttention))]
    for layer in layers:
        if layer.evolution is not None and layer.evolution.changes_nothing():
            layer.evolution = None
    for module in modules:
        if evolves(module):
            keep_logits_that_are_read(module)
    for layer in layers:
        if not any(map(_is_watched, layer.modules())):
            make_portable(layer)


@torch.no_grad()
def deploy(model: nn.Module) -> nn.Module:
    """Return a copy of a network for inference: the same outputs (exported, to 2e-5 in float32).

    Evolutions that change nothing are removed. In exported programs attention is computed by plain operations, and its
    scales and gates are folded into weights. Unknown evolutions, windows and layers with hooks or parametrisations stay
    unchanged. BatchNorms stay; ONNX Runtime and a frozen compiled network fold them. The outputs of copy and network
    are compared on noise of the network's own size, or a usual one, and of a second size if it takes one. The copy's
    weights are fixed: load weights and set the input size before.

    Args:
        model: ours or any other, in evaluation mode.

    Raises:
        UsageError: model is not an nn.Module, a module of it is in training mode, or it does not return tensors for an
            image.
        RunError: the copy's outputs differ by more than 1e-3 of the largest number.
    """
    if not isinstance(model, nn.Module):
        raise UsageError(f"a network (torch.nn.Module) is required, got {type(model).__name__}")
    for name, module in model.named_modules():
        if module.training:
            raise UsageError(
                "a network in evaluation mode is required (model.eval()), got "
                f"{name or type(model).__name__} in training mode"
            )
    expected = _outputs_by_images(model)
    deployed = _copy(model)
    _prepare_attention(deployed)
    deployed.requires_grad_(False).eval()
    _check_same(model, deployed, expected)
    return deployed
