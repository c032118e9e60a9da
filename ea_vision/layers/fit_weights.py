"""Weights of augmented convolutions from checkpoints: of another map size, with or without normalised queries, or of a
plain network's convolutions."""

import logging

from torch import Tensor, nn

from ea_vision.layers.evolution import all_zero
from ea_vision.ops.rel_pos import fit_rel_table

_logger = logging.getLogger(__name__)


class FitsWeights:
    """A mixin for `AugmentedConv2d`: weights are fitted to the layer before it loads them."""

    def _load_from_state_dict(self, state_dict: dict[str, Tensor], prefix: str, *args) -> None:
        try:
            fit_weights(self, state_dict, prefix)
        except ValueError as error:
            error_messages = args[-1]
            error_messages.append(str(error))
        else:
            super()._load_from_state_dict(state_dict, prefix, *args)


def fit_weights(layer: FitsWeights, state_dict: dict[str, Tensor], prefix: str) -> None:
    """Make the weights of a layer fit it, in place: position tables are resized, the layer gets a `qk_gain` if the
    weights have one, and with fusion="add" it takes a plain convolution.

    With a plain convolution alone, attention that adds nothing keeps its values; values of other attention are missing.

    Args:
        layer: the layer, which has not loaded them yet.
        state_dict: the checkpoint; the layer's weights are those whose names begin with prefix.
        prefix: ends in a dot, or is empty.

    Raises:
        ValueError: the weights are of another layer.
    """
    if f"{prefix}weight" in state_dict and layer.fusion == "add":
        begins = not layer.proj.weight.is_meta and all_zero(layer.proj)
        take_convolution(layer, state_dict, prefix, keep_attention=begins)
    widths = [len(state_dict.get(f"{prefix}{name}.weight", ())) for name in ("conv", "proj")]
    fusion = layer.fusion
    if widths == [layer.out_channels] * 2:
        fusion = "add"
    elif widths[1] and sum(widths) == layer.out_channels:
        fusion = "concat"
    if fusion != layer.fusion:
        raise ValueError(
            f"the weights of {prefix}conv and {prefix}proj have fusion={fusion!r}, but the network "
            f"has fusion={layer.fusion!r}: create it with fusion={fusion!r}"
        )
    gain = state_dict.get(f"{prefix}qk_gain")
    if gain is not None and layer.qk_norm is None and layer.qk_gain is None:
        layer.qk_gain = nn.Parameter(layer.qkv.weight.new_empty(gain.shape))
    for name, size in layer.table_sizes(layer.feat_size):
        table = state_dict.get(prefix + name)
        if table is not None and table.ndim == 2 and table.shape[1] == layer.dim_head_qk:
            state_dict[prefix + name] = fit_rel_table(table, size)


def take_convolution(
    layer: FitsWeights, state_dict: dict[str, Tensor], prefix: str, keep_attention: bool = True
) -> None:
    """Replace a plain convolution in a checkpoint by the layer's, in place: all of it with fusion="add"; with "concat"
    the first output channels, which keep their place in the concatenation.

    Args:
        keep_attention: whether weights of the attention that the checkpoint lacks become those of the layer.

    Raises:
        ValueError: the shape of the convolution does not fit the layer's.
    """
    for name in ("weight", "bias"):
        target = getattr(layer.conv, name, None)
        if prefix + name not in state_dict or (target is None and layer.conv is not None):
            continue  # one that the convolution lacks stays, and is unexpected
        plain = state_dict.pop(prefix + name)
        if target is not None:
            _check_shape(prefix + name, plain, target, exactly=layer.fusion == "add")
            state_dict[f"{prefix}conv.{name}"] = plain[: len(target)]
    if keep_attention:
        for name, value in layer.state_dict().items():
            if not name.startswith("conv."):
                state_dict.setdefault(prefix + name, value)


def _check_shape(name: str, weight: Tensor, target: Tensor, exactly: bool) -> None:
    """Raise ValueError if a plain weight lacks the shape of the target; it may have more output channels, unless
    `exactly`."""
    enough = len(weight) == len(target) if exactly else len(weight) >= len(target)
    if weight.shape[1:] == target.shape[1:] and enough:
        return
    least = "" if exactly else "at least "
    others = ", ".join(str(size) for size in target.shape[1:])
    raise ValueError(
        f"{name} must have {least}{len(target)} output channels and shape (*, {others}), "
        f"got {tuple(weight.shape)}"
    )


def checkpoint_filter_fn(state_dict: dict[str, Tensor], model: nn.Module) -> dict[str, Tensor]:
    """Make a checkpoint fit `model`; our own checkpoints stay unchanged (loading fits their position tables).

    Where `model` augments a convolution of a plain ResNet, the augmented layer takes the checkpoint's convolution, see
    `take_convolution`. Attention keeps the model's initial values. The log reports this in one line (level info).

    Args:
        state_dict: parameters by name, of our network or of timm's ResNet of the same depth.
        model: the network that will load them.

    Returns:
        parameters by our names.

    Raises:
        ValueError: the shape of a convolution does not fit the model's.
    """
    converted = dict(state_dict)
    layers = []
    for name, layer in model.named_modules():
        if isinstance(layer, FitsWeights) and f"{name}.weight" in converted:
            take_convolution(layer, converted, f"{name}.")
            layers.append(layer)
    if layers:
        _logger.info(
            "a plain network's checkpoint: %d tensors as they are, %d not used; %d augmented convolutions have new "
            "attention and %s of the checkpoint's output channels",
            len(converted.keys() & state_dict.keys()),
            len(converted.keys() - model.state_dict().keys()),
            len(layers),
            "all" if all(layer.fusion == "add" for layer in layers) else "the first",
        )
    return converted
