"""Attention-augmented convolution whose attention maps may evolve from layer to layer.

Papers:
* AA: `Attention Augmented Convolutional Networks` - https://arxiv.org/abs/1904.09925
* EA: `Evolving Attention with Residual Convolutions` - https://arxiv.org/abs/2102.12895
* PA: `Predictive Attention Transformer` (2020) - https://openreview.net/forum?id=YQVjbJPnPc9

The layer (AA paper, section 3): a convolution computes a part of the output channels, and beside it self-attention over
the pixels of its input (`ea_vision.layers.pixel_attention`), pooled where the convolution has a stride, computes the
rest. In PA and EA an evolution (`ea_vision.layers.evolution`) mixes the previous layer's logits into the layer's own.

Shape letters: B batch, C channels, H x W the attention map, N = H*W its pixels (row-major), K heads.
"""

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ea_vision.layers.fit_weights import FitsWeights
from ea_vision.layers.fusion import branch_widths, check_conv
from ea_vision.layers.pixel_attention import PixelAttention
from ea_vision.layers.tracing import keep_whole
from ea_vision.ops import halve


@keep_whole  # sizes are checked at run time
class AugmentedConv2d(FitsWeights, PixelAttention, nn.Module):
    """A convolution and a multi-head self-attention side by side, concatenated on channels (AA paper, section 3.2) or
    added.

    Args:
        in_channels: channels of the input.
        out_channels: channels of the output, both branches together.
        kernel_size: odd side of the convolution's kernel.
        stride: 1 or 2; at 2 the attention branch's input is average-pooled (3x3, stride 2).
        dim_v: width of values, all heads together.
        pool_attention: number of further poolings before the attention (True is one); the branch's result is then
            resized bilinearly to the convolution's size.
        fusion: "concat": each branch computes a part of the output channels. "add": the convolution computes all of
            them, and the attention's result, projected to the same number, is added. The projection begins at zero, so
            the layer begins as its convolution.
        conv: with fusion="add", the convolution of a plain network, which the layer uses unchanged (with any groups or
            dilation); by default the layer creates its own.
        attn_channels: with fusion="concat", output channels of the attention branch (default `dim_v`). If they equal
            out_channels, there is no convolution.
        dilation: of the convolution that the layer creates.
        conv_drop: dropout probability of the convolution branch's output.
        **attention: see `PixelAttention.add_attention`: dim_qk, num_heads, feat_size, evolution, position, window, ...

    Raises:
        ValueError: num_heads does not divide a width; attn_channels exceeds out_channels; fusion is unknown, or does
            not use conv or attn_channels; conv has other channels or stride; stride is not 1 or 2; kernel_size is even;
            feat_size is not two positive numbers; position is unknown; 4 does not divide in_channels for "sine"; a
            window is even; a ring has fewer heads than head_window; or head_window > 1 with an evolution.
    """

    def __init__(
        self,
        in_channels: int,
        out_channels: int,
        kernel_size: int = 3,
        stride: int = 1,
        *,
        dim_v: int,
        pool_attention: bool | int = False,
        fusion: str = "concat",
        conv: nn.Conv2d | None = None,
        attn_channels: int | None = None,
        dilation: int = 1,
        conv_drop: float = 0.0,
        device=None,
        dtype=None,
        **attention,
    ):
        dd = {"device": device, "dtype": dtype}
        super().__init__()
        if stride not in (1, 2):
            raise ValueError(f"stride must be 1 or 2, got {stride}")
        if kernel_size < 1 or kernel_size % 2 == 0:
            raise ValueError(f"kernel_size must be odd and positive, got {kernel_size}")
        conv_channels, attn_channels = branch_widths(fusion, out_channels, dim_v, attn_channels)
        self.fusion = fusion
        self.in_channels = in_channels
        self.out_channels = out_channels
        self.stride = stride
        self.resize_result = int(pool_attention) > 0
        self.num_pools = int(pool_attention) + (stride == 2)
        self.conv = conv
        if conv is not None:
            check_conv(conv, fusion, in_channels, out_channels, stride)
        elif conv_channels > 0:
            padding = dilation * (kernel_size // 2)
            options = {"padding": padding, "dilation": dilation, "bias": False, **dd}
            self.conv = nn.Conv2d(in_channels, conv_channels, kernel_size, stride, **options)
        self.conv_drop = nn.Dropout(conv_drop)
        self.add_attention(in_channels, attn_channels, dim_v=dim_v, **attention, **dd)
        if conv is None:
            self.reset_parameters()
        else:
            self.reset_attention()

    def reset_parameters(self) -> None:
        """Initialise the convolution by He, and the attention as `reset_attention` does."""
        if self.conv is not None:
            nn.init.kaiming_normal_(self.conv.weight, mode="fan_out", nonlinearity="relu")
        self.reset_attention()

    def reset_attention(self) -> None:
        """Initialise the attention, and its last projection with 0 if it is added."""
        super().reset_attention()
        if self.fusion == "add":
            nn.init.zeros_(self.proj.weight)

    def branch_input(self, x: Tensor) -> Tensor:
        """Return the input of the projection `qkv`: x (B, C, H', W') pooled, with absolute positions."""
        for _ in range(self.num_pools):
            x = halve(x)
        return super().branch_input(x)

    def forward(
        self, x: Tensor, prev_logits: Tensor | None = None, need_logits: bool | None = None
    ) -> tuple[Tensor, Tensor | None]:
        """
        Args:
            x: (B, in_channels, H', W').
            prev_logits: (B, K, N, N), the previous attention layer's logits; a layer without `evolution` ignores them.
            need_logits: whether to return the logits. Default: the layer's `need_logits`, which is True unless the
                network says that no layer reads them, or the layer has a window and no evolution. If False, faster
                implementations return None instead, unless the layer has a forward hook (which makes no difference in a
                layer with a window and no evolution).

        Returns:
            y (B, out_channels, H'/stride, W'/stride), and the logits (B, K, N, N) that entered the softmax, before a
            window hides any. With head_window > 1 they are None, since no layer evolves from such maps.

        Raises:
            ValueError: the layer has an `evolution`, and prev_logits are missing or have another shape.
        """
        need_logits = self.need_logits if need_logits is None else need_logits
        attn, logits = self.attend(x, prev_logits, need_logits)
        if self.resize_result:
            height = -(-x.shape[2] // self.stride)  # rounded up
            width = -(-x.shape[3] // self.stride)
            resized = F.interpolate(
                attn, size=(height, width), mode="bilinear", align_corners=False
            )
            attn = resized.to(attn.dtype)  # autocast on CUDA makes it float32
        if self.conv is None:
            return attn, logits
        y = self.conv_drop(self.conv(x))
        y = y + attn if self.fusion == "add" else torch.cat([y, attn], dim=1)
        return y, logits

    def extra_repr(self) -> str:
        return f"num_heads={self.num_heads}, feat_size={self.feat_size}, fusion={self.fusion!r}"
