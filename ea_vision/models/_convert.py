"""Weights of timm's ResNets, turned into ours."""

import logging

from torch import Tensor, nn

from ea_vision.layers import AugmentedConv2d

_logger = logging.getLogger(__name__)


def checkpoint_filter_fn(state_dict: dict[str, Tensor], model: nn.Module) -> dict[str, Tensor]:
    """Make a checkpoint fit `model`; ours come back unchanged (position tables are fitted when they are loaded).

    Where `model` augments a convolution of a plain ResNet's checkpoint, the augmented one takes it: all of it with
    fusion="add"; with "concat" the first output channels, which keep their place in the concatenation. Attention keeps
    the model's own initial values. Each is reported by a line of the log (level info).

    Args:
        state_dict: parameters by name, of our network or of timm's ResNet of the same depth.
        model: the network that is to load them.

    Returns:
        parameters by our names.

    Raises:
        ValueError: a convolution of other input channels or kernel than the model's.
    """
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
            adds = module.fusion == "add"
            if adds and weight.shape != wanted:
                raise ValueError(
                    f"{name}.weight must have shape {tuple(wanted)}, got {tuple(weight.shape)}"
                )
            if weight.shape[1:] != wanted[1:] or weight.shape[0] < wanted[0]:
                raise ValueError(
                    f"{name}.weight must have at least {wanted[0]} output channels and shape (*, "
                    f"{', '.join(map(str, wanted[1:]))}), got {tuple(weight.shape)}"
                )
            out[f"{name}.conv.weight"] = weight[: wanted[0]]
            _logger.info(
                "%s.conv.weight: the first %d of %d output channels",
                name,
                wanted[0],
                weight.shape[0],
            )
        fresh = [key for key in own if key.startswith(f"{name}.") and key not in out]
        out.update((key, own[key]) for key in fresh)
        _logger.info("%s: fresh %s", name, ", ".join(key[len(name) + 1 :] for key in fresh))
    if len(out) > len(state_dict):
        whole = sum(key in state_dict for key in out)
        _logger.info(
            "%d tensors as they are, %d of the checkpoint's not used",
            whole,
            sum(k not in own for k in out),
        )
    return out
