"""Weights of other makes, turned into ours: trainers' checkpoints, timm's ResNets, the EA authors' TensorFlow layer."""
import logging
from collections.abc import Mapping

import numpy as np
import torch
from torch import Tensor, nn

from ea_vision.layers import AugmentedConv2d

_logger = logging.getLogger(__name__)


def checkpoint_filter_fn(state_dict: dict[str, Tensor], model: nn.Module) -> dict[str, Tensor]:
    """Make a checkpoint fit `model`; ours come back unchanged (position tables are fitted when they are loaded).

    Of a trainer's checkpoint, which holds more than a network, the averaged weights are taken, or where it has none the
    plain ones. In a plain ResNet's checkpoint a convolution that `model` augments has more output channels than our
    branch: the branch takes the first ones, which keep their place in the concatenation. Attention keeps the model's
    own initial values. Each is reported by a line of the log (level info).

    Args:
        state_dict: parameters by name, of our network or of timm's ResNet of the same depth; or the tensors of a
            checkpoint of a run folder.
        model: the network that is to load them.

    Returns:
        parameters by our names.

    Raises:
        ValueError: a convolution of other input channels or kernel than the model's.
    """
    for prefix in ("ema.", "model."):
        part = {key[len(prefix):]: value for key, value in state_dict.items() if key.startswith(prefix)}
        if part:
            _logger.info("checkpoint of a run: %d tensors under %s*, the other %d left", len(part), prefix,
                         len(state_dict) - len(part))
            state_dict = part
            break
    own = model.state_dict()
    out = dict(state_dict)
    for name, module in model.named_modules():
        if not isinstance(module, AugmentedConv2d) or f"{name}.weight" not in out:
            continue
        weight = out.pop(f"{name}.weight")
        if module.conv is None:
            _logger.info("%s: attention alone, no convolution to take the checkpoint's", name)
        else:
            wanted = own[f"{name}.conv.weight"].shape
            if weight.shape[1:] != wanted[1:] or weight.shape[0] < wanted[0]:
                raise ValueError(
                    f"{name}.weight must have at least {wanted[0]} output channels and shape (*, "
                    f"{', '.join(map(str, wanted[1:]))}), got {tuple(weight.shape)}")
            out[f"{name}.conv.weight"] = weight[:wanted[0]]
            _logger.info("%s.conv.weight: the first %d of %d output channels", name, wanted[0], weight.shape[0])
        fresh = [key for key in own if key.startswith(f"{name}.") and key not in out]
        out.update((key, own[key]) for key in fresh)
        _logger.info("%s: fresh %s", name, ", ".join(key[len(name) + 1:] for key in fresh))
    if len(out) > len(state_dict):
        whole = sum(key in state_dict for key in out)
        _logger.info("%d tensors as they are, %d of the checkpoint's not used", whole, sum(k not in own for k in out))
    return out


def from_tensorflow(variables: Mapping[str, np.ndarray], evolves: bool) -> dict[str, Tensor]:
    """State dict of an `AugmentedConv2d` from the variables of the EA authors' TensorFlow layer.

    Args:
        variables: arrays by name within the layer's scope: `conv2d/kernel` the convolution (HWIO), `conv2d_1/...` the
            projection, ordered k, q, v, then the evolution's convolution where `evolves`, then the output projection;
            `r_height` and `r_width` where the position is relative.
        evolves: whether the layer has a predecessor.

    Raises:
        ValueError: a variable is missing or not used, or widths of k and q that the others contradict.
    """
    left = set(variables)

    def take(name: str) -> Tensor:
        if name not in left:
            raise ValueError(f"variable {name} required, got {', '.join(sorted(variables))}")
        left.remove(name)
        value = torch.from_numpy(np.ascontiguousarray(variables[name]))
        return value.permute(3, 2, 0, 1).contiguous() if value.ndim == 4 else value  # HWIO -> OIHW

    state = {"conv.weight": take("conv2d/kernel")}
    projections: list[str] = ["evolution.convs.0"] if evolves else []
    for number, ours in enumerate([*projections, "proj"], start=2):
        state[f"{ours}.weight"], state[f"{ours}.bias"] = take(f"conv2d_{number}/kernel"), take(f"conv2d_{number}/bias")
    weight, bias = take("conv2d_1/kernel"), take("conv2d_1/bias")
    dim_v = state["proj.weight"].shape[1]
    dim_qk, odd = divmod(len(bias) - dim_v, 2)
    if odd or dim_qk < 1:
        raise ValueError(f"conv2d_1 must have 2 dim_qk + {dim_v} outputs, got {len(bias)}")
    for name, value in (("weight", weight), ("bias", bias)):
        k, q, v = value.split([dim_qk, dim_qk, dim_v])
        state[f"qkv.{name}"] = torch.cat([q, k, v])
    for theirs, ours in (("r_height", "height_rel"), ("r_width", "width_rel")):
        if theirs in variables:
            state[ours] = take(theirs)
    if left:
        raise ValueError(f"variables of one layer required, got {', '.join(sorted(left))} besides")
    return state
