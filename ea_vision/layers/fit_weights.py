"""Weights of an augmented convolution from a checkpoint of another map size, with or without normalised queries."""

from typing import TYPE_CHECKING

from torch import Tensor, nn

from ea_vision.ops.rel_pos import fit_rel_table

if TYPE_CHECKING:
    from ea_vision.layers.augmented_conv import AugmentedConv2d


class FitsWeights:
    """A mixin for `AugmentedConv2d`: weights are fitted to the layer before it loads them."""

    def _load_from_state_dict(self, state_dict: dict[str, Tensor], prefix: str, *args) -> None:
        reason = fit_weights(self, state_dict, prefix)
        if reason is None:
            super()._load_from_state_dict(state_dict, prefix, *args)
        else:
            error_messages = args[-1]
            error_messages.append(reason)


def fit_weights(layer: "AugmentedConv2d", state_dict: dict[str, Tensor], prefix: str) -> str | None:
    """Make the weights of a layer fit it, in place: position tables are resized, and the layer gets a `qk_gain` if the
    weights have one.

    Args:
        layer: the layer, which has not loaded them yet.
        state_dict: the checkpoint; the layer's weights are those whose names begin with prefix.
        prefix: ends in a dot, or is empty.

    Returns:
        why the weights are of another layer, or None.
    """
    proj_weight = state_dict.get(f"{prefix}proj.weight")
    fusion = fusion_of(layer, state_dict.get(f"{prefix}conv.weight"), proj_weight)
    if fusion not in (None, layer.fusion):
        return (
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
    return None


def fusion_of(
    layer: "AugmentedConv2d", conv_weight: Tensor | None, proj_weight: Tensor | None
) -> str | None:
    """Return the fusion of a layer with these weights and this layer's number of output channels, or None."""
    if proj_weight is None:
        return None
    conv_channels = 0 if conv_weight is None else len(conv_weight)
    if conv_channels == len(proj_weight) == layer.out_channels:
        return "add"
    if conv_channels + len(proj_weight) == layer.out_channels:
        return "concat"
    return None
