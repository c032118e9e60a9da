"""The widths and checks of an augmented convolution's two branches, which it concatenates on channels or adds.

Paper: `Attention Augmented Convolutional Networks`, section 3.2 - https://arxiv.org/abs/1904.09925 (concatenated)
"""

from torch import nn


def check_fusion(fusion: str) -> None:
    """Raise ValueError unless `AugmentedConv2d` knows this fusion."""
    if fusion not in ("concat", "add"):
        raise ValueError(f"fusion must be 'concat' or 'add', got {fusion!r}")


def branch_widths(
    fusion: str, out_channels: int, dim_v: int, attn_channels: int | None
) -> tuple[int, int]:
    """Return the output channels of the convolution and of the attention branch.

    Raises:
        ValueError: fusion is unknown; attn_channels exceeds out_channels, or is set with "add".
    """
    check_fusion(fusion)
    if fusion == "add":
        if attn_channels not in (None, out_channels):
            raise ValueError(f"attn_channels must be None with fusion='add', got {attn_channels}")
        return out_channels, out_channels
    attn_channels = dim_v if attn_channels is None else attn_channels
    if not 0 < attn_channels <= out_channels:
        raise ValueError(
            f"attn_channels must be 1 to out_channels={out_channels}, got {attn_channels}"
        )
    return out_channels - attn_channels, attn_channels


def check_conv(
    conv: nn.Conv2d, fusion: str, in_channels: int, out_channels: int, stride: int
) -> None:
    """Raise ValueError unless a plain network's convolution fits the layer that will use it."""
    if fusion != "add":
        raise ValueError(f"conv needs fusion='add', got fusion={fusion!r}")
    required = (in_channels, out_channels, stride)
    received = (conv.in_channels, conv.out_channels, conv.stride[0])
    if received != required:
        raise ValueError(
            f"conv must have (in_channels, out_channels, stride) = {required}, got {received}"
        )
