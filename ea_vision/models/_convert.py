"""Weights of timm's ResNets, turned into ours."""
import logging

from torch import Tensor, nn

from ea_vision.layers import AugmentedConv2d

_logger = logging.getLogger(__name__)


def checkpoint_filter_fn(state_dict: dict[str, Tensor], model: nn.Module) -> dict[str, Tensor]:
    """Make a checkpoint fit `model`; ours come back unchanged (position tables are fitted when they are loaded).

    In a plain ResNet's checkpoint a convolution that `model` augments has more output channels than our
    branch: the branch takes the first ones, which keep their place in the concatenation. Attention keeps the model's
    own initial values. A line of the log (level info) says how many layers were filled so.

    Args:
        state_dict: parameters by name, of our network or of timm's ResNet of the same depth.
        model: the network that is to load them.

    Returns:
        parameters by our names.

    Raises:
        ValueError: a convolution of other input channels or kernel than the model's.
    """
    own, out, filled = model.state_dict(), dict(state_dict), 0
    for name, module in model.named_modules():
        if not isinstance(module, AugmentedConv2d) or f"{name}.weight" not in out:
            continue
        weight, filled = out.pop(f"{name}.weight"), filled + 1
        out.update((key, tensor) for key, tensor in own.items() if key.startswith(f"{name}."))
        if module.conv is not None:
            wanted = module.conv.weight.shape
            if weight.shape[1:] != wanted[1:] or weight.shape[0] < wanted[0]:
                raise ValueError(
                    f"{name}.weight must have at least {wanted[0]} output channels and shape (*, "
                    f"{', '.join(map(str, wanted[1:]))}), got {tuple(weight.shape)}")
            out[f"{name}.conv.weight"] = weight[:wanted[0]]
    if filled:
        _logger.info("%d augmented convolutions take the first output channels of the checkpoint's, their attention is "
                     "fresh; %d tensors of the checkpoint are not used", filled, sum(key not in own for key in out))
    return out
